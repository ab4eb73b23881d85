"""Files of saved tables: what the servers write, checked, read and rewritten without Paddle and without a server.

Layout of one table (`number` is made from its name, see `config.table_id`):

    <directory>/<table>/table.json                        written last: what this is; size, rows, hash of each part
    <directory>/<table>/<number>/part-<server>-<shard>    one shard's rows, written by the servers

Parts are of one of two kinds. Our own table writes rows (`row_parts`), bit for bit. Paddle's writes text: a line is
`key slot unseen_days delta_score shows clicks first_order state... [embedding... state...]`, floats with
six significant digits (so a restore is not bit-exact: README.md has the figures); the part in brackets is absent while
the key is below the table's admission score. Order of columns: `ctr_accessor.h` in Paddle's source; tested.

A saved table is whole, or holds only the rows that changed since an earlier one and the keys that are gone since (ours
alone). Its `table.json` then names that one, by a path relative to its own folder and by its checksum, and so on to a
whole one: `SavedTable.earlier`. Whatever reads rows here reads the table that the chain leads to.

Legend of shapes: N rows of one batch, K embedding floats, A accumulators of the first-order weight, E of the embedding.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import re
import shutil
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from paddlewheel.pserver import row_parts
from paddlewheel.pserver.config import TableConfig, check_table_name, table_id
from paddlewheel.pserver.errors import CheckpointError, PathError, SaveError, cannot_read

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

Kind = Literal["text", "rows"]
_FORMATS: dict[Kind, int] = {"text": 1, "rows": 2}
_FORMAT_OF_CHANGES = 3
DESCRIPTION = "table.json"
# Paddle hands paths to a shell without quoting (`find`, `rm -rf`): any other character could do damage.
_SAFE_PATH = re.compile(r"/[\w./=@:+,%-]*", re.ASCII)
_PART = re.compile(r"part-(\d{3,9})-(\d{5,9})", re.ASCII)
_BLOCK_BYTES = 1 << 22
_NUM_THREADS = 4
_NUM_FIXED = 6  # slot, unseen_days, delta_score, shows, clicks, first_order
_MAX_OPEN_FILES = 200
_NEWLINE, _SPACE = 10, 32


class Part(NamedTuple):
    """One file: its name within the table's folder of parts, size, rows, and xxh3-128 of its bytes.

    num_keys: of a part that holds only what changed, keys that the shard has then.
    """

    name: str
    num_bytes: int
    num_rows: int
    xxh3_128: str
    num_keys: int | None = None


class Base(NamedTuple):
    """The saved table that changes lead on from: its folder, relative to that of the changes, and its checksum."""

    path: str
    checksum: str


@dataclass(frozen=True)
class SavedTable:
    """A saved table: where it is, what it holds, and its parts in shard order.

    base: what it leads on from; None: it is whole. earlier: that one and all before it, the whole one first; empty
    where nobody has looked for them (`parse_description`).
    """

    directory: Path
    name: str
    config: TableConfig
    seed: int
    parts: tuple[Part, ...]
    kind: Kind = "text"
    base: Base | None = None
    earlier: tuple[SavedTable, ...] = ()
    _checksum_read: str = field(
        default="", compare=False
    )  # by the version that wrote it, whose config may have had other keys

    @property
    def num_rows(self) -> int:
        """In its own parts."""
        return sum(part.num_rows for part in self.parts)

    @property
    def num_keys(self) -> int:
        """Of the table that it leads to."""
        return sum(part.num_rows if part.num_keys is None else part.num_keys for part in self.parts)

    @property
    def links(self) -> tuple[SavedTable, ...]:
        """What makes up the table: the whole one, then the changes in the order in which they came."""
        return (*self.earlier, self)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def content_id(self) -> str:
        """Names the files' content: equal for a copy, different after any training."""
        import xxhash

        hashes = (part.xxh3_128 for link in self.links for part in link.parts)
        return xxhash.xxh3_128_hexdigest("".join(hashes).encode())

    @property
    def folder(self) -> Path:
        """The folder that holds the parts."""
        return self.directory / f"{table_id(self.name):03d}"

    def paths(self) -> list[Path]:
        return [self.folder / part.name for part in self.parts]

    @property
    def description(self) -> str:
        """The text of `table.json`."""
        document = self._document()
        return json.dumps({**document, "checksum": _checksum(document)}, indent=1)

    @property
    def checksum(self) -> str:
        """Of its description, and so of everything in it and before it."""
        return self._checksum_read or _checksum(self._document())

    def _document(self) -> dict[str, object]:
        parts = [{name: value for name, value in part._asdict().items() if value is not None} for part in self.parts]
        return {
            "format": _FORMATS[self.kind] if self.base is None else _FORMAT_OF_CHANGES,
            "name": self.name,
            "config": self.config.model_dump(mode="json"),
            "seed": self.seed,
            **({} if self.base is None else {"base": self.base._asdict()}),
            "parts": parts,
        }


