"""How raw columns become keys and numbers, spelled out for readers that have neither this package nor the job.

Everything that a job leaves to defaults, key spaces and fitted numbers is resolved here. trainer/serving/EXPORT.md
describes the steps. Keys and seeds are hexadecimal texts ("0x9e37..."), because not every JSON reader keeps 64-bit
integers.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from paddlewheel.data_pipeline import keys
from paddlewheel.data_pipeline.config import DataConfig, SparseFeature
from paddlewheel.data_pipeline.statistics import Fitted

VOCABULARY = "vocabulary.parquet"


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class DenseRule(_Described):
    """One number of the dense input. In this order: fill, transform, clip, standardise; then to float32."""

    column: str
    """Raw column."""

    fill: float | None
    """Stands for null and NaN. None: such a row cannot be scored."""

    transform: Literal["none", "log1p"]
    """`log1p` is sign(x) * log(1 + |x|)."""

    clip: tuple[float, float] | None
    """Smallest and largest value kept."""

    mean: float | None
    """Subtracted. None: nothing is."""

    scale: float | None
    """Multiplied with what is left: 1 / standard deviation. None: nothing is."""

    absent_column: float | None
    """Value of every row, before the transform, where the data lack the column. None: they must not lack it."""


class BucketRule(_Described):
    """How a number becomes an integer, which is then hashed. Before: NaN counts as null, others are kept in ±1e15."""

    kind: Literal["borders", "log_square"]
    """`borders`: the number of borders that are not above the value. `log_square`: floor(ln(x)^2) for x > 2, else
    floor(x)."""

    borders: tuple[float, ...] = ()
    """Rising."""


class VocabularyRule(_Described):
    """Keys that are kept as they are; others are rare. The key of a missing value is always kept."""

    file: str
    """Parquet with columns feature (string), key (uint64); beside the specification."""

    rare_key: str
    """Replaces a rare key; "0x0" means that a rare value counts as no value."""


class FeatureRule(_Described):
    """One sparse feature: column(s) -> keys of a table."""

    name: str
    """As in the job."""

    table: str
    """Table whose keys these are."""

    columns: tuple[str, ...]
    """Raw column; several make a cross."""

    is_cross: bool
    """Whether the key is made of the keys of several columns."""

    value_type: Literal["as_stored", "integer", "string"]
    """Which hash a value gets: as its column is stored, or converted to an integer or a string before."""

    seed: str
    """Seed of the feature's key space."""

    column_seeds: tuple[str, ...]
    """Of a cross: the seed for the key of each column's value; empty otherwise."""

    offset: int
    """Added to integers before hashing, modulo 2^64."""

    buckets: BucketRule | None
    """None: the value itself is hashed."""

    vocabulary: VocabularyRule | None
    """None: every key is kept."""

    missing_key: str
    """Stands for null (of a list: for a list without any key); "0x0" means no id."""

    max_length: int | None
    """Largest number of ids of a row; None: the column holds one value a row, not a list."""

    truncate: Literal["first", "last"]
    """Which ids of a longer list are kept, after null and rare ones are left out."""

    weights: str | None
    """List column with a weight an id. None: all weights are 1."""

    pooling: Literal["sum", "mean", "none"]
    """What the program does with the embeddings of a list."""

    absent_column: Literal["refuse", "missing"]
    """`missing`: where the data lack the column, every row is null. `refuse`: they must not lack it."""


class InputRules(_Described):
    """From raw columns to what tables and program take, in the order of the program's inputs."""

    dense: tuple[DenseRule, ...]
    """Columns of the program's `dense` input."""

    features: tuple[FeatureRule, ...]
    """Sparse features, in the job's order."""


def describe(config: DataConfig, fitted: Fitted, *, vocabulary_folder: str = "") -> InputRules:
    """The rules of a job with all numbers that were fitted. `vocabulary_folder`: where the vocabulary file will lie."""
    dense = []
    for block in config.dense:
        mean, scale = fitted.mean_and_scale(block) if block.standardise else (None, None)
        for at, column in enumerate(block.columns):
            dense.append(
                DenseRule(
                    column=column,
                    fill=block.fill,
                    transform=block.transform,
                    clip=block.clip,
                    mean=None if mean is None else float(mean[at]),
                    scale=None if scale is None else float(scale[at]),
                    absent_column=block.absent_column,
                )
            )
    features = tuple(_feature(f, fitted, vocabulary_folder) for f in config.sparse)
    return InputRules(dense=tuple(dense), features=features)


def _feature(feature: SparseFeature, fitted: Fitted, vocabulary_folder: str) -> FeatureRule:
    buckets = vocabulary = None
    if feature.bucketize is not None:
        rule = feature.bucketize
        borders = fitted.boundaries[feature.name].tolist() if rule.kind == "quantiles" else rule.boundaries
        log_square = rule.kind == "log_square"
        buckets = BucketRule(kind="log_square" if log_square else "borders", borders=() if log_square else borders)
    if feature.vocabulary is not None:
        rare = keys.special_key(feature.space, "rare") if feature.vocabulary.rare == "shared" else 0
        vocabulary = VocabularyRule(file=f"{vocabulary_folder}{VOCABULARY}", rare_key=_hex(rare))
    return FeatureRule(
        name=feature.name,
        table=feature.table,
        columns=feature.columns,
        is_cross=bool(feature.cross),
        value_type=feature.type or "as_stored",
        seed=_hex(keys.space_seed(feature.space)),
        column_seeds=tuple(_hex(keys.space_seed(column)) for column in feature.cross),
        offset=feature.offset,
        buckets=buckets,
        vocabulary=vocabulary,
        missing_key=_hex(keys.special_key(feature.space, "missing") if feature.null_policy == "own_key" else 0),
        max_length=feature.max_length,
        truncate=feature.truncate,
        weights=feature.weights,
        pooling=feature.pooling,
        absent_column=feature.absent_column,
    )


def _hex(value: int | np.uint64) -> str:
    return hex(int(value))
