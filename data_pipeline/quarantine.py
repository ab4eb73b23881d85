"""What happens to bad rows: the job stops, or they are left out, or also kept for a person to look at."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from paddlewheel.data_pipeline.arrow_arrays import simple
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset, Slice
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.files import SourceFile


class BadRows:
    """Applies `data.on_bad_row`."""

    def __init__(self, config: DataConfig) -> None:
        self._policy = config.on_bad_row
        self._quarantine = None
        if config.on_bad_row == "quarantine":
            assert config.quarantine_directory is not None
            self._quarantine = Quarantine(config.quarantine_directory)

    def apply_policy(
        self,
        dataset: Dataset,
        piece: Slice,
        start: int,
        num_rows: int,
        columns: dict[str, pa.Array],
        reasons: dict[int, str],
    ) -> None:
        """Rows `start` to `start + num_rows` of a slice were read as `columns`; `reasons` says which are bad, and why.

        Raises DataError, which names the first, unless bad rows are to be left out.
        """
        if reasons:
            self.apply_policy_to_bad_rows(dataset, piece, start, num_rows, self.pick(columns, reasons), reasons)

    def pick(self, columns: Mapping[str, pa.Array], reasons: Mapping[int, str]) -> dict[str, pa.Array]:
        """What is kept of columns: the bad rows where they go to quarantine, else nothing."""
        if self._quarantine is None:
            return {}
        rows = pa.array(sorted(reasons), pa.int64())
        return {name: simple(array).take(rows) for name, array in columns.items()}

    def apply_policy_to_bad_rows(
        self,
        dataset: Dataset,
        piece: Slice,
        start: int,
        num_rows: int,
        picked: Mapping[str, pa.Array | pa.ChunkedArray],
        reasons: Mapping[int, str],
    ) -> None:
        """As `apply_policy`, with columns that hold the bad rows alone, in the order of their positions."""
        file = dataset.files[piece.file]
        first = sum(g.num_rows for g in file.row_groups[: piece.row_group]) + piece.row_start + start
        if self._policy == "fail":
            row, why = min(reasons.items())
            raise DataError(
                f"{file.source.name}: row {first + row}: {why}; {len(reasons)} of {num_rows} rows here are "
                "unusable (data.on_bad_row: skip or quarantine leaves them out)"
            )
        if self._quarantine is not None:
            self._quarantine.add(file.source, first, picked, reasons)


class Quarantine:
    """Writes bad rows as Parquet: the columns that the job reads, and where each row is from and why it is bad.

    A block of rows has one file with a name of its own, so that reading it again (next epoch, after a restart)
    replaces the file instead of adding to it.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def add(
        self,
        source: SourceFile,
        first_row: int,
        picked: Mapping[str, pa.Array | pa.ChunkedArray],
        reasons: Mapping[int, str],
    ) -> None:
        """Writes rows `reasons` of a block whose first row is row `first_row` of the file."""
        rows = sorted(reasons)
        chosen = dict(picked)
        chosen["_file"] = pa.array([source.name] * len(rows))
        chosen["_row"] = pa.array([first_row + r for r in rows], pa.int64())
        chosen["_reason"] = pa.array([reasons[r] for r in rows])
        identity = hashlib.sha256(source.name.encode()).hexdigest()[:12]
        self._directory.mkdir(parents=True, exist_ok=True)
        target = self._directory / f"{identity}-{first_row:012d}.parquet"
        temporary = target.with_suffix(".tmp")
        pq.write_table(pa.table(chosen), temporary)
        temporary.replace(target)
