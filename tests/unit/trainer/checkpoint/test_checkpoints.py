"""A checkpoint is whole or is refused; and what the offline commands make of it."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from paddlewheel.deploy.cli import run
from paddlewheel.deploy.reports import checkpoint_diff
from paddlewheel.pserver import saved_tables as tables
from paddlewheel.pserver.config import TableConfig, table_id
from paddlewheel.trainer.checkpoint.manifest import (
    CheckpointError,
    Draft,
    UnavailableError,
    commit,
    committed,
    latest,
    manifest_text,
    read,
    read_cursor,
    read_manifest,
    step_of,
)

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
    draft = Draft(directory, f".step-{step}-x", step)
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
    return commit(draft.path, step, keep)


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
                read(path)
        for other in (content[:-1], content + b"\n", b""):
            file.write_bytes(other)
            with pytest.raises(CheckpointError):
                read(path)
        file.unlink()
        with pytest.raises(CheckpointError):
            read(path)
        file.write_bytes(content)
    read(path)
    (path / "sparse" / "t" / "more").write_text("")
    with pytest.raises(CheckpointError, match="unexpected files"):
        read(path)


def test_what_a_killed_load_left_does_no_harm(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "sparse" / ".t-staged").mkdir()
    (path / "sparse" / ".t-staged" / "part").write_text("x")
    read(path)


def test_a_draft_is_no_checkpoint(tmp_path: Path) -> None:
    draft = Draft(tmp_path, ".step-5-x", 5)
    (draft.sparse / "part").write_text("x")
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json cannot be read"):
        commit(draft.path, 5, 3)
    assert latest(tmp_path) is None
    draft.finish(dense={}, cursor={}, facts={})
    (draft.sparse / "part").unlink()
    with pytest.raises(CheckpointError, match="missing files"):
        commit(draft.path, 5, 3)
    assert latest(tmp_path) is None


def test_commit_replaces_and_prunes(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        newest = save(tmp_path, step, keep=2)
    assert [path.name for path in committed(tmp_path)] == ["step-3", "step-4"]
    assert (tmp_path / "LATEST").read_text() == "step-4\n"
    again = save(tmp_path, 4, bias=7.0, keep=2)
    assert again == newest
    assert read(again).dense()["bias"][0] == 7
    assert {path.name for path in tmp_path.iterdir()} == {"LATEST", "step-3", "step-4"}


def test_what_was_just_committed_stays_though_there_are_later_steps(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(tmp_path, step)
    path = save(tmp_path, 120, keep=1)
    assert path.is_dir()
    assert [path.name for path in committed(tmp_path)] == ["step-120", "step-300"]


@pytest.mark.parametrize("name", ["step-\u0661", "step-01", "step--1", "step-" + "9" * 30, "step-1.damaged", "step-"])
def test_only_a_plain_number_makes_a_step(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1).rename(tmp_path / name)
    assert committed(tmp_path) == []
    assert step_of(name) is None


def resealed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Another manifest, with the hash that it must have."""
    body = {key: value for key, value in json.loads((path / "MANIFEST.json").read_text()).items() if "xxh3" not in key}
    (path / "MANIFEST.json").write_text(manifest_text(change(body)))


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing but a format": lambda _: {"format": 2},
    "files are a list": lambda body: {**body, "files": []},
    "a file above": lambda body: {**body, "files": {"../evil": {"bytes": 1, "xxh3_128": "x"}}},
    "a file elsewhere": lambda body: {**body, "files": {"/tmp/evil": {"bytes": 1, "xxh3_128": "x"}}},
    "a file with a hole": lambda body: {**body, "files": {"a//b": {"bytes": 1, "xxh3_128": "x"}}},
    "a size that is none": lambda body: {**body, "files": {"a": {"bytes": "1", "xxh3_128": "x"}}},
    "a file without facts": lambda body: {**body, "files": {"a": 7}},
    "a step that is none": lambda body: {**body, "step": "7"},
    "a table above": lambda body: {**body, "tables": {"../x": {"keys": 1}}},
    "a table without files": lambda body: {**body, "tables": {**body["tables"], "u": {"keys": 1}}},
    "a table without keys": lambda body: {**body, "tables": {"t": {}}},
    "tables are a text": lambda body: {**body, "tables": "t"},
    "data is a list": lambda body: {**body, "data": []},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_damage_and_the_others_are_still_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], Any]
) -> None:
    save(tmp_path, 1)
    resealed(save(tmp_path, 2), change)
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step-2"):
        read(tmp_path / "step-2")
    for command, code in (("ls", 0), ("verify", 64)):
        assert run(["checkpoint", command, str(tmp_path), "--json"]) == code
        rows = json.loads(capsys.readouterr().out)
        assert ["damage" in row for row in rows] == [False, True, False]
        run(["checkpoint", command, str(tmp_path)])
        assert "mistake in paddlewheel" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content"),
    [("MANIFEST.json", b"[" * 200_000), ("cursor.json", b"[]"), ("cursor.json", b"[" * 200_000), ("cursor.json", b"7")],
)
def test_files_that_are_not_ours_are_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / file).write_bytes(content)
    if file == "cursor.json":
        facts = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
        resealed(path, lambda body: {**body, "files": {**body["files"], file: facts}})
    for command, code in (("ls", 0), ("verify", 64)):
        assert run(["checkpoint", command, str(tmp_path), "--json"]) == code
        assert ["damage" in row for row in json.loads(capsys.readouterr().out)] == [False, True]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["cursor.json", "MANIFEST.json", "sparse/t/table.json"])
def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    (path / name).unlink()
    os.mkfifo(path / name)
    assert run(["checkpoint", "verify", str(path)]) == 64
    if name == "sparse/t/table.json":
        with pytest.raises(tables.CheckpointError, match="cannot be read"):
            tables.open_table(path / "sparse" / "t")
    else:
        with pytest.raises(CheckpointError, match="cannot be read"):
            (read_cursor if name == "cursor.json" else read_manifest)(path)


def test_a_read_error_that_may_pass_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)

    def fail(number: int) -> Any:
        def open_(*_: Any, **__: Any) -> Any:
            raise OSError(number, os.strerror(number))

        return open_

    for number, kind in ((errno.EMFILE, UnavailableError), (errno.ESTALE, UnavailableError)):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", fail(number))
            with pytest.raises(kind, match="just now"):
                read(path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail(number))
            with pytest.raises(kind, match="just now"):
                read_manifest(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail(errno.EACCES))
        with pytest.raises(CheckpointError):
            read(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        read(path)


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
    found = checkpoint_diff.compare(source, target)
    assert found.same_model
    assert found.tables["t"].num_keys == (49, 49)
    assert read(target).cursor == read(source).cursor
    assert run(["checkpoint", "reshard", str(source), str(target), "--shards", "7"]) == 64
    assert run(["checkpoint", "reshard", str(source), str(tmp_path / "other"), "--shards", "7"]) == 64
    assert "step-3" in capsys.readouterr().err


def test_prune(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert run(["checkpoint", "prune", str(tmp_path), "--keep", "0"]) == 64
    assert run(["checkpoint", "prune", str(tmp_path), "--keep", "2"]) == 0
    assert [path.name for path in committed(tmp_path)] == ["step-2", "step-3"]


def test_latest_needs_no_pointer(tmp_path: Path) -> None:
    newest = save(tmp_path, 10)
    save(tmp_path, 9)
    (tmp_path / "LATEST").unlink()
    assert latest(tmp_path) == newest
    shutil.rmtree(newest)
    assert latest(tmp_path) == tmp_path / "step-9"
