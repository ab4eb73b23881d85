"""Whole jobs whose checkpoints are in an S3 server: made, resumed by other servers elsewhere, and the commands."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from paddlewheel.pserver import delta_chain
from paddlewheel.pserver.export import export_table, read_groups
from paddlewheel.pserver.saved_tables import open_table, read_rows
from tests.support.command import Job
from tests.support.object_stores import new_bucket, s3_server

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


def job_of(folder: Path, bucket: str, **checkpoint: object) -> Job:
    rng = np.random.default_rng(0)
    (folder / "train").mkdir()
    for number in range(2):
        table = {"click": rng.integers(0, 2, 2000), "a": rng.integers(0, 50, 2000), "b": rng.integers(0, 9, 2000)}
        pq.write_table(pa.table(table), folder / "train" / f"{number}.parquet")
    data = {
        "train": str(folder / "train"),
        "labels": ["click"],
        "batch_rows": 256,
        "sparse": [{"name": "a"}, {"name": "b"}],
    }
    settings = {
        "tables": {"default": {"width": 4, "shards": 12}},
        "model": {"kind": "fm"},
        "cluster": {"servers": 2, "trainers": 2},
        "metrics": {"enabled": False},
        "control": {"max_restarts": 0},
        "checkpoint": {"directory": f"s3://{bucket}/jobs/a", "staging": str(folder / "staging"), **checkpoint},
    }
    return Job(folder, data, settings)


def command(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "paddlewheel.deploy.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_job_goes_on_elsewhere_from_a_store(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained by 2 servers; its run folder is lost; trained on by 3, then evaluated as it is and by the commands."""
    bucket = new_bucket(endpoint, monkeypatch)
    job = job_of(tmp_path, bucket)
    code, outcome = job.run("train")
    assert code == 0, outcome
    first = outcome["result"]["checkpoint"]
    assert first.startswith(f"s3://{bucket}/jobs/a/step-")
    assert not list((tmp_path / "staging").glob("*/*")), "what is uploaded leaves the hosts"
    shutil.rmtree(tmp_path / "run")
    job.settings["cluster"] = {"servers": 3, "trainers": 1}
    job.settings["train"] = {"epochs": 2}
    code, outcome = job.run("train")
    assert code == 0, outcome
    second = outcome["result"]["checkpoint"]
    assert outcome["result"]["rows"] == 8000
    location = f"s3://{bucket}/jobs/a"

    code, said = command("checkpoint", "ls", location, "--json")
    assert code == 0, said
    assert [row["path"] for row in json.loads(said)] == [first, second]
    assert [row["rows"] for row in json.loads(said)] == [4000, 8000]
    code, said = command("checkpoint", "diff", first, second)
    assert code == 1, said
    assert "table default: 59 -> 59 keys" in said
    code, said = command("report", location)
    assert code == 0, said
    assert said.count("each of 4,000 rows once") == 2
    code, said = command("checkpoint", "fetch", second, str(tmp_path / "copy" / second.rpartition("/")[2]))
    assert code == 0, said
    assert command("checkpoint", "verify", str(tmp_path / "copy"))[0] == 0
    assert command("checkpoint", "diff", second, str(tmp_path / "copy" / second.rpartition("/")[2]))[0] == 0
    scores = []
    for number, model in enumerate((location, str(tmp_path / "copy"))):
        target = tmp_path / f"{number}.parquet"
        code, said = command("predict", model, "--data", str(tmp_path / "train"), "--to", str(target))
        assert code == 0, said
        scores.append(pq.read_table(target)["score_click"].to_numpy())
    np.testing.assert_array_equal(*scores)
    assert command("checkpoint", "prune", location)[1].strip() == f"removed {first}"
    code, said = command("checkpoint", "verify", location)
    assert (code, said.count("whole")) == (0, 1), said

    store = pafs.S3FileSystem(endpoint_override=endpoint.removeprefix("http://"), scheme="http")
    selected = pafs.FileSelector(f"{bucket}/jobs/a/data", recursive=True)
    part = next(info.path for info in store.get_file_info(selected) if "part-" in info.path and info.size > 10)
    content = bytearray(store.open_input_stream(part).read())
    content[5] ^= 1
    with store.open_output_stream(part) as stream:
        stream.write(bytes(content))
    code, said = command("checkpoint", "verify", location)
    assert code == 64
    assert "is damaged" in said
    job.settings["train"] = {"epochs": 3}
    code, outcome = job.run("train")
    assert code == 75, "a host that fetches a damaged part says so, and nothing is trained on it"
    assert outcome["failed_role"].startswith("pserver")
    assert "is damaged" in outcome["cause"]
    assert command("checkpoint", "ls", f"{second}.damaged")[0] == 0, "the next start goes on from the one before"


