"""A few runs of the campaign of random faults (campaign.py); PADDLEWHEEL_CAMPAIGN_RUNS and _SEED choose others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos import oracle
from tests.chaos.campaign import carry_out

_RUNS = int(os.environ.get("PADDLEWHEEL_CAMPAIGN_RUNS", "3"))
_FIRST = int(os.environ.get("PADDLEWHEEL_CAMPAIGN_SEED", "1"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _RUNS))
def test_whatever_is_done_to_a_job_every_key_has_its_shows_and_clicks(
    click_data: Path, tmp_path: Path, seed: int
) -> None:
    found = carry_out(click_data, tmp_path, seed)
    assert "error" not in found, found["error"] + "\n" + "\n".join(found["story"]) + "\n" + found["traceback"]
    assert found["keys"] > 200 or found["verdict"] == "the last checkpoint was damaged at the end"


def test_the_oracle_sees_one_show_too_many_and_one_key_too_few(click_data: Path, tmp_path: Path) -> None:
    raw = {
        "data": {
            "train": str(click_data / "train"),
            "labels": ["click"],
            "sparse": [{"name": "site"}, {"name": "tags"}],
        },
        "train": {"epochs": 2},
    }
    part = tmp_path / "sparse" / "default" / "000" / "part-000-00000"
    part.parent.mkdir(parents=True)
    lines = [f"{key} 0 0 0 {shows:g} {clicks:g} 0.5 0" for key, (shows, clicks) in oracle.expected(raw).items()]
    part.write_text("\n".join(lines))
    assert oracle.check(tmp_path, raw) == len(lines)
    for wrong in ([*lines[1:]], [lines[0].replace(" 0.5", "1 0.5"), *lines[1:]], [*lines, "7 0 0 0 1 0 0 0"]):
        part.write_text("\n".join(wrong))
        with pytest.raises(AssertionError, match="1 of "):
            oracle.check(tmp_path, raw)
