"""Pulls ahead of the step and pushes behind it, within a bound on how stale a pulled value may be.

One thread pulls, one pushes; both spend their time inside Paddle without the GIL. The step that trains batch t uses
values that lack at most the pushes of the `max_staleness_steps` batches before t (of this trainer).

Legend: B batch rows, F features, U unique keys of a table, W floats of a pulled row.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from data_pipeline.batch import Batch, TableKeys
from pserver.client import Client
from trainer.growth import Growth
from trainer.telemetry import DurationHistogram

Floats = NDArray[np.float32]


def occurrences(keys: TableKeys, labels_B: Floats) -> tuple[Floats, Floats]:
    """How often each unique key stands in the batch, and how often in rows with label 1: ([U], [U])."""
    size = len(keys.keys_U) + 1
    shows_P, clicks_P = np.zeros(size), np.zeros(size)
    arrays = [keys.single_BF] if keys.single_BF.size else []
    arrays += [index for name, index in keys.index.items() if name not in keys.single_names]
    for index_BL in arrays:
        flat = index_BL.ravel()
        shows_P += np.bincount(flat, minlength=size)
        clicks_P += np.bincount(flat, weights=np.repeat(labels_B, index_BL.shape[1]), minlength=size)
    return shows_P[1:].astype(np.float32), clicks_P[1:].astype(np.float32)


@dataclass
class Traffic:
    """What an `Exchange` has moved, for the metrics. May be shared by one exchange after the other."""

    pulls: DurationHistogram = field(default_factory=DurationHistogram)
    pushes: DurationHistogram = field(default_factory=DurationHistogram)
    pulled_keys: int = 0
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    staleness_steps: int = 0
    """Of the last pull: batches before it whose push was not yet applied."""
    ready_batches: int = 0


class _Ready(NamedTuple):
    """A batch with what was pulled for it. era: how many day boundaries the pull had behind it."""

    batch: Batch
    rows: dict[str, Floats]
    era: int


class Exchange:
    """Iterator of (batch, pulled values by table); `push` or `skip` must follow each item, in order.

    Args:
        client: connection to the servers.
        batches: this trainer's batches; drawn in the pulling thread.
        max_staleness_steps: see the module's docstring.
        embedding_l2: L2 penalty per occurrence, added to the gradients before the push.
        wait_for_all: a push counts as applied only after `release`, so that several trainers can keep one step.
        traffic: counts what is moved.
        growth: counts keys that are new; None: nobody asks.
    """

    def __init__(
        self,
        client: Client,
        batches: Iterator[Batch],
        *,
        max_staleness_steps: int,
        embedding_l2: float = 0.0,
        wait_for_all: bool = False,
        traffic: Traffic | None = None,
        growth: Growth | None = None,
    ) -> None:
        self._client, self._batches, self._l2 = client, batches, embedding_l2
        self._staleness = max_staleness_steps
        self._settled = 0  # batches whose push has reached the servers, or that were skipped
        self._released = 0  # the same, as far as pulls may count on it
        self._wait_for_all = wait_for_all
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._ready: queue.Queue[_Ready | BaseException] = queue.Queue(maxsize=max_staleness_steps + 1)
        self._pushes: queue.Queue[tuple[Batch, Mapping[str, Floats], Mapping[str, Floats]] | None] = queue.Queue()
        self._taken = 0
        self._pulling = self._held = False
        self._era = 0
        self._traffic, self._growth = traffic or Traffic(), growth
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("pull", self._pull_all), ("push", self._push_all))
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Exchange:
        return self

    def __next__(self) -> tuple[Batch, dict[str, Floats]]:
        while True:
            self._raise_error()
            try:
                item = self._ready.get(timeout=0.2)  # so that a failed push is noticed while no batch comes
                break
            except queue.Empty:
                continue
        if isinstance(item, BaseException):
            self._ready.put(item)
            raise item
        rows = item.rows if item.era == self._era else self._pull(item.batch)
        self._taken += 1
        return item.batch, rows

    def push(self, batch: Batch, rows: Mapping[str, Floats], gradients: Mapping[str, Floats]) -> None:
        """Send the gradients of the item just taken; returns at once."""
        self._pushes.put((batch, rows, gradients))

    def skip(self) -> None:
        """The item just taken changes nothing."""
        self._settle()

    def drain(self) -> None:
        """Return when every push so far is applied on the servers."""
        with self._changed:
            while self._settled < self._taken and self._error is None:
                self._changed.wait(0.2)
        self._raise_error()

    def release(self) -> None:
        """All trainers have drained: pulls may rely on every push so far."""
        with self._changed:
            self._released = self._settled
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No pull is in flight inside; what was pulled before is pulled again after. Drain first: then nothing is."""
        with self._changed:
            self._held = True
            while self._pulling:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                self._era += 1
                self._changed.notify_all()

    def close(self) -> None:
        """End both threads. Batches pulled but not taken are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pushes.put(None)
        while any(t.is_alive() for t in self._threads):
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=0.05)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _settle(self) -> None:
        with self._changed:
            self._settled += 1
            if not self._wait_for_all:
                self._released = self._settled
            self._changed.notify_all()

    def _pull_all(self) -> None:
        """Puts pulled batches in order, then StopIteration or the error that ended them."""
        try:
            for number, batch in enumerate(self._batches):
                with self._changed:
                    while self._must_wait(number) and not self._closed and self._error is None:
                        self._changed.wait()
                    if self._closed or self._error is not None:
                        return
                    self._traffic.staleness_steps = number - self._settled
                    self._pulling, era = True, self._era
                try:
                    rows = self._pull(batch, self._growth)
                finally:
                    with self._changed:
                        self._pulling = False
                        self._changed.notify_all()
                self._ready.put(_Ready(batch, rows, era))
                self._traffic.ready_batches = self._ready.qsize()
        except BaseException as error:  # noqa: BLE001  raised again in the training thread
            self._ready.put(error)
        else:
            self._ready.put(StopIteration())

    def _must_wait(self, number: int) -> bool:
        """Whether batch `number` may not be pulled yet."""
        return self._held or self._released < number - self._staleness

    def _pull(self, batch: Batch, growth: Growth | None = None) -> dict[str, Floats]:
        start = time.perf_counter()
        if growth is None:
            rows = {name: self._client.pull(name, keys.keys_U) for name, keys in batch.tables.items()}
        else:
            pulled = {name: self._client.pull_with_counts(name, keys.keys_U) for name, keys in batch.tables.items()}
            rows = {name: found.values_UW for name, found in pulled.items()}
            growth.observe(batch, {name: found.shows_U for name, found in pulled.items()})
        self._traffic.pulls.observe(time.perf_counter() - start)
        self._traffic.pulled_keys += sum(len(values) for values in rows.values())
        self._traffic.pulled_bytes += sum(values.nbytes for values in rows.values())
        return rows

    def _push_all(self) -> None:
        try:
            while (item := self._pushes.get()) is not None:
                start = time.perf_counter()
                self._push(*item)
                self._traffic.pushes.observe(time.perf_counter() - start)
                self._settle()
        except BaseException as error:  # noqa: BLE001  raised again in the training thread
            self._fail(error)

    def _push(self, batch: Batch, rows: Mapping[str, Floats], gradients: Mapping[str, Floats]) -> None:
        for name, keys in batch.tables.items():
            if len(keys.keys_U):
                shows_U, clicks_U = occurrences(keys, batch.labels_BL[:, 0])
                grads_UW = gradients[name]
                if self._l2:
                    grads_UW = grads_UW + self._l2 * shows_U[:, None] * rows[name]
                self._client.push(name, keys.keys_U, grads_UW, shows_U, clicks_U)
                self._traffic.pushed_bytes += grads_UW.nbytes
