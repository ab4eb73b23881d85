"""Checkpoints compared and rewritten offline, without Paddle.

Legend of shapes: N rows of a table, A and B the two sides.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paddlewheel.pserver import saved_tables as tables
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.coordinator.resume import differences


@dataclass(frozen=True)
class TableDifference:
    """Two versions of a table. largest_change: of any float of a key that both hold, its optimizer's state included."""

    num_keys: tuple[int, int]
    num_added: int
    num_removed: int
    num_changed: int
    largest_change: float


@dataclass(frozen=True)
class Comparison:
    """How the second checkpoint differs from the first."""

    paths: tuple[str, str]
    steps: tuple[int, int]
    rows: tuple[int, int]
    job: list[str]
    dense: dict[str, float | str]
    """Largest change by parameter, or in words what differs in kind; those that are equal are left out."""
    tables: dict[str, TableDifference]

    @property
    def same_model(self) -> bool:
        """Whether both would score any row alike and train on alike."""
        return not self.dense and not any(t.num_added or t.num_removed or t.num_changed for t in self.tables.values())

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {**asdict(self), "same_model": self.same_model}

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"step {self.steps[0]:,} -> {self.steps[1]:,}, {self.rows[0]:,} -> {self.rows[1]:,} rows seen"
        yield from (f"job: {line}" for line in self.job)
        for name, change in self.dense.items():
            yield f"dense {name}: {change if isinstance(change, str) else f'changed by up to {change:.3g}'}"
        for name, table in self.tables.items():
            before, after = table.num_keys
            moved = (
                f"{table.num_changed:,} changed by up to {table.largest_change:.3g}"
                if table.num_changed
                else "0 changed"
            )
            yield (
                f"table {name}: {before:,} -> {after:,} keys, {table.num_added:,} added, {table.num_removed:,} removed,"
                f" {moved}"
            )
        if self.same_model:
            yield "the same model"


def compare(first: Path, second: Path) -> Comparison:
    """Reads both through.

    Raises:
        CheckpointError: one is damaged.
    """
    before, after = manifest.read(first), manifest.read(second)
    names = [*before.manifest.get("tables", {}), *after.manifest.get("tables", {})]
    return Comparison(
        paths=(str(first), str(second)),
        steps=(before.manifest["step"], after.manifest["step"]),
        rows=(before.cursor.get("rows", 0), after.cursor.get("rows", 0)),
        job=list(differences(before.cursor.get("job"), after.cursor.get("job"))),
        dense=_dense(before.dense(), after.dense()),
        tables={name: _table(before.sparse / name, after.sparse / name) for name in dict.fromkeys(names)},
    )


def rewrite(source: Path, target: Path, num_shards: int | None = None) -> Path:
    """Copies a checkpoint as a full one with every table in `num_shards` shards (None: as many as it has).

    Returns its folder, committed. The target may be the source: then it takes its place. Memory: some MiB, and the keys
    that have changed since the full checkpoint in one shard.

    Raises:
        CheckpointError: the source is damaged, the target is another one that is there already, or has a name of
            another step; or another checkpoint leads on from the source, whose place the target was to take.
    """
    saved = manifest.read(source)
    step = saved.manifest["step"]
    if target == source and (dependent := manifest.leading_on_from(source)):
        raise manifest.CheckpointError(
            f"{source} has to stay as it is, because {dependent[0].name} leads on from it: compact that one first, or"
            " name another folder to write to"
        )
    if (target.exists() and target != source) or target.name != f"step-{step}":
        raise manifest.CheckpointError(
            f"{target} cannot be the copy: it must not exist, and be named step-{step}, for example"
            f" {target.parent / 'resharded' / f'step-{step}'}"
        )
    if num_shards is not None and num_shards < 1:
        raise manifest.CheckpointError(f"--shards {num_shards}: a table has at least one shard")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = manifest.Draft(target.parent, f".step-{step}.draft", step)
    try:
        for name in saved.manifest["tables"]:
            table = tables.open_table(saved.sparse / name)
            tables.reshard(table, draft.sparse / name, num_shards or len(table.parts))
        own = {"format", "step", "files", "base", "data"}
        facts = {k: v for k, v in saved.manifest.items() if k not in own and "xxh3" not in k}
        draft.finish(dense=saved.dense(), cursor=saved.cursor, facts=facts)
        return manifest.commit(draft.path, step, keep=1 << 30)
    finally:
        shutil.rmtree(draft.path, ignore_errors=True)


def _dense(before: Mapping[str, npt.NDArray[Any]], after: Mapping[str, npt.NDArray[Any]]) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name in dict.fromkeys([*before, *after]):
        if name not in before or name not in after:
            found[name] = "only in the " + ("first" if name in before else "second")
        elif before[name].shape != after[name].shape:
            found[name] = f"shape {before[name].shape} -> {after[name].shape}"
        elif not np.array_equal(before[name], after[name], equal_nan=True):
            found[name] = float(np.nanmax(np.abs(before[name].astype(np.float64) - after[name].astype(np.float64))))
    return found


def _table(first: Path, second: Path) -> TableDifference:
    """Shard by shard where both have as many; else all at once."""
    both = [tables.open_table(path) if path.is_dir() else None for path in (first, second)]
    before, after = both
    counts = tuple(saved.num_keys if saved else 0 for saved in both)
    num_keys = (counts[0], counts[1])
    if before is None or after is None or before.config.width != after.config.width:
        return TableDifference(num_keys, num_keys[1], num_keys[0], 0, 0.0)
    added = removed = changed = 0
    largest = 0.0
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]
    if len(before.parts) == len(after.parts):
        pairs = [((a,), (a,)) for a in range(len(before.parts))]
        chained = before.base is not None or after.base is not None  # then parts of one name may mean other rows
        same = [not chained and p.xxh3_128 == q.xxh3_128 for p, q in zip(before.parts, after.parts, strict=True)]
    else:
        pairs = [(tuple(range(len(before.parts))), tuple(range(len(after.parts))))]
        same = [False]
    for (shards_a, shards_b), equal in zip(pairs, same, strict=True):
        if equal:
            continue
        keys_A, values_A = _values(before, shards_a)
        keys_B, values_B = _values(after, shards_b)
        _, at_A, at_B = np.intersect1d(keys_A, keys_B, assume_unique=True, return_indices=True)
        change_N = np.abs(values_A[at_A] - values_B[at_B]).max(axis=1, initial=0.0)
        added += len(keys_B) - len(at_B)
        removed += len(keys_A) - len(at_A)
        changed += int((change_N > 0).sum())
        largest = max(largest, float(change_N.max(initial=0.0)))
    return TableDifference(num_keys, added, removed, changed, largest)


def _values(
    saved: tables.SavedTable, shards: tuple[int, ...]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
    keys, values = [np.empty(0, np.uint64)], []
    for rows in tables.read_rows(saved, shards=shards):
        keys.append(rows.keys_N)
        columns = [rows.first_order_N[:, None], rows.first_order_state_NA, rows.embedding_NK, rows.embedding_state_NE]
        values.append(np.concatenate([np.asarray(column, np.float64) for column in columns], axis=1))
    width = sum(tables.state_widths(saved.config)) + saved.config.width + 1
    return np.concatenate(keys), np.concatenate(values) if values else np.empty((0, width))
