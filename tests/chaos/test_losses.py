"""Kill, stop, delay and terminate each role at moments drawn from a seed; the job ends, and each row counts once.

Every test runs a real job (Paddle servers and trainers). `pytest tests/chaos -k NAME` repeats one; its seed is in the
table. PADDLEWHEEL_CHAOS_LOG names a file that gets one line of JSON for each scenario: outcome, times, rows replayed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.coordinator import run_report
from tests.chaos.driver import AUC_TOLERANCE, ChaosJob, check_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

StartJob = Callable[..., ChaosJob]


@dataclass(frozen=True)
class Blow:
    """One scenario: who is hit, how and when. restarts: how many it must cost; None: at least one. cause: its words."""

    name: str
    seed: int
    strike: Callable[[ChaosJob], None]
    restarts: int | None = 1
    cause: str = ""


def at_random(role: str, rank: int, part: str, how: signal.Signals) -> Callable[[ChaosJob], None]:
    def strike(job: ChaosJob) -> None:
        job.random_moment()
        job.hit(job.pid_of(role, rank, part), how)

    return strike


def coordinator(how: signal.Signals) -> Callable[[ChaosJob], None]:
    def strike(job: ChaosJob) -> None:
        job.wait_for_commits(1)
        job.random_moment()
        job.hit(job.coordinator_pid(), how)

    return strike


def in_phase(victim: str, rank: int, phase: str, *, of: str = "trainer") -> Callable[[ChaosJob], None]:
    """Kills the victim's worker while a worker of the role `of` is in this phase."""

    def strike(job: ChaosJob) -> None:
        if phase == "loading":
            job.wait_for_commits(1)
            job.hit(job.pid_of("trainer", 1, "worker"))
        pid = 0
        while not pid:
            found = job.wait_for_phase(of, phase, attempt=2 if phase == "loading" else 1)
            members = {(m.role, m.rank): m.worker_pid for m in found.members}
            pid = members[1 if victim == "pserver" else 2, rank]
        job.hit(pid)

    return strike


def coordinator_in_a_save(job: ChaosJob) -> None:
    job.wait_for(lambda s: s.checkpoint.state in {"saving", "committing"} and s.checkpoint.num_committed, "a save")
    job.hit(job.coordinator_pid())


def in_an_allreduce(job: ChaosJob) -> None:
    """Trainer 1 stops, so that trainer 0 waits for it in the AllReduce of the next step; then it dies."""
    job.random_moment()
    pid = job.pid_of("trainer", 1, "worker")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)
    job.hit(pid)


