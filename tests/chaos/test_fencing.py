"""A trainer of an earlier attempt that goes on: on fixed ports it meets the servers of the later one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import yaml

from paddlewheel.pserver import admin
from paddlewheel.pserver import saved_tables as tables
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.errors import ServerError
from paddlewheel.trainer.checkpoint import manifest
from tests.chaos.driver import ChaosJob, check_run
from tests.chaos.test_losses import note
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_KEYS_A_PUSH = 32


class StaleTrainer:
    """Pushes to the servers of a job without end: old keys while it may, new keys all the time after `lose`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ended, self._lost = threading.Event(), threading.Event()
        self.applied_at: list[float] = []
        self.new_keys: list[np.ndarray] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        random = np.random.default_rng(9)
        keys = random.integers(1, 1 << 64, _KEYS_A_PUSH, dtype=np.uint64)
        once, grads = np.ones(_KEYS_A_PUSH, np.float32), np.full((_KEYS_A_PUSH, 5), 1e-3, np.float32)
        while not self._ended.wait(0.002):
            if self._lost.is_set():
                keys = random.integers(1, 1 << 64, _KEYS_A_PUSH, dtype=np.uint64)
                self.new_keys.append(keys)
            with contextlib.suppress(ServerError):
                self._client.push("default", keys, grads, once, once * 0)
                self.applied_at.append(time.time())

    def lose(self) -> None:
        self._lost.set()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()


def test_a_stale_trainer_changes_nothing(start_job: Callable[..., ChaosJob], undisturbed_auc: float) -> None:
    ports = [free_port(), free_port()]
    job = start_job(81, cluster={"servers": 2, "trainers": 2, "trainer_threads": 1, "server_ports": ports})
    job.wait_for_commits(1)
    job.random_moment()
    config = TableConfig(**yaml.safe_load((job.run_dir.parent / "job.yaml").read_text())["tables"]["default"])
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    server_uids = [admin.server_uid("127.0.0.1", port) for port in ports]
    with Client({"default": config}, endpoints, seed=5, server_uids=server_uids) as client:
        stale = StaleTrainer(client)
        with stale.at_work():
            job.wait_for(lambda _: len(stale.applied_at) > 3, "pushes of the other trainer")
            job.hit(job.pid_of("pserver", 0, "worker"))
            stale.lose()
            job.wait_for(lambda s: s.attempt == 2 and s.phase == "running", "the second attempt")
            again_at = time.time()  # whoever answers on the ports now was started anew
            outcome = job.finish()
    report = check_run(job, outcome, undisturbed_auc)
    assert outcome["num_restarts"] == 1, job.log()
    assert max(stale.applied_at) < again_at
    tried = np.concatenate(stale.new_keys)
    assert len(tried) > 1000, "it went on trying"
    newest = manifest.latest(job.run_dir / "checkpoints")
    assert newest is not None
    saved = tables.open_table(manifest.read(newest).sparse / "default")
    kept = np.concatenate([rows.keys_N for rows in tables.read_rows(saved)])
    assert not np.isin(tried, kept).any()
    note("stale_trainer", 81, job, report, outcome)