@dataclass(frozen=True)
class Rows:
    """Some keys of a table as saved. Values are changes from the initial vectors (see `initial`)."""

    keys_N: npt.NDArray[np.uint64]
    unseen_days_N: npt.NDArray[np.float32]
    delta_score_N: npt.NDArray[np.float32]
    shows_N: npt.NDArray[np.float32]
    clicks_N: npt.NDArray[np.float32]
    first_order_N: npt.NDArray[np.float32]
    first_order_state_NA: npt.NDArray[np.float32]
    has_embedding_N: npt.NDArray[np.bool_]
    embedding_NK: npt.NDArray[np.float32]  # zeros where there is none
    embedding_state_NE: npt.NDArray[np.float32]  # zeros where there is none
    class_N: npt.NDArray[np.uint8]  # of `TableConfig.admission_thresholds`

    def __len__(self) -> int:
        return len(self.keys_N)

    def take(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Rows:
        """Some of the rows."""
        return Rows(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        """All rows of several batches (at least one) of one table."""
        return Rows(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Rows)})


def state_widths(config: TableConfig) -> tuple[int, int]:
    """(A, E): accumulators that the table's rule keeps beside the first-order weight and beside the embedding."""
    return _num_state(config, 1), _num_state(config, config.width)


def _num_state(config: TableConfig, width: int) -> int:
    return row_parts.state_floats(config.optimizer.rule, width)


def row_bytes(config: TableConfig) -> int:
    """Bytes of a key's row in a server, with its embedding: the key and every float. Memory: README.md has figures."""
    return 8 + 4 * (_NUM_FIXED + config.width + sum(state_widths(config)))


def max_bytes_per_row(config: TableConfig) -> int:
    """Longest line of a saved table: a key of 20 digits, and floats such as " -1.23457e-05"."""
    return 21 + 13 * (_NUM_FIXED + config.width + sum(state_widths(config)))


def saved_row_bytes(config: TableConfig) -> int:
    """Bytes of a row in a server of our own engine, and on disk."""
    return row_parts.row_type(config).itemsize


def check_path(path: Path) -> None:
    """Raise PathError unless the path is absolute and safe in Paddle's shell commands."""
    if not _SAFE_PATH.fullmatch(str(path)):
        raise PathError(
            f"{str(path)!r} cannot hold tables: Paddle's servers pass it to a shell unquoted, so it must be absolute "
            "and made of ASCII letters, digits and . _ / = @ : + , % - only"
        )


# ---- whole tables ---------------------------------------------------------------------------------------------------


