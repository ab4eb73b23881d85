"""Pulls ahead of the step and pushes behind it, within a bound on how stale a pulled value may be.

One thread pulls, one pushes; both spend their time inside Paddle without the GIL. The step that trains batch t uses
values that lack at most the pushes of the `max_staleness_steps` batches before t (of this trainer).

A key below its table's `admission_threshold` is pulled with an embedding of zeros, whatever the servers hold: it may
have had one and lost shows since. A gradient computed at those zeros says nothing about the vector that lies there, so
it is not pushed; the first-order weight, which counts from the first row on, is.

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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from paddlewheel.data_pipeline.batch import Batch, TableKeys
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig, Tables
from paddlewheel.trainer.loop.new_keys import NewKeyCounter
from paddlewheel.trainer.telemetry import DurationHistogram

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


def class_arguments(keys: TableKeys, config: TableConfig | None) -> dict[str, NDArray[np.uint8]]:
    """What pulls and pushes of a batch's keys are told beside them: `class_U` [U], where features have thresholds.

    A class is a place in `TableConfig.admission_thresholds`.
    """
    if config is None or not config.admission_by_feature:
        return {}
    class_P = np.zeros(len(keys.keys_U) + 1, np.uint8)
    for number, name in enumerate(config.admission_by_feature, start=1):
        class_P[keys.index[name]] = number
    return {"class_U": class_P[1:]}


@dataclass
class Traffic:
    """What an `EmbeddingPipeline` has moved, for the metrics. May be shared by one exchange after the other."""

    pulls: DurationHistogram = field(default_factory=DurationHistogram)
    pushes: DurationHistogram = field(default_factory=DurationHistogram)
    pulled_keys: int = 0
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    staleness_steps: int = 0
    """Of the last pull: batches before it whose push was not yet applied."""
    ready_batches: int = 0


class _Pulled(NamedTuple):
    """What the servers gave for a batch, by table: values [U, W], and of tables with an admission who passed it [U]."""

    rows: dict[str, Floats]
    admitted: dict[str, NDArray[np.bool_]]


class _Ready(NamedTuple):
    """A batch with what was pulled for it. era: how many day boundaries the pull had behind it."""

    batch: Batch
    pulled: _Pulled
    era: int


class _Push(NamedTuple):
    """number: of the batch, from 0."""

    number: int
    batch: Batch
    rows: Mapping[str, Floats]
    admitted: Mapping[str, NDArray[np.bool_]]
    gradients: Mapping[str, Floats]
    rate: float


class EmbeddingPipeline:
    """Iterator of (batch, pulled values by table); `push` or `skip` must follow each item, in order.

    Args:
        client: connection to the servers.
        batches: this trainer's batches; drawn in the pulling thread.
        max_staleness_steps: see the module's docstring.
        embedding_l2: L2 penalty per occurrence, added to the gradients before the push.
        wait_for_all: a push counts as applied only after `release`, so that several trainers can keep one step.
        tables: of the batches: those with an admission need care (see the module).
        only_pulls: nothing is ever pushed.
        traffic: counts what is moved.
        growth: optional counter of first-seen keys.
    """

    def __init__(
        self,
        client: Client,
        batches: Iterator[Batch],
        *,
        max_staleness_steps: int,
        embedding_l2: float = 0.0,
        wait_for_all: bool = False,
        tables: Tables | None = None,
        only_pulls: bool = False,
        traffic: Traffic | None = None,
        growth: NewKeyCounter | None = None,
    ) -> None:
        self._client, self._batches, self._l2 = client, batches, embedding_l2
        self._staleness = max_staleness_steps
        self._settled = 0  # so many batches, the first ones, were skipped or their push has reached the servers
        self._settled_early: set[int] = set()  # numbers of later ones: a skip overtakes the push before it
        self._released = 0  # the same, as far as pulls may count on it
        self._wait_for_all = wait_for_all
        self._tables = tables or {}
        self._first_order = {
            name: t.first_order for name, t in self._tables.items() if t.has_admission and not only_pulls
        }
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._ready: queue.Queue[_Ready | BaseException] = queue.Queue(maxsize=max_staleness_steps + 1)
        self._pushes: queue.Queue[_Push | None] = queue.Queue()
        self._taken = 0
        self._admitted: Mapping[str, NDArray[np.bool_]] = {}  # of the batch that was taken last
        self._has_first = threading.Event()
        self._pulling = self._held = False
        self._era = 0
        self._traffic, self._growth = traffic or Traffic(), growth
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("pull", self._pull_all), ("push", self._push_all))
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> EmbeddingPipeline:
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
        pulled = item.pulled if item.era == self._era else self._pull(item.batch)
        self._taken += 1
        self._admitted = pulled.admitted
        return item.batch, pulled.rows

    def wait_for_first(self) -> None:
        """Return when the first item, or the end, can be had without waiting. Raises what the threads raised."""
        while not self._has_first.wait(0.2):
            self._raise_error()

    def push(
        self, batch: Batch, rows: Mapping[str, Floats], gradients: Mapping[str, Floats], rate: float = 1.0
    ) -> None:
        """Send the gradients of the item just taken; returns at once. rate: factor of the tables' learning rates."""
        self._pushes.put(_Push(self._taken - 1, batch, rows, self._admitted, gradients, rate))

    def skip(self) -> None:
        """The item just taken changes nothing."""
        self._settle(self._taken - 1)

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

    def _settle(self, number: int) -> None:
        with self._changed:
            self._settled_early.add(number)
            while self._settled in self._settled_early:
                self._settled_early.remove(self._settled)
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
                    pulled = self._pull(batch, self._growth)
                finally:
                    with self._changed:
                        self._pulling = False
                        self._changed.notify_all()
                self._ready.put(_Ready(batch, pulled, era))
                self._has_first.set()
                self._traffic.ready_batches = self._ready.qsize()
        except BaseException as error:  # noqa: BLE001  raised again in the training thread
            self._ready.put(error)
        else:
            self._ready.put(StopIteration())
        finally:
            self._has_first.set()

    def _must_wait(self, number: int) -> bool:
        """Whether batch `number` may not be pulled yet."""
        return self._held or self._released < number - self._staleness

    def _pull(self, batch: Batch, growth: NewKeyCounter | None = None) -> _Pulled:
        start = time.perf_counter()
        if growth is None and not self._first_order:
            pull = self._client.pull
            pulled = _Pulled(
                {n: pull(n, keys.keys_U, **self._classes(n, keys)) for n, keys in batch.tables.items()}, {}
            )
        else:
            pull_both = self._client.pull_with_counts
            found = {n: pull_both(n, keys.keys_U, **self._classes(n, keys)) for n, keys in batch.tables.items()}
            pulled = _Pulled(
                {name: each.values_UW for name, each in found.items()},
                {name: each.admitted_U for name, each in found.items() if name in self._first_order},
            )
            if growth is not None:
                growth.observe(batch, {name: each.shows_U for name, each in found.items()})
        rows = pulled.rows
        self._traffic.pulls.observe(time.perf_counter() - start)
        self._traffic.pulled_keys += sum(len(values) for values in rows.values())
        self._traffic.pulled_bytes += sum(values.nbytes for values in rows.values())
        return pulled

    def _classes(self, name: str, keys: TableKeys) -> dict[str, NDArray[np.uint8]]:
        return class_arguments(keys, self._tables.get(name))

    def _push_all(self) -> None:
        try:
            while (item := self._pushes.get()) is not None:
                start = time.perf_counter()
                self._push(item)
                self._traffic.pushes.observe(time.perf_counter() - start)
                self._settle(item.number)
        except BaseException as error:  # noqa: BLE001  raised again in the training thread
            self._fail(error)

    def _push(self, item: _Push) -> None:
        batch, rows = item.batch, item.rows
        for name, keys in batch.tables.items():
            if len(keys.keys_U):
                shows_U, clicks_U = occurrences(keys, batch.labels_BL[:, 0])
                grads_UW = item.gradients[name]
                if self._l2:
                    grads_UW = grads_UW + self._l2 * shows_U[:, None] * rows[name]
                if name in item.admitted:
                    grads_UW = _admitted_part(grads_UW, item.admitted[name], first_order=self._first_order[name])
                more: dict[str, Any] = {**self._classes(name, keys)}
                if item.rate != 1.0:
                    more["rate"] = item.rate
                self._client.push(name, keys.keys_U, grads_UW, shows_U, clicks_U, **more)
                self._traffic.pushed_bytes += grads_UW.nbytes


def _admitted_part(grads_UW: Floats, admitted_U: NDArray[np.bool_], *, first_order: bool) -> Floats:
    """The gradients, without those of embeddings that nobody saw."""
    if admitted_U.all():
        return grads_UW
    first = int(first_order)
    return np.concatenate([grads_UW[:, :first], np.where(admitted_U[:, None], grads_UW[:, first:], 0.0)], axis=1)
