"""How stale a pull may be, errors of both threads, and the counts that go with a push."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from paddlewheel.data_pipeline.batch import Batch, TableKeys
from paddlewheel.pserver.client import Pulled
from paddlewheel.pserver.config import TableConfig
from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingPipeline, occurrences
from paddlewheel.trainer.loop.new_keys import NewKeyCounter


def _batch(number: int) -> Batch:
    single = np.array([[1, 0], [1, 2]], np.int32)
    tags = np.array([[2, 2, 1], [0, 0, 0]], np.int32)
    keys = TableKeys(np.array([7, 8], np.uint64), {"a": single[:, 0], "b": single[:, 1], "t": tags}, single, ("a", "b"))
    return Batch(
        num_rows=2,
        dense_BD=np.zeros((2, 0), np.float32),
        labels_BL=np.array([[1.0], [0.0]], np.float32),
        tables={"default": keys},
        spans=(),
        num_skipped_rows=number,
    )


class _Table:
    """A server of one counter: a pull returns how many pushes it has seen."""

    def __init__(self, fail_pull_at: int | None = None, *, fail_push: bool = False) -> None:
        self.pushes: list[tuple] = []
        self.pulls = 0
        self.fail_pull_at, self.fail_push = fail_pull_at, fail_push
        self.gate = threading.Event()
        self.gate.set()

    def pull(self, table: str, keys_U: np.ndarray) -> np.ndarray:
        self.pulls += 1
        if self.pulls - 1 == self.fail_pull_at:
            raise ConnectionError("no server")
        return np.full((len(keys_U), 1), len(self.pushes), np.float32)

    def push(self, table: str, *arrays: np.ndarray) -> None:
        assert self.gate.wait(20)
        if self.fail_push:
            raise ConnectionError("push refused")
        self.pushes.append(arrays)


def test_occurrences_count_every_id_and_its_label() -> None:
    batch = _batch(0)
    shows, clicks = occurrences(batch.tables["default"], batch.labels_BL[:, 0])
    np.testing.assert_array_equal(shows, [3, 3])  # key 7: a, a, t; key 8: b, t, t
    np.testing.assert_array_equal(clicks, [2, 2])


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_pull_never_lacks_more_pushes_than_allowed(staleness: int) -> None:
    table = _Table()
    seen = []
    with EmbeddingPipeline(table, iter(map(_batch, range(20))), max_staleness_steps=staleness) as exchange:
        for number, (batch, rows) in enumerate(exchange):
            seen.append(number - rows["default"][0, 0])
            exchange.push(batch, rows, {"default": np.zeros((2, 1), np.float32)})
        exchange.drain()
        assert len(table.pushes) == 20
    assert max(seen) <= staleness
    if staleness == 0:
        assert seen == [0] * 20


def test_pulls_do_run_ahead_of_a_slow_push() -> None:
    table = _Table()
    table.gate.clear()
    with EmbeddingPipeline(table, iter(map(_batch, range(5))), max_staleness_steps=2) as exchange:
        lags = []
        for number in range(3):
            batch, rows = next(exchange)
            lags.append(number - rows["default"][0, 0])
            exchange.push(batch, rows, {"default": np.zeros((2, 1), np.float32)})
        assert lags == [0, 1, 2]
        table.gate.set()


def test_l2_is_per_occurrence() -> None:
    table = _Table()
    table.pushes.append(())  # so that the pulled value is 1
    with EmbeddingPipeline(table, iter([_batch(0)]), max_staleness_steps=0, embedding_l2=0.5) as exchange:
        batch, rows = next(exchange)
        exchange.push(batch, rows, {"default": np.full((2, 1), 0.25, np.float32)})
        exchange.drain()
    _, grads, shows, _ = table.pushes[-1]
    np.testing.assert_array_equal(grads[:, 0], 0.25 + 0.5 * shows)


def test_a_failed_pull_reaches_the_training_thread() -> None:
    with EmbeddingPipeline(_Table(fail_pull_at=1), iter(map(_batch, range(5))), max_staleness_steps=0) as exchange:
        next(exchange)
        exchange.skip()
        with pytest.raises(ConnectionError, match="no server"):
            next(exchange)


def test_a_failed_push_reaches_the_training_thread() -> None:
    with EmbeddingPipeline(_Table(fail_push=True), iter(map(_batch, range(5))), max_staleness_steps=0) as exchange:
        batch, rows = next(exchange)
        exchange.push(batch, rows, {"default": np.zeros((2, 1), np.float32)})
        with pytest.raises(ConnectionError, match="push refused"):
            exchange.drain()
        with pytest.raises(ConnectionError, match="push refused"):
            next(exchange)


def test_an_error_of_the_reader_reaches_the_training_thread() -> None:
    def batches():
        yield _batch(0)
        raise ValueError("bad file")

    with EmbeddingPipeline(_Table(), batches(), max_staleness_steps=0) as exchange:
        next(exchange)
        exchange.skip()
        with pytest.raises(ValueError, match="bad file"):
            next(exchange)


def test_close_ends_the_threads_whatever_they_wait_for() -> None:
    before = threading.active_count()
    exchange = EmbeddingPipeline(_Table(), iter(map(_batch, range(100))), max_staleness_steps=1)
    next(exchange)
    exchange.close()
    assert threading.active_count() == before


def test_while_it_is_held_nothing_is_pulled_and_what_was_is_pulled_again() -> None:
    table = _Table()
    with EmbeddingPipeline(table, iter(map(_batch, range(6))), max_staleness_steps=2) as exchange:
        batch, rows = next(exchange)
        exchange.push(batch, rows, {"default": np.zeros((2, 1), np.float32)})
        exchange.drain()
        with exchange.held():
            before = table.pulls
            table.pushes += [()] * 1000  # the boundary changes the table
            assert not exchange._pulling
        for _ in range(5):
            batch, rows = next(exchange)
            assert rows["default"][0, 0] >= 1000
            exchange.push(batch, rows, {"default": np.zeros((2, 1), np.float32)})
        exchange.drain()
        assert before <= 3 + 1
        with pytest.raises(StopIteration):
            next(exchange)


def test_a_skipped_batch_does_not_stand_in_for_a_push_that_is_on_its_way() -> None:
    table = _Table()
    table.gate.clear()
    with EmbeddingPipeline(table, iter(map(_batch, range(9))), max_staleness_steps=1) as exchange:
        batch, rows = next(exchange)
        exchange.push(batch, rows, {"default": np.zeros((2, 1), np.float32)})  # stays on its way
        next(exchange)
        exchange.skip()
        with exchange._changed:
            assert exchange._settled == 0
            assert exchange._must_wait(2), "batch 2 lacks the push of batch 0, two steps before it"
        table.gate.set()
        seen = [rows["default"][0, 0] for _, rows in _skipping(exchange)]
    assert seen[0] == 1, "batch 2 was pulled after the push"
    assert len(seen) == 7


def _skipping(exchange: EmbeddingPipeline):
    for item in exchange:
        yield item
        exchange.skip()


def test_draining_waits_for_a_push_before_a_skipped_batch() -> None:
    table = _Table()
    table.gate.clear()
    with EmbeddingPipeline(table, iter(map(_batch, range(2))), max_staleness_steps=1) as exchange:
        batch, rows = next(exchange)
        exchange.push(batch, rows, {"default": np.zeros((2, 1), np.float32)})
        next(exchange)
        exchange.skip()
        threading.Timer(0.05, table.gate.set).start()
        exchange.drain()
        assert len(table.pushes) == 1


def test_the_first_batch_can_be_waited_for() -> None:
    gate = threading.Event()

    def slow():
        assert gate.wait(20)
        yield _batch(0)

    with EmbeddingPipeline(_Table(), slow(), max_staleness_steps=0) as exchange:
        threading.Timer(0.05, gate.set).start()
        exchange.wait_for_first()
        assert exchange._ready.qsize() > 0
    with EmbeddingPipeline(_Table(), iter(()), max_staleness_steps=0) as exchange:
        exchange.wait_for_first()  # the end is something to have, too


class _Admitting(_Table):
    """A table with a first-order weight; key 7 has not been shown often enough, key 8 has."""

    def pull_with_counts(self, table: str, keys_U: np.ndarray) -> Pulled:
        ones = np.ones(len(keys_U), np.float32)
        return Pulled(np.ones((len(keys_U), 3), np.float32), ones, ones, keys_U == 8)


@pytest.mark.parametrize("boundary", [False, True], ids=["pulled-ahead", "pulled-again"])
def test_gradients_of_embeddings_that_nobody_saw_are_not_pushed(boundary: bool) -> None:
    table = _Admitting()
    config = {"default": TableConfig(width=2, admission_threshold=3)}
    with EmbeddingPipeline(
        table, iter([_batch(0)]), max_staleness_steps=0, tables=config, growth=NewKeyCounter()
    ) as exchange:
        exchange.wait_for_first()
        if boundary:
            with exchange.held():
                pass
        batch, rows = next(exchange)
        exchange.push(batch, rows, {"default": np.full((2, 3), 5.0, np.float32)})
        exchange.drain()
    _, grads, _, _ = table.pushes[-1]
    np.testing.assert_array_equal(grads, [[5, 0, 0], [5, 5, 5]])


def test_counts_can_be_read_while_names_come_up() -> None:
    growth, stop, errors = NewKeyCounter(), threading.Event(), []

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            keys = replace(_batch(0).tables["default"])
            growth.observe(replace(_batch(0), tables={f"t{number % 997}": keys}), {f"t{number % 997}": np.zeros(2)})

    def read() -> None:
        try:
            for _ in range(2_000):
                tables, features = growth.counts()
                sum(tables.values())
                features.most_common(3)
        except RuntimeError as error:
            errors.append(error)

    writer, reader = threading.Thread(target=write), threading.Thread(target=read)
    writer.start()
    reader.start()
    reader.join()
    stop.set()
    writer.join()
    assert errors == []


def test_growth_counts_new_keys_by_table_and_feature() -> None:
    growth = NewKeyCounter()
    growth.observe(_batch(0), {"default": np.array([0, 3], np.float32)})  # key 7 is new: a twice, b never, t once
    growth.observe(_batch(1), {"default": np.array([1, 4], np.float32)})
    assert growth.new_keys == {"default": 1}
    assert growth.new_keys_of_features == {"a": 1, "b": 0, "t": 1}
    growth.observe(_batch(2), {"default": np.zeros(2, np.float32)})
    assert growth.new_keys == {"default": 3}
    assert growth.new_keys_of_features == {"a": 2, "b": 1, "t": 3}


@pytest.mark.parametrize("share", [0.001, 0.05, 1.0])
def test_growth_by_feature_is_that_of_sets(share: float) -> None:
    rng = np.random.default_rng(3)
    single = rng.integers(0, 401, (300, 3)).astype(np.int32)
    tags = rng.integers(0, 401, (300, 4)).astype(np.int32)
    names = ("a", "b", "c")
    index = {**{name: single[:, i] for i, name in enumerate(names)}, "t": tags}
    keys = TableKeys(np.arange(1, 401, dtype=np.uint64), index, single, names)
    shows = np.where(rng.random(400) < share, 0, 3).astype(np.float32)
    shows[7] = 0
    growth = NewKeyCounter()
    growth.observe(replace(_batch(0), tables={"default": keys}), {"default": shows})
    new = set((np.flatnonzero(shows == 0) + 1).tolist())
    assert growth.new_keys["default"] == len(new)
    for name, at in index.items():
        assert growth.new_keys_of_features[name] == len(new & set(at.ravel().tolist())), name
