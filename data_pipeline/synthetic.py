"""Seeded click data whose best possible AUC is known.

Click probability = sigmoid(bias + one effect per id + a low-rank interaction + a linear part of the numbers). No
model can rank the evaluation rows better than this probability does, so its AUC on the drawn labels is the ceiling.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from paddlewheel.data_pipeline.errors import DataError

Float = npt.NDArray[np.float64]
_CARDINALITIES = {"user": 120, "item": 90, "site": 30, "category": 20, "segment": 12, "device": 6, "hour": 24}
_NUM_TAGS = 40
_MAX_TAGS = 5
_DENSE = ("price", "age", "recency", "depth")
_CHUNK_ROWS = 50_000


@dataclass(frozen=True)
class SyntheticResult:
    """What was written, and how well any model can do on it."""

    directory: str
    seed: int
    train_rows: int
    eval_rows: int
    click_rate: float
    best_auc: float
    """AUC of the true click probability on the evaluation labels."""
    best_logloss: float
    """Logloss of the true click probability on the evaluation labels."""


def generate(
    directory: str | os.PathLike[str],
    rows: int,
    seed: int,
    *,
    eval_fraction: float = 0.2,
    files: int = 8,
    days: Sequence[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> SyntheticResult:
    """Writes `train/`, `eval/` (Parquet) and `best.json` below `directory`, which must not hold other files.

    With days, the training rows are shared out evenly to folders `train/day=<day>`. The same arguments give the same
    data. Raises DataError for a directory in use and for numbers that make no data.
    """
    root = Path(directory)
    if root.exists() and any(root.iterdir()) and not (root / "best.json").exists():
        raise DataError(f"{root}: holds other files; choose a new or empty directory")
    if not 0 < eval_fraction < 1 or rows < 10:
        raise DataError(
            f"eval_fraction must lie between 0 and 1 (got {eval_fraction}) and rows be at least 10 (got {rows})"
        )
    world = _World(seed)
    eval_rows = max(1, round(rows * eval_fraction))
    scores: list[Float] = []
    labels: list[npt.NDArray[np.int8]] = []
    clicks = 0
    done = 0
    for part, count in (("train", rows - eval_rows), ("eval", eval_rows)):
        folder = root / part
        temporary = root / f".{part}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        by_day = days if part == "train" else ()
        pieces = len(by_day) or max(1, min(files if part == "train" else 2, count // 1000))
        for number in range(pieces):
            size = count * (number + 1) // pieces - count * number // pieces
            place = temporary / f"day={by_day[number]}" if by_day else temporary
            place.mkdir(exist_ok=True)
            with pq.ParquetWriter(place / f"part-{number:05d}.parquet", _SCHEMA, compression="zstd") as writer:
                for start in range(0, size, _CHUNK_ROWS):
                    now = min(_CHUNK_ROWS, size - start)
                    random = np.random.RandomState([seed & 0xFFFFFFFF, part == "eval", number, start])
                    table, probability, label = world.draw(now, random)
                    writer.write_table(table)
                    clicks += int(label.sum())
                    if part == "eval":
                        scores.append(probability)
                        labels.append(label)
                    done += now
                    if on_progress is not None:
                        on_progress(done, rows)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    p, y = np.concatenate(scores), np.concatenate(labels)
    result = SyntheticResult(
        str(root),
        seed,
        rows - eval_rows,
        eval_rows,
        clicks / rows,
        auc(p, y),
        float(-np.mean(np.where(y == 1, np.log(p), np.log1p(-p)))),
    )
    temporary = root / ".best.json.tmp"
    temporary.write_text(json.dumps(asdict(result), indent=2) + "\n")
    temporary.rename(root / "best.json")
    return result


def data_section(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The `data` section of a job for this data."""
    root = Path(directory)
    return {
        "train": str(root / "train"),
        "eval": str(root / "eval"),
        "batch_rows": 2048,
        "labels": ["click"],
        "dense": {"columns": list(_DENSE), "fill": 0.0, "clip": [-5.0, 5.0]},
        "sparse": [{"name": name} for name in _CARDINALITIES]
        + [{"name": "tags", "pooling": "mean", "max_length": _MAX_TAGS}],
    }


