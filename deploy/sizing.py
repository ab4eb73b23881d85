"""How much memory, disk and time a job's tables take: the numbers behind the sizing guide and the manifests.

Measured on Paddle 2.6.2 (x86-64, 600,000 keys a table), bytes a key: AdaGrad at width 8, 16, 32 and 64: 183, 224, 316
and 488; SGD at width 16: 194; Adam at width 16 and 64: 370 and 1003. `bytes_per_key` says as much, or up to 21 % more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pserver.config import TableConfig
from trainer.config import JobConfig

_SERVER_BASE_BYTES = 300 << 20
"""A server without keys: 201 MiB measured, and its agent, 60 MiB."""
_TRAINER_BASE_BYTES = 700 << 20
"""A trainer with a small model and its agent: 500 MiB and 60 MiB measured."""
_HEADROOM = 1.3
"""Servers are not loaded exactly evenly, a save needs buffers, and tables grow."""
_ENTRY_BYTES, _FLOAT_BYTES = 95, 5.5
"""Of a key in the server: hash map entry and allocation; a float of 4 bytes with what the allocator adds."""
_TEXT_BYTES_PER_FLOAT = 10
_TEXT_ENTRY_BYTES = 40
_SAVED_KEYS_PER_SECOND = 140_000
"""Of one server with one core at width 16; 279,000 were measured on two."""

_DEFAULT_KEYS = 10_000_000


class SizingError(ValueError):
    """Numbers were given for a table that the job has not."""


@dataclass(frozen=True)
class Sizing:
    """What a job needs.

    Attributes:
        keys: assumed number of keys, by table.
        server_memory_bytes: of each server's container.
        trainer_memory_bytes: of each trainer's container.
        shared_memory_bytes: /dev/shm of each trainer.
        checkpoint_bytes: on disk, one checkpoint.
        storage_bytes: for the checkpoints that are kept, the one being written, and logs.
        save_seconds: about how long a checkpoint takes.
    """

    keys: Mapping[str, int]
    server_memory_bytes: int
    trainer_memory_bytes: int
    shared_memory_bytes: int
    checkpoint_bytes: int
    storage_bytes: int
    save_seconds: float


def floats_per_key(table: TableConfig) -> int:
    """Floats of a key in the server: counts, weights, and the state of the update rule."""
    state = {
        "sgd": (0, 0),
        "adagrad": (1, 1),
        "adagrad_elementwise": (1, table.width),
        "adam": (4, 2 * table.width + 2),
        "adam_shared": (4, 4),
    }[table.optimizer.rule]
    return 5 + 1 + table.width + sum(state)


def bytes_per_key(table: TableConfig) -> float:
    """Server memory of one key."""
    return _ENTRY_BYTES + _FLOAT_BYTES * floats_per_key(table)


def size(job: JobConfig, keys: Mapping[str, int] | None = None) -> Sizing:
    """The needs of a job whose tables grow to these numbers of keys (10 million each where nothing is said).

    Raises:
        SizingError: `keys` names a table that the job does not use.
    """
    used = {name: job.tables[name] for name in job.data.tables}
    unknown = sorted(set(keys or {}) - set(used))
    if unknown:
        raise SizingError(f"the job uses no table {unknown[0]!r}; it uses {', '.join(used)}")
    numbers = {name: (keys or {}).get(name, _DEFAULT_KEYS) for name in used}
    table_bytes = sum(bytes_per_key(table) * numbers[name] for name, table in used.items())
    checkpoint = sum(
        (_TEXT_ENTRY_BYTES + _TEXT_BYTES_PER_FLOAT * floats_per_key(table)) * numbers[name]
        for name, table in used.items()
    )
    servers = job.cluster.servers
    server = _SERVER_BASE_BYTES + _HEADROOM * table_bytes / servers
    widest = max(table.pull_width for table in used.values())
    ids_per_row = sum(feature.max_length or 1 for feature in job.data.sparse)
    batch = job.data.batch_rows * (ids_per_row * (8 + 2 * 4 * widest) + 4 * len(job.data.dense_columns))
    trainer = _TRAINER_BASE_BYTES + 2 * job.data.memory_bytes + 4 * (job.train.max_staleness_steps + 2) * batch
    return Sizing(
        keys=numbers,
        server_memory_bytes=_rounded(server),
        trainer_memory_bytes=_rounded(trainer),
        shared_memory_bytes=256 << 20,
        checkpoint_bytes=math.ceil(checkpoint),
        storage_bytes=_rounded(checkpoint * (job.checkpoint.keep + 2) + (5 << 30), 1 << 30),
        save_seconds=sum(numbers.values()) / servers / _SAVED_KEYS_PER_SECOND,
    )


def _rounded(value: float, unit: int = 256 << 20) -> int:
    return math.ceil(value / unit) * unit
