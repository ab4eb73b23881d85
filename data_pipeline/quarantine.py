"""Bad rows, kept for a person to look at."""

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.sources import SourceFile


class Quarantine:
    """Writes bad rows as Parquet: the columns that the job reads, and where each row is from and why it is bad.

    A block of rows has one file with a name of its own, so that reading it again (next epoch, after a restart)
    replaces the file instead of adding to it.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def add(self, source: SourceFile, first_row: int, columns: dict[str, pa.Array], reasons: dict[int, str]) -> None:
        """Writes rows `reasons` of a block whose first row is row `first_row` of the file."""
        rows = sorted(reasons)
        chosen = {name: array.take(pa.array(rows)) for name, array in columns.items()}
        chosen["_file"] = pa.array([source.name] * len(rows))
        chosen["_row"] = pa.array([first_row + r for r in rows], pa.int64())
        chosen["_reason"] = pa.array([reasons[r] for r in rows])
        identity = hashlib.sha256(source.name.encode()).hexdigest()[:12]
        self._directory.mkdir(parents=True, exist_ok=True)
        target = self._directory / f"{identity}-{first_row:012d}.parquet"
        temporary = target.with_suffix(".tmp")
        pq.write_table(pa.table(chosen), temporary)
        temporary.replace(target)