def auc(scores: Float, labels: npt.NDArray[np.int8]) -> float:
    """Area under the ROC curve (Mann-Whitney); tied scores count half. NaN if only one class is present."""
    positives = int(labels.sum())
    negatives = labels.size - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, where, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[where][labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives))


_SCHEMA = pa.schema(
    [
        ("click", pa.int8()),
        ("user", pa.int64()),
        ("item", pa.int64()),
        ("site", pa.string()),
        ("category", pa.string()),
        ("segment", pa.int32()),
        ("device", pa.string()),
        ("hour", pa.int16()),
        ("tags", pa.list_(pa.string())),
        *((name, pa.float32()) for name in _DENSE),
    ]
)


class _World:
    """The fixed truth behind the rows of one seed."""

    def __init__(self, seed: int) -> None:
        random = np.random.RandomState([seed & 0xFFFFFFFF, 0x776F726C])
        scale = {"user": 0.6, "item": 0.7, "site": 0.5, "category": 0.4, "segment": 0.3, "device": 0.3, "hour": 0.3}
        self.effects = {name: scale[name] * random.standard_normal(size) for name, size in _CARDINALITIES.items()}
        self.frequency = {name: _zipf(random, size) for name, size in _CARDINALITIES.items()}
        self.user_ids = random.randint(1, 1 << 62, size=_CARDINALITIES["user"], dtype=np.int64)
        self.item_ids = np.arange(_CARDINALITIES["item"], dtype=np.int64) * 1000 + 7
        self.tag_effects = 0.5 * random.standard_normal(_NUM_TAGS)
        self.segment_vectors = random.standard_normal((_CARDINALITIES["segment"], 2))
        self.category_vectors = random.standard_normal((_CARDINALITIES["category"], 2))
        self.dense_effects = np.array([0.4, -0.3, 0.2, 0.1])

    def draw(self, rows: int, random: np.random.RandomState) -> tuple[pa.Table, Float, npt.NDArray[np.int8]]:
        ids = {name: random.choice(size, rows, p=self.frequency[name]) for name, size in _CARDINALITIES.items()}
        num_tags = random.randint(0, _MAX_TAGS, rows)
        tags = random.randint(0, _NUM_TAGS, int(num_tags.sum()))
        row = np.repeat(np.arange(rows), num_tags)
        dense = random.standard_normal((rows, len(_DENSE))).astype(np.float32)
        gaps = random.random_sample(dense.shape) < 0.05
        logit = -1.6 + sum(self.effects[name][at] for name, at in ids.items())
        logit = logit + np.bincount(row, self.tag_effects[tags], rows) / np.maximum(num_tags, 1)
        logit += 0.3 * np.einsum(
            "nr,nr->n", self.segment_vectors[ids["segment"]], self.category_vectors[ids["category"]]
        )
        logit += np.where(gaps, 0.0, dense) @ self.dense_effects
        probability = 1 / (1 + np.exp(-logit))
        label = (random.random_sample(rows) < probability).astype(np.int8)
        offsets = np.concatenate([[0], np.cumsum(num_tags)]).astype(np.int32)
        columns = [
            pa.array(label),
            pa.array(self.user_ids[ids["user"]]),
            pa.array(self.item_ids[ids["item"]]),
            _names("site", ids["site"], _CARDINALITIES["site"]),
            _names("category", ids["category"], _CARDINALITIES["category"]),
            pa.array(ids["segment"].astype(np.int32)),
            _names("device", ids["device"], _CARDINALITIES["device"]),
            pa.array(ids["hour"].astype(np.int16)),
            pa.ListArray.from_arrays(pa.array(offsets), _names("tag", tags, _NUM_TAGS)),
            *(pa.array(dense[:, i], mask=gaps[:, i]) for i in range(len(_DENSE))),
        ]
        return pa.table(columns, schema=_SCHEMA), probability, label


def _zipf(random: np.random.RandomState, size: int) -> Float:
    weights = 1 / (1 + np.arange(size)) ** 0.6
    random.shuffle(weights)
    result: Float = weights / weights.sum()
    return result


def _names(prefix: str, at: npt.NDArray[np.int64], size: int) -> pa.Array:
    return pa.array([f"{prefix}-{i:02d}" for i in range(size)]).take(pa.array(at))