def record(
    directory: Path, name: str, config: TableConfig, seed: int, num_shards: int, *, base: Base | None = None
) -> SavedTable:
    """Read back the parts in `directory`, of which there must be one per shard, and write its `table.json`.

    base: what the parts lead on from, when they hold only what changed. Returns when all of it has reached the disk.
    """
    folder = directory / f"{table_id(name):03d}"
    paths = _parts_by_shard(folder)
    if len(paths) != num_shards:
        raise CheckpointError(f"{folder} holds {len(paths)} parts instead of {num_shards}")
    saved = SavedTable(directory, name, config, seed, tuple(_measure_all(paths, sync=True)), kind_of(paths), base)
    check_parts(saved)
    path = directory / DESCRIPTION
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(saved.description)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    for parent in (folder, directory):
        _sync_directory(parent)
    return saved


def check_parts(saved: SavedTable) -> None:
    """Raise CheckpointError unless all parts hold changes, or none does, as the table says."""
    wrong = [part.name for part in saved.parts if (part.num_keys is None) != (saved.base is None)]
    if wrong:
        what = "a whole shard" if saved.base is not None else "only changes"
        raise CheckpointError(f"table {saved.name!r}: part {wrong[0]} in {saved.directory} holds {what}")


def open_table(directory: Path) -> SavedTable:
    """A saved table as its `table.json` describes it. Looks at the parts' names and sizes; `verify` looks into them.

    Raises CheckpointError when the description is missing or broken, or parts are missing, extra or of another size;
    also when this is so of a table that it leads on from, or that is not what it was.
    """
    saved = _open_link(directory)
    links = [saved]
    while (link := links[0]).base is not None:
        links.insert(0, _open_base(link))
    return with_earlier(links)


def with_earlier(links: Sequence[SavedTable]) -> SavedTable:
    """The last of these saved tables, which lead on from one another, with all others before it.

    Raises CheckpointError when one does not lead on from the one before it.
    """
    for before, link in itertools.pairwise(links):
        if link.base is None or before.checksum != link.base.checksum:
            raise CheckpointError(
                f"{link.directory} holds only what changed since {before.directory}, which is not what it was then: "
                "bring that one back, or restore an older checkpoint"
            )
        check_fits(before, link.name, link.config, link.seed)
    if links[0].kind != "rows" and len(links) > 1:
        raise CheckpointError(f"{links[0].directory} holds text: nothing of our own tables can lead on from it")
    return replace(links[-1], earlier=tuple(links[:-1]))


def _open_base(link: SavedTable) -> SavedTable:
    """Also from a checkpoint that was put aside, one folder deeper, when its base was not."""
    assert link.base is not None
    places = [link.directory / link.base.path, link.directory / ".." / link.base.path]
    there = next((place for place in places if (place / DESCRIPTION).exists()), None)
    if there is None:
        raise CheckpointError(
            f"{link.directory} holds only what changed since {Path(os.path.normpath(places[0]))}, which is missing: "
            "bring that one back, or restore an older checkpoint"
        )
    return _open_link(Path(os.path.normpath(there)))


def _open_link(directory: Path) -> SavedTable:
    path = directory / DESCRIPTION
    try:
        text = read_regular(path).decode()
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} is not a complete saved table: it has no {DESCRIPTION}") from error
    except OSError as error:
        raise cannot_read(path, error) from error
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    saved = parse_description(text, directory)
    expected = {part.name: part.num_bytes for part in saved.parts}
    entries = list(saved.folder.iterdir()) if saved.folder.is_dir() else []
    found = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    for what, names in (
        ("missing", expected.keys() - found.keys()),
        ("not part of it", {entry.name for entry in entries} - expected.keys()),
    ):
        if names:
            raise CheckpointError(f"{saved.folder}: {len(names)} files are {what}, such as {min(names)}")
    for part in saved.parts:
        if found[part.name] != part.num_bytes:
            raise CheckpointError(
                f"{saved.folder / part.name} has {found[part.name]} bytes instead of {part.num_bytes}"
            )
    return saved


