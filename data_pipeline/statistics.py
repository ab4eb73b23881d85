"""Numbers that come from the training data: means, quantiles, vocabularies. Made by `data_pipeline.fit`, read by all.

A folder holds `fitted.json` and, if a feature has a vocabulary, `vocabulary.parquet` (feature, key, count).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from paddlewheel.data_pipeline.config import DataConfig, DenseBlock, SparseFeature
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.keys import special_key
from paddlewheel.data_pipeline.patience import UNREADABLE, read_patiently

UInt64 = npt.NDArray[np.uint64]
_VERSION = 1
_LEAST_RELATIVE_DEVIATION = 2.0**-44
_LEAST_DEVIATION = 2.0**-126


class KeySet:
    """A fixed set of well-mixed keys with a vectorised membership test."""

    def __init__(self, keys: UInt64) -> None:
        self._keys = np.unique(keys)
        bits = max(1, int(self._keys.size).bit_length())
        self._shift = np.uint64(64 - bits)
        edges = np.arange(1 << bits, dtype=np.uint64) << self._shift
        self._starts = np.searchsorted(self._keys, edges)
        ends = np.append(self._starts[1:], self._keys.size)
        self._deepest = int((ends - self._starts).max(initial=0))
        self._padded = np.append(self._keys, np.zeros(self._deepest + 1, dtype=np.uint64))

    def __len__(self) -> int:
        return int(self._keys.size)

    def holds(self, keys: UInt64) -> npt.NDArray[np.bool_]:
        """Mask of the keys that are in the set (0 never is)."""
        at = self._starts[(keys >> self._shift).view(np.int64)]
        found: npt.NDArray[np.bool_] = np.zeros(keys.shape, dtype=bool)
        for step in range(self._deepest):
            found |= self._padded[at + step] == keys
        found &= keys != 0
        return found


class Fitted:
    """What `fit` found. The empty one serves jobs that need nothing."""

    def __init__(
        self,
        moments: Mapping[str, tuple[float, float]],
        boundaries: Mapping[str, npt.NDArray[np.float64]],
        vocabularies: Mapping[str, UInt64],
        about: Mapping[str, Any],
    ) -> None:
        self.moments = dict(moments)
        """Mean and standard deviation by dense column, after fill, transform and clip."""
        self.boundaries = dict(boundaries)
        """Bucket edges by feature."""
        self.vocabularies = dict(vocabularies)
        """Kept keys by feature."""
        self.about = dict(about)
        self._sets = {name: KeySet(keys) for name, keys in self.vocabularies.items()}

    def mean_and_scale(self, block: DenseBlock) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Per column of a block: mean and 1 / standard deviation.

        1 for a constant column, also where rounding made its values differ in their last digits, and for one that only
        varies below the smallest float32: an ordinary value in later data would become an enormous one.
        """
        mean, deviation = np.array([self.moments[c] for c in block.columns]).T
        varies = deviation > np.maximum(_LEAST_RELATIVE_DEVIATION * np.abs(mean), _LEAST_DEVIATION)
        return mean, 1 / np.where(varies, deviation, 1)

    def known(self, feature: SparseFeature, keys: UInt64) -> UInt64:
        """Keys with rare ones replaced as the feature's vocabulary says."""
        rule = feature.vocabulary
        assert rule is not None
        rare = ~self._sets[feature.name].holds(keys) & (keys != 0) & (keys != special_key(feature.space, "missing"))
        instead = special_key(feature.space, "rare") if rule.rare == "shared" else np.uint64(0)
        return np.where(rare, instead, keys)

    @classmethod
    def load(cls, config: DataConfig) -> "Fitted":
        """Reads `data.statistics`. Raises DataError if it is missing, damaged, or does not have what the job needs."""
        if config.statistics is None:
            return cls({}, {}, {}, {})
        what = f"data.statistics: {config.statistics}"
        try:
            return read_patiently(what, lambda: cls._load(config))
        except DataError:
            raise
        except (*UNREADABLE, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{what} cannot be read ({error}); run `paddlewheel data fit JOB`") from error

    @classmethod
    def _load(cls, config: DataConfig) -> "Fitted":
        assert config.statistics is not None
        folder = Path(config.statistics)
        remedy = "run `paddlewheel data fit JOB`"
        if not (folder / "fitted.json").exists():
            raise DataError(f"data.statistics: {folder}/fitted.json does not exist; {remedy}")
        try:
            content = json.loads((folder / "fitted.json").read_text())
        except ValueError as error:
            raise DataError(f"data.statistics: {folder}/fitted.json is damaged ({error}); {remedy}") from None
        if content.get("version") != _VERSION:
            raise DataError(
                f"data.statistics: {folder} has version {content.get('version')}, {_VERSION} is needed; {remedy}"
            )
        vocabularies: dict[str, UInt64] = {}
        if (folder / "vocabulary.parquet").exists():
            table = pq.read_table(folder / "vocabulary.parquet")
            for name in pc.unique(table["feature"]).to_pylist():
                vocabularies[name] = table.filter(pc.equal(table["feature"], name))["key"].to_numpy()
        result = cls(
            {c: (m[0], m[1]) for c, m in content["moments"].items()},
            {n: np.array(b) for n, b in content["boundaries"].items()},
            vocabularies,
            content["about"],
        )
        result._check(folder, remedy)
        for name, rules in needs(config).items():
            if content["rules"].get(name) != rules:
                raise DataError(
                    f"data.statistics: {folder} was made for other settings of {name!r} "
                    f"({content['rules'].get(name)}, the job says "
                    f"{rules}); {remedy}"
                )
        for feature in config.sparse:
            if feature.vocabulary is not None and feature.name not in vocabularies:
                vocabularies[feature.name] = np.zeros(0, dtype=np.uint64)
                result._sets[feature.name] = KeySet(vocabularies[feature.name])
        return result

    def hashes(self, config: DataConfig) -> dict[str, str]:
        """A hash of the content of everything that the job takes from the fit, by the names of `needs`."""
        found = {}
        for name in needs(config):
            kind, _, which = name.partition(" ")
            if kind == "dense":
                content = np.array(self.moments[which], np.float64).tobytes()
            elif kind == "quantiles":
                content = np.asarray(self.boundaries[which], np.float64).tobytes()
            else:
                content = np.unique(self.vocabularies[which]).tobytes()
            found[name] = xxhash.xxh3_128_hexdigest(content)
        return found

    @property
    def made_from(self) -> str:
        """The data of the fit, for people."""
        return f"{self.about.get('num_rows', '?')} rows of data {str(self.about.get('fingerprint', '?'))[:8]}"

    def _check(self, folder: Path, remedy: str) -> None:
        """Raises DataError for numbers that no fit finds."""
        for column, (mean, deviation) in self.moments.items():
            if not (np.isfinite(mean) and np.isfinite(deviation) and deviation >= 0):
                raise DataError(
                    f"data.statistics: {folder} has mean {mean} and deviation {deviation} for {column!r}; {remedy}"
                )
        for name, borders in self.boundaries.items():
            if not (np.isfinite(borders).all() and (np.diff(borders) > 0).all()):
                raise DataError(f"data.statistics: {folder} has quantiles for {name!r} that do not rise; {remedy}")

    def save(self, config: DataConfig, counts: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """Writes `data.statistics`, `fitted.json` last and by rename."""
        assert config.statistics is not None
        folder = Path(config.statistics)
        folder.mkdir(parents=True, exist_ok=True)
        if self.vocabularies:
            table = pa.table(
                {
                    "feature": pa.array([n for n, k in self.vocabularies.items() for _ in range(k.size)], pa.string()),
                    "key": np.concatenate(list(self.vocabularies.values())),
                    "count": np.concatenate([counts[n] for n in self.vocabularies]),
                }
            )
            pq.write_table(table, folder / ".vocabulary.tmp")
            (folder / ".vocabulary.tmp").replace(folder / "vocabulary.parquet")
        content = {
            "version": _VERSION,
            "rules": needs(config),
            "moments": self.moments,
            "boundaries": {n: b.tolist() for n, b in self.boundaries.items()},
            "about": self.about,
        }
        temporary = folder / ".fitted.tmp"
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(folder / "fitted.json")


def needs(config: DataConfig) -> dict[str, str]:
    """What a job takes from a fit: the settings that matter, by feature or dense column."""
    result: dict[str, str] = {}
    for block in config.dense:
        if block.standardise:
            for column in block.columns:
                result[f"dense {column}"] = json.dumps([block.transform, block.fill, block.clip])
    for feature in config.sparse:
        if feature.vocabulary is not None:
            what = [feature.columns, feature.space, feature.type, feature.offset, feature.vocabulary.min_count]
            result[f"vocabulary {feature.name}"] = json.dumps(what)
        if feature.bucketize is not None and feature.bucketize.kind == "quantiles":
            result[f"quantiles {feature.name}"] = json.dumps([feature.columns, feature.bucketize.num_buckets])
    return result
