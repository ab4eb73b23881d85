"""Saved tables where every server has a disk of its own: what the host of one server does before and after.

    save    `Client.save_per_host` has the server write its parts under a folder of its host; `measure` reads them there
    load    the host fetches the `needed` parts, `lay_out` makes a folder of them; `Client.load_per_host` has it read

Whoever calls these moves the files between the hosts and the place where they are kept. Without Paddle.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paddlewheel.pserver import native, saved_tables
from paddlewheel.pserver.config import TableConfig, table_id
from paddlewheel.pserver.errors import CheckpointError
from paddlewheel.pserver.saved_tables import Kind, Part, SavedTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def measure(directory: Path, tables: Iterable[str]) -> dict[str, list[Part]]:
    """Reads what a server has saved under `directory/<table>/`: its parts of each table, in shard order.

    Raises CheckpointError for a part that is cut short, and for files that are no parts.
    """
    return {name: saved_tables.measure_parts(directory / name / f"{table_id(name):03d}") for name in tables}


def combine(
    name: str,
    config: TableConfig,
    seed: int,
    num_shards: int,
    parts: Iterable[Sequence[Part]],
    kind: Kind,
    base: saved_tables.Base | None = None,
) -> SavedTable:
    """The table whose parts (of this kind) the servers have saved, given by server in rank order.

    base: what they lead on from, if they hold only what changed.

    Raises CheckpointError unless there is one part for each shard.
    """
    every = [part for some in parts for part in some]
    shards = [saved_tables.shard_of(part.name) for part in every]
    if shards != list(range(num_shards)):
        raise CheckpointError(f"table {name!r}: the servers saved {len(every)} parts that are not one a shard")
    saved = SavedTable(Path(name), name, config, seed, tuple(every), kind, base)
    saved_tables.check_parts(saved)
    return saved


def folder_of_link(directory: Path, number: int) -> Path:
    """Where a host lays out link `number` of a chain, the whole save being 0; `directory` is of all of them."""
    return directory / f"link-{number}" if number else directory


def needed(saved: SavedTable, rank: int, num_servers: int, config: TableConfig) -> tuple[Part, ...]:
    """The parts that the host of server `rank` needs: its own, or all of them when the number of shards changes."""
    num_shards = config.num_shards(num_servers)
    if len(saved.parts) != num_shards:
        return saved.parts
    own = _own_shards(rank, num_servers, num_shards)
    return saved.parts[own.start : own.stop]


def lay_out(
    saved: SavedTable, fetched: Path, directory: Path, rank: int, num_servers: int, config: TableConfig
) -> Path:
    """Makes `directory/<table>/` of the `needed` parts in `fetched`, for the server to load; returns it.

    Paddle's table counts the files, sorts them by name, and reads those of its own shards alone: the others are left
    empty. Ours picks its rows from whatever files there are.
    """
    num_shards = config.num_shards(num_servers)
    own = _own_shards(rank, num_servers, num_shards)
    folder = directory / saved.name / f"{table_id(saved.name):03d}"
    folder.parent.mkdir(parents=True)
    kind: Kind = "rows" if native.is_expected(config.engine) else "text"
    paths = [fetched / part.name for part in saved.parts]
    if saved.base is not None and kind != "rows":
        raise CheckpointError(
            f"{saved.name} holds only what changed, which Paddle's own tables cannot load: have a compiler on this "
            "host, or make the checkpoint whole first (paddlewheel checkpoint compact)"
        )
    if saved.kind != kind or (kind == "text" and len(saved.parts) != num_shards):
        saved_tables.spread(saved, folder, num_shards, kind=kind, only=own, paths=[p for p in paths if p.exists()])
        return folder.parent
    folder.mkdir()
    for shard, path in enumerate(paths):
        if path.exists() and (len(paths) != num_shards or shard in own):
            path.rename(folder / f"part-000-{shard:05d}")
        elif kind == "text":
            (folder / f"part-000-{shard:05d}").touch()
    return folder.parent


def _own_shards(rank: int, num_servers: int, num_shards: int) -> range:
    each = num_shards // num_servers
    return range(rank * each, (rank + 1) * each)
