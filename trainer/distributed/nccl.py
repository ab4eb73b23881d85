"""AllReduce between GPUs: NCCL, called directly.

The trainers' group over gloo stays for what the host agrees on, and brings NCCL's identity to everyone.
"""

from __future__ import annotations

import ctypes

import numpy as np

from paddlewheel.trainer.distributed.process_group import PeerLostError, ProcessGroup
from paddlewheel.trainer.kernels.gpu import cuda_library
from paddlewheel.trainer.kernels.gpu.cuda_library import Device, GpuError

_FLOAT, _SUM, _ID_BYTES = 7, 0, 128
_LIMIT_SECONDS = 30.0
"""As gloo has it: a peer that comes later than this counts as lost."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_uint8 * _ID_BYTES),)


class Nccl:
    """A communicator of all trainers, each with a GPU of its own.

    Raises:
        GpuError: no NCCL, or it cannot connect.
    """

    def __init__(self, device: Device, group: ProcessGroup) -> None:
        path = cuda_library.nccl_library()
        try:
            self._library = ctypes.CDLL(path or "libnccl.so.2")
        except OSError as error:
            raise GpuError(
                f"several trainers on GPUs need NCCL, and libnccl.so.2 cannot be loaded ({error}): install NVIDIA's "
                "NCCL 2 (pip install nvidia-nccl-cu12, or the package libnccl2)"
            ) from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._device, self._group = device, group
        identity = _Id()
        if group.rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(identity)), "ncclGetUniqueId")
        words = np.frombuffer(bytearray(identity), np.int64).copy()
        if group.rank != 0:
            words[:] = 0
        group.all_reduce(words)
        ctypes.memmove(ctypes.byref(identity), words.ctypes.data, _ID_BYTES)
        self._communicator = ctypes.c_void_p()
        device.use()
        made = self._library.ncclCommInitRank(
            ctypes.byref(self._communicator), ctypes.c_int(group.num_trainers), identity, ctypes.c_int(group.rank)
        )
        self._check(made, "ncclCommInitRank")

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            raise GpuError(f"{what}: {self._library.ncclGetErrorString(code).decode()}; NCCL_DEBUG=INFO tells more")

    def all_reduce(self, address: int, count: int) -> None:
        """Sum float32 values in the GPU's memory over all trainers, in place; waits for the result.

        Raises:
            PeerLostError: a trainer did not come to it in time, or is gone.
        """
        pointer = ctypes.c_void_p(address)
        code = self._library.ncclAllReduce(
            pointer, pointer, ctypes.c_size_t(count), _FLOAT, _SUM, self._communicator, self._device.stream
        )
        if code != 0:
            raise PeerLostError(f"NCCL AllReduce failed: {self._library.ncclGetErrorString(code).decode()}")
        if not self._device.wait(_LIMIT_SECONDS):
            self._library.ncclCommAbort(self._communicator)
            raise PeerLostError(
                f"AllReduce over {self._group.num_trainers} trainers failed: another trainer did not come to it within "
                f"{_LIMIT_SECONDS:.0f} s"
            )
