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
from paddlewheel.trainer.loop.pull_ahead import PullAhead
from tests.support.fakes import CountingTables


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


def test_occurrences_count_every_id_and_its_label() -> None:
    batch = _batch(0)
    shows, clicks = occurrences(batch.tables["default"], batch.labels_BL[:, 0])
    np.testing.assert_array_equal(shows, [3, 3])  # key 7: a, a, t; key 8: b, t, t
    np.testing.assert_array_equal(clicks, [2, 2])


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_pull_never_lacks_more_pushes_than_allowed(staleness: int) -> None:
    table = CountingTables()
    seen = []
    with EmbeddingPipeline(table, iter(map(_batch, range(20))), max_staleness_steps=staleness) as pipeline:
        for number, item in enumerate(pipeline):
            seen.append(number - item.rows["default"][0, 0])
            item.push({"default": np.zeros((2, 1), np.float32)})
        pipeline.drain()
        assert len(table.pushes) == 20
    assert max(seen) <= staleness
    if staleness == 0:
        assert seen == [0] * 20


def test_pulls_do_run_ahead_of_a_slow_push() -> None:
    table = CountingTables()
    table.gate.clear()
    with EmbeddingPipeline(table, iter(map(_batch, range(5))), max_staleness_steps=2) as pipeline:
        lags = []
        for number in range(3):
            item = next(pipeline)
            lags.append(number - item.rows["default"][0, 0])
            item.push({"default": np.zeros((2, 1), np.float32)})
        assert lags == [0, 1, 2]
        table.gate.set()


def test_l2_is_per_occurrence() -> None:
    table = CountingTables()
    table.pushes.append(())  # so that the pulled value is 1
    with EmbeddingPipeline(table, iter([_batch(0)]), max_staleness_steps=0, embedding_l2=0.5) as pipeline:
        item = next(pipeline)
        item.push({"default": np.full((2, 1), 0.25, np.float32)})
        pipeline.drain()
    _, grads, shows, _ = table.pushes[-1]
    np.testing.assert_array_equal(grads[:, 0], 0.25 + 0.5 * shows)


def test_a_failed_pull_reaches_the_training_thread() -> None:
    with EmbeddingPipeline(
        CountingTables(fail_pull_at=1), iter(map(_batch, range(5))), max_staleness_steps=0
    ) as pipeline:
        next(pipeline).discard()
        with pytest.raises(ConnectionError, match="no server"):
            next(pipeline)


def test_a_failed_push_reaches_the_training_thread() -> None:
    with EmbeddingPipeline(
        CountingTables(fail_push=True), iter(map(_batch, range(5))), max_staleness_steps=0
    ) as pipeline:
        item = next(pipeline)
        item.push({"default": np.zeros((2, 1), np.float32)})
        with pytest.raises(ConnectionError, match="push refused"):
            pipeline.drain()
        with pytest.raises(ConnectionError, match="push refused"):
            next(pipeline)


def test_an_error_of_the_reader_reaches_the_training_thread() -> None:
    def batches():
        yield _batch(0)
        raise ValueError("bad file")

    with EmbeddingPipeline(CountingTables(), batches(), max_staleness_steps=0) as pipeline:
        next(pipeline).discard()
        with pytest.raises(ValueError, match="bad file"):
            next(pipeline)


def test_close_ends_the_threads_whatever_they_wait_for() -> None:
    before = threading.active_count()
    pipeline = EmbeddingPipeline(CountingTables(), iter(map(_batch, range(100))), max_staleness_steps=1)
    next(pipeline)
    pipeline.close()
    assert threading.active_count() == before


def test_while_it_is_held_nothing_is_pulled_and_what_was_is_pulled_again() -> None:
    table = CountingTables()
    with EmbeddingPipeline(table, iter(map(_batch, range(6))), max_staleness_steps=2) as pipeline:
        item = next(pipeline)
        item.push({"default": np.zeros((2, 1), np.float32)})
        pipeline.drain()
        with pipeline.held():
            before = table.pulls
            table.pushes += [()] * 1000  # the boundary changes the table
            assert not pipeline._pulling
        for _ in range(5):
            item = next(pipeline)
            assert item.rows["default"][0, 0] >= 1000
            item.push({"default": np.zeros((2, 1), np.float32)})
        pipeline.drain()
        assert before <= 3 + 1
        with pytest.raises(StopIteration):
            next(pipeline)


