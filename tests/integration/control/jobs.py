"""A job of real processes with fake children, to be broken by tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil

from paddlewheel.trainer.coordinator import run_report
from paddlewheel.trainer.coordinator.resume import read_journal

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LONG = {"steps": 5_000}


class Job:
    """A launcher in a process of its own."""

    def __init__(
        self, run_dir: Path, plan: dict[str, Any], changes: dict[str, Any], errors: IO[str] | int = subprocess.PIPE
    ) -> None:
        self.run_dir = run_dir
        environment = {**os.environ, "FAKE_PLAN": json.dumps(plan), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(HERE / "run_fake_job.py"), str(run_dir), json.dumps(changes)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        self.errors = ""

    def finish(self, seconds: float = 90.0) -> dict[str, Any]:
        """Waits for its end; its outcome, whose exit code is the launcher's."""
        out, self.errors = self.process.communicate(timeout=seconds)
        assert out, self.errors
        outcome: dict[str, Any] = json.loads(out)
        assert self.process.returncode == outcome["exit_code"], (self.process.returncode, outcome, self.errors)
        return outcome

    def processes(self, *words: str) -> list[psutil.Process]:
        """Its processes whose command line holds all the words."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in words):
                found.append(process)
        return found

    def agent(self, role: str, rank: int) -> psutil.Process:
        return self.processes("paddlewheel.trainer.agent.agent", role, str(rank))[0]

    def worker(self, role: str, rank: int) -> psutil.Process:
        return self.agent(role, rank).children()[0]

    def coordinator(self) -> psutil.Process:
        return self.processes("paddlewheel.trainer.coordinator")[0]

    def is_running(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        log = self.run_dir / "logs" / "trainer-1.log"
        if not log.exists() or "fake trainer 1" not in log.read_text():
            return False  # looking through all processes of the machine, time and again, would slow the start down
        return len(self.processes(str(HERE / "fake_worker.py"))) == 4

    def records(self, what: str) -> list[dict[str, Any]]:
        """Of the journal."""
        records = read_journal(self.run_dir / "journal.jsonl")
        return [record.model_dump() for record in records if record.what == what]

    def has(self, what: str, number: int = 1) -> Callable[[], bool]:
        """A condition: so many records of the journal."""

        def condition() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return len(self.records(what)) >= number

        condition.__name__ = f"{number} times {what!r} in the journal"
        return condition

    def address(self) -> str:
        """Of its coordinator."""
        command = self.processes("paddlewheel.trainer.agent.agent")[0].cmdline()
        return command[command.index("--coordinator") + 1]

    def report(self) -> run_report.Report:
        return run_report.report(self.run_dir)
