"""How much memory and disk the keys of a table take: the one model behind every capacity plan.

Measured on Paddle 2.6.2 (x86-64, 48 shards a table), bytes that a further key took between 0.6 and 2 million keys:

    width             4     8    16    32    64   128
    sgd             145   145   176   236   365
    adagrad         144   161   190   254   372   635
    adagrad_elem.   161         250         638
    adam_shared     174         206         398
    adam            190   236   333   524   912  1680

That is 95 bytes and 4 for each float. In a small table the buffers of large pushes come on top: `paddlewheel bench
tables` finds 254 (adagrad) and 391 (adam) at width 16 in a table of a million keys. The model lies between: at most
26 % above the first, at most 11 % below the second.

Those are Paddle's own tables, and plans are made for them unless a table insists on the engine `paddlewheel`: with
`auto` it may be either. Ours take their row, and 5 to 10 bytes for its place in the index.
"""

from __future__ import annotations

import math

from paddlewheel.pserver import engine
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.saved_tables import row_bytes, saved_row_bytes

SERVER_BASE_BYTES = 300 << 20
"""A server without keys: 201 MiB measured, its agent, 60 MiB, and buffers."""
HEADROOM = 1.3
"""Servers are not loaded exactly evenly, a save needs buffers, and tables grow."""
_ENTRY_BYTES, _FLOAT_BYTES = 120.0, 4.4
_TEXT_ENTRY_BYTES, _TEXT_FLOAT_BYTES = 40.0, 10.0


class SizingError(ValueError):
    """A plan that cannot be made."""


def floats_per_key(table: TableConfig) -> int:
    """Floats of a key in a server: counts, weights, and the state of the update rule."""
    return (row_bytes(table) - 8) // 4


def bytes_per_key(table: TableConfig) -> float:
    """Server memory of one key."""
    if table.engine == "paddlewheel":
        return float(engine.memory_bytes(table))
    return _ENTRY_BYTES + _FLOAT_BYTES * floats_per_key(table)


def saved_bytes_per_key(table: TableConfig) -> float:
    """Disk space of one key in a checkpoint, which is text if Paddle's table wrote it."""
    if table.engine == "paddlewheel":
        return float(saved_row_bytes(table))
    return _TEXT_ENTRY_BYTES + _TEXT_FLOAT_BYTES * floats_per_key(table)


def server_memory_bytes(table_bytes: float, num_servers: int) -> float:
    """Memory of each of so many servers that hold tables of so many bytes together."""
    return SERVER_BASE_BYTES + HEADROOM * table_bytes / num_servers


def servers_needed(table_bytes: float, memory_bytes: float) -> int:
    """Fewest servers of so much memory that hold tables of so many bytes.

    Raises:
        SizingError: a server without any key needs more.
    """
    left = memory_bytes - SERVER_BASE_BYTES
    if not left > 0:
        raise SizingError(
            f"{memory_bytes / 1e9:g} GB is too little for a server, which takes {SERVER_BASE_BYTES / 1e9:.2f} GB "
            "without any key: give it more"
        )
    return max(1, math.ceil(HEADROOM * table_bytes / left))
