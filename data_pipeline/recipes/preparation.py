"""Raw files -> `train/` and `eval/` as Parquet: streamed, several files at a time, restartable, and all or nothing.

Finished parts are kept in `.work/` below the target until all are there; then the two folders appear by rename. A run
that was interrupted goes on with the parts that are missing, if the sources and the settings are the same.
"""

import concurrent.futures
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.keys import mix

_ROW_GROUP_ROWS = 1 << 16
Bool = npt.NDArray[np.bool_]
Progress = Callable[[int, int], None]
Advance = Callable[[int], None]
Convert = Callable[[Path, Advance], Iterator[pa.RecordBatch]]
"""Reads a source as batches; calls back with the bytes of the source read so far."""


@dataclass(frozen=True)
class Split:
    """Which rows are for evaluation.

    `random`: each row by a hash of (seed, file, row). `order`: the last rows. `permutation`: the first `train_rows`
    rows of `numpy.random.RandomState(seed).permutation(num_rows)` are for training, the others for evaluation.
    """

    kind: Literal["random", "order", "permutation"] = "random"
    eval_fraction: float = 0.1
    seed: int = 0
    train_rows: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.eval_fraction < 1:
            raise DataError(f"eval fraction {self.eval_fraction} must lie between 0 and 1")
        if self.train_rows is not None and self.kind == "random":
            raise DataError("a number of training rows goes with the splits `order` and `permutation`")

    @property
    def needs_count(self) -> bool:
        return self.kind != "random"

    def whole(self, num_rows: int) -> Bool:
        """Mask of all rows, for the kinds that need their number."""
        num_train = self.train_rows if self.train_rows is not None else num_rows - round(num_rows * self.eval_fraction)
        if not 0 < num_train < num_rows:
            raise DataError(f"{num_train} of {num_rows} rows for training leave one part empty")
        mask = np.zeros(num_rows, dtype=bool)
        order = (
            np.random.RandomState(self.seed).permutation(num_rows)
            if self.kind == "permutation"
            else np.arange(num_rows)
        )
        mask[order[num_train:]] = True
        return mask

    def hashed(self, source: int, first_row: int, num_rows: int) -> Bool:
        """Mask of rows of one source, for `random`."""
        rows = np.arange(first_row, first_row + num_rows, dtype=np.uint64)
        bits = mix(mix(rows ^ np.uint64((self.seed * 0x9E3779B97F4A7C15 + source) & 0xFFFFFFFFFFFFFFFF)))
        result: Bool = bits < np.uint64(int(self.eval_fraction * 2**64))
        return result


