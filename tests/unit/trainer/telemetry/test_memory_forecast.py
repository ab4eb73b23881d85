"""The time until a memory limit, from measurements that grow, do not, or begin anew."""

from __future__ import annotations

import numpy as np
import pytest

from paddlewheel.trainer.telemetry.forecast import MemoryForecast

MIB = 1 << 20


def _measured(used, step: float = 5.0) -> MemoryForecast:
    forecast = MemoryForecast()
    for number, value in enumerate(used):
        forecast.add(1000.0 + step * number, value)
    return forecast


def test_steady_growth_is_drawn_on_to_the_limit() -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 60)
    forecast = _measured((300 + 0.5 * 5 * np.arange(60) + noise) * MIB)  # half a MiB a second, 447 MiB at the end
    assert forecast.seconds_until(1024 * MIB) == pytest.approx((1024 - 447.5) / 0.5, rel=0.02)
    assert forecast.seconds_until(100 * MIB) == 0.0


def test_only_the_last_ten_minutes_count() -> None:
    used = np.concatenate([np.linspace(100, 1000, 60), 1000 + np.arange(200) * 1.0]) * MIB
    assert _measured(used).seconds_until(2199 * MIB) == pytest.approx(1000 / 0.2, rel=0.02)


@pytest.mark.parametrize(
    "used",
    [
        [],
        [100.0] * 2,
        [100.0, 200.0, 300.0],  # 10 s are too few to tell
        [1000.0 * MIB] * 100,
        np.linspace(500, 400, 100) * MIB,
        (1000 + np.tile([0, 1], 50)) * MIB,
    ],
)
def test_what_does_not_grow_has_no_end(used) -> None:
    assert _measured(used).seconds_until(2000 * MIB) is None


@pytest.mark.parametrize(
    "used",
    [
        np.concatenate([np.linspace(100, 224, 12), np.full(60, 224.0)]) * MIB,  # it has started, and holds a few keys
        (224 + 0.2 * np.arange(5)) * MIB,  # in two hours, as 20 s of its life tell
    ],
)
def test_a_process_that_has_only_started_is_not_said_to_be_full_soon(used) -> None:
    assert _measured(used).seconds_until(16 * 1024 * MIB) is None


def test_what_is_full_soon_is_told_from_the_start() -> None:
    assert _measured((224 + 100 * np.arange(5)) * MIB).seconds_until(1024 * MIB) == pytest.approx(20.0)


def test_a_new_process_begins_anew() -> None:
    forecast = _measured(np.linspace(100, 1000, 60) * MIB)
    assert forecast.seconds_until(2000 * MIB) is not None
    forecast.clear()
    assert forecast.seconds_until(2000 * MIB) is None
