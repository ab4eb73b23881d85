"""Checkpoints that hold only what changed since another: read, kept, broken, rewritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paddlewheel.deploy.cli import run
from paddlewheel.pserver import saved_tables
from paddlewheel.pserver.errors import CheckpointError as SavedTableError
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.checkpoint.folder_store import open_checkpoints
from paddlewheel.trainer.checkpoint.manifest import CheckpointError
from paddlewheel.trainer.checkpoint.object_store import ObjectStore
from paddlewheel.trainer.checkpoint.trained_model import open_model
from tests.support.chains import ChainedJob, rows_of

pytestmark = pytest.mark.needs("our own tables")


@pytest.fixture
def job(tmp_path: Path) -> ChainedJob:
    made = ChainedJob(tmp_path / "kept")
    yield made
    made.table.close()


def names(folder: Path) -> list[str]:
    return [path.name for path in manifest.committed(folder)]


def read_all(folder: Path) -> None:
    saved_tables.verify(saved_tables.open_table(folder))


def test_each_checkpoint_of_a_chain_is_the_table_of_its_moment(job: ChainedJob) -> None:
    """Also after keys were evicted, and from a folder that later ones were put aside in."""
    paths = [job.save(step) for step in (1, 2, 3, 4, 5, 6, 7)]
    assert [manifest.num_links(manifest.read_manifest(path)) for path in paths] == [1, 2, 3, 4, 5, 6, 7]
    saved = saved_tables.open_table(paths[-1] / "sparse" / "t")
    assert job.table.statistics().evicted > 0
    assert saved.num_rows < saved.num_keys == len(rows_of(paths[-1]))
    assert rows_of(paths[-1]) == job.rows()
    aside = Path(open_checkpoints(str(job.directory)).set_aside([str(paths[-1])]))
    manifest.read(aside / "step-7")
    assert rows_of(aside / "step-7") == job.rows()


def test_what_a_kept_checkpoint_leads_on_from_is_kept(job: ChainedJob) -> None:
    for step in (1, 2, 3):
        job.save(step, full=step == 2)
    manifest.mark_best(job.directory / "step-3")
    for step in (4, 5, 6, 7):
        job.save(step, full=step in {4, 6})
    assert [path.name for path in manifest.prune(job.directory, 1)] == ["step-1", "step-4", "step-5"]
    assert names(job.directory) == ["step-2", "step-3", "step-6", "step-7"]
    kept = open_checkpoints(str(job.directory))
    kept.set_aside([str(job.directory / "step-7")])
    job.save(8, full=True, keep=1)
    assert names(job.directory) == ["step-2", "step-3", "step-6", "step-8"], "one that was put aside can be read"


@pytest.mark.parametrize("harm", ["missing", "another", "flipped", "cut"])
def test_a_broken_link_is_told_by_its_name_with_what_helps(job: ChainedJob, harm: str) -> None:
    paths = [job.save(step) for step in (1, 2, 3)]
    part = next(path for path in paths[1].rglob("part-*") if path.stat().st_size > 90)
    if harm == "missing":
        shutil.rmtree(paths[1])
        words = r"step-3 holds only what changed since .*step-2, which is missing\. Bring that one back"
    elif harm == "another":
        job.base = None
        job.save(2)
        words = r"step-3 holds only what changed since .*step-2, which is another checkpoint now\. Bring"
    elif harm == "flipped":
        content = bytearray(part.read_bytes())
        content[85] ^= 1
        part.write_bytes(content)
        words = r"step-2/.*part-.* is damaged: its hash differs"
    else:
        part.write_bytes(part.read_bytes()[:-1])
        words = r"step-3 leads on from one that is not whole: .*step-2.* is damaged: .* bytes.*Bring that one back"
    with pytest.raises(CheckpointError, match=words):
        manifest.read(paths[2])
    assert run(["checkpoint", "verify", str(paths[2])]) == 64
    with pytest.raises((SavedTableError, CheckpointError)):
        read_all(paths[2] / "sparse" / "t")
    manifest.read(paths[0])


def test_a_draft_is_not_committed_when_its_base_is_gone(job: ChainedJob) -> None:
    first = job.save(1)
    draft, _ = job.draft(2)
    shutil.rmtree(first)
    with pytest.raises(CheckpointError, match="step-1, which is missing"):
        manifest.commit(draft, 2, 9)
    assert names(job.directory) == []


def test_commands_read_through_a_chain_and_make_it_full(
    job: ChainedJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [job.save(step) for step in (1, 2, 3)]
    expected = [rows_of(path) for path in paths]

    def told(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        assert run([*("checkpoint", *map(str, words))]) == code
        said = capsys.readouterr()
        return said.out + said.err

    listed = json.loads(told("ls", job.directory, "--json"))
    assert [(row["step"], row["base"], row["keys"]["t"]) for row in listed] == [
        (step, base, len(rows))
        for step, base, rows in zip((1, 2, 3), (None, "step-1", "step-2"), expected, strict=True)
    ]
    assert told("ls", paths[1]).strip().endswith("changes since step-1")
    assert told("verify", job.directory).count("whole") == 3
    full = tmp_path / "full" / "step-3"
    told("compact", paths[2], full)
    assert (rows_of(full), manifest.read_manifest(full).get("base")) == (expected[2], None)
    assert "the same model" in told("diff", paths[2], full)
    assert f"{len(expected[1])} -> {len(expected[2])} keys" in told("diff", paths[1], paths[2], code=1)
    told("reshard", paths[2], tmp_path / "wide" / "step-3", "--shards", 6)
    assert rows_of(tmp_path / "wide" / "step-3") == expected[2]
    assert "step-3 leads on from it: compact that one first" in told("compact", paths[1], code=64)
    told("compact", paths[2])
    told("compact", paths[1])
    assert [rows_of(path) for path in paths[1:]] == expected[1:]
    assert told("prune", job.directory).split() == ["removed", str(paths[0]), "removed", str(paths[1])]
    assert rows_of(paths[2]) == expected[2]


def test_one_in_a_store_is_made_full_in_its_place(
    job: ChainedJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ObjectStore(f"file://{tmp_path}/store")
    with store.sole_use():
        addresses = []
        for step in (1, 2, 3):
            addresses.append(put_in_store(job, store, step, keep=9))
            expected = job.rows()
            job.table.mark(job.base.mark)  # to look has been a whole save
            job.table.drop(job.base.mark)
        assert run(["checkpoint", "compact", addresses[1]]) == 64
        assert "step-3 leads on from it: compact that one first" in capsys.readouterr().err
        before = store.manifest(addresses[2])
        with pytest.raises(FileNotFoundError):
            store.replace(addresses[2], lambda copy: copy / "nothing")
        assert store.manifest(addresses[2]) == before
        assert run(["checkpoint", "compact", addresses[2]]) == 0
        assert store.manifest(addresses[2]).get("base") is None
        store.verify(addresses[2])
        with store.local_copy(addresses[2]) as copy:
            assert rows_of(copy) == expected
        assert len(list((tmp_path / "store" / "data").glob("*/.step-*"))) == 3, "the files of before are gone"
        assert store.prune(1) == addresses[:2]
        store.verify(addresses[2])
        with pytest.raises(CheckpointError, match="taken over"):
            put_in_store(job, store, 4, keep=9, full=True)


def put_in_store(job: ChainedJob, store: ObjectStore, step: int, keep: int, *, full: bool = False) -> str:
    """As hosts and coordinator do it; returns the checkpoint's address."""
    draft, body = job.draft(step, full=full)
    name = f".step-{step}-draft"
    facts = {k: v for k, v in body.items() if k not in {"format", "step", "files"}}
    sent = store.put(store.draft(name), {name: draft / name for name in body["files"]})
    store.finish(store.draft(name), step, facts, sent)
    return store.commit(name, step, keep)