def delayed(role: str, seconds: float) -> Callable[[ChaosJob], None]:
    """Stopped for less than the limits: nobody may take it for lost."""

    def strike(job: ChaosJob) -> None:
        job.random_moment()
        pid = job.coordinator_pid() if role == "coordinator" else job.pid_of(role, 0, "agent")
        job.hit(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    return strike


def storm(job: ChaosJob) -> None:
    """Three losses, each as soon as training goes on."""
    for attempt in (1, 2, 3):
        job.wait_for(
            lambda s, n=attempt: s.attempt >= n and s.phase == "running" and s.HasField("progress"), "to be training"
        )
        role, part = job.random.choice(["pserver", "trainer"]), job.random.choice(["agent", "worker"])
        job.hit(job.pid_of(role, job.random.randint(0, 1), part))
        job.wait_for(lambda s, n=attempt: s.num_restarts >= n, "a restart")


BLOWS = [
    Blow("kill_trainer_0", 1, at_random("trainer", 0, "worker", signal.SIGKILL)),
    Blow("kill_trainer_1", 2, at_random("trainer", 1, "worker", signal.SIGKILL)),
    Blow("kill_server_0", 3, at_random("pserver", 0, "worker", signal.SIGKILL)),
    Blow("kill_server_1", 4, at_random("pserver", 1, "worker", signal.SIGKILL)),
    Blow("kill_agent_of_trainer", 5, at_random("trainer", 1, "agent", signal.SIGKILL)),
    Blow("kill_agent_of_server", 6, at_random("pserver", 0, "agent", signal.SIGKILL)),
    Blow("kill_coordinator", 7, coordinator(signal.SIGKILL)),
    Blow("stop_trainer", 8, at_random("trainer", 1, "worker", signal.SIGSTOP)),
    Blow("stop_server", 9, at_random("pserver", 1, "worker", signal.SIGSTOP)),
    Blow("stop_agent_of_trainer", 10, at_random("trainer", 0, "agent", signal.SIGSTOP)),
    Blow("stop_coordinator", 11, coordinator(signal.SIGSTOP)),
    Blow("terminate_trainer_worker", 12, at_random("trainer", 1, "worker", signal.SIGTERM)),
    Blow(
        "terminate_server_worker",
        13,
        at_random("pserver", 0, "worker", signal.SIGTERM),
        cause="pserver 0 was sent SIGTERM by somebody",
    ),
    Blow("kill_trainer_0_in_a_save", 14, in_phase("trainer", 0, "saving")),
    Blow("kill_server_in_a_save", 15, in_phase("pserver", 0, "saving")),
    Blow("kill_coordinator_in_a_save", 16, coordinator_in_a_save),
    Blow("kill_server_in_a_load", 17, in_phase("pserver", 0, "loading"), restarts=2),
    Blow("kill_trainer_in_a_load", 18, in_phase("trainer", 0, "loading"), restarts=2),
    Blow("kill_trainer_at_its_start", 19, in_phase("trainer", 1, "starting")),
    Blow("kill_server_at_its_start", 20, in_phase("pserver", 0, "starting", of="pserver")),
    Blow("kill_trainer_in_an_allreduce", 21, in_an_allreduce),
    Blow("kill_trainer_in_the_evaluation", 22, in_phase("trainer", 1, "evaluating")),
    Blow("delay_agent_of_server", 23, delayed("pserver", 1.0), restarts=0),
    Blow("delay_coordinator", 24, delayed("coordinator", 1.0), restarts=0),
    Blow("storm", 25, storm, restarts=3),
]


def note(name: str, seed: int, job: ChaosJob, report: run_report.Report, outcome: dict[str, object]) -> None:
    path = os.environ.get("PADDLEWHEEL_CHAOS_LOG")
    if path:
        line = {
            "scenario": name,
            "seed": seed,
            "exit_code": outcome["exit_code"],
            "restarts": outcome["num_restarts"],
            "detect_seconds": round(job.seconds_to_detect(), 2),
            "down_seconds": round(sum(story.down_seconds for story in report.attempts), 2),
            "rows_replayed": sum(story.rows_replayed or 0 for story in report.attempts),
            "causes": [story.cause for story in report.attempts if story.cause],
            "exact": report.exact,
            "seconds": round(time.monotonic() - job.started, 1),
        }
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("blow", BLOWS, ids=lambda blow: blow.name)
def test_the_job_ends_and_each_row_counts_once(start_job: StartJob, undisturbed_auc: float, blow: Blow) -> None:
    job = start_job(blow.seed)
    blow.strike(job)
    outcome = job.finish()
    report = check_run(job, outcome, undisturbed_auc)
    note(blow.name, blow.seed, job, report, outcome)
    if blow.restarts is not None:
        assert outcome["num_restarts"] == blow.restarts, job.log()
    if blow.cause:
        assert blow.cause in report.attempts[0].cause


def test_what_rounding_left_over_is_not_saved(start_job: StartJob, undisturbed_auc: float) -> None:
    """With 16 bits between trainers a restart begins owing nothing; rows, towers and AUC are as ever."""
    job = start_job(27, train={"allreduce_dtype": "bfloat16"})
    job.wait_for_commits(2)
    job.hit(job.pid_of("trainer", 1, "worker"))
    outcome = job.finish()
    report = check_run(job, outcome, undisturbed_auc)
    assert outcome["num_restarts"] == 1, job.log()
    note("kill_trainer_with_16_bits", 27, job, report, outcome)


def test_sigterm_saves_and_the_next_run_goes_on(start_job: StartJob, undisturbed_auc: float) -> None:
    """And with other numbers of servers and trainers."""
    first = start_job(31)
    first.wait_for_step(20)
    first.process.terminate()
    stopped = first.finish(143)
    assert "SIGTERM" in stopped["cause"]
    before = run_report.report(first.run_dir)
    assert before.exact
    assert before.steps[-1] >= 20
    second = start_job(32, cluster={"servers": 3, "trainers": 1})
    outcome = second.finish()
    report = check_run(second, outcome, None)
    assert outcome["result"]["eval"]["auc"] > undisturbed_auc - AUC_TOLERANCE  # better: one trainer makes more steps
    assert report.attempts[1].restored == before.steps[-1]
    assert report.attempts[0].rows_replayed == 0
    note("sigterm_to_the_launcher", 31, second, report, outcome)


@pytest.mark.parametrize("role", ["pserver", "trainer"])
def test_sigterm_to_one_role_saves_and_stops_all(start_job: StartJob, undisturbed_auc: float, role: str) -> None:
    first = start_job(33)
    first.wait_for_step(20)
    first.hit(first.pid_of(role, 1, "agent"), signal.SIGTERM)
    first.finish(143)
    second = start_job(34)
    outcome = second.finish()
    report = check_run(second, outcome, undisturbed_auc)
    assert report.attempts[0].rows_replayed == 0
    note(f"sigterm_to_a_{role}", 33, second, report, outcome)


def test_sigterm_to_every_process(start_job: StartJob, undisturbed_auc: float) -> None:
    """What a host that shuts down does. The children die of it, so this costs the rows since the last checkpoint."""
    import psutil

    first = start_job(35)
    first.wait_for_commits(2)
    everyone = [first.process.pid, *(p.pid for p in psutil.Process(first.process.pid).children(recursive=True))]
    for pid in everyone:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
    first.process.wait(timeout=120)
    assert first.process.returncode in {143, 75}
    second = start_job(36)
    outcome = second.finish()
    note("sigterm_to_all", 35, second, check_run(second, outcome, undisturbed_auc), outcome)


def test_a_killed_launcher_leaves_nothing_and_the_next_run_goes_on(start_job: StartJob, undisturbed_auc: float) -> None:
    import psutil

    first = start_job(37)
    first.wait_for_commits(2)
    everyone = psutil.Process(first.process.pid).children(recursive=True)
    first.process.kill()
    _, alive = psutil.wait_procs(everyone, timeout=10)
    assert not alive
    second = start_job(38)
    outcome = second.finish()
    report = check_run(second, outcome, undisturbed_auc)
    assert (report.attempts[1].restored or 0) >= 30
    note("kill_launcher", 37, second, report, outcome)


def test_a_flipped_byte_is_found_and_the_checkpoint_before_it_is_used(
    start_job: StartJob, undisturbed_auc: float
) -> None:
    first = start_job(39)
    first.wait_for_commits(2)
    first.process.kill()
    first.process.wait()
    newest = manifest.latest(first.run_dir / "checkpoints")
    assert newest is not None
    parts = sorted(path for path in newest.rglob("part-*") if path.stat().st_size)
    part = first.random.choice(parts)
    content = bytearray(part.read_bytes())
    content[first.random.randrange(len(content))] ^= 1 << first.random.randrange(8)
    part.write_bytes(content)
    second = start_job(40)
    outcome = second.finish()
    assert f"put aside as {newest.name}.damaged" in second.log()
    note("flipped_byte", 39, second, check_run(second, outcome, undisturbed_auc), outcome)


EXACT = {
    "cluster": {"servers": 2, "trainers": 1},
    "data": {"slice_assignment": "static"},
    "train": {"max_staleness_steps": 0, "epochs": 1},
}
"""A job whose result does not depend on races."""


def saved_model(job: ChaosJob) -> dict[str, Any]:
    """Every array of the newest checkpoint, rows in the order of keys."""
    import numpy as np

    from paddlewheel.pserver.saved_tables import Rows, open_table, read_rows

    newest = manifest.latest(job.run_dir / "checkpoints")
    assert newest is not None
    rows = Rows.concatenate(list(read_rows(open_table(newest / "sparse" / "default"))))
    return {**manifest.read(newest).dense(), **vars(rows.take(np.argsort(rows.keys_N)))}


def test_a_recovered_run_equals_an_undisturbed_one(start_job: StartJob, tmp_path: Path) -> None:
    """With one trainer, static slices and synchronous pulls, to the last bit of the dense part and of the tables."""
    import numpy as np

    models = []
    for name, seed in (("undisturbed", 41), ("recovered", 42)):
        job = start_job(seed, run_dir=str(tmp_path / name), **EXACT)
        if name == "recovered":
            job.wait_for_commits(1)
            job.hit(job.pid_of("pserver", 1, "worker"))
        outcome = job.finish()
        report = check_run(job, outcome, None)
        models.append(saved_model(job))
    note("exact_recovery", 42, job, report, outcome)
    assert outcome["num_restarts"] == 1
    for name, before in models[0].items():
        np.testing.assert_array_equal(models[1][name], before, err_msg=name)


@pytest.mark.needs("our own tables")
@pytest.mark.parametrize("victim", ["pserver", "trainer"])
def test_what_dies_in_a_save_of_changes_loses_no_row(start_job: StartJob, tmp_path: Path, victim: str) -> None:
    """The checkpoints after it lead on from what was committed before it: bits as of a run that saves whole tables."""
    import numpy as np

    models = []
    for name, sections in (
        ("undisturbed", {}),
        ("killed", {"checkpoint": {"every_steps": 3, "full_every": 4, "keep": 2}}),
    ):
        job = start_job(43, run_dir=str(tmp_path / name), **EXACT, **sections)
        if name == "killed":
            for number in (2, 6):
                job.wait_for(
                    lambda s, n=number: (
                        s.checkpoint.state in {"saving", "committing"} and s.checkpoint.num_committed >= n
                    ),
                    "a save of changes",
                )
                job.hit(job.pid_of(victim, 0, "worker"))
                job.wait_for(lambda s, n=number: s.num_restarts >= (1 if n == 2 else 2), "a restart")
        outcome = job.finish()
        check_run(job, outcome, None)
        models.append(saved_model(job))
    assert outcome["num_restarts"] == 2
    kept = manifest.committed(job.run_dir / "checkpoints")
    assert any(manifest.read_manifest(path).get("base") for path in kept)
    for path in kept:
        manifest.read(path)
    for name, before in models[0].items():
        np.testing.assert_array_equal(models[1][name], before, err_msg=name)