def parse_description(text: str, directory: Path) -> SavedTable:
    """A saved table by the text of its `table.json`. Its parts are not looked at, and `directory` need not be there.

    Raises CheckpointError when the text is broken.
    """
    path = directory / DESCRIPTION
    try:
        document = json.loads(text)
        kinds: dict[int, Kind] = {number: kind for kind, number in _FORMATS.items()}
        kinds[_FORMAT_OF_CHANGES] = "rows"
        if document["format"] not in kinds:
            known = ", ".join(map(str, kinds))
            raise CheckpointError(f"{path} has format {document['format']}; this version reads formats {known}")
        if document.pop("checksum") != _checksum(document):
            raise CheckpointError(f"{path} has changed since it was written: its checksum does not fit")
        saved = SavedTable(
            directory,
            check_table_name(document["name"]),
            TableConfig.model_validate(document["config"]),
            int(document["seed"]),
            tuple(_parse_part(part) for part in document["parts"]),
            kinds[document["format"]],
            _parse_base(document["base"]) if document["format"] == _FORMAT_OF_CHANGES else None,
            _checksum_read=_checksum(document),
        )
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ValidationError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    check_parts(saved)
    return saved


def _parse_base(raw: dict[str, Any]) -> Base:
    if not all(isinstance(each, str) and "\0" not in each for each in raw.values()):
        raise CheckpointError(f"it leads on from {raw!r}, which is not what paddlewheel writes")
    return Base(**raw)


def _parse_part(raw: dict[str, Any]) -> Part:
    """Its name becomes part of paths on every host that fetches the table: it must be one that servers give."""
    part = Part(**raw)
    shard_of(part.name)
    numbers: tuple[object, ...] = (part.num_bytes, part.num_rows, part.num_keys or 0)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise CheckpointError(f"{part.name} has {part.num_bytes!r} bytes and {part.num_rows!r} rows")
    return part


def read_regular(path: Path) -> bytes:
    """The content of a file. Raises OSError, also for what only looks like one: a pipe would be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        return file.read()


def verify(saved: SavedTable) -> None:
    """Read every byte: CheckpointError names the first part whose content is not what was written."""
    for link in saved.links:
        for part, now in zip(link.parts, _measure_all(link.paths()), strict=True):
            if now != part:
                raise CheckpointError(
                    f"{link.folder / part.name} has changed since it was written: {now.num_rows} rows instead of "
                    f"{part.num_rows}, hash {now.xxh3_128} instead of {part.xxh3_128}"
                )


def count_embeddings(saved: SavedTable) -> int:
    """How many rows have an embedding; counts the columns without reading them."""
    if not saved.config.has_admission:
        return saved.num_keys
    if saved.base is not None:
        return sum(row_parts.count_embeddings_of(raw_N, saved.config) for raw_N in _raw_rows(saved))
    if saved.kind == "rows":
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            return sum(pool.map(partial(row_parts.count_embeddings, config=saved.config), saved.paths()))
    num_first, num_embedding = state_widths(saved.config)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        num_spaces = sum(pool.map(_count_spaces, saved.paths()))
    beyond = num_spaces - saved.num_rows * (_NUM_FIXED + num_first)
    return beyond // (saved.config.width + num_embedding)


def _count_spaces(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b" ") for block in iter(partial(file.read, _BLOCK_BYTES), b""))


def check_fits(saved: SavedTable, name: str, config: TableConfig, seed: int) -> None:
    """Raise CheckpointError unless a table of this name, config and seed can go on from the saved one."""
    must_agree: list[tuple[str, object, object]] = [
        ("name", saved.name, name),
        ("width", saved.config.width, config.width),
        ("first_order", saved.config.first_order, config.first_order),
        ("dtype", saved.config.dtype, config.dtype),
        ("optimizer.rule", saved.config.optimizer.rule, config.optimizer.rule),
        ("initial_range", saved.config.initial_range, config.initial_range),
        ("seed", saved.seed, seed),
    ]
    for what, was, wanted in must_agree:
        if was != wanted:
            raise CheckpointError(
                f"table {name!r}: {what} is {wanted}, but {saved.directory} was saved with {was}: use {was}, "
                "or start afresh"
            )


def shard_of(name: str) -> int:
    """The shard that a part's name tells. Raises CheckpointError for any other name."""
    match = _PART.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{name} is not part of a table")
    return int(match[2])