def test_chains_in_a_store(job: ChainedJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`file://` stands for the store; drafts are uploaded as hosts do it."""
    store = ObjectStore(f"file://{tmp_path}/store")
    with store.sole_use():
        addresses = []
        for step in (1, 2, 3, 4):
            addresses.append(put_in_store(job, store, step, keep=1 if step == 4 else 9, full=step == 3))
            expected = job.rows()
            job.table.mark(job.base.mark)  # to look has been a whole save
            job.table.drop(job.base.mark)
        assert store.committed() == addresses[2:]
        store.verify(addresses[3])
        remote = store.read(addresses[3])
        assert remote.chain == addresses[2:]
        with store.local_copy(addresses[3]) as copy:
            assert rows_of(copy) == expected
        target = tmp_path / "copy" / "step-4"
        assert run(["checkpoint", "fetch", addresses[3], str(target)]) == 0
        assert (rows_of(target), manifest.read_manifest(target).get("base")) == (expected, None)
        elsewhere = tmp_path / "compacted" / "step-4"
        assert run(["checkpoint", "compact", addresses[3], str(elsewhere)]) == 0
        assert rows_of(elsewhere) == expected
        aside = store.set_aside(addresses[3:])
        store.verify(f"{aside}/step-4")
        assert store.prune(1) == []
        store.clear()
        store.verify(f"{aside}/step-4")
        aside_too = store.set_aside(addresses[2:3])
        if aside_too == aside:
            store.verify(f"{aside}/step-4")
        else:
            with pytest.raises(CheckpointError, match="step-3, which is missing"):
                store.verify(f"{aside}/step-4")


def test_a_job_may_begin_with_a_chain(job: ChainedJob) -> None:
    """What takes a trained model verifies what it leads on from, too."""
    paths = [job.save(step) for step in (1, 2)]
    settings = {"data": {"sparse": [{"name": "a", "table": "t"}]}, "tables": {"t": {"width": 3}}}
    text = (paths[1] / manifest.MANIFEST).read_text()
    body = manifest.parse_manifest(text.encode(), "x")
    (paths[1] / manifest.MANIFEST).write_text(manifest.manifest_text({**body, "settings": settings}))
    trained = open_model(paths[1])
    trained.verify(["t"])
    part = next(path for path in paths[0].rglob("part-*") if path.stat().st_size > 90)
    content = bytearray(part.read_bytes())
    content[85] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-1/.*is damaged"):
        trained.verify(["t"])
