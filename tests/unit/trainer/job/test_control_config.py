"""Limits that no clock can keep are refused before anything starts."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from paddlewheel.trainer.job.control import ControlConfig

_SECONDS = [name for name in ControlConfig.model_fields if name.endswith("_seconds")]


@pytest.mark.parametrize("name", _SECONDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, -1.0])
def test_seconds_are_finite_and_of_this_world(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        ControlConfig.model_validate({name: value})


def test_heartbeats_leave_the_processor_time_for_something_else() -> None:
    with pytest.raises(ValidationError, match="heartbeat_seconds"):
        ControlConfig(heartbeat_seconds=1e-300)
