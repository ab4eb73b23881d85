"""What a test needs beside Python and make, how to tell whether it is here, and what brings it.

A test says so with `@pytest.mark.needs("promtool")`, a fixture or a function that runs the program with
`require("promtool")`. Where it is missing, the test is skipped with the remedy, and the run ends with a table of what
was left out. With PADDLEWHEEL_TEST_STRICT set, as in CI, the test fails instead, unless no package can bring what is
missing (a GPU, a processor's instructions).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from paddlewheel.pserver import native
from paddlewheel.trainer.kernels import cpu
from paddlewheel.trainer.kernels.gpu import cuda_library as gpu

STRICT = "PADDLEWHEEL_TEST_STRICT"
DATA = "PADDLEWHEEL_TEST_DATA"
_PROPERTY = "needs"


@dataclass(frozen=True)
class Need:
    """One thing that may be missing.

    Attributes:
        is_here: tells whether this machine has it.
        remedy: what brings it.
        strict: whether its absence fails a test under PADDLEWHEEL_TEST_STRICT.
    """

    is_here: Callable[[], bool]
    remedy: str
    strict: bool = True


def _program(name: str, package: str) -> Need:
    return Need(lambda: shutil.which(name) is not None, f"apt-get install {package}")


def _succeeds(*command: str) -> bool:
    """Whether the kernel, and whoever confines this machine, let the command happen."""
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _loopback_has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def _has_data() -> bool:
    folder = os.environ.get(DATA)
    return bool(folder) and Path(folder).is_dir()


_CABLE = "ip link add one type veth peer name two && tc qdisc replace dev one root tbf rate 50mbit burst 64kb limit 1mb"
_ROOT = "a machine or container whose kernel lets root (CAP_SYS_ADMIN) do it"

NEEDS: dict[str, Need] = {
    "promtool": _program("promtool", "prometheus"),
    "prometheus": _program("prometheus", "prometheus"),
    "chromium": _program("chromium", "chromium"),
    "tini": _program("tini", "tini"),
    "openssl": _program("openssl", "openssl"),
    "bash": _program("bash", "bash"),
    "setpriv": _program("setpriv", "util-linux"),
    "nsenter": _program("nsenter", "util-linux"),
    # No package of Debian's: whoever has it gets the tests.
    "kubectl": Need(
        lambda: shutil.which("kubectl") is not None, "kubectl 1.21 or newer (kubernetes.io/docs/tasks/tools)", False
    ),
    "native operators": Need(
        lambda: cpu.support().built is not None or cpu.support().compiler is not None,
        "apt-get install g++, or CXX=<a C++ compiler>",
    ),
    "g++": _program("g++", "g++"),
    "our own tables": Need(
        lambda: native.is_expected("auto"),
        "apt-get install g++, or CXX=<a C++ compiler>, and paddlepaddle 2.6.2 as the public index has it",
    ),
    "an ordinary user": Need(lambda: os.geteuid() != 0, "run as another user than root, who may write anywhere", False),
    "process namespaces": Need(
        lambda: _succeeds("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "true"),
        f"util-linux, root and {_ROOT}",
    ),
    "network namespaces": Need(
        lambda: (
            os.geteuid() == 0 and Path("/dev/net/tun").exists() and _succeeds("unshare", "--net", "ip", "link", "show")
        ),
        f"apt-get install iproute2, root, /dev/net/tun and {_ROOT}",
    ),
    "virtual cables": Need(
        lambda: os.geteuid() == 0 and _succeeds("unshare", "--net", "sh", "-ec", _CABLE),
        f"apt-get install iproute2, root, the kernel's veth and sch_tbf, and {_ROOT}",
    ),
    "user namespaces": Need(
        lambda: _succeeds(
            *("unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", "mount -t tmpfs -o size=1m tmpfs /mnt")
        ),
        "util-linux, and a kernel that lets users mount (sysctl kernel.unprivileged_userns_clone=1)",
    ),
    "ipv6": Need(_loopback_has_ipv6, "IPv6 on the loopback interface (sysctl net.ipv6.conf.lo.disable_ipv6=0)"),
    "data": Need(_has_data, f"{DATA}=<folder of the public data sets>"),
    "bfloat16": Need(lambda: cpu.support().bfloat16, "a processor with bfloat16 products (AVX512-BF16 or AMX)", False),
    "gpu": Need(lambda: bool(gpu.gpus()), "an NVIDIA GPU with its driver", False),
}
"""Everything that a test may need, by the name that it gives to `needs` or `require`."""


class Missing(pytest.skip.Exception):
    """Skips a test for what is not here; its line of the table is carried along."""

    def __init__(self, message: str, line: tuple[str, str]) -> None:
        super().__init__(message)
        self.line = line


@cache
def is_here(name: str) -> bool:
    """Asked once in a run."""
    return NEEDS[name].is_here()


def require(*names: str) -> None:
    """Leaves out the running test unless all of these are here. Raises: KeyError for a name not in the table."""
    for name in names:
        if not is_here(name):
            _miss(name)


def _miss(name: str) -> NoReturn:
    need = NEEDS[name]
    message = f"needs {name}: {need.remedy}"
    if need.strict and os.environ.get(STRICT):
        pytest.fail(f"{message} ({STRICT} is set, so this is no reason to leave it out)", pytrace=False)
    raise Missing(message, (name, need.remedy))


def require_marked(item: pytest.Item) -> None:
    """What the test's marks `needs` name, nearest last."""
    for mark in item.iter_markers("needs"):
        require(*mark.args)


def note(report: pytest.TestReport, raised: BaseException | None) -> None:
    """Has the report of a skipped test carry what it needs, across processes too."""
    if isinstance(raised, Missing):
        report.user_properties.append((_PROPERTY, raised.line))


def table(skipped: Iterable[pytest.TestReport]) -> list[str]:
    """One line for each reason for which tests were left out: how many, for want of what, and what brings it."""
    found = [dict(report.user_properties).get(_PROPERTY, ("other reasons", "see -rs")) for report in skipped]
    counts = Counter((str(name), str(remedy)) for name, remedy in found)
    lines = [(str(number), *line) for line, number in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    if not lines:
        return []
    lines.insert(0, ("tests", "left out for want of", "what brings it"))
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return [f"{a:>{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in lines]
