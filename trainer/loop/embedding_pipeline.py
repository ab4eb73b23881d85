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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paddlewheel.data_pipeline.batch import Batch, TableKeys
from paddlewheel.pserver.client import Pulled
from paddlewheel.pserver.config import Tables
from paddlewheel.trainer.loop.new_keys import NewKeyCounter
from paddlewheel.trainer.loop.pull_ahead import EmbeddingSource, Floats, PullThread
from paddlewheel.trainer.telemetry import DurationHistogram


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
    """What an `EmbeddingPipeline` has moved, for the metrics. May be shared by one pipeline after the other."""

    pulls: DurationHistogram = field(default_factory=DurationHistogram)
    pushes: DurationHistogram = field(default_factory=DurationHistogram)
    pulled_keys: int = 0
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    staleness_steps: int = 0
    """Of the last pull: batches before it whose push was not yet applied."""
    ready_batches: int = 0


class EmbeddingTables(EmbeddingSource, Protocol):
    """An `EmbeddingSource` that can be trained."""

    def pull_with_counts(self, table: str, keys_U: NDArray[np.uint64]) -> Pulled:
        """As `pull`, with what each key has been shown, and whether it is admitted."""
        ...

    def push(
        self,
        table: str,
        keys_U: NDArray[np.uint64],
        grads_UW: Floats,
        shows_U: Floats,
        clicks_U: Floats,
        *,
        rate: float = 1.0,
    ) -> None:
        """One update for each key; see `pserver.client.Client.push`."""
        ...


class _Values(NamedTuple):
    """What the servers gave for a batch, by table: values [U, W], and of tables with an admission who passed it [U]."""

    rows: dict[str, Floats]
    admitted: dict[str, NDArray[np.bool_]]


class TrainingItem:
    """A batch and what was pulled for it. Either `push` or `discard` must follow, once."""

    __slots__ = ("_admitted", "_number", "_pipeline", "batch", "rows")

    def __init__(self, pipeline: EmbeddingPipeline, number: int, batch: Batch, values: _Values) -> None:
        self._pipeline, self._number, self._admitted = pipeline, number, values.admitted
        self.batch, self.rows = batch, values.rows

    def push(self, gradients: Mapping[str, Floats], rate: float = 1.0) -> None:
        """Send the gradients, [U, W] by table; returns at once. rate: factor of the tables' learning rates."""
        self._pipeline._push_later(_Push(self._number, self.batch, self.rows, self._admitted, gradients, rate))  # noqa: SLF001  its maker

    def discard(self) -> None:
        """This batch changes nothing."""
        self._pipeline._discard(self._number)  # noqa: SLF001


class _Push(NamedTuple):
    """number: of the batch, from 0."""

    number: int
    batch: Batch
    rows: Mapping[str, Floats]
    admitted: Mapping[str, NDArray[np.bool_]]
    gradients: Mapping[str, Floats]
    rate: float


