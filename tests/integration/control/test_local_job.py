"""Real processes, fake children: whatever is killed, stopped or fails, the job ends as promised.

That no process, port or temporary file is left is checked for every test here (tests/conftest.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.control.jobs import HERE, LONG, Job
from tests.support.authorities import make_authority


def test_a_job_runs_to_its_end(start_job: Callable[..., Job]) -> None:
    job = start_job({})
    outcome = job.finish()
    assert outcome["exit_code"] == 0
    assert outcome["result"]["rows"] == 1000
    assert "trained      1,000 rows" in job.errors
    assert json.loads((job.run_dir / "result.json").read_text())["result"] == outcome["result"]
    logs = {path.name for path in (job.run_dir / "logs").iterdir()}
    assert logs == {"coordinator.log", "pserver-0.log", "pserver-1.log", "trainer-0.log", "trainer-1.log"}


@pytest.mark.parametrize(("role", "part"), [("pserver", "worker"), ("trainer", "agent")])
def test_a_killed_process_ends_the_job_and_is_named(
    start_job: Callable[..., Job], eventually: Callable[..., None], role: str, part: str
) -> None:
    job = start_job({"*": LONG})
    eventually(job.is_running, seconds=60)
    getattr(job, part)(role, 1).kill()
    killed_at = time.monotonic()
    outcome = job.finish()
    assert time.monotonic() - killed_at < 10
    assert outcome["exit_code"] == 75
    assert outcome["failed_role"] == f"{role} 1"
    assert ("lost its agent" if part == "agent" else "was killed by SIGKILL") in outcome["cause"]


@pytest.mark.parametrize(("role", "part"), [("pserver", "agent"), ("trainer", "worker")])
def test_a_stopped_process_is_noticed_within_seconds(
    start_job: Callable[..., Job], eventually: Callable[..., None], role: str, part: str
) -> None:
    job = start_job({"*": LONG})
    eventually(job.is_running, seconds=60)
    getattr(job, part)(role, 1).suspend()
    outcome = job.finish()
    assert outcome["exit_code"] == 75
    assert outcome["failed_role"] == f"{role} 1"
    assert ("no heartbeat" if part == "agent" else "SIGSTOP") in outcome["cause"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_coordinator_ends_the_job(
    start_job: Callable[..., Job], eventually: Callable[..., None], how: signal.Signals
) -> None:
    job = start_job({"*": LONG})
    eventually(job.is_running, seconds=60)
    job.coordinator().send_signal(how)
    outcome = job.finish()
    assert outcome["exit_code"] == 75
    assert outcome["failed_role"] == "coordinator"


def test_a_signal_stops_a_job_that_hangs(start_job: Callable[..., Job], eventually: Callable[..., None]) -> None:
    job = start_job({"*": LONG, "trainer 1": {"at_step": 3, "do": "hang"}}, stop_seconds=1.0)
    eventually(job.is_running, seconds=60)
    job.process.send_signal(signal.SIGINT)
    assert job.finish(10.0)["exit_code"] == 130


def test_a_signal_to_a_job_that_waits_for_a_server(
    start_job: Callable[..., Job], eventually: Callable[..., None]
) -> None:
    job = start_job({"pserver 0": {"startup_timeout_seconds": 60}})
    eventually(lambda: job.processes(str(HERE / "fake_worker.py")), seconds=60)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(10.0)["exit_code"] == 143


def test_nothing_outlives_a_killed_launcher(start_job: Callable[..., Job], eventually: Callable[..., None]) -> None:
    job = start_job({"*": LONG})
    eventually(job.is_running, seconds=60)
    processes = job.processes()
    assert len(processes) == 9
    job.process.kill()
    eventually(lambda: not any(process.is_running() for process in processes), seconds=3.0)


def test_an_agent_told_to_go_stops_the_whole_job(
    start_job: Callable[..., Job], eventually: Callable[..., None]
) -> None:
    job = start_job({"*": LONG})
    eventually(job.is_running, seconds=60)
    job.agent("pserver", 0).terminate()
    outcome = job.finish()
    assert outcome["exit_code"] == 143
    assert "pserver 0" in outcome["cause"]


def test_a_job_error_is_shown_with_its_cause_and_not_retried(start_job: Callable[..., Job]) -> None:
    said = {"at_step": 3, "do": "error", "kind": "data", "message": "column click: label 2", "code": 64}
    job = start_job({"*": LONG, "trainer 1": said}, max_restarts=3)
    outcome = job.finish()
    assert outcome["exit_code"] == 64
    assert outcome["cause"] == "trainer 1 failed: column click: label 2"
    assert outcome["num_restarts"] == 0
    assert "Traceback: made up" in job.errors


def test_a_crash_is_explained_by_the_last_lines_of_its_log(start_job: Callable[..., Job]) -> None:
    job = start_job({"*": LONG, "trainer 0": {"at_step": 3, "do": "exit", "code": 1}})
    outcome = job.finish()
    assert outcome["exit_code"] == 75
    assert "a word before the end" in outcome["detail"]


def test_a_stuck_trainer_is_noticed(start_job: Callable[..., Job]) -> None:
    job = start_job({"*": LONG, "trainer 1": {"at_step": 3, "do": "hang"}}, step_timeout_seconds=1.0)
    outcome = job.finish()
    assert outcome["exit_code"] == 75
    assert "made progress for 1 s" in outcome["cause"]  # which one, nobody can tell: they wait for each other


def test_a_crash_is_mended_by_a_restart(start_job: Callable[..., Job]) -> None:
    job = start_job({"trainer 0": {"at_step": 3, "do": "kill", "attempts": [1, 2]}}, max_restarts=2)
    outcome = job.finish()
    assert outcome["exit_code"] == 0
    assert outcome["num_restarts"] == 2


def test_a_killed_agent_comes_back(start_job: Callable[..., Job], eventually: Callable[..., None]) -> None:
    job = start_job({"*": {"steps": 100}}, max_restarts=2)
    eventually(job.is_running, seconds=60)
    job.agent("pserver", 1).kill()
    outcome = job.finish()
    assert outcome["exit_code"] == 0
    assert outcome["num_restarts"] == 1


def test_a_stopped_agent_is_replaced(start_job: Callable[..., Job], eventually: Callable[..., None]) -> None:
    job = start_job({"*": {"steps": 100}}, max_restarts=2)
    eventually(job.is_running, seconds=60)
    job.agent("trainer", 1).suspend()
    outcome = job.finish()
    assert outcome["exit_code"] == 0
    assert outcome["num_restarts"] == 1


def test_restarts_are_counted(start_job: Callable[..., Job]) -> None:
    job = start_job({"trainer 0": {"at": "start", "do": "exit", "code": 1}}, max_restarts=1)
    outcome = job.finish()
    assert outcome["exit_code"] == 75
    assert "after 1 restart" in outcome["cause"]


@pytest.mark.parametrize("where", ["a pipe that nobody reads", "/dev/full"])
def test_what_is_shown_of_a_job_cannot_end_it(tmp_path: Path, where: str) -> None:
    """`train 2>&1 | head`, and a log on a full disk: the job goes on, and its exit code is its own."""
    if where == "/dev/full":
        errors = Path(where).open("w")  # noqa: SIM115
    else:
        read_end, write_end = os.pipe()
        os.close(read_end)
        errors = os.fdopen(write_end, "w")
    with errors:
        job = Job(tmp_path / "run", {"*": {"steps": 10}}, {"cluster": {"servers": 1, "trainers": 1}}, errors)
    assert job.finish()["exit_code"] == 0
    assert job.report().exact


def test_a_signal_before_the_coordinator_is_ready_ends_the_launcher(
    start_job: Callable[..., Job], eventually: Callable[..., None]
) -> None:
    """It may read a large checkpoint through first, for minutes. Here it stands still."""
    job = start_job({})
    eventually(lambda: job.processes("paddlewheel.trainer.coordinator"), seconds=60)
    coordinator = job.coordinator()
    coordinator.suspend()
    assert "coordinator at" not in (job.run_dir / "logs" / "coordinator.log").read_text()
    job.process.send_signal(signal.SIGINT)
    outcome = job.finish(10.0)
    assert outcome["exit_code"] == 130
    assert "before the coordinator was ready" in outcome["cause"]
    assert not coordinator.is_running()


def test_a_launcher_that_was_stopped_by_its_user_loses_nobody(
    start_job: Callable[..., Job], eventually: Callable[..., None]
) -> None:
    """Ctrl-Z, some coffee, fg."""
    job = start_job({"*": LONG}, heartbeat_timeout_seconds=1.0)
    eventually(job.is_running, seconds=60)
    job.process.send_signal(signal.SIGSTOP)
    time.sleep(4.0)  # twice what the launcher waits for its coordinator
    job.process.send_signal(signal.SIGCONT)
    eventually(lambda: json.loads(_last_progress(job))["step"] > 0, seconds=30)
    time.sleep(1.0)
    assert not job.records("lost")
    assert len(job.records("run")) == 1
    job.process.send_signal(signal.SIGINT)
    assert job.finish()["exit_code"] == 130


def _last_progress(job: Job) -> str:
    command = [sys.executable, "-m", "paddlewheel.deploy.cli", "status", job.address(), "--json"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return json.dumps(json.loads(told.stdout)["progress"])


def test_a_job_that_ended_while_its_launcher_was_stopped_is_over(
    start_job: Callable[..., Job], eventually: Callable[..., None]
) -> None:
    job = start_job({"*": {"steps": 30}}, max_restarts=3)
    eventually(job.is_running, seconds=60)
    coordinator = job.coordinator()
    job.process.send_signal(signal.SIGSTOP)
    eventually(job.has("over"), seconds=60)
    eventually(lambda: coordinator.status() == "zombie", seconds=30)
    job.process.send_signal(signal.SIGCONT)
    outcome = job.finish()
    assert (outcome["exit_code"], outcome["num_restarts"]) == (0, 0)
    assert outcome["result"]["loss"] == 0.5
    assert len(job.records("run")) == 1


def test_two_jobs_do_not_share_a_run_folder(start_job: Callable[..., Job], eventually: Callable[..., None]) -> None:
    first = start_job({"*": LONG})
    eventually(first.is_running, seconds=60)
    second = start_job({})
    _, errors = second.process.communicate(timeout=60)
    assert "RunFolderBusyError" in errors
    assert "another run uses" in errors
    third = Job(first.run_dir.with_name("other"), {}, {"checkpoint": {"directory": str(first.run_dir / "checkpoints")}})
    _, errors = third.process.communicate(timeout=60)
    assert "LaunchError: checkpoint.directory: another run uses" in errors
    first.process.send_signal(signal.SIGINT)
    assert first.finish()["exit_code"] == 130


def test_a_job_behind_tls_and_a_token(
    start_job: Callable[..., Job],
    eventually: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of its processes speak TLS with each other; who lacks the secrets learns nothing."""
    secrets = {**make_authority(tmp_path, "ours"), "PADDLEWHEEL_TOKEN": "secret"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    job = start_job({"*": LONG}, {"cluster": {"servers": 1, "trainers": 1}})
    eventually(job.has("running"), seconds=60)
    command = [sys.executable, "-m", "paddlewheel.deploy.cli", "status", job.address(), "--json"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["phase"] == "running"
    for missing in ({"PADDLEWHEEL_TOKEN"}, set(secrets) - {"PADDLEWHEEL_TOKEN"}):
        others = {name: value for name, value in os.environ.items() if name not in missing}
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60, env=others)
        assert refused.returncode == 75, refused.stdout
    job.process.send_signal(signal.SIGINT)
    assert job.finish()["exit_code"] == 130
    assert not any(b"secret" in path.read_bytes() for path in job.run_dir.rglob("*") if path.is_file())
