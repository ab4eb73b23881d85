"""Parts of saved tables as our own table writes them: rows of one size, bit for bit as they lay in memory.

A part is a header of 80 bytes, the rows, and (in a part of changes) the keys that are gone:

    header   magic, version, sizes, shard, numbers of rows and removed keys, xxh64 of the rest, xxh64 of the header
    row      key u8, shows f4, clicks f4, meta u4, first-order weight f4, its state f4[A],
             embedding f4[K] or bfloat16[K], its state f4[E]
    meta     bit 30: has an embedding; bits 24 to 29: class of the key; bits 0 to 11: unseen days

All little-endian. `native/part_file.h` and `native/layout.h` say the same. Legend of shapes: N rows of one batch, K
embedding floats, A accumulators of the first-order weight, E of the embedding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paddlewheel.pserver.errors import CheckpointError
from paddlewheel.pserver.initializer import admitted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from paddlewheel.pserver.config import TableConfig

MAGIC = b"PWHLRWS1"
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("row_bytes", "<u4"),
        ("width", "<u4"),
        ("first_state", "<u4"),
        ("embedding_state", "<u4"),
        ("flags", "<u4"),
        ("shard", "<u4"),
        ("shards", "<u4"),
        ("rows", "<u8"),
        ("removed", "<u8"),
        ("days", "<u4"),
        ("keys", "<u4"),
        ("body_hash", "<u8"),
        ("header_hash", "<u8"),
    ]
)
HEADER_BYTES = _HEADER.itemsize
_HALF, _CHANGES = 1, 2
_BLOCK_BYTES = 1 << 22
_USED, _HAS, _CLASS_SHIFT, _CLASS_MASK, _DAY_MASK = 1 << 31, 1 << 30, 24, 63, 4095


class Header(NamedTuple):
    """What a part says about itself."""

    shard: int
    num_shards: int
    num_rows: int
    num_removed: int
    only_changes: bool
    row_bytes: int
    body_hash: int
    num_days: int = 0
    """Of a part of changes: days since the state that it leads on from."""
    num_keys: int = 0
    """Of a part of changes: keys that the shard has then."""

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return HEADER_BYTES + self.num_rows * self.row_bytes + 8 * self.num_removed


def state_floats(rule: str, width: int) -> int:
    """Accumulators that a rule keeps beside this many weights."""
    return {"sgd": 0, "adagrad": 1, "adagrad_elementwise": width, "adam": 2 * width + 2, "adam_shared": 4}[rule]


def row_type(config: TableConfig) -> np.dtype[np.void]:
    """The layout of a row of this table."""
    rule, half = config.optimizer.rule, config.dtype == "bfloat16"
    fields: list[Any] = [("key", "<u8"), ("shows", "<f4"), ("clicks", "<f4"), ("meta", "<u4"), ("first", "<f4")]
    fields += [
        ("first_state", "<f4", (state_floats(rule, 1),)),
        ("embedding", "<u2" if half else "<f4", (config.width,)),
    ]
    if half and config.width % 2:
        fields.append(("padding", "<u2"))
    fields.append(("embedding_state", "<f4", (state_floats(rule, config.width),)))
    return np.dtype(fields)


def is_row_part(path: Path) -> bool:
    """Whether a part is of this kind (else it is text, written by Paddle's table)."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path, config: TableConfig | None = None) -> Header:
    """Raises CheckpointError when the part was not finished, is damaged, or is not of such a table (None: of any)."""
    import xxhash

    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES or raw[: len(MAGIC)] != MAGIC:
        raise CheckpointError(f"{path} is cut short, or no part of a table")
    found = np.frombuffer(raw, _HEADER)[0]
    if int(found["header_hash"]) != xxhash.xxh64_intdigest(raw[:-8]):
        raise CheckpointError(f"{path} is damaged, or was not written completely")
    if int(found["version"]) != 1:
        raise CheckpointError(f"{path} has version {found['version']}; this version reads 1")
    header = Header(
        int(found["shard"]),
        int(found["shards"]),
        int(found["rows"]),
        int(found["removed"]),
        bool(found["flags"] & _CHANGES),
        int(found["row_bytes"]),
        int(found["body_hash"]),
        int(found["days"]),
        int(found["keys"]),
    )
    if config is not None and _layout(config) != (
        *(int(found[name]) for name in ("row_bytes", "width", "first_state", "embedding_state")),
        int(found["flags"]) & _HALF,
    ):
        raise CheckpointError(f"{path} is of a table with another width, rule or dtype")
    if path.stat().st_size != header.num_bytes:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; its header says {header.num_bytes}")
    return header


def _layout(config: TableConfig) -> tuple[int, int, int, int, int]:
    rule = config.optimizer.rule
    states = state_floats(rule, 1), state_floats(rule, config.width)
    return (row_type(config).itemsize, config.width, *states, int(config.dtype == "bfloat16"))


def read(path: Path, config: TableConfig) -> Iterator[npt.NDArray[np.void]]:
    """The rows, some MiB at a time. Raises CheckpointError."""
    header, kind = read_header(path, config), row_type(config)
    per_block = max(1, _BLOCK_BYTES // kind.itemsize)
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        for start in range(0, header.num_rows, per_block):
            yield np.fromfile(file, kind, min(per_block, header.num_rows - start))


def read_removed(path: Path) -> npt.NDArray[np.uint64]:
    """The keys that are gone, of a part that holds only what changed."""
    header = read_header(path)
    with path.open("rb") as file:
        file.seek(HEADER_BYTES + header.num_rows * header.row_bytes)
        return np.fromfile(file, np.uint64, header.num_removed)


def add_unseen_days(raw_N: npt.NDArray[np.void], num_days: int) -> npt.NDArray[np.void]:
    """The rows as they are after days without a push, as a server counts them (round, by 12 bits)."""
    aged_N = raw_N.copy()
    meta_N = aged_N["meta"]
    day_mask = np.uint32(_DAY_MASK)
    aged_N["meta"] = (meta_N & ~day_mask) | ((meta_N + np.uint32(num_days)) & day_mask)
    return aged_N


def columns(raw_N: npt.NDArray[np.void], config: TableConfig) -> dict[str, Any]:
    """The fields of `saved_tables.Rows`."""
    meta_N = raw_N["meta"]
    embedding_NK = raw_N["embedding"]
    if config.dtype == "bfloat16":
        embedding_NK = (embedding_NK.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return {
        "keys_N": np.ascontiguousarray(raw_N["key"]),
        "class_N": classes(raw_N, config),
        "unseen_days_N": (meta_N & np.uint32(_DAY_MASK)).astype(np.float32),
        "delta_score_N": np.zeros(len(raw_N), np.float32),
        "shows_N": np.ascontiguousarray(raw_N["shows"]),
        "clicks_N": np.ascontiguousarray(raw_N["clicks"]),
        "first_order_N": np.ascontiguousarray(raw_N["first"]),
        "first_order_state_NA": np.ascontiguousarray(raw_N["first_state"]),
        "has_embedding_N": (meta_N & np.uint32(_HAS)) != 0,
        "embedding_NK": np.ascontiguousarray(embedding_NK),
        "embedding_state_NE": np.ascontiguousarray(raw_N["embedding_state"]),
    }


def classes(raw_N: npt.NDArray[np.void], config: TableConfig) -> npt.NDArray[np.uint8]:
    """Of each key, whose threshold it has; the table's own where the config has fewer classes, as a server reads it."""
    class_N = (raw_N["meta"] >> np.uint32(_CLASS_SHIFT) & np.uint32(_CLASS_MASK)).astype(np.uint8)
    class_N[class_N >= len(config.admission_thresholds)] = 0
    return class_N


def rows_of(columns: dict[str, Any], config: TableConfig) -> npt.NDArray[np.void]:
    """The other way round; embeddings become bfloat16 by rounding to nearest even."""
    raw_N = np.zeros(len(columns["keys_N"]), row_type(config))
    raw_N["key"], raw_N["shows"], raw_N["clicks"] = columns["keys_N"], columns["shows_N"], columns["clicks_N"]
    has_N = columns["has_embedding_N"]
    unseen_N = np.minimum(columns["unseen_days_N"], 4000).astype(np.uint32)
    class_N = columns["class_N"].astype(np.uint32) << np.uint32(_CLASS_SHIFT)
    raw_N["meta"] = np.uint32(_USED) | class_N | unseen_N | (has_N.astype(np.uint32) * np.uint32(_HAS))
    raw_N["first"], raw_N["first_state"] = columns["first_order_N"], columns["first_order_state_NA"]
    embedding_NK = np.where(has_N[:, None], columns["embedding_NK"], np.float32(0))
    raw_N["embedding"] = to_bfloat16(embedding_NK) if config.dtype == "bfloat16" else embedding_NK
    raw_N["embedding_state"] = np.where(has_N[:, None], columns["embedding_state_NE"], np.float32(0))
    return raw_N


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The high halves of float32s, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    half = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return ((bits + half) >> np.uint32(16)).astype(np.uint16)


def count_embeddings(path: Path, config: TableConfig) -> int:
    """How many rows of a part have an embedding that is used: one whose key decayed below the admission score waits."""
    return sum(count_embeddings_of(raw_N, config) for raw_N in read(path, config))


def count_embeddings_of(raw_N: npt.NDArray[np.void], config: TableConfig) -> int:
    """The same of some rows."""
    has_N = raw_N["meta"] & np.uint32(_HAS) != 0
    return int(np.count_nonzero(has_N & admitted(config, raw_N["shows"], raw_N["clicks"], classes(raw_N, config))))


class Writer:
    """Writes parts with any number of rows in any order into an existing folder; `finish` makes them whole.

    only: shards whose rows are written; those of others are left out.
    """

    def __init__(self, folder: Path, config: TableConfig, num_shards: int, *, only: range | None = None) -> None:
        import xxhash

        self._config, self._num_shards, self._only = config, num_shards, only or range(num_shards)
        self._paths = [folder / f"part-000-{shard:05d}" for shard in range(num_shards)]
        self._hashes = [xxhash.xxh64() for _ in range(num_shards)]
        self._rows = [0] * num_shards
        for shard in self._only:
            self._paths[shard].write_bytes(bytes(HEADER_BYTES))

    def add(self, raw_N: npt.NDArray[np.void]) -> None:
        """Rows of this table's layout; perhaps none."""
        if not len(raw_N):
            return
        shard_N = (raw_N["key"] % np.uint64(self._num_shards)).astype(np.int64)
        order_N = np.argsort(shard_N, kind="stable")
        sorted_raw_N, sorted_shard_N = raw_N[order_N], shard_N[order_N]
        shards, starts = np.unique(sorted_shard_N, return_index=True)
        for shard, start, end in zip(shards.tolist(), starts, [*starts[1:], len(raw_N)], strict=True):
            if shard in self._only:
                some = sorted_raw_N[start:end].tobytes()
                with self._paths[shard].open("ab") as file:
                    file.write(some)
                self._hashes[shard].update(some)
                self._rows[shard] += int(end - start)

    def finish(self) -> None:
        """Nothing can be added afterwards."""
        import xxhash

        row_bytes, width, first_state, embedding_state, half = _layout(self._config)
        for shard in self._only:
            header = np.zeros((), _HEADER)
            header["magic"], header["version"], header["row_bytes"], header["width"] = MAGIC, 1, row_bytes, width
            header["first_state"], header["embedding_state"] = first_state, embedding_state
            header["flags"] = _HALF if half else 0
            header["shard"], header["shards"], header["rows"] = shard, self._num_shards, self._rows[shard]
            header["body_hash"] = self._hashes[shard].intdigest()
            header["header_hash"] = xxhash.xxh64_intdigest(header.tobytes()[:-8])
            with self._paths[shard].open("r+b") as file:
                file.write(header.tobytes())
