"""The checkpoint folder lies on a small file system that fills up, and is emptied again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from paddlewheel.pserver.saved_tables import open_table, read_rows
from paddlewheel.trainer.checkpoint import manifest
from tests.chaos.driver import ChaosJob, check_run
from tests.chaos.test_losses import note

pytestmark = [pytest.mark.needs("user namespaces", "nsenter"), pytest.mark.slow, pytest.mark.timeout(600)]

_MOUNT_AND_RUN = """
mount -t tmpfs -o size=3m tmpfs "$0" || exit 99
"$@"
code=$?
cp -a "$0" "$0.saved"
exit $code
"""


def enter(job: ChaosJob, command: str) -> None:
    """Runs a shell command where the job sees its files."""
    launcher = next(p for p in psutil.Process(job.process.pid).children() if "train" in p.cmdline())
    nsenter = ["nsenter", "-t", str(launcher.pid), "--user", "--mount", "--preserve-credentials", "sh", "-c", command]
    subprocess.run(nsenter, check=False, capture_output=True, timeout=60)


def test_training_goes_on_when_the_disk_is_full(
    start_job: Callable[..., ChaosJob], undisturbed_auc: float, tmp_path: Path
) -> None:
    directory = tmp_path / "small"
    directory.mkdir()
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _MOUNT_AND_RUN, str(directory)]
    job = start_job(51, prefix=prefix, checkpoint={"directory": str(directory)})
    job.wait_for_commits(2)
    enter(job, f"dd if=/dev/zero of={directory}/filler bs=4k")
    job.wait_for(lambda s: s.checkpoint.num_failed >= 1, "a failed checkpoint")
    enter(job, f"rm {directory}/filler")
    outcome = job.finish()
    assert outcome["num_restarts"] == 0, job.log()
    report = check_run(job, outcome, undisturbed_auc, Path(f"{directory}.saved"))
    assert report.num_failed_checkpoints >= 1
    assert "no checkpoint of step" in job.log()
    note("full_disk", 51, job, report, outcome)


def test_a_run_folder_on_a_full_disk_ends_in_order(start_job: Callable[..., ChaosJob], tmp_path: Path) -> None:
    """Logs, journal and checkpoints: nothing can be written any more. The job says so and ends with 75."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _MOUNT_AND_RUN, str(run_dir)]
    job = start_job(52, prefix=prefix, control={"max_restarts": 1})
    job.wait_for_step(10)
    enter(job, f"dd if=/dev/zero of={run_dir}/filler bs=4k")
    outcome = job.finish(75)
    assert "could not save the checkpoint" in outcome["cause"], outcome
    assert "room" in outcome["cause"] or "No space" in outcome["cause"], outcome


def test_a_day_boundary_that_cannot_be_saved_is_carried_out_later(
    start_job: Callable[..., ChaosJob], tmp_path: Path
) -> None:
    """A save has the servers count the day, so the attempt ends with it, and each boundary still happens once."""
    directory = tmp_path / "small"
    directory.mkdir()
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _MOUNT_AND_RUN, str(directory)]
    table = {
        "width": 4,
        "optimizer": {"rule": "adagrad", "learning_rate": 0.1},
        "lifecycle": {"show_click_decay": 0.5, "every_rows": 20_000},
    }
    job = start_job(
        53,
        prefix=prefix,
        checkpoint={"directory": str(directory), "every_steps": None},
        tables={"default": table},
        control={"max_restarts": 20},
    )
    job.wait_for_commits(1)
    enter(job, f"dd if=/dev/zero of={directory}/filler bs=4k")
    job.wait_for(lambda s: s.num_restarts >= 1, "a restart")
    enter(job, f"rm {directory}/filler")
    outcome = job.finish()
    report = check_run(job, outcome, None, Path(f"{directory}.saved"))
    assert any("checkpoint at a day boundary" in story.cause for story in report.attempts), report.attempts
    assert [story.rows // 20_000 for story in report.days] == [1, 2, 3, 4]
    newest = manifest.latest(Path(f"{directory}.saved"))
    assert newest is not None
    shows = sum(float(rows.shows_N.sum()) for rows in read_rows(open_table(newest / "sparse" / "default")))
    # of single-valued features alone it would be four a row; tags add some
    bounds = [0, *(story.rows for story in report.days), 3 * 32_000]
    weights = [0.5 ** (len(bounds) - 2 - place) for place in range(len(bounds) - 1)]
    kept = sum(weight * (after - before) for weight, after, before in zip(weights, bounds[1:], bounds, strict=False))
    assert 4 * kept < shows < 7 * kept
    note("full_disk_at_a_day_boundary", 53, job, report, outcome)
