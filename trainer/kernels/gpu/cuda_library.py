"""The library of kernels: where it is, how it is built, how it is loaded; memory and streams of one GPU.

`paddlewheel gpu build` compiles kernels.cu with the machine's nvcc for the machine's GPUs. The result is kept by the
hash of the source, so that an old library is never taken for a new one. Nothing here needs Paddle.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.trainer.kernels.gpu.kernel_calls import Call
from paddlewheel.trainer.kernels.gpu.structs import STRUCTS, Address, encode

SOURCE = Path(__file__).with_name("kernels.cu")
OLDEST_CAPABILITY = 70


class GpuError(ValueError):
    """The job asks for a GPU, and this machine cannot run it there. The message says what to do."""


class GpuFaultError(RuntimeError):
    """A call to the GPU failed while it was in use."""


def directory() -> Path:
    """Where built libraries are kept: PADDLEWHEEL_GPU_DIRECTORY, or a folder in the user's cache."""
    given = os.environ.get("PADDLEWHEEL_GPU_DIRECTORY")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "paddlewheel", "gpu")


def kernels_path() -> Path:
    """Of the library that belongs to this version of the kernels."""
    return directory() / f"kernels-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"


def cuda_homes() -> list[Path]:
    """Folders that may hold a CUDA toolkit, or a part of one from pip."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(Path(nvcc).resolve().parent.parent)
    homes += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    for packages in [*site.getsitepackages(), *sys.path]:
        homes += sorted(Path(packages).glob("nvidia/*")) if packages else []
    return [home for home in dict.fromkeys(homes) if home.is_dir()]


def _find(pattern: str, *folders: str) -> Path | None:
    for home in cuda_homes():
        for folder in folders:
            found = sorted(Path(home, folder).glob(pattern))
            if found:
                return found[-1]
    return None


def nvcc() -> Path | None:
    """CUDA's compiler."""
    found = shutil.which("nvcc")
    return Path(found) if found else _find("nvcc", "bin")


def cublas_library() -> Path | None:
    """cuBLASLt, version 11 to 13."""
    return _find("libcublasLt.so.1[123]", "lib64", "lib", "targets/x86_64-linux/lib")


def nccl_library() -> str | None:
    """NCCL."""
    found = _find("libnccl.so.2", "lib64", "lib", "targets/x86_64-linux/lib")
    if found is None:
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib"):
            if Path(folder, "libnccl.so.2").exists():
                return str(Path(folder, "libnccl.so.2"))
    return None if found is None else str(found)


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it."""

    name: str
    capability: int  # 90 for compute capability 9.0
    driver: str
    mib: int


def gpus() -> list[Gpu]:
    """All GPUs of this machine; none without a driver that answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[1].replace(".", "").isdigit():
            found.append(Gpu(parts[0], int(parts[1].replace(".", "")), parts[2], int(float(parts[3]))))
    return found


def build(architectures: Sequence[int] = ()) -> Path:
    """Compiles the kernels and returns the library.

    Args:
        architectures: compute capabilities such as 80 or 90; by default those of this machine's GPUs.

    Raises:
        GpuError: no compiler, no cuBLAS, no GPU to build for, or the compiler failed.
    """
    compiler = nvcc()
    if compiler is None:
        raise GpuError("nvcc was not found: install the CUDA toolkit (12 or 13), or set CUDA_HOME to where it is")
    wanted = sorted(set(architectures) or {gpu.capability for gpu in gpus()})
    if not wanted:
        raise GpuError("nvidia-smi shows no GPU: name the compute capability to build for, such as --arch 90")
    if wanted[0] < OLDEST_CAPABILITY:
        raise GpuError(f"compute capability {wanted[0] / 10}: the kernels need 7.0 (V100) or later")
    header, cublas = _find("cublasLt.h", "include", "targets/x86_64-linux/include"), cublas_library()
    if header is None or cublas is None:
        what = "cublasLt.h" if header is None else "libcublasLt.so"
        raise GpuError(f"{what} was not found: install cuBLAS with the CUDA toolkit, or pip install nvidia-cublas")
    target = kernels_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch, "kernels.so")
        code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in wanted]
        code.append(f"-gencode=arch=compute_{wanted[-1]},code=compute_{wanted[-1]}")  # later GPUs compile it at start
        command = [
            str(compiler),
            "-std=c++17",
            "-O3",
            *code,
            "-shared",
            "-cudart",
            "static",
            "-Xcompiler",
            "-fPIC,-fvisibility=hidden",
            "-I",
            str(header.parent),
            "-o",
            str(made),
            str(SOURCE),
            "-L",
            str(cublas.parent),
            f"-l:{cublas.name}",
            "-Xlinker",
            f"-rpath={cublas.parent}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise GpuError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")
        made.replace(target)
    return target


_library: ctypes.CDLL | None = None


