"""Checkpoints of a table of ours, made without servers: one is full, the others hold what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paddlewheel.pserver import engine, native, saved_tables
from paddlewheel.pserver.config import TableConfig, table_id
from paddlewheel.trainer.checkpoint import manifest

CONFIG = TableConfig(width=3, shards=4, max_keys=1000)
PARTS = f"{table_id('t'):03d}"


class ChainedJob:
    """A table that is trained, and saved in a folder as trainer 0 does it. Keys go as others come."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.table = native.MemoryTable({**engine.options("t", CONFIG), "log_removed": True, "threads": 1})
        self.rng = np.random.default_rng(3)
        self.base: manifest.Base | None = None

    def draft(self, step: int, *, full: bool = False) -> tuple[Path, dict[str, Any]]:
        """Trains a little, then makes a draft of a checkpoint."""
        keys = np.unique(self.rng.integers(1, 1 << 64, 300, dtype=np.uint64))
        self.table.push(keys, np.abs(self.rng.normal(size=(len(keys), 7))).astype(np.float32))
        base = None if full else self.base
        draft = manifest.Draft(self.directory, f".step-{step}-draft", step)
        folder = draft.sparse / "t"
        (folder / PARTS).mkdir(parents=True)
        self.table.mark(f"m{step}")
        self.table.save(f"m{step}", folder / PARTS, "" if base is None else base.mark)
        since = None if base is None else base.since().tables["t"]
        saved = saved_tables.record(folder, "t", CONFIG, 0, 4, base=since)
        facts = {"job": "j", "tables": {"t": {"keys": saved.num_keys}}, **({} if base is None else base.facts())}
        body = draft.finish(
            dense={"w": np.ones(1, np.float32)},
            cursor={"step": step, "rows": step, "position": {"epoch": 0, "done": []}},
            facts=facts,
        )
        self.base = manifest.Base(
            f"step-{step}", manifest.identity(body), {"t": saved.checksum}, f"m{step}", manifest.num_links(body)
        )
        return draft.path, body

    def save(self, step: int, *, keep: int = 99, full: bool = False) -> Path:
        """The same, committed."""
        path, _ = self.draft(step, full=full)
        return manifest.commit(path, step, keep)

    def rows(self) -> dict[int, bytes]:
        """What the table holds now, key by key."""
        place = self.directory.parent / f"whole-{self.rng.integers(1 << 60)}"
        place.mkdir()
        self.table.mark("look")
        self.table.save("look", place)
        from paddlewheel.pserver import row_parts

        return by_key(raw for path in place.iterdir() for raw in row_parts.read(path, CONFIG))


def by_key(batches: Any) -> dict[int, bytes]:
    """Rows of a table, as they are saved."""
    return {int(row["key"]): row.tobytes() for raw_N in batches for row in raw_N}


def rows_of(path: Path) -> dict[int, bytes]:
    """Of a checkpoint's table, through its chain."""
    return by_key(saved_tables._raw_rows(saved_tables.open_table(path / "sparse" / "t")))
