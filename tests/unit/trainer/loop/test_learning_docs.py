"""The documented metrics are those that an evaluation reports; the documented search file can be read."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from paddlewheel.deploy.bench import tuning
from paddlewheel.trainer.loop.metrics import ClickReport, GroupedReport, WeightedReport

ROOT = Path(__file__).parents[4]
TRAINER, PARITY = ROOT / "trainer", ROOT / "deploy" / "bench" / "parity"


def test_every_metric_is_documented() -> None:
    text = (TRAINER / "LEARNING.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    documented = set(re.findall(r"`([a-z_]+)`", "\n".join(line.rsplit("|", 2)[0] for line in table.splitlines())))
    reported = {f.name for report in (ClickReport, GroupedReport, WeightedReport) for f in fields(report)}
    assert reported - {"rows", "positives"} <= documented


def test_the_documented_search_file_is_one(tmp_path: Path) -> None:
    [space] = re.findall(r"```yaml\n(.*?)```", (PARITY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "space.yaml").write_text(space)
    assert len(tuning.load_space(tmp_path / "space.yaml")) == 3
