"""What a job says about its data: where it lies, which columns it reads and how they become keys and numbers.

This part of the job file is the only authority on columns: no type, name or shape is taken from "the first file".
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, (str, dict, BaseModel)) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple, json_schema_input_type=str | tuple[str, ...])]
"""A list of texts, or one text alone."""


class LabelRule(_Section):
    """Which label values are clicks. The default accepts exactly 0, 1, false and true."""

    positive: float | None = None
    """Rows whose label equals this are positive, every other non-null value is negative (-1/1 labels: `positive:
    1`)."""

    at_least: float | None = None
    """Rows whose label is at least this are positive (ratings: `at_least: 4`)."""

    soft: bool = False
    """Accept any probability between 0 and 1 as a label."""

    null_without_click: Literal["refuse", "negative"] = "refuse"
    """What null means in a label after the first, in a row whose first label is 0 (a conversion without a click): a bad
    row, or 0. Any other null label is a bad row."""

    @model_validator(mode="after")
    def _one_rule(self) -> "LabelRule":
        if (self.positive is not None) + (self.at_least is not None) + self.soft > 1:
            raise ValueError("label_rule: give only one of positive, at_least, soft")
        return self


class DenseBlock(_Section):
    """Numeric columns that share one treatment. Order: fill, transform, clip, standardise; the result must be
    finite.
    """

    columns: tuple[str, ...] = Field(min_length=1)
    """Column names, in the order in which they reach the model."""

    transform: Literal["none", "log1p"] = "none"
    """`log1p` is sign(x) * log(1 + |x|): defined for every finite number, negative ones included."""

    fill: float | None = 0.0
    """Value for null and NaN (before the transform). `null` makes a missing value a bad row."""

    clip: tuple[float, float] | None = None
    """Smallest and largest value kept, after the transform."""

    standardise: bool = False
    """Subtract the mean and divide by the standard deviation found by `paddlewheel data fit`: needs
    `data.statistics`."""

    absent_column: float | None = None
    """Value for all rows of a file that lacks the column. `null`: such a file is an error."""

    @model_validator(mode="after")
    def _clip_ordered(self) -> "DenseBlock":
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"clip: {list(self.clip)} must be [smallest, largest]")
        return self


class Bucketize(_Section):
    """Turns a number into a bucket, which is then a sparse id."""

    kind: Literal["boundaries", "quantiles", "log_square"] = "log_square"
    """`boundaries`: the given edges. `quantiles`: edges found by `paddlewheel data fit`. `log_square`:
    floor(log(x)^2) above 2, floor(x) at and below 2 (well suited to counts)."""

    boundaries: tuple[float, ...] = ()
    """Rising edges; bucket i holds edge[i-1] <= x < edge[i]."""

    num_buckets: int = Field(default=32, ge=2, le=4096)
    """Number of quantile buckets."""

    @model_validator(mode="after")
    def _edges(self) -> "Bucketize":
        if (self.kind == "boundaries") != bool(self.boundaries):
            raise ValueError("bucketize: boundaries are needed by, and only by, kind: boundaries")
        if any(b <= a for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)):
            raise ValueError(f"bucketize: boundaries {list(self.boundaries)} must rise")
        return self


class Vocabulary(_Section):
    """Keeps only values that occur often enough in the training data, counted by `paddlewheel data fit`."""

    min_count: int = Field(default=2, ge=1)
    """Values seen fewer times than this in the training rows are rare."""

    rare: Literal["shared", "none"] = "shared"
    """Rare and unknown values share one key, or count as no feature."""


class SparseFeature(_Section):
    """One categorical input: a column (or a cross of columns) whose values become 64-bit keys of a table."""

    name: str
    """Unique name of the feature."""

    column: str | None = None
    """Column that holds the ids; the feature's name if not given."""

    cross: tuple[str, ...] = ()
    """Instead of `column`: columns whose joint value is the id (single-valued; null in any of them means no
    feature)."""

    type: Literal["integer", "string"] | None = None
    """How values are read. Not given: as every file's footer says, which must then agree. `string` keeps a partition
    value such as `00`; `integer` parses text exactly."""

    table: str = "default"
    """Embedding table."""

    key_space: str | None = None
    """Features of one key space share the keys of equal values. Not given: the table's name if `table` was given,
    else the feature's own name."""

    pooling: Literal["sum", "mean", "none"] = "sum"
    """How the embeddings of a multi-valued feature become one vector. `none` keeps the sequence, with a mask."""

    max_length: int | None = Field(default=None, ge=1, le=4096)
    """Largest number of ids of a row. Given: the feature is multi-valued (list column). Not given: single-valued."""

    truncate: Literal["first", "last"] = "first"
    """Which ids of a list longer than `max_length` are kept; the others are counted as truncated."""

    weights: str | None = None
    """List column of per-id weights, as long as the id list (multi-valued features only)."""

    offset: int = 0
    """Added to integer ids before they become keys, so that columns with local ids can share one key space."""

    bucketize: Bucketize | None = None
    """Read the column as a number and use its bucket as the id."""

    vocabulary: Vocabulary | None = None
    """Drop rare values (needs `data.statistics`)."""

    null_policy: Literal["zero", "own_key"] = "zero"
    """Null means no feature (a zero vector), or a key of its own."""

    absent_column: Literal["refuse", "missing"] = "refuse"
    """A file that lacks the column is an error, or all its rows are treated as null."""

    @model_validator(mode="before")
    @classmethod
    def _settle_key_space(cls, given: Any) -> Any:
        # Whether `table` was given must not be asked later: a job that was written out in full gives every key.
        if isinstance(given, dict) and given.get("key_space") is None:
            return {**given, "key_space": given.get("table", given.get("name"))}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> "SparseFeature":
        where = f"sparse feature {self.name!r}"
        if self.cross and (self.column is not None or len(self.cross) < 2):
            raise ValueError(f"{where}: cross needs two or more columns and no `column`")
        if self.cross and (self.max_length or self.bucketize or self.offset):
            raise ValueError(f"{where}: cross goes with neither max_length, bucketize nor offset")
        if self.pooling == "none" and self.max_length is None:
            raise ValueError(f"{where}: pooling: none (a sequence) needs max_length")
        if self.weights is not None and self.max_length is None:
            raise ValueError(f"{where}: weights need max_length (they go with a list of ids)")
        if self.weights is not None and self.pooling == "none":
            raise ValueError(f"{where}: weights need pooling sum or mean")
        if self.bucketize is not None and (self.max_length is not None or self.offset or self.type is not None):
            raise ValueError(f"{where}: bucketize goes with neither max_length, offset nor type")
        if self.offset and self.type == "string":
            raise ValueError(f"{where}: offset needs integer ids")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns read for the ids."""
        return self.cross or (self.column or self.name,)

    @property
    def space(self) -> str:
        """Name of the key space."""
        assert self.key_space is not None
        return self.key_space

    @property
    def multi_valued(self) -> bool:
        return self.max_length is not None


class Shuffle(_Section):
    """How rows are mixed. The order depends on seed, epoch and data alone, never on threads or listing order."""

    enabled: bool = True
    """False: file order (paths sorted), row by row."""

    interleave: int = Field(default=16, ge=1, le=1024)
    """Number of slices, from different parts of the data, whose rows are mixed at a time."""

    window_rows: int = Field(default=65536, ge=1)
    """Rows that are held and mixed at a time."""

    slice_rows: int | None = Field(default=None, ge=1)
    """Rows of a slice, the unit that is given to a trainer. Not given: about a 200th of the data, a power of two from
    256 to 65,536."""


def _as_blocks(value: Any) -> Any:
    return () if value is None else _as_tuple(value)


class DataConfig(_Section):
    """The `data` section of a job."""

    train: Names = ()
    """Training data: files, folders, globs, `s3://`, `gs://` or `hdfs://` addresses."""

    eval: Names = ()
    """Evaluation data, as `train`."""

    batch_rows: int = Field(default=2048, ge=1, le=1 << 20)
    """Rows per trainer and step."""

    labels: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)],
        BeforeValidator(_as_tuple, json_schema_input_type=str | Annotated[tuple[str, ...], Field(min_length=1)]),
    ]
    """Label columns; the first is the click."""

    label_rule: LabelRule = LabelRule()
    """Which label values are positive."""

    dense: Annotated[
        tuple[DenseBlock, ...],
        BeforeValidator(_as_blocks, json_schema_input_type=DenseBlock | tuple[DenseBlock, ...] | None),
    ] = ()
    """Numeric columns: one block, or a list of blocks."""

    sparse: tuple[SparseFeature, ...] = ()
    """Categorical features."""

    sample_weight: str | None = None
    """Column with a finite, non-negative weight per row."""

    group: str | None = None
    """Column (a user, a query) by which grouped metrics are computed."""

    slice_metrics_by: Names = ()
    """Columns for whose values evaluation also reports the metrics one by one. Read in evaluation only."""

    partitions: Literal["hive", "none"] = "hive"
    """`hive`: folders named `key=value` give columns."""

    on_bad_file: Literal["fail", "skip"] = "fail"
    """A file that cannot be read stops the job, or is left out and counted."""

    on_bad_row: Literal["fail", "skip", "quarantine"] = "fail"
    """A row with an unusable label, weight or number stops the job, is left out and counted, or is also written as
    Parquet."""

    quarantine_directory: str | None = None
    """Local folder for quarantined rows."""

    statistics: str | None = None
    """Folder written by `paddlewheel data fit`: means, quantiles, vocabularies."""

    shuffle: Shuffle = Shuffle()
    """Order of training rows. Evaluation always reads in file order."""

    threads: int = Field(default=2, ge=0, le=64)
    """Threads that read and encode. 0: in the caller's own thread."""

    encoder_backend: Literal["auto", "native", "numpy"] = "auto"
    """What hashes ids, gathers rows and finds unique keys. native: C++, compiled at the first use, several threads at a
    time. numpy: the same results, slower. auto: native where there is a compiler or a compiled library."""

    slice_assignment: Literal["dynamic", "static"] = "dynamic"
    """Who reads which slice of an epoch. dynamic: slices go to whoever asks next, each trainer up to its share.
    static: all are dealt out beforehand, so that a run can be repeated exactly."""

    prefetch_batches: int = Field(default=8, ge=1, le=1024)
    """Finished batches kept ready."""

    memory_bytes: int = Field(default=176 << 20, ge=16 << 20)
    """Bound on decoded row groups and open readers of one trainer."""

    @model_validator(mode="after")
    def _consistent(self) -> "DataConfig":
        if not self.sparse and not self.dense:
            raise ValueError("data: give at least one sparse feature or one dense column")
        for what, names in (
            ("sparse feature", [f.name for f in self.sparse]),
            ("dense column", list(self.dense_columns)),
            ("label", list(self.labels)),
        ):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ValueError(f"data: {what} {twice[0]!r} is given twice")
        leaked = set(self.labels) & ({c for f in self.sparse for c in f.columns} | set(self.dense_columns))
        if leaked:
            raise ValueError(f"data: column {min(leaked)!r} is a label and a feature")
        if self.on_bad_row == "quarantine" and self.quarantine_directory is None:
            raise ValueError("data: on_bad_row: quarantine needs quarantine_directory")
        needs_fit = [f.name for f in self.sparse if f.vocabulary or (f.bucketize and f.bucketize.kind == "quantiles")]
        needs_fit += [b.columns[0] for b in self.dense if b.standardise]
        if needs_fit and self.statistics is None:
            raise ValueError(
                f"data: {needs_fit[0]!r} needs numbers from the training data: set data.statistics to a folder and run "
                "`paddlewheel data fit JOB`"
            )
        return self

    @property
    def dense_columns(self) -> tuple[str, ...]:
        """All dense columns in the order of `Batch.dense_BD`."""
        return tuple(c for block in self.dense for c in block.columns)

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables used, in order of first use."""
        return tuple(dict.fromkeys(f.table for f in self.sparse))
