"""What this machine's processor asks of the math libraries that Paddle brings along."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

COMPUTE_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that say how many threads a trainer computes its dense part with."""
_CPUINFO = Path("/proc/cpuinfo")
_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",  # oneDNN runs on GNU's OpenMP, MKL on Intel's
    "KMP_BLOCKTIME": "0",
    "FLAGS_new_executor_serial_run": "true",
}


def math_environment(environment: Mapping[str, str], cpuinfo: str | None = None) -> dict[str, str]:
    """Variables for a process that runs Paddle's CPU kernels; those that `environment` already has are left alone.

    Paddle 2.6.2 ships MKL 2019.5, which takes its slowest path on processors of other makers than Intel.
    `MKL_DEBUG_CPU_TYPE=5` makes it take its AVX2 path, which gives matrix products more than twice the speed on an AMD
    EPYC (`paddlewheel bench dense` shows it). Releases of MKL from 2020.1 on ignore the variable.

    Threads that wait for the next parallel loop sleep instead of spinning: beside the tower, threads of the same
    process read, pull and push, and on full cores spinning costs them more than waking up costs the tower.

    NumPy's products (norms and checks of gradients) run in the thread that asks: helpers of OpenBLAS spin after each
    one, which took 7 % of both cores.

    Paddle's executor runs a program's operators one after the other in the calling thread instead of handing them to
    four threads of its own: each of those would have OpenMP threads of its own (27 ms for what then takes 22).

    Args:
        environment: what the process would otherwise get.
        cpuinfo: text of /proc/cpuinfo; read when None.
    """
    if cpuinfo is None:
        cpuinfo = _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""
    wanted = dict(_THREADS)
    if "AuthenticAMD" in cpuinfo and " avx2 " in cpuinfo:
        wanted["MKL_DEBUG_CPU_TYPE"] = "5"
    return {name: value for name, value in wanted.items() if name not in environment}


def prepare_for_paddle() -> None:
    """The same for this process, and no remarks of Paddle on standard error; before Paddle is imported."""
    os.environ.update(math_environment(os.environ))
    os.environ.setdefault("GLOG_minloglevel", "1")