@pytest.mark.slow
@pytest.mark.needs("our own tables")
def test_chains_and_published_days_in_a_store(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Days are published from checkpoints of changes in a store; a second run goes on with other servers."""
    bucket = new_bucket(endpoint, monkeypatch)
    job = job_of(tmp_path, bucket, full_every=3, keep=9, every_steps=3)
    days = [f"2026-01-0{number}" for number in (1, 2, 3)]
    for number, day in enumerate(days):
        rng = np.random.default_rng(number)
        (tmp_path / "days" / f"day={day}").mkdir(parents=True)
        table = {"click": rng.integers(0, 2, 1500), "a": rng.integers(0, 50, 1500) + 9 * number}
        table["b"] = rng.integers(0, 9, 1500)
        pq.write_table(pa.table(table), tmp_path / "days" / f"day={day}" / "a.parquet")
    job.data |= {"train": str(tmp_path / "days"), "partitions": "hive"}
    job.settings["tables"]["default"]["lifecycle"] = {"delete_after_unseen_days": 1}
    job.settings["train"] = {"days": {"publish": {"base_every_days": 2}}}
    location = f"s3://{bucket}/jobs/a"
    for servers, until in ((2, days[1]), (3, days[2])):
        job.settings["cluster"] = {"servers": servers, "trainers": 1}
        code, outcome = job.run("train", "--days", f"{days[0]}..{until}")
        assert code == 0, outcome
    code, said = command("checkpoint", "ls", location, "--json")
    assert code == 0, said
    rows = json.loads(said)
    bases = [row["base"] for row in rows]
    assert None in bases[1:], "not all lead on from the first one"
    assert len(set(bases)) > 3, "some lead on"
    code, said = command("checkpoint", "verify", location)
    assert (code, said.count("whole")) == (0, len(rows)), said

    directory = tmp_path / "run" / "published" / "default"
    known = delta_chain.links(directory)
    assert [(link.kind, link.day) for link in known] == [("base", days[0]), ("delta", days[1]), ("base", days[2])]
    assert not list(directory.glob(".whole-*"))
    ends = [row for row in rows if row["rows"] in {1500, 3000, 4500}]
    for row, day in zip(ends, days, strict=True):
        copy = tmp_path / day / row["path"].rpartition("/")[2]
        assert command("checkpoint", "fetch", row["path"], str(copy))[0] == 0
        export_table(open_table(copy / "sparse" / "default"), tmp_path / f"full-{day}")
        delta_chain.follow(directory, tmp_path / f"followed-{day}", day=day)
        full, followed = (
            pa.concat_tables(list(read_groups(tmp_path / f"{kind}-{day}"))).sort_by("key")
            for kind in ("full", "followed")
        )
        assert full.equals(followed), day


@pytest.mark.parametrize(
    ("change", "words", "expected"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "cannot be written to", 75),
        ({"bucket": "no-such-bucket-here"}, "Does the bucket exist?", 64),
    ],
    ids=["nobody-listens", "no-bucket"],
)
def test_a_store_that_cannot_be_used_is_told_before_anything_starts(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], words: str, expected: int
) -> None:
    bucket = new_bucket(endpoint, monkeypatch)
    if "AWS_ENDPOINT_URL" in change:
        monkeypatch.setenv("AWS_ENDPOINT_URL", change["AWS_ENDPOINT_URL"])
    job = job_of(tmp_path, change.get("bucket", bucket))
    code, said = command("train", str(job.path))
    assert code == expected, "a store that is away may come back; a bucket that is not there is a mistake"
    assert words in said
    assert "AWS_ACCESS_KEY_ID" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_days_go_on_from_a_store(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary after a restore is that of an undisturbed run, the unseen days of keys included."""
    bucket = new_bucket(endpoint, monkeypatch)
    job = job_of(tmp_path, bucket)
    for number, rows in enumerate(([1, 2, 3], [1, 2], [1])):
        folder = tmp_path / "train" / f"day=2026-03-0{number + 1}"
        folder.mkdir()
        pq.write_table(pa.table({"click": [0, 1] * len(rows), "a": rows * 2, "b": rows * 2}), folder / "0.parquet")
    for loose in (tmp_path / "train").glob("*.parquet"):
        loose.unlink()
    lifecycle = {"show_click_decay": 0.5, "delete_after_unseen_days": 1}
    job.settings["tables"] = {"default": {"width": 4, "shards": 12, "lifecycle": lifecycle}}
    for days, keys in (("2026-03-01", 6), ("2026-03-02", 6), ("2026-03-03", 4)):
        code, outcome = job.run("train", "--days", days)
        assert code == 0, outcome
        assert outcome["result"]["keys"] == {"default": keys}  # the ids 3 were last seen two boundaries ago
    newest = outcome["result"]["checkpoint"]
    code, said = command("checkpoint", "fetch", newest, str(tmp_path / "copy" / newest.rpartition("/")[2]))
    assert code == 0, said
    (fetched,) = (tmp_path / "copy").iterdir()
    found = sorted(
        (show, unseen)
        for rows in read_rows(open_table(fetched / "sparse" / "default"))
        for show, unseen in zip(rows.shows_N.tolist(), rows.unseen_days_N.tolist(), strict=True)
    )
    once, twice = (2 / 2 + 2) / 2, ((2 / 2 + 2) / 2 + 2)  # shows of the ids 2, not seen on the last day, and 1
    assert found == [(once, 1.0)] * 2 + [(twice, 0.0)] * 2
    code, said = command("report", f"s3://{bucket}/jobs/a")
    assert code == 0, said
    assert "day 2026-03-02: 4 rows" in said
    store = pafs.S3FileSystem(endpoint_override=endpoint.removeprefix("http://"), scheme="http")
    drafts = store.get_file_info(pafs.FileSelector(f"{bucket}/jobs/a/data", recursive=True))
    assert not [info.path for info in drafts if "boundary" in info.path], "what was saved for the boundary alone"
