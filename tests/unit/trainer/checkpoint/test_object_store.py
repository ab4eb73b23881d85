"""Checkpoints in an object store: half of one is never seen, whatever dies; the rest is as in a folder.

`file://` stands for a store here, so that a death can be tried after every single call to it. The tests that speak to
an S3 server are tests/integration/test_checkpoints_in_a_store.py and tests/chaos/test_object_store.py.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs as pafs

from paddlewheel.deploy.cli import run
from paddlewheel.trainer.checkpoint.folder_store import open_address, open_checkpoints
from paddlewheel.trainer.checkpoint.manifest import CheckpointError, Draft, commit, manifest_text, parse_manifest
from paddlewheel.trainer.checkpoint.object_store import CancelledError, ObjectStore, StoreError
from paddlewheel.trainer.checkpoint.store import is_remote
from tests.support.object_stores import CREDENTIALS
from tests.support.ports import free_port

CURSOR = {"step": 0, "rows": 7, "position": {"epoch": 0, "done": []}}


class KilledError(BaseException):
    """Stands for the end of the process."""


class Mortal:
    """A file system that ends the process at its n-th call that changes something."""

    def __init__(self, real: pafs.FileSystem, lives: int) -> None:
        self._real, self.lives = real, lives

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in {"open_output_stream", "delete_dir", "delete_file"}:
            return found

        def call(*arguments: Any) -> Any:
            self.lives -= 1
            if self.lives < 0:
                raise KilledError
            return found(*arguments)

        return call


def store_at(folder: Path, lives: int | None = None) -> ObjectStore:
    store = ObjectStore(f"file://{folder}/kept")
    if lives is not None:
        filesystem, root = store._connect()
        store._connected = (Mortal(filesystem, lives), root)
    return store


def save(store: ObjectStore, step: int, keep: int = 9, content: bytes = b"1 2 3\n") -> str:
    """As a trainer and the coordinator do it."""
    name = f".step-{step}-attempt-1-draft-{step}"
    draft = store.draft(name)
    files = store.put(draft, {"sparse/t/1/part-000-00000": content, "sparse/t/table.json": b"{}"})
    files |= store.put(draft, {"dense.safetensors": b"d" * 100, "cursor.json": json.dumps(CURSOR).encode()})
    store.finish(draft, step, {"job": "j", "tables": {"t": {"keys": 1}}}, files)
    return store.commit(name, step, keep)


def objects(folder: Path) -> set[str]:
    return {str(path.relative_to(folder / "kept")) for path in (folder / "kept").rglob("*") if path.is_file()}


def test_what_is_committed_is_whole_and_can_be_had_back(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with store.sole_use():
        address = save(store, 3)
    assert address == f"file://{tmp_path}/kept/step-3"
    assert store.committed() == [address]
    assert store.cursor(address) == CURSOR
    store.verify(address)
    kept, same = open_address(address)
    with kept.local_copy(same) as copy:
        assert (copy / "sparse/t/1/part-000-00000").read_bytes() == b"1 2 3\n"
    assert not copy.exists()
    assert is_remote(address)
    assert open_checkpoints(str(tmp_path)).committed() == []


@pytest.mark.parametrize("again", [False, True], ids=["a-new-step", "the-same-step-again"])
def test_whatever_dies_half_of_a_checkpoint_is_never_seen(tmp_path: Path, again: bool) -> None:
    """The process ends at every call that changes the store, one after the other, until none ends it."""
    for lives in range(100):
        folder = tmp_path / str(lives)
        first = store_at(folder)
        with first.sole_use():
            save(first, 5)
        dying = store_at(folder, lives)
        ended = False
        try:
            with dying.sole_use():
                save(dying, 5 if again else 6, keep=1, content=b"4 5 6\n")
        except KilledError:
            ended = True
        after = store_at(folder)
        for address in after.committed():
            after.verify(address)
        steps = [address.rpartition("-")[2] for address in after.committed()]
        assert steps in ([["5"]] if again else [["5"], ["5", "6"], ["6"]])
        with after.sole_use():
            after.clear()
            kept = {name for name in objects(folder) if name.startswith("data/")}
            assert len(kept) == 5 * len(after.committed()), "the next coordinator leaves no orphan"
            save(after, 7, keep=1)
            assert after.committed() == [f"{after.location}/step-7"]
            after.verify(after.committed()[0])
        if not ended:
            assert lives > 7
            return
    pytest.fail("it always dies")


def damaged(folder: Path) -> list[Path]:
    return [path for path in (folder / "kept" / "data").rglob("*") if path.is_file() and path.name != "MANIFEST.json"]


def test_any_damage_is_found(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with store.sole_use():
        address = save(store, 1)
    for path in damaged(tmp_path):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="is damaged"):
            store.verify(address)
        path.write_bytes(content + b"x")
        with pytest.raises(CheckpointError, match="is damaged"):
            store.check_complete(address)
        path.unlink()
        with pytest.raises(CheckpointError, match="missing files"):
            store.check_complete(address)
        path.write_bytes(content)
    extra = damaged(tmp_path)[0].with_name("extra")
    extra.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="unexpected files"):
        store.verify(address)
    extra.unlink()
    store.verify(address)
    manifest = tmp_path / "kept" / "step-1" / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(CheckpointError, match="differs from its own hash"):
        store.check_complete(address)


def test_a_coordinator_that_was_taken_over_commits_no_more(tmp_path: Path) -> None:
    old, new = store_at(tmp_path), store_at(tmp_path)
    with old.sole_use():
        save(old, 1)
        with new.sole_use():
            with pytest.raises(CheckpointError, match="another coordinator has taken over"):
                save(old, 2)
            save(new, 2)
    assert len(new.committed()) == 2


def test_what_was_put_aside_stays_and_can_be_read(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with store.sole_use():
        addresses = [save(store, step) for step in (1, 2, 3)]
        assert store.set_damaged_aside(addresses[2]) == "step-3.damaged"
        aside = store.set_aside(addresses[:2])
        assert store.committed() == []
        store.clear()
        store.discard(".step-*")
        later = open_checkpoints(aside)
        assert later.committed() == [f"{aside}/step-1", f"{aside}/step-2"]
        later.verify(f"{aside}/step-1")
        store.verify(f"{store.location}/step-3.damaged")


def test_the_best_stays_and_drafts_go(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with store.sole_use():
        best = save(store, 1)
        store.mark_best(best)
        for step in (2, 3, 4):
            save(store, step, keep=2)
        assert [a.rpartition("/")[2] for a in store.committed()] == ["step-1", "step-3", "step-4"]
        assert store.best() == best
        store.put(store.draft(".step-9-attempt-2-draft-1"), {"dense.safetensors": b"x"})
        store.discard(".step-*-attempt-2-draft-*")
        assert not [name for name in objects(tmp_path) if "step-9" in name]
        assert store.prune(1) == [f"{store.location}/step-3"]


def test_the_journal_comes_back_where_it_was_lost(tmp_path: Path) -> None:
    store, here, there = store_at(tmp_path), tmp_path / "a.jsonl", tmp_path / "b" / "b.jsonl"
    store.fetch_journal(here)
    assert not here.exists()
    here.write_text("one\n")
    with store.sole_use():
        store.keep_journal(here)
    store.fetch_journal(there)
    assert there.read_text() == "one\n"
    there.write_text("one\nand what was not kept yet\n")
    store.fetch_journal(there)
    assert there.read_text() == "one\nand what was not kept yet\n"


def test_the_journal_of_whoever_came_later_replaces_a_stale_one(tmp_path: Path) -> None:
    """Run on one machine, then on another, then on the first again."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    old, new = store_at(tmp_path), store_at(tmp_path)
    first.write_text("of the first\n")
    with old.sole_use():
        old.keep_journal(first)
        first.write_text("of the first\nlast words that were never kept, and are long\n")
        with new.sole_use():
            new.fetch_journal(second)
            second.write_text(second.read_text() + "of the second\n")
            new.keep_journal(second)
            with pytest.raises(StoreError, match="another coordinator has taken over"):
                old.keep_journal(first)
    again = store_at(tmp_path)
    with again.sole_use():
        again.fetch_journal(first)
    assert first.read_text() == "of the first\nof the second\n"
    assert "last words" in (tmp_path / "first.jsonl.replaced").read_text()


