"""Random faults by seed: signals to any process of a job at any moment, damaged files between its starts.

    python -m tests.chaos.campaign --runs 200 --seed 1

Each run is one job: broken, started again as often as it takes, and brought to its end. Then every key of the final
model must have the shows and clicks that the data has (oracle.py), the report must not say that they are wrong, and no
process may be left. One line of JSON a run; the exit code is that of a test. `--seed N --runs 1` repeats run N.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from paddlewheel.data_pipeline import synthetic
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.coordinator import run_report
from tests.chaos import oracle
from tests.chaos.driver import NUM_ROWS, ChaosJob, job_file

_SIGNALS = (
    signal.SIGKILL,
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGSTOP,
    signal.SIGHUP,
    signal.SIGABRT,
)
_LAUNCHER_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)
_MAX_BLOWS = 5
_MAX_STARTS = 8
_PATIENCE_SECONDS = 300.0
_GOES_ON = {75, 129, 130, 143, -signal.SIGKILL, -signal.SIGHUP, -signal.SIGINT, -signal.SIGTERM}
"""What a start may end with, beside 0; the last three while Python itself still starts."""


class Run:
    """One job and what is done to it.

    Args:
        data: what it trains.
        folder: of its own.
        seed: of everything.
    """

    def __init__(self, data: Path, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder, self.seed = folder, seed
        self.shape = {"servers": self.random.randint(1, 2), "trainers": self.random.randint(1, 2)}
        # A damaged file costs no restart, but a run of bad luck may: it is not what this looks for.
        self.job = job_file(
            folder,
            data,
            cluster=self.shape,
            train={"epochs": 2},
            control={"max_restarts": 10, "checkpoint_timeout_seconds": 60},
            checkpoint={"every_steps": self.random.choice([7, 15, 40]), "keep": self.random.randint(2, 4)},
        )
        self.blows_left = self.random.randint(1, _MAX_BLOWS)
        self.story: list[str] = []
        self.journal_is_whole = True
        self.harmed: Path | None = None

    def carry_out(self) -> dict[str, Any]:
        """To the end; what became of it. Raises AssertionError."""
        for number in range(_MAX_STARTS):
            job = ChaosJob(self.job, self.seed)
            try:
                code = self._one_start(job)
            finally:
                job.close()
            self._assert_nothing_left(job)
            if code == 0:
                return {"starts": number + 1, **self._check(job)}
            assert code in _GOES_ON, f"exit code {code}: {job_log(self.folder)}"
            self._damage()
        raise AssertionError(f"not over after {_MAX_STARTS} starts: {job_log(self.folder)}")

    def _one_start(self, job: ChaosJob) -> int:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        held: list[tuple[float, psutil.Process]] = []
        strike_at = time.monotonic() + self.random.uniform(0.5, 45.0)
        processes: set[psutil.Process] = set()
        self._processes = processes
        while job.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {job_log(self.folder)}"
            with contextlib.suppress(psutil.NoSuchProcess):
                processes |= set(psutil.Process(job.process.pid).children(recursive=True))
            if self.blows_left and time.monotonic() >= strike_at:
                self.blows_left -= 1
                strike_at = time.monotonic() + self.random.expovariate(1 / 6.0)
                self._strike(job, held)
            for until, process in [one for one in held if one[0] <= time.monotonic()]:
                held.remove((until, process))
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            time.sleep(0.05)
        for _, process in held:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self.story.append(f"exit {job.process.returncode}")
        return int(job.process.returncode)

    def _strike(self, job: ChaosJob, held: list[tuple[float, psutil.Process]]) -> None:
        chance = self.random.random()
        if chance < 0.12:
            self._harm_journal()
            return
        if chance < 0.24:
            self._harm_checkpoint()
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(job.process.pid)
            others = sorted(launcher.children(recursive=True), key=lambda process: process.pid)
            victim = launcher if not others or self.random.random() < 0.2 else self.random.choice(others)
            how = self.random.choice(_LAUNCHER_SIGNALS if victim is launcher else _SIGNALS)
            if "paddlewheel.deploy.checks.model_check" in victim.cmdline() and how is signal.SIGABRT:
                how = signal.SIGKILL  # one that aborts looks like a mistake in a model of the user's own
            words = " ".join(word for word in victim.cmdline()[1:6] if not word.startswith("{"))
            self.story.append(f"{how.name} to {words[:80]}")
            victim.send_signal(how)
            if how is signal.SIGSTOP:
                held.append((time.monotonic() + self.random.choice([0.5, 3.0, 12.0]), victim))

    def _harm_journal(self) -> None:
        path = self.folder / "run" / "journal.jsonl"
        if not path.exists() or not path.stat().st_size:
            return
        self.journal_is_whole = False
        how = self.random.choice(["removed", "cut", "one bit"])
        self.story.append(f"journal: {how}")
        if how == "removed":
            path.unlink()
        elif how == "cut":
            os.truncate(path, self.random.randrange(path.stat().st_size))
        else:
            with path.open("r+b") as file:
                _flip(file, path.stat().st_size, self.random)

    def _damage(self) -> None:
        """While nobody runs: one bit of a file of the newest checkpoint, or of the journal; or a file that is gone."""
        chance = self.random.random()
        if chance < 0.2:
            self._harm_journal()
        elif chance < 0.5:
            self._harm_checkpoint()

    def _harm_checkpoint(self) -> None:
        newest = manifest.latest(self.folder / "run" / "checkpoints")
        with contextlib.suppress(FileNotFoundError):  # it is pruned, or put aside, at this moment
            files = (
                sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size) if newest else []
            )
            if not files:
                return
            path = self.random.choice(files)
            self.story.append(f"damaged {path.relative_to(self.folder)}")
            self.harmed = newest
            if self.random.random() < 0.3:
                path.unlink()
            else:
                with path.open("r+b") as file:
                    _flip(file, path.stat().st_size, self.random)

    def _check(self, job: ChaosJob) -> dict[str, Any]:
        newest = manifest.latest(job.run_dir / "checkpoints")
        assert newest is not None
        try:
            manifest.read(newest)
        except manifest.CheckpointError:
            assert newest == self.harmed  # after the job's last commit
            return {"keys": 0, "verdict": "the last checkpoint was damaged at the end"}
        keys = oracle.check(newest, job.raw)
        try:
            report = run_report.report(job.run_dir)
        except run_report.NoHistoryError:
            assert not self.journal_is_whole
            return {"keys": keys, "verdict": "no journal"}
        allowed = {"exact"} if self.journal_is_whole else {"exact", "not proven"}
        assert report.verdict in allowed, (report.verdict, report.reasons, report.epochs)
        return {"keys": keys, "verdict": report.verdict, "attempts": len(report.attempts)}

    def _assert_nothing_left(self, job: ChaosJob) -> None:
        _, alive = psutil.wait_procs(list(self._processes), timeout=15)
        left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        assert not left, f"left: {left}"


def _flip(file: Any, size: int, chance: random.Random) -> None:
    place = chance.randrange(size)
    file.seek(place)
    byte = file.read(1)[0]
    file.seek(place)
    file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def job_log(folder: Path) -> str:
    """The end of what the launchers have said."""
    lines = [line for path in sorted(folder.glob("launcher-*.log")) for line in path.read_text().splitlines()]
    return "\n".join(lines[-30:])


def carry_out(data: Path, folder: Path, seed: int) -> dict[str, Any]:
    """One run by its seed, in a folder that is removed if it went well; `error` says what did not."""
    place = folder / f"seed-{seed}"
    started = time.monotonic()
    run = Run(data, place, seed)
    found: dict[str, Any] = {"seed": seed, **run.shape}
    try:
        found |= run.carry_out()
    except Exception as error:  # noqa: BLE001 -- the campaign goes on, and tells of it
        found |= {
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
            "folder": str(place),
        }
    else:
        shutil.rmtree(place)
    return {**found, "story": run.story, "seconds": round(time.monotonic() - started, 1)}


def make_data(folder: Path) -> Path:
    """What all runs train."""
    synthetic.generate(folder, NUM_ROWS, 5)
    return folder


def main() -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.campaign", description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next ones count on from it")
    parser.add_argument("--folder", type=Path, help="for data and runs that failed (default: a temporary one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="campaign-"))
    folder.mkdir(parents=True, exist_ok=True)
    data = make_data(folder / "data")
    num_failed = 0
    for seed in range(options.seed, options.seed + options.runs):
        found = carry_out(data, folder, seed)
        num_failed += "error" in found
        print(json.dumps(found), flush=True)  # noqa: T201 -- the answer of a command
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
