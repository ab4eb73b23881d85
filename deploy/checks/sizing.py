"""How much memory, disk and time a job takes: the numbers behind the sizing guide and the manifests.

What a key takes is in `pserver.sizing`, which every plan shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paddlewheel.pserver.sizing import SizingError, bytes_per_key, saved_bytes_per_key, server_memory_bytes
from paddlewheel.trainer.job.config import JobConfig

_TRAINER_BASE_BYTES = 700 << 20
"""A trainer with a small model and its agent: 500 MiB and 60 MiB measured."""
_SAVED_KEYS_PER_SECOND = 140_000
"""Of one server with one core at width 16; 279,000 were measured on two."""

_DEFAULT_KEYS = 10_000_000


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


def size(job: JobConfig, keys: Mapping[str, int] | None = None) -> Sizing:
    """The needs of a job whose tables grow to these numbers of keys (10 million each where nothing is said).

    Raises:
        SizingError: `keys` names a table that the job does not use, or the job has none.
    """
    used = {name: job.tables[name] for name in job.data.tables}
    unknown = sorted(set(keys or {}) - set(used))
    if unknown:
        raise SizingError(f"the job uses no table {unknown[0]!r}; it uses {', '.join(used)}")
    numbers = {name: (keys or {}).get(name, _DEFAULT_KEYS) for name in used}
    table_bytes = sum(bytes_per_key(table) * numbers[name] for name, table in used.items())
    checkpoint = sum(saved_bytes_per_key(table) * numbers[name] for name, table in used.items())
    servers = job.cluster.servers
    server = server_memory_bytes(table_bytes, servers)
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
        storage_bytes=_rounded(
            checkpoint * (job.checkpoint.keep + 2 + ((job.checkpoint.full_every or 1) - 1)) + (5 << 30), 1 << 30
        ),
        save_seconds=sum(numbers.values()) / servers / _SAVED_KEYS_PER_SECOND,
    )


def _rounded(value: float, unit: int = 256 << 20) -> int:
    return math.ceil(value / unit) * unit