def test_a_transfer_can_be_ended(tmp_path: Path) -> None:
    ended = threading.Event()
    ended.set()
    store = ObjectStore(f"file://{tmp_path}/kept", cancelled=ended)
    with pytest.raises(CancelledError):
        store.put(store.draft(".d"), {"a": b"x"})


def test_a_place_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be written to: .*credentials"):
        store_at(tmp_path).check_access()
    with pytest.raises(CheckpointError, match="cannot be used for checkpoints"):
        ObjectStore("nowhere://x/y").committed()
    assert issubclass(StoreError, OSError)


def test_a_checkpoint_that_was_copied_into_the_store_by_hand(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "kept", ".d", 4)
    (draft.sparse / "part").write_text("x")
    draft.finish(dense={}, cursor=CURSOR, facts={"job": "j"})
    commit(draft.path, 4, 9)
    store = store_at(tmp_path)
    address = store.committed()[0]
    store.verify(address)
    assert store.cursor(address) == CURSOR
    with store.sole_use():
        store.clear()
        save(store, 5)
        aside = store.set_aside([address])
        store.clear()
        open_checkpoints(aside).verify(f"{aside}/step-4")
        save(store, 6, keep=1)
    assert store.committed() == [f"{store.location}/step-6"]


def resealed(store: ObjectStore, tmp_path: Path, step: int, **changes: Any) -> str:
    path = tmp_path / "kept" / f"step-{step}" / "MANIFEST.json"
    body = parse_manifest(path.read_bytes(), str(path))
    path.write_text(manifest_text({**body, **changes}))
    return f"{store.location}/step-{step}"


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/../../evil", "./evil", "a//evil", "evil/", ""])
def test_a_manifest_cannot_have_a_file_written_outside_the_copy(tmp_path: Path, name: str) -> None:
    store = store_at(tmp_path)
    with store.sole_use():
        save(store, 1)
    manifest = store.manifest(f"{store.location}/step-1")
    files = {**manifest["files"], name: {"bytes": 4, "xxh3_128": "x"}}
    address = resealed(store, tmp_path, 1, files=files)
    before = set(tmp_path.rglob("*"))
    for action in (store.verify, store.read, lambda address: store.fetch(address, tmp_path / "copy" / "step-1")):
        with pytest.raises(CheckpointError, match="is no name of a file in a checkpoint"):
            action(address)
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "data", ["..", "../other/data/o/d", "data", "data/o", "data/o/d/e", "step-2", "/etc", "data/../../x"]
)
def test_a_manifest_cannot_have_files_of_others_removed(tmp_path: Path, data: str) -> None:
    """What a manifest names as its files is removed with it: it must be a draft of the same location."""
    store = store_at(tmp_path)
    other = tmp_path / "other" / "data" / "o" / "d" / "precious"
    other.parent.mkdir(parents=True)
    other.write_text("x")
    with store.sole_use():
        for step in (1, 2):
            save(store, step)
        address = resealed(store, tmp_path, 1, data=data)
        with pytest.raises(CheckpointError, match="not in a draft of its location"):
            store.verify(address)
        store.clear()
        save(store, 3, keep=1)
        store.verify(f"{store.location}/step-3")
    assert other.read_text() == "x"
    assert store.committed() == [f"{store.location}/step-3"]