def kind_of(paths: Sequence[Path]) -> Kind:
    """Of which kind the parts are. Raises CheckpointError when there are both."""
    found = {row_parts.is_row_part(path) for path in paths}
    if len(found) > 1:
        raise CheckpointError(f"{paths[0].parent} holds parts of both engines: two saves are mixed")
    return "rows" if True in found else "text"


def measure_parts(folder: Path) -> list[Part]:
    """Reads the parts in a folder, which need not be all of the table; in shard order.

    Raises CheckpointError for a part that is cut short, and for files that are no parts.
    """
    paths = sorted(folder.iterdir() if folder.is_dir() else (), key=lambda path: shard_of(path.name))
    return list(_measure_all(paths))


def _parts_by_shard(folder: Path) -> list[Path]:
    parts: dict[int, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        shard = shard_of(path.name)
        if shard in parts:
            raise CheckpointError(f"{path} and {parts[shard]} are both shard {shard}: two saves are mixed")
        parts[shard] = path
    missing = sorted(set(range(max(parts, default=0) + 1)) - set(parts))
    if missing:
        raise CheckpointError(f"{folder} has {len(parts)} parts; shard {missing[0]} is missing")
    return [parts[shard] for shard in sorted(parts)]


def _checksum(document: dict[str, object]) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _measure_all(paths: list[Path], *, sync: bool = False) -> Iterator[Part]:
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        yield from pool.map(partial(_measure, sync=sync), paths)


def _measure(path: Path, *, sync: bool) -> Part:
    import xxhash

    rows, size, digest, last, keys = 0, 0, xxhash.xxh3_128(), b"\n", None
    try:
        is_text = not row_parts.is_row_part(path)
        if not is_text:
            header = row_parts.read_header(path)
            rows, keys = header.num_rows, header.num_keys if header.only_changes else None
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                if is_text:
                    rows += block.count(b"\n")
                size += len(block)
                digest.update(block)
                last = block[-1:]
            if sync:
                os.fsync(file.fileno())
    except OSError as error:
        raise cannot_read(path, error) from error
    if is_text and last != b"\n":
        raise CheckpointError(f"{path} ends within a line: it was not written completely")
    return Part(path.name, size, rows, digest.hexdigest(), keys)


# ---- rows -----------------------------------------------------------------------------------------------------------


def read_rows(saved: SavedTable, *, shards: Iterable[int] | None = None) -> Iterator[Rows]:
    """All rows (or those of some shards), some MiB at a time. CheckpointError on anything malformed."""
    if saved.kind == "rows":
        for raw_N in _raw_rows(saved, shards):
            yield Rows(**row_parts.columns(raw_N, saved.config))
        return
    paths = saved.paths()
    for shard in range(len(paths)) if shards is None else shards:
        for block in _blocks(paths[shard]):
            yield _parse(block, saved.config, paths[shard])


def _raw_rows(
    saved: SavedTable, shards: Iterable[int] | None = None, *, paths: Sequence[Path] | None = None
) -> Iterator[npt.NDArray[np.void]]:
    """Rows of our own table, in the order of shards, some MiB at a time. Through a chain, each key's newest row.

    Holds no more in memory than a batch and, of a chain, the keys of its changes that share a part. paths: where the
    parts of a whole table lie; None: where it says.
    """
    if saved.base is not None:
        yield from _through_chain(saved, shards)
        return
    paths = saved.paths() if paths is None else paths
    for shard in range(len(paths)) if shards is None else shards:
        yield from row_parts.read(paths[shard], saved.config)


def _through_chain(saved: SavedTable, shards: Iterable[int] | None) -> Iterator[npt.NDArray[np.void]]:
    """The newest link first: a key's row counts unless a later link has the key, as a row or as one that is gone.

    Links may have different numbers of shards. Keys of one residue by their greatest common divisor share parts: they
    are taken together.
    """
    assert saved.earlier, f"{saved.directory} was not opened together with what it leads on from"
    num_shards = len(saved.parts)
    common = math.gcd(*(len(link.parts) for link in saved.links))
    groups = ((at, None) for at in range(common)) if shards is None else ((s % common, s) for s in shards)
    for residue, shard in groups:
        later_keys_L = np.empty(0, np.uint64)  # sorted
        num_days = 0
        for link in reversed(saved.links):
            keys, days_of_link = [later_keys_L], 0
            for path in link.paths()[residue::common]:
                for raw_N in row_parts.read(path, link.config):
                    mine_N = raw_N if shard is None else raw_N[raw_N["key"] % np.uint64(num_shards) == shard]
                    if link.base is not None:
                        keys.append(mine_N["key"].copy())
                    newest_N = mine_N[~_is_among(mine_N["key"], later_keys_L)]
                    yield row_parts.add_unseen_days(newest_N, num_days) if num_days else newest_N
                if link.base is not None:
                    keys.append(row_parts.read_removed(path))
                    days_of_link = row_parts.read_header(path).num_days
            later_keys_L = np.unique(np.concatenate(keys))
            num_days += days_of_link


def _is_among(keys_N: npt.NDArray[np.uint64], sorted_L: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    if not len(sorted_L):
        return np.zeros(len(keys_N), np.bool_)
    at_N = np.minimum(np.searchsorted(sorted_L, keys_N), len(sorted_L) - 1)
    return np.asarray(sorted_L[at_N] == keys_N)


def _blocks(path: Path) -> Iterator[bytes]:
    """The file in pieces that end with a line."""
    rest = b""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            end = block.rfind(b"\n") + 1
            if end:
                yield rest + block[:end]
                rest = block[end:]
            else:
                rest += block
    if rest:
        raise CheckpointError(f"{path} ends within a line: it was not written completely")


def _parse(block: bytes, config: TableConfig, path: Path) -> Rows:
    num_first, num_embedding = state_widths(config)
    short = 1 + _NUM_FIXED + num_first
    full = short + config.width + num_embedding
    bytes_ = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(bytes_ == _NEWLINE) + 1
    columns = np.diff(np.cumsum(bytes_ == _SPACE, dtype=np.int32)[ends - 1], prepend=0) + 1
    is_full = columns == full
    is_short = columns == short
    if not bool((is_full | is_short).all()):
        wrong = int(columns[~(is_full | is_short)][0])
        raise CheckpointError(
            f"{path} has a line of {wrong} columns; a table of width {config.width} with rule {config.optimizer.rule} "
            f"has {full}, or {short} for a key without an embedding"
        )
    groups = []
    lengths = np.diff(ends, prepend=0)
    for group, count in ((is_full, full), (is_short, short)):
        if group.all():
            groups.append((group, _columns(block, count, path)))
        elif group.any():
            groups.append((group, _columns(bytes_[np.repeat(group, lengths)].tobytes(), count, path)))
    num_rows = len(ends)
    keys_N = np.empty(num_rows, np.uint64)
    values_NV = np.zeros((num_rows, full - 1), np.float32)
    for group, (keys, values) in groups:
        keys_N[group] = keys
        values_NV[group, : values.shape[1]] = values
    embedding = short - 1
    return Rows(
        keys_N=keys_N,
        unseen_days_N=values_NV[:, 1],
        delta_score_N=values_NV[:, 2],
        shows_N=values_NV[:, 3],
        clicks_N=values_NV[:, 4],
        first_order_N=values_NV[:, 5],
        first_order_state_NA=values_NV[:, _NUM_FIXED:embedding],
        has_embedding_N=is_full,
        embedding_NK=values_NV[:, embedding : embedding + config.width],
        embedding_state_NE=values_NV[:, embedding + config.width :],
        class_N=np.zeros(num_rows, np.uint8),
    )


def _columns(lines: bytes, count: int, path: Path) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
    """Keys and float32 [N, count - 1] of lines that all have `count` columns."""
    import pyarrow as pa
    from pyarrow import csv

    names = [str(i) for i in range(count)]
    try:
        table = csv.read_csv(
            pa.BufferReader(lines),
            read_options=csv.ReadOptions(column_names=names, block_size=1 << 20),
            parse_options=csv.ParseOptions(delimiter=" ", quote_char=False),
            convert_options=csv.ConvertOptions(
                column_types={name: pa.float32() if i else pa.uint64() for i, name in enumerate(names)}, null_values=[]
            ),
        )
    except pa.ArrowInvalid as error:
        raise CheckpointError(f"{path} has a malformed line: {error}") from error
    values = np.empty((len(table), count - 1), np.float32)
    for i in range(1, count):
        values[:, i - 1] = table.column(i).to_numpy()
    return table.column(0).to_numpy(), values


# ---- rewriting ------------------------------------------------------------------------------------------------------


def reshard(saved: SavedTable, directory: Path, num_shards: int, *, name: str | None = None) -> SavedTable:
    """Copy a saved table into `directory` with another number of shards (and perhaps another name).

    Values are copied as they are. A renamed table's initial vectors would be others, so a new name is refused
    unless initial_range is 0. Raises CheckpointError; SaveError when not all rows got there.
    """
    name = saved.name if name is None else name
    if name != saved.name and saved.config.initial_range:
        raise CheckpointError(
            f"table {saved.name!r} cannot become {name!r} by copying: initial vectors depend on the name"
        )
    with new_directory(directory):
        spread(saved, directory / f"{table_id(name):03d}", num_shards)
        copy = record(directory, name, saved.config, saved.seed, num_shards)
        if copy.num_rows != saved.num_keys:
            raise SaveError(f"{directory} got {copy.num_rows} rows of {saved.num_keys}: is the disk full?")
    return copy


@contextlib.contextmanager
def staged(saved: SavedTable, num_shards: int, kind: Kind) -> Iterator[Path]:
    """A directory that servers whose table reads parts of this kind can load: the table's own, or a copy beside it.

    Paddle's table wants as many parts as it has shards; ours takes any number.
    """
    check_path(saved.directory)
    if saved.base is None and saved.kind == kind and (kind == "rows" or len(saved.parts) == num_shards):
        yield saved.directory
        return
    with tempfile.TemporaryDirectory(prefix=f".{saved.directory.name}-", dir=saved.directory.parent) as temporary:
        copy = type(saved.directory)(temporary) / "copy"
        check_path(copy)
        copy.mkdir()
        spread(saved, copy / saved.folder.name, num_shards, kind=kind)
        yield copy


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[None]:
    """Create the directory; remove it again if the block fails."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError as error:
        raise CheckpointError(f"{directory} exists already") from error
    try:
        yield
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def spread(
    saved: SavedTable,
    folder: Path,
    num_shards: int,
    *,
    kind: Kind | None = None,
    only: range | None = None,
    paths: Sequence[Path] | None = None,
) -> None:
    """Write every row into the part of the new `folder` that its key belongs to, as text or rows (None: as it is).

    Values do not change: text holds as many digits as a float needs. Parts not in `only` stay empty, or (of rows) away.
    paths: where the saved table's parts lie; None: where it says.
    """
    paths = saved.paths() if paths is None else paths
    kind = kind or saved.kind
    folder.mkdir()
    if kind == saved.kind == "text":
        _spread_text(paths, folder, num_shards, only)
    elif kind == "rows":
        writer = row_parts.Writer(folder, saved.config, num_shards, only=only)
        if saved.kind == "rows":
            for raw_N in _raw_rows(saved, paths=paths):
                writer.add(raw_N)
        else:
            for path in paths:
                for block in _blocks(path):
                    writer.add(row_parts.rows_of(vars(_parse(block, saved.config, path)), saved.config))
        writer.finish()
    else:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            lines = folder.parent / temporary / "lines"
            with lines.open("wb") as file:
                for raw_N in _raw_rows(saved, paths=paths):
                    write_lines(Rows(**row_parts.columns(raw_N, saved.config)), file)
            _spread_text([lines], folder, num_shards, only)


def write_lines(rows: Rows, file: IO[bytes]) -> None:
    """Rows as text, with as many digits as each float needs."""
    import pyarrow as pa
    from pyarrow import csv

    options = csv.WriteOptions(include_header=False, delimiter=" ", quoting_style="none")
    for has_embedding in (False, True):
        group = rows.take(rows.has_embedding_N == has_embedding)
        if not len(group):
            continue
        columns = [group.keys_N, np.zeros(len(group), np.int8), group.unseen_days_N, group.delta_score_N]
        columns += [group.shows_N, group.clicks_N, group.first_order_N, *group.first_order_state_NA.T]
        if has_embedding:
            columns += [*group.embedding_NK.T, *group.embedding_state_NE.T]
        table = pa.table([pa.array(column) for column in columns], names=[str(i) for i in range(len(columns))])
        csv.write_csv(table, file, options)


def _spread_text(paths: Sequence[Path], folder: Path, num_shards: int, only: range | None) -> None:
    for first in range(0, num_shards, _MAX_OPEN_FILES):
        shards = range(first, min(first + _MAX_OPEN_FILES, num_shards))
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context((folder / f"part-000-{shard:05d}").open("wb")) for shard in shards]
            for path in paths:
                for block in _blocks(path):
                    for shard, lines in _lines_by_shard(block, num_shards):
                        if shard in shards and (only is None or shard in only):
                            files[shard - first].write(lines)


def _lines_by_shard(block: bytes, num_shards: int) -> Iterator[tuple[int, memoryview]]:
    bytes_ = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(bytes_ == _NEWLINE) + 1
    shard_N = (_keys(block) % np.uint64(num_shards)).astype(np.int64)
    order_N = np.argsort(shard_N, kind="stable")
    lengths = np.diff(ends, prepend=0)
    sorted_lengths = lengths[order_N]
    sorted_ends = np.cumsum(sorted_lengths)
    source = np.arange(len(bytes_)) + np.repeat(
        (ends - lengths)[order_N] - (sorted_ends - sorted_lengths), sorted_lengths
    )
    sorted_bytes = memoryview(bytes_[source]).cast("B")
    sorted_shard_N = shard_N[order_N]
    shards, starts = np.unique(sorted_shard_N, return_index=True)
    byte_starts = [*(sorted_ends[starts] - sorted_lengths[starts]).tolist(), len(bytes_)]
    for i, shard in enumerate(shards.tolist()):
        yield shard, sorted_bytes[byte_starts[i] : byte_starts[i + 1]]


def _keys(block: bytes) -> npt.NDArray[np.uint64]:
    """The numbers at the beginnings of the lines."""
    bytes_ = np.frombuffer(block, np.uint8)
    starts = np.concatenate([[0], np.flatnonzero(bytes_ == _NEWLINE)[:-1] + 1])
    keys_N = np.zeros(len(starts), np.uint64)
    at = starts.copy()
    going = np.ones(len(starts), np.bool_)
    while True:
        digit = bytes_[at] - np.uint8(48)
        going &= digit < 10
        if not going.any():
            return keys_N
        keys_N[going] = keys_N[going] * np.uint64(10) + digit[going]
        at += going