def load() -> ctypes.CDLL:
    """The library.

    Raises:
        GpuError: it was not built, or cannot be loaded.
    """
    global _library  # noqa: PLW0603  loaded once a process
    if _library is not None:
        return _library
    path = kernels_path()
    if not path.exists():
        raise GpuError(
            f"the GPU kernels are not built ({path} is missing): run `paddlewheel gpu build` on this machine"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise GpuError(f"the GPU kernels cannot be loaded: {error}. Run `paddlewheel gpu build` again") from error
    pointers = ("pw_alloc", "pw_alloc_host", "pw_stream", "pw_end_capture", "pw_event")
    for name in pointers:
        getattr(library, name).restype = ctypes.c_void_p
    library.pw_last_error.restype = ctypes.c_char_p
    library.pw_elapsed_ms.restype = ctypes.c_float
    sizes = (ctypes.c_int32 * 32)()
    count = library.pw_struct_sizes(sizes)
    assert list(sizes[:count]) == [ctypes.sizeof(s) for s in STRUCTS], "kernels.cu and structs.py differ"
    _library = library
    return library


class Device:
    """One GPU of this process: memory, a stream, calls. Frees everything on `close`."""

    def __init__(self, index: int) -> None:
        self.loaded = load()
        count = int(self.loaded.pw_num_devices())
        if count == 0:
            raise GpuError("CUDA shows no GPU to this process: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
        if index >= count:
            raise GpuError(
                f"this trainer wants GPU {index}, the machine shows {count}: start at most one trainer a GPU "
                f"(cluster.trainers), or set CUDA_VISIBLE_DEVICES"
            )
        self.index = index
        self.check(self.loaded.pw_use_device(index))
        self.capability = int(self.loaded.pw_capability(index))
        self.stream = ctypes.c_void_p(self._made(self.loaded.pw_stream()))
        self._memory: dict[int, bool] = {}

    def check(self, code: int) -> None:
        """Raises GpuFaultError when a call failed."""
        if code != 0:
            raise GpuFaultError(f"GPU {self.index}: {self.loaded.pw_last_error().decode()}")

    def _made(self, pointer: Any) -> int:
        if not pointer:
            raise GpuFaultError(f"GPU {self.index}: {self.loaded.pw_last_error().decode()}")
        return int(pointer)

    def use(self) -> None:
        """Make this GPU the calling thread's."""
        self.check(self.loaded.pw_use_device(self.index))

    def alloc(self, nbytes: int, *, host: bool = False) -> int:
        """Memory of the GPU, or pinned memory of the host."""
        made = self._made((self.loaded.pw_alloc_host if host else self.loaded.pw_alloc)(ctypes.c_int64(nbytes)))
        self._memory[made] = host
        return made

    def free(self, pointer: int) -> None:
        """What `alloc` gave."""
        host = self._memory.pop(pointer)
        (self.loaded.pw_free_host if host else self.loaded.pw_free)(ctypes.c_void_p(pointer))

    def close(self) -> None:
        """Free all memory."""
        self.synchronize()
        for pointer in list(self._memory):
            self.free(pointer)

    def upload(self, to: int, source: NDArray[Any]) -> None:
        """Copy an array to the GPU; the array must stay as it is until `synchronize`, unless its memory is not
        pinned.
        """
        assert source.flags.c_contiguous
        pointer = ctypes.c_void_p(source.ctypes.data)
        self.check(self.loaded.pw_upload(ctypes.c_void_p(to), pointer, ctypes.c_int64(source.nbytes), self.stream))

    def download(self, target: NDArray[Any], source: int) -> None:
        """Copy memory of the GPU into an array; done after `synchronize`."""
        assert target.flags.c_contiguous
        pointer = ctypes.c_void_p(target.ctypes.data)
        self.check(
            self.loaded.pw_download(pointer, ctypes.c_void_p(source), ctypes.c_int64(target.nbytes), self.stream)
        )

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        self.check(self.loaded.pw_synchronize(self.stream))

    def launch(self, call: Call, address: Address) -> None:
        """StartPoint a kernel."""
        self._start(call.kernel, encode(call, address))

    def _start(self, kernel: str, struct: Any) -> None:
        self.check(getattr(self.loaded, f"pw_{kernel}")(ctypes.byref(struct), self.stream))

    def capture(self, calls: Sequence[Call], address: Address) -> int:
        """A graph of the calls, for `replay`."""
        structs = [(call.kernel, encode(call, address)) for call in calls]
        self.check(self.loaded.pw_begin_capture(self.stream))
        try:
            for kernel, struct in structs:
                self._start(kernel, struct)
        finally:
            graph = self.loaded.pw_end_capture(self.stream)
        return self._made(graph)

    def replay(self, graph: int) -> None:
        """StartPoint all calls of a graph."""
        self.check(self.loaded.pw_launch(ctypes.c_void_p(graph), self.stream))

    def forget(self, graph: int) -> None:
        """A graph that is not needed any more."""
        self.check(self.loaded.pw_free_graph(ctypes.c_void_p(graph)))

    def milliseconds(self, work: Callable[[], None]) -> float:
        """How long the GPU takes over what `work` starts."""
        begin, end = (ctypes.c_void_p(self._made(self.loaded.pw_event())) for _ in range(2))
        self.check(self.loaded.pw_record(begin, self.stream))
        work()
        self.check(self.loaded.pw_record(end, self.stream))
        found = float(self.loaded.pw_elapsed_ms(begin, end))
        self.loaded.pw_free_event(begin)
        self.loaded.pw_free_event(end)
        return found

    def wait(self, seconds: float) -> bool:
        """Wait for the stream at most so long; whether it is done."""
        deadline = time.monotonic() + seconds
        while (state := int(self.loaded.pw_query(self.stream))) == 1:
            if time.monotonic() > deadline:
                return False
        self.check(state)
        return True

    def pinned(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Pinned memory and an array over it."""
        pointer = self.alloc(nbytes, host=True)
        return pointer, np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))
