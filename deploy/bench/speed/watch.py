"""Starts the processes of one measured run and samples, from outside, what each role uses.

A run is a few processes; those and all their descendants belong to a role. The measured program tells on the machine's
monotonic clock when its passes began and ended, so what was used within them can be read from the samples afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from paddlewheel.trainer.distributed.subprocesses import kill_session, start
from paddlewheel.trainer.job.exit_codes import describe_exit

_SAMPLE_SECONDS = 0.2
_TAIL_LINES = 20
_ROLE_OF_MODULE = {
    "paddlewheel.pserver.server_process": "server",
    "paddlewheel.trainer.worker": "trainer",
    "paddlewheel.trainer.agent.agent": "control",
    "paddlewheel.trainer.coordinator": "control",
}


class RunError(RuntimeError):
    """A measured program failed or took too long; the message holds the end of its log."""


@dataclass(frozen=True)
class Pass:
    """One pass over the rows. Times are seconds of time.monotonic()."""

    rows: int
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended - self.started


@dataclass
class _Samples:
    """CPU seconds so far of one process, by time."""

    role: str
    times: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def between(self, started: float, ended: float) -> float:
        """CPU seconds used in between."""
        if not self.times:
            return 0.0
        # before the first sample: what it had by then was used since its start, all of it after `times[0] - cpu`
        times = [self.times[0] - max(self.cpu_seconds[0], 1e-3), *self.times]
        return float(np.diff(np.interp([started, ended], times, [0.0, *self.cpu_seconds]))[0])


class Watch:
    """The processes of one run. Use `watching`, which ends them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._roots: dict[int, str] = {}
        self._samples: dict[tuple[int, float], _Samples] = {}
        self._machine = _Samples("machine")
        self._peak_bytes: dict[str, int] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(
        self,
        role: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> asyncio.subprocess.Process:
        """Starts a process of a role; its output goes to `<name>.log` in the run's folder."""
        name = name or role
        with self.log(name).open("wb") as output:
            process = await start(command, environment=environment, output=output)
        self._roots[process.pid] = role
        self._processes[name] = process
        return process

    def log(self, name: str) -> Path:
        """Where a process writes to."""
        return self._directory / f"{name}.log"

    async def finish(self, name: str, *, seconds: float) -> None:
        """Waits for a process to end well.

        Raises:
            RunError: it did not, or not in time; also when another process of the run failed meanwhile.
        """
        waiting = {asyncio.ensure_future(p.wait()): n for n, p in self._processes.items()}
        deadline = time.monotonic() + seconds
        try:
            pending = set(waiting)
            while True:
                left = max(0.0, deadline - time.monotonic())
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise RunError(f"{name} took longer than {seconds:g} s{self._tail(name)}")
                for task in done:
                    if task.result() != 0:
                        raise RunError(f"{waiting[task]} {describe_exit(task.result())}{self._tail(waiting[task])}")
                if any(waiting[task] == name for task in done):
                    return
        finally:
            for task in waiting:
                task.cancel()

    def cpu_seconds(self, passes: Sequence[Pass]) -> dict[str, float]:
        """CPU seconds per role within the passes."""
        used: dict[str, float] = {}
        for samples in self._samples.values():
            seconds = sum(samples.between(p.started, p.ended) for p in passes)
            used[samples.role] = used.get(samples.role, 0.0) + seconds
        return used

    def foreign_share(self, passes: Sequence[Pass]) -> float:
        """Share of the machine's cores that processes of no concern to this run used within the passes."""
        seconds = sum(p.seconds for p in passes)
        busy = sum(self._machine.between(p.started, p.ended) for p in passes)
        own = sum(self.cpu_seconds(passes).values())
        return max(0.0, busy - own) / (seconds * (os.cpu_count() or 1))

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Largest resident memory per role, as the kernel counts each process's peak, summed over its processes."""
        return dict(self._peak_bytes)

    def _tail(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = self.log(name).read_text(errors="replace").rstrip().splitlines()[-_TAIL_LINES:]
            return "\n" + "\n".join(f"    {line}" for line in lines)
        return ""

    async def _sample_forever(self) -> None:
        while True:
            self._sample()
            await asyncio.sleep(_SAMPLE_SECONDS)

    def _sample(self) -> None:
        now = time.monotonic()
        machine = psutil.cpu_times()
        self._machine.times.append(now)
        self._machine.cpu_seconds.append(machine.user + machine.system + machine.nice + machine.softirq + machine.irq)
        peaks: dict[str, int] = {}
        for pid, root_role in self._roots.items():
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(pid)
                for process in [root, *root.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error, OSError):
                        role = self._measure(process, root_role, now)
                        peaks[role] = peaks.get(role, 0) + _peak_bytes(process.pid)
        for role, peak in peaks.items():
            self._peak_bytes[role] = max(self._peak_bytes.get(role, 0), peak)

    def _measure(self, process: psutil.Process, root_role: str, now: float) -> str:
        key = (process.pid, process.create_time())
        samples = self._samples.get(key)
        if samples is None:
            words = process.cmdline()
            role = next((role for module, role in _ROLE_OF_MODULE.items() if module in words), root_role)
            samples = self._samples[key] = _Samples(role)
        times = process.cpu_times()
        samples.times.append(now)
        samples.cpu_seconds.append(times.user + times.system)
        return samples.role

    async def _end(self) -> None:
        for process in self._processes.values():
            kill_session(process.pid)
        for process in self._processes.values():
            await process.wait()


@contextlib.asynccontextmanager
async def watching(directory: Path) -> AsyncIterator[Watch]:
    """A watch whose processes are gone at the end, whatever happened."""
    watch = Watch(directory)
    sampler = asyncio.create_task(watch._sample_forever())  # noqa: SLF001
    try:
        yield watch
    finally:
        sampler.cancel()
        await watch._end()  # noqa: SLF001


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
