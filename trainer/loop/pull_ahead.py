"""Reads batches and pulls their embeddings in a thread of its own, ahead of whoever scores or trains them.

Legend: U unique keys of a table, W floats of a pulled row.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from paddlewheel.data_pipeline.batch import Batch

Floats = NDArray[np.float32]
Payload = TypeVar("Payload")
Item = TypeVar("Item")
Values = TypeVar("Values")


class EmbeddingSource(Protocol):
    """Where embeddings come from: servers, an exported lookup on disk, or tables in memory."""

    def pull(self, table: str, keys_U: NDArray[np.uint64]) -> Floats:
        """Effective values [U, W] of unique keys, none of them 0; see `pserver.client.Client.pull`."""
        ...


@dataclass
class _Ready(Generic[Payload, Values]):
    """An item that can be had. values: None when what was pulled holds no longer."""

    number: int
    payload: Payload
    values: Values | None


class PullThread(ABC, Generic[Payload, Values, Item]):
    """Iterator of items, made in order from payloads that a thread draws and pulls for. Use as a context manager.

    A subclass says when a pull may begin, what is pulled, and what an item is.

    Args:
        payloads: drawn in the pulling thread; an error that it raises is raised by `next` after the items before it.
    """

    def __init__(self, payloads: Iterable[Payload]) -> None:
        self._payloads = payloads
        self._changed = threading.Condition()
        """Guards, and tells of every change to, everything below that two threads use."""
        self._ready: deque[_Ready[Payload, Values]] = deque()
        self._taken = 0
        self._end: BaseException | None = None  # what ended the payloads: StopIteration or an error
        self._error: BaseException | None = None  # raised at once, whatever is ready
        self._closed = self._pulling = False
        self._threads = [threading.Thread(target=self._pull_all, name="pull", daemon=True)]

    def _start(self) -> None:
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def _may_pull(self, number: int) -> bool:
        """Whether the pull for this item, counted from 0, may begin. Asked with `_changed` held."""

    @abstractmethod
    def _pull(self, payload: Payload, *, again: bool = False) -> Values:
        """What is pulled for a payload. again: a second time, since the first values hold no longer."""

    @abstractmethod
    def _item(self, number: int, payload: Payload, values: Values) -> Item:
        """What `next` returns."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._wait_for_item()
            if not self._ready:
                assert self._end is not None
                raise self._end
            ready = self._ready.popleft()
            self._taken += 1
            self._changed.notify_all()
        values = ready.values if ready.values is not None else self._pull(ready.payload, again=True)
        return self._item(ready.number, ready.payload, values)

    def wait_for_first(self) -> None:
        """Return when the first item, or the end, can be had without waiting. Raises what other threads raised."""
        with self._changed:
            self._wait_for_item()

    def close(self) -> None:
        """End all threads. What was pulled and not taken is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_for_item(self) -> None:
        while not self._ready and self._end is None and self._error is None:
            self._changed.wait()
        self._raise_error()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _pull_all(self) -> None:
        end: BaseException = StopIteration()
        try:
            for number, payload in enumerate(self._payloads):
                with self._changed:
                    while not self._may_pull(number) and not self._closed and self._error is None:
                        self._changed.wait()
                    if self._closed or self._error is not None:
                        return
                    self._pulling = True
                try:
                    values = self._pull(payload)
                    with self._changed:
                        self._ready.append(_Ready(number, payload, values))
                finally:
                    with self._changed:
                        self._pulling = False
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  raised again by whoever takes the items
            end = error
        finally:
            with self._changed:
                self._end = end
                self._changed.notify_all()


@dataclass(frozen=True)
class PulledItem(Generic[Payload]):
    """A payload with what was pulled for its batch: values [U, W] by table; nothing for a batch without rows."""

    payload: Payload
    rows: Mapping[str, Floats]


class PullAhead(PullThread[Payload, "dict[str, Floats]", "PulledItem[Payload]"]):
    """Iterator of `PulledItem` payloads in order, for who only reads: evaluation, prediction.

    Args:
        source: what is pulled from.
        payloads: batches, or whatever holds one.
        batch_of: the batch of a payload.
        ahead: how many payloads may lie pulled while another one is worked on.
    """

    def __init__(
        self, source: EmbeddingSource, payloads: Iterable[Payload], batch_of: Callable[[Payload], Batch], *, ahead: int
    ) -> None:
        super().__init__(payloads)
        self._source, self._batch_of, self._ahead = source, batch_of, ahead
        self._start()

    def _may_pull(self, number: int) -> bool:
        return number < self._taken + self._ahead

    def _pull(self, payload: Payload, *, again: bool = False) -> dict[str, Floats]:
        batch = self._batch_of(payload)
        if not batch.num_rows:
            return {}
        return {name: self._source.pull(name, keys.keys_U) for name, keys in batch.tables.items()}

    def _item(self, number: int, payload: Payload, values: dict[str, Floats]) -> PulledItem[Payload]:
        return PulledItem(payload, values)