class EmbeddingPipeline(PullThread[Batch, _Values, TrainingItem]):
    """Iterator of `TrainingItem`s in the order of the batches. Use as a context manager.

    Args:
        client: connection to the servers.
        batches: this trainer's batches; drawn in the pulling thread.
        max_staleness_steps: see the module's docstring.
        embedding_l2: L2 penalty per occurrence, added to the gradients before the push.
        wait_for_all: a push counts as applied only after `release`, so that several trainers can keep one step.
        tables: of the batches, if something is pushed: those with an admission need care (see the module).
        traffic: counts what is moved.
        growth: optional counter of first-seen keys.
    """

    def __init__(
        self,
        client: EmbeddingTables,
        batches: Iterable[Batch],
        *,
        max_staleness_steps: int,
        embedding_l2: float = 0.0,
        wait_for_all: bool = False,
        tables: Tables | None = None,
        traffic: Traffic | None = None,
        growth: NewKeyCounter | None = None,
    ) -> None:
        super().__init__(batches)
        self._client, self._l2, self._staleness = client, embedding_l2, max_staleness_steps
        self._settled = 0  # so many batches, the first ones, were discarded or their push has reached the servers
        self._settled_early: set[int] = set()  # numbers of later ones: a discard overtakes the push before it
        self._released = 0  # the same, as far as pulls may count on it
        self._wait_for_all = wait_for_all
        self._first_order = {n: t.first_order for n, t in (tables or {}).items() if t.admission_threshold is not None}
        self._answered: set[int] = set()  # taken items that were pushed or discarded, and are not settled
        self._pushes: queue.SimpleQueue[_Push | None] = queue.SimpleQueue()
        self._held = False
        self._traffic, self._growth = traffic or Traffic(), growth
        self._threads.append(threading.Thread(target=self._push_all, name="push", daemon=True))
        self._start()

    def drain(self) -> None:
        """Return when every push so far is applied on the servers.

        Raises:
            RuntimeError: an item was taken and neither pushed nor discarded; its push would be waited for in vain.
        """
        with self._changed:
            self._raise_error()
            open_items = self._taken - self._settled - len(self._answered)
            if open_items > 0:
                raise RuntimeError(f"{open_items} items were taken from the pipeline and neither pushed nor discarded")
            while self._settled < self._taken and self._error is None:
                self._changed.wait()
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
                for ready in self._ready:
                    ready.values = None
                self._held = False
                self._changed.notify_all()

    def close(self) -> None:
        """End both threads, after the pushes that are on their way. What was pulled and not taken is dropped."""
        self._pushes.put(None)
        super().close()

    def _push_later(self, push: _Push) -> None:
        self._answer(push.number)
        self._pushes.put(push)

    def _discard(self, number: int) -> None:
        self._answer(number)
        self._settle(number)

    def _answer(self, number: int) -> None:
        with self._changed:
            if number < self._settled or number in self._answered:
                raise RuntimeError(f"batch {number} of the pipeline was pushed or discarded before")
            self._answered.add(number)

    def _settle(self, number: int) -> None:
        with self._changed:
            self._settled_early.add(number)
            while self._settled in self._settled_early:
                self._settled_early.remove(self._settled)
                self._answered.remove(self._settled)
                self._settled += 1
            if not self._wait_for_all:
                self._released = self._settled
            self._changed.notify_all()

    def _may_pull(self, number: int) -> bool:
        may = not self._held and self._released >= number - self._staleness
        if may:
            self._traffic.staleness_steps = number - self._settled
        return may

    def _item(self, number: int, payload: Batch, values: _Values) -> TrainingItem:
        return TrainingItem(self, number, payload, values)

    def _pull(self, payload: Batch, *, again: bool = False) -> _Values:
        batch, growth = payload, None if again else self._growth
        start = time.perf_counter()
        if not batch.num_rows:
            pulled = _Values({}, {})
        elif growth is None and not self._first_order:
            pulled = _Values({name: self._client.pull(name, keys.keys_U) for name, keys in batch.tables.items()}, {})
        else:
            found = {name: self._client.pull_with_counts(name, keys.keys_U) for name, keys in batch.tables.items()}
            pulled = _Values(
                {name: each.values_UW for name, each in found.items()},
                {name: each.admitted_U for name, each in found.items() if name in self._first_order},
            )
            if growth is not None:
                growth.observe(batch, {name: each.shows_U for name, each in found.items()})
        rows = pulled.rows
        self._traffic.pulls.observe(time.perf_counter() - start)
        self._traffic.pulled_keys += sum(len(values) for values in rows.values())
        self._traffic.pulled_bytes += sum(values.nbytes for values in rows.values())
        self._traffic.ready_batches = len(self._ready) + (not again)
        return pulled

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
                self._client.push(name, keys.keys_U, grads_UW, shows_U, clicks_U, rate=item.rate)
                self._traffic.pushed_bytes += grads_UW.nbytes


def _admitted_part(grads_UW: Floats, admitted_U: NDArray[np.bool_], *, first_order: bool) -> Floats:
    """The gradients, without those of embeddings that nobody saw."""
    if admitted_U.all():
        return grads_UW
    first = int(first_order)
    return np.concatenate([grads_UW[:, :first], np.where(admitted_U[:, None], grads_UW[:, first:], 0.0)], axis=1)