def test_a_skipped_batch_does_not_stand_in_for_a_push_that_is_on_its_way() -> None:
    table = CountingTables()
    table.gate.clear()
    with EmbeddingPipeline(table, iter(map(_batch, range(9))), max_staleness_steps=1) as pipeline:
        item = next(pipeline)
        item.push({"default": np.zeros((2, 1), np.float32)})  # stays on its way
        next(pipeline).discard()
        with pipeline._changed:
            assert pipeline._settled == 0
            assert not pipeline._may_pull(2), "batch 2 lacks the push of batch 0, two steps before it"
        table.gate.set()
        seen = [item.rows["default"][0, 0] for item in _discarding(pipeline)]
    assert seen[0] == 1, "batch 2 was pulled after the push"
    assert len(seen) == 7


def _discarding(pipeline: EmbeddingPipeline):
    for item in pipeline:
        yield item
        item.discard()


def test_draining_waits_for_a_push_before_a_skipped_batch() -> None:
    table = CountingTables()
    table.gate.clear()
    with EmbeddingPipeline(table, iter(map(_batch, range(2))), max_staleness_steps=1) as pipeline:
        item = next(pipeline)
        item.push({"default": np.zeros((2, 1), np.float32)})
        next(pipeline).discard()
        threading.Timer(0.05, table.gate.set).start()
        pipeline.drain()
        assert len(table.pushes) == 1


def test_an_item_is_pushed_or_discarded_once() -> None:
    table = CountingTables()
    gradients = {"default": np.zeros((2, 1), np.float32)}
    with EmbeddingPipeline(table, iter(map(_batch, range(2))), max_staleness_steps=1) as pipeline:
        first, second = next(pipeline), next(pipeline)
        second.discard()
        with pytest.raises(RuntimeError, match="1 items were taken from the pipeline and neither pushed nor discarded"):
            pipeline.drain()
        first.push(gradients)
        pipeline.drain()
        for again in (first, second):
            with pytest.raises(RuntimeError, match="was pushed or discarded before"):
                again.discard()
            with pytest.raises(RuntimeError, match="was pushed or discarded before"):
                again.push(gradients)
        assert len(table.pushes) == 1


def test_a_failed_push_wakes_who_waits_for_a_batch() -> None:
    table, gate = CountingTables(fail_push=True), threading.Event()
    table.gate.clear()

    def batches():
        yield _batch(0)
        assert gate.wait(20)

    with EmbeddingPipeline(table, batches(), max_staleness_steps=1) as pipeline:
        next(pipeline).push({"default": np.zeros((2, 1), np.float32)})
        threading.Timer(0.05, table.gate.set).start()
        with pytest.raises(ConnectionError, match="push refused"):
            next(pipeline)
        gate.set()


def test_reading_ahead_keeps_payloads_in_order_and_pulls_nothing_for_batches_without_rows() -> None:
    table = CountingTables()
    payloads = [("a", _batch(0)), ("none", replace(_batch(1), num_rows=0)), ("b", _batch(2))]
    with PullAhead(table, payloads, lambda payload: payload[1], ahead=2) as ahead:
        found = [(item.payload[0], sorted(item.rows)) for item in ahead]
    assert found == [("a", ["default"]), ("none", []), ("b", ["default"])]
    assert table.pulls == 2


def test_reading_ahead_is_bounded() -> None:
    table, drawn = CountingTables(), []

    def batches():
        for number in range(10):
            drawn.append(number)
            yield _batch(number)

    with PullAhead(table, batches(), lambda batch: batch, ahead=2) as ahead:
        for number, item in enumerate(ahead):
            assert item.payload.num_skipped_rows == number
            assert table.pulls <= number + 3
    assert drawn == list(range(10))


def test_the_first_batch_can_be_waited_for() -> None:
    gate = threading.Event()

    def slow():
        assert gate.wait(20)
        yield _batch(0)

    with EmbeddingPipeline(CountingTables(), slow(), max_staleness_steps=0) as pipeline:
        threading.Timer(0.05, gate.set).start()
        pipeline.wait_for_first()
        assert len(pipeline._ready) > 0
    with EmbeddingPipeline(CountingTables(), iter(()), max_staleness_steps=0) as pipeline:
        pipeline.wait_for_first()  # the end is something to have, too


class _Admitting(CountingTables):
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
    ) as pipeline:
        pipeline.wait_for_first()
        if boundary:
            with pipeline.held():
                pass
        item = next(pipeline)
        item.push({"default": np.full((2, 3), 5.0, np.float32)})
        pipeline.drain()
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