def prepare(
    sources: Iterable[str | Path],
    directory: str | Path,
    convert: Convert,
    split: Split,
    *,
    settings: Mapping[str, Any],
    threads: int = 2,
    on_progress: Progress | None = None,
) -> dict[str, int]:
    """Converts every source to a part of `train/` and of `eval/`. Returns row counts.

    `settings` is whatever else the result depends on. Raises DataError for a missing source, a target in use and bad
    lines; OSError, with the file's name, for a read that the system refuses.
    """
    convert = _naming_the_file(convert)
    files = _sources(sources)
    root = Path(directory)
    _check_target(root)
    work = root / ".work"
    work.mkdir(parents=True, exist_ok=True)
    tick = _Progress(files, on_progress, 2 if split.needs_count else 1)
    masks: list[Bool] | None = None
    with concurrent.futures.ThreadPoolExecutor(max(1, threads)) as pool:
        if split.needs_count:
            counts = list(
                pool.map(lambda n: sum(b.num_rows for b in convert(files[n], tick.part(n))), range(len(files)))
            )
            whole = split.whole(sum(counts))
            ends = np.cumsum(counts)
            masks = [whole[end - count : end] for end, count in zip(ends, counts, strict=True)]

        def one(number: int) -> dict[str, int]:
            identity = _identity(files[number], number, split, settings)
            if masks is not None:
                identity = hashlib.sha256(
                    (identity + hashlib.sha256(masks[number].tobytes()).hexdigest()).encode()
                ).hexdigest()
            mask = None if masks is None else masks[number]
            return _part(files[number], number, work, identity, convert, split, mask, tick.part(number, last=True))

        futures = [pool.submit(one, n) for n in range(len(files))]
        try:
            found = [f.result() for f in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    totals = {key: sum(f[key] for f in found) for key in ("train_rows", "eval_rows")}
    if not totals["train_rows"] or not totals["eval_rows"]:
        raise DataError(
            f"{totals['train_rows']} training and {totals['eval_rows']} evaluation rows: one part would be empty"
        )
    final = work / "final"
    shutil.rmtree(final, ignore_errors=True)
    for part in ("train", "eval"):
        (final / part).mkdir(parents=True)
        for number in range(len(files)):
            finished = work / f"{number:05d}" / f"{part}.parquet"
            if finished.exists():
                _link(finished, final / part / f"part-{number:05d}.parquet")
    for part in ("train", "eval"):
        shutil.rmtree(root / part, ignore_errors=True)
        (final / part).rename(root / part)
    (root / "prepared.json").write_text(
        json.dumps({**totals, "split": asdict(split), "settings": dict(settings)}, indent=1) + "\n"
    )
    shutil.rmtree(work)
    return totals


def _link(source: Path, target: Path) -> None:
    """A second name for a finished part: until the very end a run can be repeated."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _sources(sources: Iterable[str | Path]) -> list[Path]:
    files: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            files += sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith((".", "_")))
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"{path}: does not exist")
    if not files:
        raise DataError("no source file is given or found")
    return files


def _check_target(root: Path) -> None:
    known = {".work", "train", "eval", "prepared.json"}
    strange = sorted(p.name for p in root.iterdir() if p.name not in known) if root.exists() else []
    if strange:
        raise DataError(f"{root}: holds other files ({', '.join(strange[:3])}); choose a new or empty folder")


def _identity(source: Path, number: int, split: Split, settings: Mapping[str, Any]) -> str:
    stat = source.stat()
    content = [str(source.resolve()), stat.st_size, stat.st_mtime_ns, number, asdict(split), dict(settings)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _part(
    source: Path,
    number: int,
    work: Path,
    identity: str,
    convert: Convert,
    split: Split,
    mask: Bool | None,
    advance: Advance,
) -> dict[str, int]:
    folder = work / f"{number:05d}"
    done = folder / "done.json"
    if done.exists():
        kept: dict[str, Any] = json.loads(done.read_text())
        if kept["identity"] == identity:
            advance(source.stat().st_size)
            return {key: int(kept[key]) for key in ("train_rows", "eval_rows")}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writers = {part: _RowGroups(folder / f"{part}.parquet") for part in ("train", "eval")}
    row = 0
    try:
        for batch in convert(source, advance):
            chosen = split.hashed(number, row, batch.num_rows) if mask is None else mask[row : row + batch.num_rows]
            row += batch.num_rows
            for part, rows in (("train", ~chosen), ("eval", chosen)):
                if rows.any():
                    writers[part].write(batch.filter(pa.array(rows)))
    finally:
        for writer in writers.values():
            writer.close()
    counts = {f"{part}_rows": writer.num_rows for part, writer in writers.items()}
    temporary = folder / "done.tmp"
    temporary.write_text(json.dumps({**counts, "identity": identity}))
    temporary.replace(done)
    return counts


def _naming_the_file(convert: Convert) -> Convert:
    """The same batches; what the system says of a read that failed names the file, as an open that fails does."""

    def named(source: Path, advance: Advance) -> Iterator[pa.RecordBatch]:
        try:
            yield from convert(source, advance)
        except OSError as error:
            if error.filename is None and error.errno is not None:
                raise OSError(error.errno, error.strerror, str(source)) from error
            raise

    return named


class _RowGroups:
    """A Parquet file with row groups of a good size."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._held: list[pa.RecordBatch] = []
        self._held_rows = 0
        self.num_rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch)
        self._held_rows += batch.num_rows
        self.num_rows += batch.num_rows
        if self._held_rows >= _ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            table = pa.Table.from_batches(self._held)
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd", write_page_checksum=True)
            self._writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
            self._held, self._held_rows = [], 0

    def close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()


class _Progress:
    """Bytes read of all sources, from several threads."""

    def __init__(self, files: list[Path], report: Progress | None, passes: int) -> None:
        self._lock = threading.Lock()
        self._report = report
        self._sizes = [f.stat().st_size for f in files]
        self._passes = passes
        self._done = [0] * len(files)

    def part(self, number: int, *, last: bool = False) -> Advance:
        before = self._sizes[number] * (self._passes - 1) if last else 0

        def advance(num_bytes: int) -> None:
            with self._lock:
                self._done[number] = max(self._done[number], before + num_bytes)
                if self._report is not None:
                    self._report(sum(self._done), self._passes * sum(self._sizes))

        return advance
