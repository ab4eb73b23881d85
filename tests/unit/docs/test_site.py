"""The documentation site: references are complete, and a strict build finds what is broken."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paddlewheel.deploy.cli import _COMMANDS
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.telemetry.catalogue import BY_NAME

ROOT = Path(__file__).parents[3]


def page(name: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "reference.py", name], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_reference_of_the_job_file_has_every_key() -> None:
    text, schema = page("job"), JobConfig.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for name, key in section.get("properties", {}).items():
            assert f"| `{name}` |" in text, name
            words = re.findall(r"\w+", key.get("description", ""))[:4]
            assert re.search(r"\W+".join(words), text), name
    for path in ("data.sparse[]", "tables.NAME", "train.evaluation", "control", "checkpoint"):
        assert f"\n## `{path}`" in text, path
    assert "\n## `model` (kind: deepfm)" in text
    assert "\n## `tables.NAME.optimizer` (rule: adagrad)" in text


def test_the_reference_of_the_command_line_has_every_command() -> None:
    text = page("command-line")
    for name in _COMMANDS:
        assert f"\n## paddlewheel {name}\n" in text
    assert "\n### paddlewheel role coordinator\n" in text
    outside_code = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert "<" not in outside_code, "a browser would take it for a tag"


def test_the_references_of_metrics_and_alerts_are_complete() -> None:
    metrics, alerts = page("metrics"), page("alerts")
    assert all(f"| `{name}` |" in metrics for name in BY_NAME)
    rules = yaml.safe_load((ROOT / "deploy/monitoring/rules.yaml").read_text())
    names = {rule.get("alert") or rule["record"] for group in rules["groups"] for rule in group["rules"]}
    assert all(name in alerts for name in names)


def test_an_unknown_reference_is_refused_with_the_names() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "reference.py", "jobs"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 64
    assert "job|command-line" in done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the site is built from."""
    for folder in ("data_pipeline", "pserver", "trainer", "deploy", "jobs", "tests"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for file in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml"]:
        shutil.copy(file, tmp_path)
    return tmp_path


def build(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # --quiet would let warnings pass
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def test_the_site_is_built_strictly(tree: Path) -> None:
    done = build(tree)
    assert done.returncode == 0, done.stderr
    site = tree / "build" / "site"
    for name in ("index.html", "README.zh-CN.html", "reference/job.html", "docs/decisions/001-import-root.html"):
        assert (site / name).is_file(), name
    assert (site / "deploy/monitoring/pictures/status-page.png").is_file()
    assert 'class="mermaid"' in (site / "ARCHITECTURE.html").read_text()


def test_a_broken_link_fails_the_build(tree: Path) -> None:
    with (tree / "CONTRIBUTING.md").open("a") as file:
        file.write("\n[x](NOWHERE.md) [y](ARCHITECTURE.md#nowhere)\n")
    done = build(tree)
    assert done.returncode == 1
    for target in ("NOWHERE.md", "#nowhere"):
        assert re.search(rf"WARNING.*CONTRIBUTING\.md.*{target}", done.stderr), target