def test_pruning_takes_the_right_to_commit_from_nobody(tmp_path: Path) -> None:
    job, person = store_at(tmp_path), store_at(tmp_path)
    with job.sole_use():
        for step in (1, 2, 3):
            save(job, step)
        assert run(["checkpoint", "prune", person.location, "--keep", "2"]) == 0
        save(job, 4)
    assert [a.rpartition("/")[2] for a in job.committed()] == ["step-2", "step-3", "step-4"]


def test_what_was_just_committed_stays_though_there_are_later_steps(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with store.sole_use():
        for step in (100, 200, 300):
            save(store, step)
        store.verify(save(store, 120, keep=1))
    assert [a.rpartition("/")[2] for a in store.committed()] == ["step-120", "step-300"]


def test_a_commit_during_a_take_over_is_taken_back(tmp_path: Path) -> None:
    """The owner was looked at, another one came, and then the manifest was written."""
    old, new = store_at(tmp_path), store_at(tmp_path)
    with old.sole_use():
        save(old, 1)
        write = old._write

        def slowly(path: str, content: bytes) -> None:
            if path.endswith("step-2/MANIFEST.json"):
                stack.enter_context(new.sole_use())
            write(path, content)

        old._write = slowly  # type: ignore[method-assign]
        with (
            contextlib.ExitStack() as stack,
            pytest.raises(CheckpointError, match="another coordinator has taken over"),
        ):
            save(old, 2)
        assert new.committed() == [f"{new.location}/step-1"]


def test_a_network_that_is_away_is_no_mistake_in_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore("s3://bucket/kept")
    for call in (store.committed, store.check_access, lambda: store.read("s3://bucket/kept/step-1")):
        with pytest.raises(StoreError, match="NETWORK_CONNECTION"):
            call()
