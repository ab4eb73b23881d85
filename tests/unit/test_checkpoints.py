"""A checkpoint is whole or is refused; and what the offline commands make of it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from deploy import comparison
from deploy.cli import run
from pserver import checkpoint as tables
from pserver.config import TableConfig, table_id
from trainer import checkpoint
from trainer.checkpoint import CheckpointError

CONFIG = TableConfig(width=2)


def save(
    directory: Path,
    step: int,
    *,
    keys: dict[int, float] | None = None,
    bias: float = 0.0,
    shards: int = 2,
    keep: int = 9,
) -> Path:
    """A checkpoint with one table `t` whose key k has the embedding (value, value)."""
    draft = checkpoint.Draft(directory, f".step-{step}-x", step)
    keys = {3: 0.5, 4: 1.0} if keys is None else keys
    folder = draft.sparse / "t" / f"{table_id('t'):03d}"
    folder.mkdir(parents=True)
    first, rest = tables.state_widths(CONFIG)
    for shard in range(shards):
        lines = [
            " ".join([str(key), *["0"] * (6 + first), *[f"{value:g}"] * 2, *["0"] * rest]) + "\n"
            for key, value in keys.items()
            if key % shards == shard
        ]
        (folder / f"part-000-{shard:05d}").write_text("".join(lines))
    tables.record(draft.sparse / "t", "t", CONFIG, 1, shards)
    dense = {"bias": np.full(3, bias, np.float32), "weight": np.ones((2, 2), np.float32)}
    cursor = {"step": step, "rows": 10 * step, "position": {"epoch": 0}, "job": {"seed": 1, "train": {"epochs": 2}}}
    facts = {"job": "j", "tables": {"t": {"keys": len(keys)}}}
    draft.finish(dense=dense, cursor=cursor, facts=facts)
    return checkpoint.commit(draft.path, step, keep)


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    chance = random.Random(4)
    for file in [file for file in path.rglob("*") if file.is_file()]:
        content = file.read_bytes()
        places = (
            range(len(content))
            if file.name == "MANIFEST.json"
            else chance.sample(range(len(content)), min(40, len(content)))
        )
        for place in places:
            changed = bytearray(content)
            changed[place] ^= 1 << chance.randrange(8)
            file.write_bytes(changed)
            with pytest.raises(CheckpointError):
                checkpoint.read(path)
        for other in (content[:-1], content + b"\n", b""):
            file.write_bytes(other)
            with pytest.raises(CheckpointError):
                checkpoint.read(path)
        file.unlink()
        with pytest.raises(CheckpointError):
            checkpoint.read(path)
        file.write_bytes(content)
    checkpoint.read(path)
    (path / "sparse" / "t" / "more").write_text("")
    with pytest.raises(CheckpointError, match="unexpected files"):
        checkpoint.read(path)


def test_what_a_killed_load_left_does_no_harm(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "sparse" / ".t-staged").mkdir()
    (path / "sparse" / ".t-staged" / "part").write_text("x")
    checkpoint.read(path)


def test_a_draft_is_no_checkpoint(tmp_path: Path) -> None:
    draft = checkpoint.Draft(tmp_path, ".step-5-x", 5)
    (draft.sparse / "part").write_text("x")
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json cannot be read"):
        checkpoint.commit(draft.path, 5, 3)
    assert checkpoint.latest(tmp_path) is None
    draft.finish(dense={}, cursor={}, facts={})
    (draft.sparse / "part").unlink()
    with pytest.raises(CheckpointError, match="missing files"):
        checkpoint.commit(draft.path, 5, 3)
    assert checkpoint.latest(tmp_path) is None


def test_commit_replaces_and_prunes(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        newest = save(tmp_path, step, keep=2)
    assert [path.name for path in checkpoint.committed(tmp_path)] == ["step-3", "step-4"]
    assert (tmp_path / "LATEST").read_text() == "step-4\n"
    again = save(tmp_path, 4, bias=7.0, keep=2)
    assert again == newest
    assert checkpoint.read(again).dense()["bias"][0] == 7
    assert {path.name for path in tmp_path.iterdir()} == {"LATEST", "step-3", "step-4"}


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.read(path)


# ------------------------------------------------------------------------------------------------------- the commands


def test_verify_says_which_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    assert run(["checkpoint", "verify", str(tmp_path)]) == 0
    (damaged / "cursor.json").write_text("{}")
    capsys.readouterr()
    assert run(["checkpoint", "verify", str(tmp_path), "--json"]) == 64
    rows = json.loads(capsys.readouterr().out)
    assert ["damage" in row for row in rows] == [False, True]
    (damaged / "MANIFEST.json").write_text("{")
    assert run(["checkpoint", "ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "10 rows" in out
    assert "DAMAGED" in out
    assert run(["checkpoint", "ls", str(tmp_path / "nothing")]) == 64


def test_diff_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(tmp_path, 1, keys={1: 0.5, 2: 1.0, 3: 2.0})
    second = save(tmp_path, 2, keys={2: 1.0, 3: 2.25, 4: 9.0}, bias=0.5, shards=3)
    assert run(["checkpoint", "diff", str(first), str(second), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["dense"] == {"bias": 0.5}
    assert found["tables"]["t"] == {
        "num_keys": [3, 3],
        "num_added": 1,
        "num_removed": 1,
        "num_changed": 1,
        "largest_change": 0.25,
    }
    assert run(["checkpoint", "diff", str(first), str(second)]) == 1
    out = capsys.readouterr().out
    assert "dense bias: changed by up to 0.5" in out
    assert "1 added, 1 removed, 1 changed by up to 0.25" in out
    assert run(["checkpoint", "diff", str(first), str(first)]) == 0


def test_reshard_keeps_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path, 3, keys={key: key / 8 for key in range(1, 50)})
    target = tmp_path / "wide" / "step-3"
    assert run(["checkpoint", "reshard", str(source), str(target), "--shards", "7"]) == 0
    assert len(tables.open_table(target / "sparse" / "t").parts) == 7
    found = comparison.compare(source, target)
    assert found.same_model
    assert found.tables["t"].num_keys == (49, 49)
    assert checkpoint.read(target).cursor == checkpoint.read(source).cursor
    assert run(["checkpoint", "reshard", str(source), str(target), "--shards", "7"]) == 64
    assert run(["checkpoint", "reshard", str(source), str(tmp_path / "other"), "--shards", "7"]) == 64
    assert "step-3" in capsys.readouterr().err


def test_prune(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert run(["checkpoint", "prune", str(tmp_path), "--keep", "0"]) == 64
    assert run(["checkpoint", "prune", str(tmp_path), "--keep", "2"]) == 0
    assert [path.name for path in checkpoint.committed(tmp_path)] == ["step-2", "step-3"]


def test_latest_needs_no_pointer(tmp_path: Path) -> None:
    newest = save(tmp_path, 10)
    save(tmp_path, 9)
    (tmp_path / "LATEST").unlink()
    assert checkpoint.latest(tmp_path) == newest
    shutil.rmtree(newest)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-9"
