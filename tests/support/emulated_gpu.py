"""A GPU made of NumPy: the calls that kernels would run, on the host's memory. For all but the kernels themselves."""

from __future__ import annotations

import ctypes

import numpy as np

from paddlewheel.trainer.kernels.gpu import reference
from paddlewheel.trainer.kernels.gpu.cuda_library import Device
from paddlewheel.trainer.kernels.gpu.structs import encode
from paddlewheel.trainer.kernels.gpu.views import BYTES, View


class _Memory(reference.HostMemory):
    """Buffers are where the addresses say."""

    def __init__(self, starts):
        super().__init__()
        self._starts = starts

    def bytes(self, buffer):
        start = self._starts[buffer]
        return np.ctypeslib.as_array((ctypes.c_uint8 * max(16, buffer.nbytes)).from_address(start))


class EmulatedDevice(Device):
    """Behaves as `Device` does; `captured` counts graphs."""

    def __init__(self, index=0, capability=90):
        self.index, self.capability, self.captured = index, capability, 0
        self._memory, self._graphs = {}, {}
        self._queue = []

    def use(self):
        pass

    def alloc(self, nbytes, *, host=False):
        # poisoned, as a GPU's memory may hold anything; with room for views that end past what is used
        array = np.full(nbytes + 64, 0 if host else 0xFF, np.uint8)
        self._memory[array.ctypes.data] = array
        return array.ctypes.data

    def free(self, pointer):
        del self._memory[pointer]

    def close(self):
        self._memory.clear()

    def pinned(self, nbytes):
        pointer = self.alloc(nbytes, host=True)
        return pointer, self._memory[pointer][:nbytes]

    def upload(self, to, source):
        assert source.flags.c_contiguous
        ctypes.memmove(to, source.ctypes.data, source.nbytes)

    def download(self, target, source):
        assert target.flags.c_contiguous
        ctypes.memmove(target.ctypes.data, source, target.nbytes)

    def synchronize(self):
        pass

    def launch(self, call, address):
        self._run(self._bound(call, address))

    def _bound(self, call, address):
        encode(call, address)  # what the kernel would be told must be sayable
        starts = {v.buffer: address(View(v.buffer, 0, (1,), (1,), v.type)) for v in call.views}
        for view in call.views:
            assert address(view) == starts[view.buffer] + view.offset * BYTES[view.type]
        return call, starts

    def _run(self, bound):
        call, starts = bound
        reference.run(call, _Memory(starts))

    def capture(self, calls, address):
        self.captured += 1
        self._graphs[self.captured] = [self._bound(call, address) for call in calls]
        return self.captured

    def replay(self, graph):
        for bound in self._graphs[graph]:
            self._run(bound)

    def forget(self, graph):
        del self._graphs[graph]
