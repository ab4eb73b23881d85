"""When the math libraries get their variables."""

from __future__ import annotations

import pytest

from trainer.processor import math_environment

SLEEP = {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx avx2 fma\n"


@pytest.mark.parametrize(
    ("cpuinfo", "environment", "expected"),
    [
        (AMD, {}, {"MKL_DEBUG_CPU_TYPE": "5", **SLEEP}),
        (AMD, {"MKL_DEBUG_CPU_TYPE": "4"}, SLEEP),
        (AMD.replace(" avx2", ""), {}, SLEEP),
        (AMD.replace("AuthenticAMD", "GenuineIntel"), {}, SLEEP),
        ("", {}, SLEEP),
        ("", {"GOMP_SPINCOUNT": "1000"}, {"KMP_BLOCKTIME": "0"}),
    ],
)
def test_only_processors_that_need_it_and_only_if_the_user_said_nothing(cpuinfo, environment, expected) -> None:
    assert math_environment(environment, cpuinfo) == expected


def test_this_machine_can_be_asked() -> None:
    assert set(math_environment({})) <= {"MKL_DEBUG_CPU_TYPE", *SLEEP}
