"""What this machine and Python environment offer a job, and what to do about what they lack."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from paddlewheel.data_pipeline import native
from paddlewheel.trainer.kernels import cpu
from paddlewheel.trainer.kernels.gpu import cuda_library as gpu_native

_DISTRIBUTIONS = (
    "paddlewheel",
    "paddlepaddle",
    "paddlepaddle-gpu",
    "protobuf",
    "grpcio",
    "numpy",
    "pyarrow",
    "pydantic",
)
_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the examination.

    Attributes:
        level: "fail" when no job can run, "warn" when one may run badly, else "ok".
        what: the thing looked at.
        found: what is there.
        remedy: what to do about it; empty when nothing needs doing.
    """

    level: Literal["ok", "warn", "fail"]
    what: str
    found: str
    remedy: str = ""


def versions() -> dict[str, str]:
    """Versions of the installed distributions that decide how a job runs."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def examine() -> list[Finding]:
    """Looks at everything; takes a few seconds, because Paddle is imported in a process of its own."""
    checks = (
        _python,
        _system,
        _paddle,
        _tables,
        _libraries,
        _processor,
        _operators,
        _encoder,
        _memory,
        _shared_memory,
        _limits,
        _network,
        _disk,
        _gpu,
    )
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    version = sys.version.split()[0]
    if (3, 10) <= sys.version_info < (3, 13):
        yield Finding("ok", "Python", f"{version} ({sys.executable})")
    else:
        yield Finding(
            "fail", "Python", version, "use Python 3.10, 3.11 or 3.12: Paddle 2.6.2 has wheels for no later one"
        )


def _system() -> Iterator[Finding]:
    name = f"{platform.system()} {platform.machine()}, kernel {platform.release()}"
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        yield Finding("ok", "system", name)
    else:
        yield Finding(
            "fail", "system", name, "use Linux on x86-64: Paddle's parameter server is built for nothing else"
        )


def _paddle() -> Iterator[Finding]:
    # In a process of its own: on a processor without AVX, importing Paddle ends the process.
    code = "from paddlewheel.pserver import requirements; print(requirements.check())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(
            "fail", "Paddle", "importing it took more than 120 s", "look for a slow disk or an overloaded machine"
        )
        return
    if done.returncode == 0:
        yield Finding("ok", "Paddle", f"{done.stdout.strip().splitlines()[-1]}, with the parameter server")
        return
    last = (done.stderr.strip().splitlines() or [f"importing it ended with status {done.returncode}"])[-1]
    message = last.partition(": ")[2] if last.startswith("paddlewheel.pserver.errors.") else last
    yield Finding(
        "fail", "Paddle", message, "make the environment as the README says, or install what the message names"
    )


def _tables() -> Iterator[Finding]:
    code = (
        "from paddlewheel.pserver import engine; from paddlewheel.pserver.config import TableConfig; "
        "engine.choose({'t': TableConfig(engine='paddlewheel')}, num_servers=1, rank=0)"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("warn", "tables", "building our own took more than 300 s", "look for an overloaded machine")
        return
    if done.returncode == 0:
        yield Finding("ok", "tables", "our own engine works in Paddle's servers")
        return
    last = (done.stderr.strip().splitlines() or [f"loading it ended with status {done.returncode}"])[-1]
    why = last.rpartition("needs our own engine, but: ")[2].removeprefix("paddlewheel.pserver.native.NativeError: ")
    yield Finding("warn", "tables", "Paddle's own: more memory and time, and saves that training waits for", why)


def _libraries() -> Iterator[Finding]:
    found = versions()
    names = [name for name in _DISTRIBUTIONS if not name.startswith("paddle")]
    missing = [name for name in names if name not in found]
    if missing:
        yield Finding("fail", "libraries", f"missing: {', '.join(missing)}", "pip install paddlewheel again")
    else:
        yield Finding("ok", "libraries", ", ".join(f"{name} {found[name]}" for name in names))


def _processor() -> Iterator[Finding]:
    flags: set[str] = set()
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "flags":
                flags = set(value.split())
            elif key.strip() == "model name":
                model = value.strip()
    usable = len(os.sched_getaffinity(0))
    wanted = ("avx", "avx2", "avx512f", "avx512_bf16", "amx_bf16")
    have = [flag for flag in wanted if flag in flags]
    found = f"{model}, {usable} usable cores, {' '.join(have) or 'no vector extension known here'}"
    if "avx" not in flags:
        yield Finding("fail", "processor", found, "use a processor with AVX: Paddle's wheel is built for it")
    elif usable < 2:
        yield Finding("warn", "processor", found, "a server and a trainer share one core; two or more train faster")
    else:
        yield Finding("ok", "processor", found)


def _operators() -> Iterator[Finding]:
    """Whether the dense part runs on our compiled operators, built here and now if need be."""
    try:
        library = cpu.build()
    except cpu.NativeError as error:
        found = "not built: the dense part runs on Paddle's own operators, in float32, about half as fast"
        yield Finding("warn", "operators", found, str(error))
        return
    without = "float32, and `bfloat16` is refused: this processor has neither AVX512-BF16 nor AMX"
    precision = "bfloat16" if cpu.support().bfloat16 else without
    yield Finding("ok", "operators", f"built ({library.name}); `train.precision: auto` means {precision}")


def _encoder() -> Iterator[Finding]:
    """Whether rows are encoded in C++, built here and now if need be."""
    try:
        native.load()
    except native.NativeError as error:
        yield Finding("warn", "encoder", "NumPy: more CPU time, and threads of the reader that wait", str(error))
        return
    yield Finding("ok", "encoder", f"native ({native.build().name}); `data.encoder_backend: auto` means it")


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    limits = [memory.total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(file).read_text().strip() if Path(file).exists() else ""
        if text.isdigit():
            limits.append(int(text))
    found = f"{memory.available / _GIB:.1f} GiB available of {memory.total / _GIB:.1f} GiB"
    if min(limits) < memory.total:
        found += f", limited to {min(limits) / _GIB:.1f} GiB by the container"
    if min(memory.available, *limits) < 2 * _GIB:
        yield Finding(
            "warn",
            "memory",
            found,
            "each role needs about 0.5 GiB beside its share of the tables: free some, or start fewer roles",
        )
    else:
        yield Finding("ok", "memory", found)


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev") / "shm"
    if not folder.is_dir():
        yield Finding("warn", str(folder), "missing", "mount a tmpfs there; NCCL and Paddle use it between processes")
        return
    free = shutil.disk_usage(folder).free
    if free < 64 * _MIB:
        yield Finding(
            "warn", str(folder), f"{free / _MIB:.0f} MiB free", "give the container more (docker run --shm-size=1g)"
        )
    else:
        yield Finding("ok", str(folder), f"{free / _MIB:.0f} MiB free")


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        yield Finding("warn", "open files", f"at most {soft} (hard limit {hard})", "raise it: ulimit -n 4096")
    else:
        yield Finding("ok", "open files", f"at most {soft}")


def _network() -> Iterator[Finding]:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname(), timeout=5):
                pass
    except OSError as error:
        yield Finding("fail", "loopback", f"cannot be used: {error}", "bring the lo interface up; roles talk over it")
        return
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    chosen = f"free ports come from {'-'.join(ports.read_text().split())}" if ports.exists() else "works"
    yield Finding("ok", "loopback", chosen)


def _disk() -> Iterator[Finding]:
    for what, folder in (("run folder", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        found = f"{folder}: {free / _GIB:.1f} GiB free"
        if not os.access(folder, os.W_OK):
            yield Finding(
                "warn", what, f"{folder} cannot be written", "run from a folder of yours, or set run_dir in the job"
            )
        elif free < _GIB:
            yield Finding("warn", what, found, "make room: checkpoints take about 250 bytes a key")
        else:
            yield Finding("ok", what, found)


def _gpu() -> Iterator[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        yield Finding("ok", "GPU", "none; the dense part runs on the CPU")
        return
    query = [program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("warn", "GPU", "nvidia-smi does not answer", "look at the driver: dmesg | grep -i nvrm")
        return
    if done.returncode != 0:
        yield Finding(
            "warn", "GPU", (done.stdout + done.stderr).strip(), "look at the driver; the CPU is used meanwhile"
        )
        return
    lines = [[part.strip() for part in line.split(",")] for line in done.stdout.strip().splitlines()]
    usable = 0
    for name, capability, driver in lines:
        found = f"{name}, compute capability {capability}, driver {driver}"
        if float(capability) * 10 < gpu_native.OLDEST_CAPABILITY:
            yield Finding("warn", "GPU", found, "not used: the kernels need compute capability 7.0 (V100) or later")
        else:
            usable += 1
            yield Finding("ok", "GPU", found)
    if usable:
        yield from _gpu_software(usable)


def _gpu_software(num_gpus: int) -> Iterator[Finding]:
    """What `train.device: gpu` needs beside the driver. Jobs on the CPU need none of it."""
    library, cublas, nccl = gpu_native.kernels_path(), gpu_native.cublas_library(), gpu_native.nccl_library()
    if library.exists():
        yield Finding("ok", "GPU kernels", str(library))
    elif gpu_native.nvcc() is None:
        remedy = "install the CUDA toolkit (12 or 13; or set CUDA_HOME), then run `paddlewheel gpu build`"
        yield Finding("warn", "GPU kernels", "not built, and there is no nvcc to build them with", remedy)
    else:
        yield Finding("warn", "GPU kernels", "not built for this version", "run `paddlewheel gpu build`")
    if cublas is None:
        remedy = "install it with the CUDA toolkit, or pip install nvidia-cublas-cu12"
        yield Finding("warn", "cuBLAS", "libcublasLt was not found", remedy)
    else:
        yield Finding("ok", "cuBLAS", str(cublas))
    if nccl is not None:
        yield Finding("ok", "NCCL", nccl)
    elif num_gpus > 1:
        remedy = "several trainers on GPUs need it: pip install nvidia-nccl-cu12, or install libnccl2"
        yield Finding("warn", "NCCL", "libnccl.so.2 was not found", remedy)
