"""AllReduce between trainers: one float32 buffer a step, summed in place over gloo (16 bits: compression.py).

Paddle's process group works on NumPy memory without a copy, releases the GIL, and raises when a peer goes away. So it
is used directly instead of an operator inside the program: the host reads the flags before anything is applied.

Legend: T trainers, N floats of the buffer.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paddlewheel.trainer.distributed import key_value_store as rendezvous_store
from paddlewheel.trainer.distributed.peer_connections import PeerConnections, PeerLostError, own_address
from paddlewheel.trainer.distributed.subprocesses import tied

__all__ = ["GlooGroup", "PeerLostError", "ProcessGroup", "SingleGroup", "join_group"]

_POLL_SECONDS = 0.02  # besides the 0.045 s that asking the store takes


class ProcessGroup(Protocol):
    """The group of all trainers of an attempt. All of them make the same calls, in the same order.

    Every call raises PeerLostError when a trainer is gone.
    """

    @property
    def rank(self) -> int:
        """This trainer's place."""
        ...

    @property
    def num_trainers(self) -> int:
        """How many trainers there are."""
        ...

    def all_reduce(self, array: NDArray[Any]) -> NDArray[Any]:
        """Sum `array` over all trainers, in place. float32, float64 and int64 of any shape, C-contiguous.

        Every trainer gets the same bits.
        """
        ...

    def all_to_all(self, outgoing: Mapping[int, NDArray[Any]], incoming: Mapping[int, NDArray[Any]]) -> None:
        """Send an array to each trainer in `outgoing` and fill the arrays in `incoming`."""
        ...

    def all_gather(self, value: int) -> list[int]:
        """Every trainer's int64 `value`, by rank."""
        ...

    def barrier(self) -> None:
        """Return when every trainer has called this, all within 30 s: see `long_barrier`."""
        ...

    def long_barrier(self) -> None:
        """Return when every trainer has called this, however long that takes. Not for every step."""
        ...


def join_group(rank: int, num_trainers: int, store: str, *, interface: str | None) -> ProcessGroup:
    """The group of an attempt's trainers; arguments and errors as of `GlooGroup`, which one trainer does not need."""
    return SingleGroup() if num_trainers == 1 else GlooGroup(rank, num_trainers, store, interface=interface)


