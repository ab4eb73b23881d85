"""The learning rate over a run."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from paddlewheel.trainer.job.train import ScheduleConfig
from paddlewheel.trainer.loop.lr_schedule import rate_factor


def test_constant_by_default() -> None:
    assert {rate_factor(ScheduleConfig(), step, 10) for step in range(20)} == {1.0}


def test_warm_up_rises_evenly_and_starts_above_zero() -> None:
    config = ScheduleConfig(warmup_steps=4)
    assert [rate_factor(config, s, 10) for s in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.55), ("cosine", 0.55), ("exponential", 0.1**0.5)])
def test_decay_goes_from_one_to_the_final_factor_and_stays(decay: str, middle: float) -> None:
    config = ScheduleConfig(warmup_steps=2, decay=decay, final_factor=0.1)
    factors = [rate_factor(config, s, 12) for s in range(20)]
    assert factors[2] == 1.0
    assert factors[7] == pytest.approx(middle)
    assert factors[12:] == pytest.approx([0.1] * 8)
    assert sorted(factors[2:], reverse=True) == factors[2:]


def test_decay_steps_replace_the_run_length() -> None:
    config = ScheduleConfig(decay="linear", decay_steps=4)
    assert [rate_factor(config, s, 1000) for s in range(6)] == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])


def test_warm_up_longer_than_the_run_is_no_division_by_zero() -> None:
    assert rate_factor(ScheduleConfig(warmup_steps=20, decay="cosine"), 25, 10) == 0.0


def test_exponential_decay_to_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match="give final_factor"):
        ScheduleConfig(decay="exponential")
