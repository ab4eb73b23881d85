"""Checkpoints in an S3 server, and hosts that see nothing of each other's disks; losses in the middle of an upload."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from paddlewheel.trainer.checkpoint.object_store import ObjectStore
from tests.chaos.driver import AUC_TOLERANCE, ChaosJob, check_run
from tests.chaos.test_losses import note
from tests.support.object_stores import new_bucket, s3_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

StartJob = Callable[..., ChaosJob]
FEW_PARTS = {"default": {"width": 4, "shards": 12, "optimizer": {"rule": "adagrad", "learning_rate": 0.1}}}


@pytest.fixture
def location(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server() as endpoint:
        yield f"s3://{new_bucket(endpoint, monkeypatch)}/jobs/chaos"


def wait_for_half_an_upload(job: ChaosJob, location: str) -> None:
    """Until parts of a draft are there whose manifest is not, after a first checkpoint."""
    job.wait_for_commits(1)
    store = ObjectStore(location)

    def is_half_there(_: object) -> bool:
        names = [info.path for info in store._files(store._path(store.location) + "/data")]
        drafts = {name.rpartition("/sparse/")[0] for name in names if "/part-" in name}
        return any(f"{draft}/MANIFEST.json" not in names for draft in drafts)

    job.wait_for(is_half_there, "half of an upload")


@pytest.mark.parametrize(
    ("victim", "seed"), [("server_host", 71), ("server", 72), ("trainer_0", 73), ("coordinator", 74)]
)
def test_a_loss_in_the_middle_of_an_upload(
    start_job: StartJob, undisturbed_auc: float, location: str, victim: str, seed: int
) -> None:
    job = start_job(seed, tables=FEW_PARTS, checkpoint={"every_steps": 15, "directory": location})
    wait_for_half_an_upload(job, location)
    pids = {
        "server_host": lambda: job.pid_of("pserver", 0, "agent"),
        "server": lambda: job.pid_of("pserver", 0, "worker"),
        "trainer_0": lambda: job.pid_of("trainer", 0, "worker"),
        "coordinator": job.coordinator_pid,
    }
    job.hit(pids[victim]())
    outcome = job.finish()
    report = check_run(job, outcome, undisturbed_auc, location)
    note(f"kill_{victim}_in_an_upload", seed, job, report, outcome)
    assert outcome["num_restarts"] == 1, job.log()
    assert no_orphans(location)
    assert not list(job.run_dir.glob("staging*"))


def no_orphans(location: str) -> bool:
    """After a next coordinator has cleaned up."""
    store = ObjectStore(location)
    with store.sole_use():
        store.clear()
    kept = {store._data(address, store.manifest(address)) for address in store.committed()}
    found = {info.path.partition("/sparse/")[0].rpartition("/")[0] for info in store._files(store._root + "/data")}
    return {name for name in found if ".step" in name.rpartition("/")[2]} <= kept


@contextmanager
def stopped(address_of: str) -> Iterator[None]:
    """Whoever listens at the port answers nothing for a while."""
    port = int(address_of.rpartition(":")[2])
    listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port]
    pid = listening[0].pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_training_goes_on_while_the_store_does_not_answer(
    start_job: StartJob, undisturbed_auc: float, location: str
) -> None:
    job = start_job(75, tables=FEW_PARTS, checkpoint={"every_steps": 15, "directory": location})
    job.wait_for_commits(1)
    with stopped(os.environ["AWS_ENDPOINT_URL"]):
        job.hit_at = time.time()
        job.wait_for(lambda s: s.checkpoint.num_failed >= 1, "a failed checkpoint")
    outcome = job.finish()
    report = check_run(job, outcome, undisturbed_auc, location)
    note("store_does_not_answer", 75, job, report, outcome)
    assert outcome["num_restarts"] == 0, job.log()
    assert report.num_failed_checkpoints >= 1


@pytest.mark.needs("user namespaces")
def test_hosts_that_share_nothing(start_job: StartJob, undisturbed_auc: float, location: str, tmp_path: Path) -> None:
    """Each server's host has a disk that no other process sees. A server's host is lost and comes back empty; then the
    whole run folder is lost, and the job goes on elsewhere with other numbers of servers and trainers.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    connect = tmp_path / "connect"
    connect.write_text(
        f'#!/bin/sh\nexec unshare --user --map-root-user --mount sh -c "mount -t tmpfs tmpfs {disk} && exec $1"\n'
    )
    connect.chmod(0o755)
    hosts = {
        "coordinator": "127.0.0.1",
        "connect": [str(connect)],
        "command": f"{sys.executable} -m paddlewheel.deploy.cli",
        "hosts": [{"name": f"n{i}", "address": "127.0.0.1", "servers": 1, "trainers": 1, "threads": 1} for i in (1, 2)],
    }
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(hosts))
    checkpoint = {"every_steps": 15, "directory": location, "staging": str(disk)}
    settings = {"tables": FEW_PARTS, "checkpoint": checkpoint}
    job = start_job(76, arguments=["--hosts", str(tmp_path / "hosts.yaml")], **settings)
    job.wait_for_commits(2)
    job.hit(job.pid_of("pserver", 1, "agent"))
    job.wait_for(lambda s: s.attempt >= 2 and s.phase == "running", "the second attempt")
    job.wait_for_commits(3)
    job.process.terminate()
    job.finish(143)
    assert not list(disk.iterdir()), "nothing was written outside of the hosts' own disks"
    shutil.rmtree(job.run_dir)
    again = start_job(77, cluster={"servers": 3, "trainers": 1}, **settings)
    outcome = again.finish()
    report = check_run(again, outcome, None, location)
    assert outcome["result"]["eval"]["auc"] > undisturbed_auc - AUC_TOLERANCE
    assert report.attempts[-1].restored
    note("hosts_that_share_nothing", 76, again, report, outcome)