class SingleGroup:
    """The group of one trainer: nobody to sum with, nobody to wait for."""

    rank, num_trainers = 0, 1

    def all_reduce(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array, as it is."""
        return array

    def all_to_all(self, outgoing: Mapping[int, NDArray[Any]], incoming: Mapping[int, NDArray[Any]]) -> None:
        """Nothing: there is no other trainer."""
        assert not outgoing, outgoing.keys()
        assert not incoming, incoming.keys()

    def all_gather(self, value: int) -> list[int]:
        """The value alone."""
        return [value]

    def barrier(self) -> None:
        """Nothing to wait for."""

    def long_barrier(self) -> None:
        """Nothing to wait for."""


class GlooGroup:
    """Several trainers, over gloo.

    Args:
        rank, num_trainers: this trainer's place; trainer 0 starts the store.
        store: "ip:port" of the rendezvous store (key_value_store.py), which listens there and nowhere else.
        interface: network interface for gloo; None lets gloo resolve the host name.
        timeout_seconds: how long all trainers may need to come.

    Raises:
        PeerLostError: some did not come within that time.
        OSError: trainer 0 cannot listen on `store`.
    """

    def __init__(
        self, rank: int, num_trainers: int, store: str, *, interface: str | None, timeout_seconds: int = 120
    ) -> None:
        self.rank, self.num_trainers = rank, num_trainers
        self._num_rendezvous = 0
        self._mesh: PeerConnections | None = None
        self._lock = threading.Lock()
        from paddle.base import core
        from paddle.base.dygraph.tracer import Tracer

        os.environ["PADDLE_TRAINER_ID"] = str(rank)  # ProcessGroup reads the global rank from here
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        self._store_address = store
        host, port = store.rsplit(":", 1)
        self._core, self._tracer = core, Tracer()
        if rank == 0:
            self._server = _start_store(host, int(port))
        _wait_for_store(host, int(port), timeout_seconds)
        self._store = core.TCPStore(host, int(port), False, 0, timeout_seconds)
        self._gather_trainers(timeout_seconds)
        self._group: Any = core.ProcessGroupGloo.create(self._store, rank, num_trainers, 0)

    def _gather_trainers(self, timeout_seconds: float) -> None:
        """Until all have reached the store: gloo would wait for them without an end."""
        deadline, mine = time.monotonic() + timeout_seconds, 1
        while (here := self._store.add("trainers", mine)) < self.num_trainers:
            mine = 0
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"{here} of {self.num_trainers} trainers came to {self._store_address} in {timeout_seconds:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def all_reduce(self, array: NDArray[Any]) -> NDArray[Any]:
        """Sum `array` over all trainers, in place. float32, float64 and int64 of any shape, C-contiguous.

        Every trainer gets the same bits.

        Raises:
            PeerLostError: a peer closed its connection.
        """
        assert array.flags.c_contiguous
        with self._lock:
            # Paddle makes such tensors in dynamic mode only (in static mode it crashes): give it a tracer for this line
            self._core._switch_tracer(self._tracer)  # noqa: SLF001
            tensor = self._core.eager.Tensor(array, self._core.CPUPlace(), False, True, "dense_sync", True)  # no copy
            if not self._dynamic():
                self._core._switch_tracer(None)  # noqa: SLF001
            try:
                self._group.all_reduce(tensor, self._core.ReduceOp.SUM, True).wait()
            except Exception as error:
                late = "TIMEOUT" in str(error)
                why = "another trainer did not come to it within 30 s, gloo's limit" if late else str(error)
                raise PeerLostError(f"AllReduce over {self.num_trainers} trainers failed: {why}") from error
        return array

    @staticmethod
    def _dynamic() -> bool:
        import paddle

        return bool(paddle.in_dynamic_mode())

    def all_to_all(self, outgoing: Mapping[int, NDArray[Any]], incoming: Mapping[int, NDArray[Any]]) -> None:
        """Send an array to each trainer in `outgoing` and fill the arrays in `incoming`, over connections of their own.

        The first call makes the connections, so all trainers make it at the same time.

        Raises:
            PeerLostError: a peer is gone, or did not come within 30 s.
        """
        if self._mesh is None:
            address = own_address(os.environ.get("GLOO_SOCKET_IFNAME"), self._store_address)
            self._mesh = PeerConnections(self.rank, self.num_trainers, self._store, address)
        self._mesh.all_to_all(outgoing, incoming)

    def all_gather(self, value: int) -> list[int]:
        """Every trainer's int64 `value`, by rank."""
        slots_T = np.zeros(self.num_trainers, np.int64)
        slots_T[self.rank] = value
        return [int(v) for v in self.all_reduce(slots_T)]

    def barrier(self) -> None:
        """Return when every trainer has called this, all within 30 s: see `long_barrier`."""
        self.all_gather(0)

    def long_barrier(self) -> None:
        """Return when every trainer has called this, however long that takes.

        Gloo gives a sum up after 30 s, which Paddle lets nobody change. So whoever may have to wait longer, for a load,
        a save or an evaluation, waits here first, through the store. It takes 0.1 s: nothing for every step. A lost
        peer ends it when the coordinator ends this process.

        Raises:
            PeerLostError: trainer 0, which holds the store, is gone.
        """
        self._num_rendezvous += 1
        key, mine = f"rendezvous-{self._num_rendezvous}", 1
        try:
            while self._store.add(key, mine) < self.num_trainers:
                mine = 0
                time.sleep(_POLL_SECONDS)
        except Exception as error:
            raise PeerLostError(f"trainer 0 does not answer: {error}") from error


def _wait_for_store(host: str, port: int, seconds: float) -> None:
    """Until it can be connected to: Paddle's client would try for ever, every three seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
        except OSError as error:
            if time.monotonic() > deadline:
                text = f"trainer 0 does not listen on {host}:{port}, after {seconds:g} s: {error}"
                raise PeerLostError(text) from error
            time.sleep(_POLL_SECONDS)
        else:
            return


def _start_store(host: str, port: int) -> subprocess.Popen[bytes]:
    """The store's process, which the kernel ends with this one. Returns when it listens.

    Raises:
        OSError: it cannot.
    """
    read_end, write_end = os.pipe()
    program = str(Path(rendezvous_store.__file__))
    command = [sys.executable, "-I", "-S", program, host, str(port), str(write_end)]
    try:
        process = subprocess.Popen(tied(command), stdin=subprocess.DEVNULL, pass_fds=[write_end])
    finally:
        os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as pipe:
        said = pipe.read().strip()
    if said != "ready":
        process.wait()
        raise OSError(f"the trainers' store did not start: {said or 'it ended without a word'}")
    return process
