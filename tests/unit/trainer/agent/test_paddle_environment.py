"""When the math libraries get their variables."""

from __future__ import annotations

import pytest

from paddlewheel.trainer.agent.paddle_environment import math_environment

THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "FLAGS_new_executor_serial_run": "true",
}
AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx avx2 fma\n"


@pytest.mark.parametrize(
    ("cpuinfo", "environment", "expected"),
    [
        (AMD, {}, {"MKL_DEBUG_CPU_TYPE": "5", **THREADS}),
        (AMD, {"MKL_DEBUG_CPU_TYPE": "4"}, THREADS),
        (AMD.replace(" avx2", ""), {}, THREADS),
        (AMD.replace("AuthenticAMD", "GenuineIntel"), {}, THREADS),
        ("", {}, THREADS),
        ("", {"GOMP_SPINCOUNT": "9"}, {k: v for k, v in THREADS.items() if k != "GOMP_SPINCOUNT"}),
    ],
)
def test_only_processors_that_need_it_and_only_if_the_user_said_nothing(cpuinfo, environment, expected) -> None:
    assert math_environment(environment, cpuinfo) == expected


def test_this_machine_can_be_asked() -> None:
    assert set(math_environment({})) <= {"MKL_DEBUG_CPU_TYPE", *THREADS}
