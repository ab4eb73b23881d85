"""The work that every system in a benchmark is given, and the files it reads it from.

A DeepFM whose rows have 26 ids, one a slot, drawn from a Zipf distribution, and 13 dense numbers. All systems read the
same rows in the same form as they would in production: Parquet for ours and PyTorch, text for Paddle's own reader.

Legend: B rows of a block, F slots, D dense columns.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

_FORMAT = 1  # part of the name of a cached data set: changes when the same numbers would give other files


@dataclass(frozen=True)
class Workload:
    """Rows and model of a benchmark.

    Attributes:
        rows: rows of one pass.
        seed: fixes every row.
        num_slots: ids a row.
        ids_per_slot: ids of a slot lie in [1, ids_per_slot].
        zipf_exponent: ids are Zipf-distributed with this exponent, taken modulo ids_per_slot.
        num_dense: dense numbers a row, uniform in [0, 1), four decimals.
        num_files: files that the rows are split into.
        width: floats of an embedding, beside the first-order weight.
        tower: units of the hidden layers.
        embedding_learning_rate: of AdaGrad on the tables.
        dense_learning_rate: of Adam on the dense part.
    """

    rows: int = 200_000
    seed: int = 1
    num_slots: int = 26
    ids_per_slot: int = 1_000_000
    zipf_exponent: float = 1.2
    num_dense: int = 13
    num_files: int = 8
    width: int = 16
    tower: tuple[int, ...] = (400, 400, 400)
    embedding_learning_rate: float = 0.05
    dense_learning_rate: float = 1e-3

    @property
    def slots(self) -> list[str]:
        """Names of the id columns."""
        return [f"C{i + 1}" for i in range(self.num_slots)]

    @property
    def dense(self) -> list[str]:
        """Names of the dense columns."""
        return [f"I{i + 1}" for i in range(self.num_dense)]

    @property
    def tower_sizes(self) -> list[int]:
        """Floats a row before each layer of the tower, and after the last."""
        return [self.num_slots * self.width + self.num_dense, *self.tower, 1]

    @property
    def tower_bytes(self) -> int:
        """Of the tower's weights and biases."""
        return 4 * sum((a + 1) * b for a, b in pairwise(self.tower_sizes))

    @property
    def tower_flops_per_row(self) -> int:
        """Floating-point operations of the tower's matrix products for one row, forward and backward."""
        return 6 * sum(a * b for a, b in pairwise(self.tower_sizes))


@dataclass(frozen=True)
class Block:
    """Rows of one file. ids_BF counts from 1 within each slot."""

    ids_BF: NDArray[np.int64]
    dense_BD: NDArray[np.float32]
    labels_B: NDArray[np.float32]


@dataclass(frozen=True)
class Files:
    """Where the rows lie. Files are in order: block i is `parquet[i]` and `text[i]`."""

    parquet: tuple[Path, ...]
    text: tuple[Path, ...]

    @property
    def parquet_directory(self) -> Path:
        """Folder that holds the Parquet files alone."""
        return self.parquet[0].parent

    @property
    def text_directory(self) -> Path:
        """Folder that holds the text files alone."""
        return self.text[0].parent


def blocks(work: Workload) -> Iterator[Block]:
    """The rows, file by file. Labels depend weakly on ids and dense numbers, so that a loss can fall."""
    rng = np.random.default_rng(work.seed)
    effect_F = rng.normal(0.0, 0.15, work.num_slots)
    effect_D = rng.normal(0.0, 0.3, work.num_dense)
    for index in range(work.num_files):
        num_rows = work.rows * (index + 1) // work.num_files - work.rows * index // work.num_files
        ids_BF = rng.zipf(work.zipf_exponent, (num_rows, work.num_slots)) % work.ids_per_slot + 1
        dense_BD = (rng.integers(0, 10_000, (num_rows, work.num_dense)) / 1e4).astype(np.float32)
        sign_BF = 1.0 - 2.0 * (ids_BF % 2)
        log_odds_B = sign_BF @ effect_F + (dense_BD - 0.5) @ effect_D - 1.2
        labels_B = (rng.random(num_rows) < 1.0 / (1.0 + np.exp(-log_odds_B))).astype(np.float32)
        yield Block(ids_BF.astype(np.int64), dense_BD, labels_B)


def keys_per_row(work: Workload, batch_rows: int) -> float:
    """Distinct ids of a batch, over its rows; of the first rows."""
    ids_BF = next(blocks(work)).ids_BF[:batch_rows]
    return sum(len(np.unique(ids_BF[:, slot])) for slot in range(work.num_slots)) / len(ids_BF)


def prepare(work: Workload, directory: Path) -> Files:
    """Writes the files below `directory`, once: a later call with the same numbers finds them."""
    rows_only = {k: v for k, v in asdict(work).items() if k not in _MODEL_FIELDS}
    digest = hashlib.sha256(json.dumps([_FORMAT, rows_only], sort_keys=True).encode()).hexdigest()[:12]
    target = directory / f"rows-{work.rows}-{digest}"
    if not target.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=directory))
        try:
            _write(work, draft)
            draft.replace(target)
        except OSError:
            if not target.is_dir():  # else another run has just made the same
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return Files(tuple(sorted((target / "parquet").iterdir())), tuple(sorted((target / "text").iterdir())))


_MODEL_FIELDS = {"width", "tower", "embedding_learning_rate", "dense_learning_rate"}


def _write(work: Workload, directory: Path) -> None:
    parquet, text = directory / "parquet", directory / "text"
    parquet.mkdir()
    text.mkdir()
    for number, block in enumerate(blocks(work)):
        columns = {"label": pa.array(block.labels_B.astype(np.int8))}
        columns |= {name: pa.array(block.dense_BD[:, i]) for i, name in enumerate(work.dense)}
        columns |= {name: pa.array(block.ids_BF[:, i]) for i, name in enumerate(work.slots)}
        table = pa.table(columns)
        pq.write_table(table, parquet / f"part-{number:03}.parquet", row_group_size=65_536)
        _write_text(work, table, text / f"part-{number:03}.txt")


def _write_text(work: Workload, table: pa.Table, path: Path) -> None:
    """Paddle's MultiSlot format: for each input its number of values, then the values.

    All slots share one table, so ids are made disjoint here (slot f begins after f * ids_per_slot). They stay small,
    which is the shortest text and so the fastest for Paddle to parse; hashed 64-bit keys would be twice as long.
    """
    arrays: list[pa.Array] = []

    def count(number: int) -> None:
        arrays.append(pa.repeat(pa.scalar(number, pa.int8()), table.num_rows))

    for index, name in enumerate(work.slots):
        count(1)
        arrays.append(pc.add(table[name].combine_chunks(), index * work.ids_per_slot))
    count(work.num_dense)
    arrays += [table[name].combine_chunks() for name in work.dense]
    count(1)
    arrays.append(table["label"].combine_chunks())
    rows = pa.table(arrays, names=[str(i) for i in range(len(arrays))])
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter=" ", quoting_style="none")
    pyarrow.csv.write_csv(rows, path, options)
