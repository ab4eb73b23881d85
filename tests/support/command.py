"""Jobs run by the command, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml


@dataclass
class Job:
    """A job file in a folder of its own, run by `paddlewheel`."""

    folder: Path
    data: dict
    settings: dict = field(default_factory=dict)

    @property
    def path(self) -> Path:
        path = self.folder / "job.yaml"
        whole = {"name": "job", "seed": 3, "run_dir": str(self.folder / "run"), "data": self.data, **self.settings}
        path.write_text(yaml.safe_dump(whole))
        return path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "paddlewheel.deploy.cli", arguments[0], str(self.path), *arguments[1:]]

    def run(self, *arguments: str, timeout: float = 240) -> tuple[int, dict]:
        done = subprocess.run(
            self.command(*arguments, "--json"), capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.stdout.strip(), done.stderr[-4000:]
        return done.returncode, json.loads(done.stdout)

    def start(self, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(*arguments, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
