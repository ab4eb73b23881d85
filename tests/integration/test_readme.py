"""README and guides tell the truth: their job is the quickstart's, their commands exist and run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import paddlewheel.deploy.cli
from paddlewheel.trainer.job.config import JobConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = [
    (ROOT / "docs/guides" / name).read_text(encoding="utf-8")
    for name in ("first-job.md", "serving.md", "day-by-day.md", "warm-start.md")
]


def blocks(language: str) -> list[str]:
    pages = "\n".join([README, *GUIDES])
    return re.findall(rf"^```{language}\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_job_shown_is_the_quickstarts() -> None:
    shown, *parts = map(yaml.safe_load, blocks("yaml"))
    assert shown == yaml.safe_load((ROOT / "jobs/quickstart.yaml").read_text())
    for part in parts:  # what may be added to it
        JobConfig.parse({**shown, **part})


def test_every_command_is_named_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    top = set()
    for cell in re.findall(r"^\| (`paddlewheel .*?`) \| ", README, re.MULTILINE):
        _, name, *first = re.findall(r"`(.*?)`", cell)[0].split()
        for word in [*first, *re.findall(r"`(\w+)`", cell)] or [""]:
            words = [word] if word in paddlewheel.deploy.cli._COMMANDS else [name, word]
            assert paddlewheel.deploy.cli.run([*filter(None, words), "--help"]) == 0, (words, capsys.readouterr().err)
            top |= {name, words[0]}
    assert top == set(paddlewheel.deploy.cli._COMMANDS)


def test_ci_runs_the_make_targets() -> None:
    script = (ROOT / ".ci/run").read_text()
    for words in commands():
        if words[0] == "make":
            assert re.search(rf"\bmake {words[1]}\b", script), words


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_run_as_they_stand(shared_data: Path, tmp_path: Path) -> None:
    shutil.copy(shared_data / "criteo" / "criteo_sample.tsv.gz", tmp_path / "day.tsv.gz")
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = 0
    for words in commands():
        if words[0] == "paddlewheel":
            done = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True)
            assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
            ran += 1
    assert ran >= 10
