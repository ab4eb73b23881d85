"""Exactly once, in thousands of histories: random speeds, failed saves, losses at any moment, other numbers of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlewheel.trainer.agent import worker_process
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.coordinator.row_ledger import (
    Cursor,
    EpochPlan,
    RowLedger,
    RowLedgerError,
    prove,
    runs_of,
    sizes_of,
)
from paddlewheel.trainer.protocol.messages import CursorRequest, EpochRequest, Request, read_event, to_line
from tests.support.plans import epoch_request

SEED = 3


def report(step: int, spans: Any, *, skipped: Any = (), epoch: int = 0) -> CursorRequest:
    tuples = [tuple(tuple(span) for span in found) for found in (spans, skipped)]
    return CursorRequest(step=step, epoch=epoch, spans=tuples[0], skipped=tuples[1])


class Trainer:
    """Reads slices in leased order, a random number of rows at a time, and remembers what it trained."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.open: list[list[int]] = []  # [slice, next row, rows]
        self.spans: list[list[int]] = []
        self.exhausted = False


class Run:
    """A job on one RowLedger: `sizes` rows by slice, the same in every epoch but in another order."""

    def __init__(self, order: random.Random, sizes: list[int], num_epochs: int, *, dynamic: bool) -> None:
        self.order, self.sizes, self.num_epochs, self.dynamic = order, dict(enumerate(sizes)), num_epochs, dynamic
        self.lineage = RowLedger(1, num_epochs)
        self.line: list[dict[str, Any]] = []  # committed cursors
        self.attempt = 0
        self.step = 0

    def start(self, num_trainers: int) -> None:
        self.attempt += 1
        self.lineage = RowLedger(num_trainers, self.num_epochs, self.line[-1] if self.line else None)
        self.lineage.begin(self.attempt)
        self.trainers = [Trainer(rank) for rank in range(num_trainers)]
        position = self.line[-1] if self.line else {"step": 0, "position": {"epoch": 0}}
        self.step, self.epoch = position["step"], position["position"]["epoch"]
        if self.epoch < self.num_epochs:
            self.open_epoch()

    def open_epoch(self) -> None:
        plan = list(self.sizes.items())
        random.Random(self.epoch).shuffle(plan)
        asked = epoch_request(dict(plan), self.epoch, SEED)
        replies = [self.lineage.open_epoch(asked)[0] for _ in self.trainers]
        assert all(reply == replies[0] for reply in replies)
        self.done = replies[0]
        for trainer in self.trainers:
            trainer.exhausted = False
            if not self.dynamic:
                mine = [s for s in plan if s[0] % len(self.trainers) == trainer.rank and self.done.get(s[0], 0) < s[1]]
                trainer.open = [[index, self.done.get(index, 0), rows] for index, rows in mine]
                trainer.exhausted = True

    def train(self) -> bool:
        """One step of all trainers; False when no rows were left."""
        self.step += 1
        trained = 0
        for trainer in self.order.sample(self.trainers, len(self.trainers)):
            while not trainer.exhausted and len(trainer.open) < 3:
                indices = self.lineage.lease(trainer.rank, self.epoch)
                trainer.exhausted = not indices
                trainer.open += [[index, self.done.get(index, 0), self.sizes[index]] for index in indices]
            for _ in range(self.order.randint(0 if trained else 1, 3)):
                if not trainer.open:
                    break
                piece = self.order.choice(trainer.open)
                rows = self.order.randint(1, piece[2] - piece[1])
                trainer.spans.append([self.epoch, piece[0], piece[1], rows])
                trained += rows
                piece[1] += rows
                if piece[1] == piece[2]:
                    trainer.open.remove(piece)
        return trained > 0

    def save(self) -> Cursor:
        for place, trainer in enumerate(self.order.sample(self.trainers, len(self.trainers))):
            asked = report(self.step, trainer.spans, skipped=trainer.spans[:1], epoch=self.epoch)
            trainer.spans = []
            cursor = self.lineage.report(trainer.rank, asked)
            assert (cursor is not None) == (place == len(self.trainers) - 1)
        assert cursor is not None
        return cursor

    def commit(self, cursor: Cursor) -> None:
        self.lineage.commit_finished(cursor, committed=True)
        assert cursor.body["parent"] == (self.line[-1]["draft"] if self.line else None)
        self.line.append(dict(cursor.body))


@settings(max_examples=1500)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    num_epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    dynamic=st.booleans(),
)
def test_every_row_is_trained_once_whatever_is_lost(
    sizes: list[int], num_epochs: int, seed: int, dynamic: bool
) -> None:
    order = random.Random(seed)
    run = Run(order, sizes, num_epochs, dynamic=dynamic)
    losses = order.randint(0, 6)
    while True:
        run.start(order.randint(1, 4))
        lost = False
        while run.epoch < num_epochs and not lost:
            more = run.train()
            if not more:
                run.epoch += 1
            what = order.random()
            if losses and what < 0.15:
                losses, lost = losses - 1, True
            elif what < 0.4 or run.epoch == num_epochs:
                cursor = run.save()
                if losses and order.random() < 0.3:
                    losses, lost = losses - 1, True
                    if order.random() < 0.5:
                        run.commit(cursor)  # it was committed, but nobody lived to hear of it
                elif order.random() < 0.2 and run.epoch < num_epochs:
                    run.lineage.commit_finished(cursor, committed=False)
                else:
                    run.commit(cursor)
                    assert run.lineage.is_last(cursor) or run.epoch < num_epochs
            if not lost and not more and run.epoch < num_epochs:
                run.open_epoch()
        if not lost or (run.line and run.line[-1]["position"]["epoch"] == num_epochs):
            break
    proofs = prove(dict.fromkeys(range(num_epochs), run.sizes), run.line)
    assert [proof.epoch for proof in proofs] == list(range(num_epochs))
    assert all(proof.is_exact and proof.num_trained == sum(sizes) for proof in proofs), proofs
    assert run.line[-1]["rows"] == sum(sizes) * num_epochs
    assert run.line[-1]["position"]["done"] == []


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40), num_trainers=st.integers(1, 5), seed=st.integers(0, 99)
)
def test_a_greedy_trainer_gets_its_share_and_no_more(sizes: list[int], num_trainers: int, seed: int) -> None:
    order = random.Random(seed)
    lineage = RowLedger(num_trainers, 1)
    lineage.begin(1)
    lineage.open_epoch(epoch_request(dict(enumerate(sizes))))
    given_out: dict[int, list[int]] = {}
    for rank in order.sample(range(num_trainers), num_trainers):  # each takes all it can get before the next one asks
        given_out[rank] = []
        while leased := lineage.lease(rank, 0):
            given_out[rank] += leased
    assert sorted(index for indices in given_out.values() for index in indices) == list(range(len(sizes)))
    share = -(-sum(sizes) // num_trainers)
    assert all(sum(sizes[index] for index in indices) < share + max(sizes) for indices in given_out.values())


def one(spans: list[list[int]], *, sizes: dict[int, int] | None = None, num_epochs: int = 2) -> Cursor | None:
    lineage = RowLedger(1, num_epochs)
    lineage.begin(1)
    lineage.open_epoch(epoch_request(sizes or {0: 10, 1: 10}))
    return lineage.report(0, report(3, spans))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[0, 0, 0, 5], [0, 0, 4, 2]], "slice 0 of epoch 0: rows 4 to 5 trained twice"),
        ([[0, 0, 0, 5], [0, 0, 6, 2]], "slice 0 of epoch 0: rows 5 to 6 left out"),
        ([[0, 0, 1, 5]], "rows 0 to 1 left out"),
        ([[0, 0, 0, 11]], "11 rows trained of 10"),
        ([[0, 7, 0, 1]], "slice 7 of epoch 0 was trained, which no plan holds"),
        ([[1, 0, 0, 1]], "slice 0 of epoch 1 was trained, which no plan holds"),
        ([[0, 0, 0, 0]], "a span of 0 rows"),
    ],
)
def test_spans_that_do_not_fit_are_refused(spans: list[list[int]], message: str) -> None:
    with pytest.raises(RowLedgerError, match=message):
        one(spans)


def test_an_epoch_does_not_begin_before_the_one_before_it_is_complete() -> None:
    lineage = RowLedger(1, 2)
    lineage.begin(1)
    for epoch in (0, 1):
        lineage.open_epoch(epoch_request({0: 10, 1: 10}, epoch))
    with pytest.raises(RowLedgerError, match="epoch 1 was begun before rows 5 to 10 of slice 1 of epoch 0"):
        lineage.report(0, report(1, [[0, 0, 0, 10], [0, 1, 0, 5], [1, 0, 0, 1]], epoch=1))


def test_trainers_that_read_different_data_are_told() -> None:
    lineage = RowLedger(2, 1)
    lineage.begin(1)
    asked = epoch_request({0: 10})
    lineage.open_epoch(asked)
    with pytest.raises(RowLedgerError, match="do not read the same data") as refusal:
        lineage.open_epoch(asked.model_copy(update={"fingerprint": "g"}))
    assert refusal.value.kind == "data"
    with pytest.raises(RowLedgerError, match="same data"):
        lineage.open_epoch(epoch_request({0: 9}))


@pytest.mark.parametrize("key", ["fingerprint", "order", "seed"])
def test_other_data_than_the_checkpoints_is_refused_in_the_middle_of_an_epoch(key: str) -> None:
    other: dict[str, Any] = {key: 2 if key == "seed" else "other"}
    cursor = one([[0, 0, 0, 5]], sizes={0: 10})
    assert cursor is not None
    lineage = RowLedger(1, 2, cursor.body)
    lineage.begin(2)
    with pytest.raises(RowLedgerError, match=key) as refusal:
        lineage.open_epoch(epoch_request({0: 10}).model_copy(update=other))
    assert refusal.value.kind == "data"
    at_the_end = one([[0, 0, 0, 10]], sizes={0: 10})
    assert at_the_end is not None
    after = RowLedger(1, 2, at_the_end.body)
    after.begin(2)
    assert after.open_epoch(epoch_request({0: 10}, epoch=1).model_copy(update=other))[0] == {}


def test_trainers_at_different_steps_are_told() -> None:
    lineage = RowLedger(2, 1)
    lineage.begin(1)
    lineage.report(0, report(4, []))
    with pytest.raises(RowLedgerError, match="different steps: 4 and 5"):
        lineage.report(1, report(5, []))


def test_the_proof_counts_what_was_trained_twice_or_never() -> None:
    line = [{"spans": [[0, 0, 0, 5]], "skipped": [[0, 0, 0, 2]]}, {"spans": [[0, 0, 3, 4], [0, 1, 2, 2]]}]
    proof = prove({0: {0: 10, 1: 4}}, line)[0]
    assert (proof.num_repeated, proof.num_missing, proof.num_skipped) == (2, 5, 2)
    assert not proof.is_exact


@given(st.dictionaries(st.integers(0, 60), st.integers(1, 3), max_size=40))
def test_sizes_as_runs_are_the_same_sizes(sizes: dict[int, int]) -> None:
    assert sizes_of(runs_of(sizes)) == sizes


def test_two_million_slices_fit_into_one_event() -> None:
    """Of many small row groups: indices in the order of the epoch, sizes as runs."""
    number = 2_000_000
    order = list(range(number))
    random.Random(1).shuffle(order)
    sizes = runs_of({index: 1000 if index % 100 else 900 for index in range(number)})
    asked = EpochRequest(epoch=0, fingerprint="f", order="o", seed=1, slices=tuple(order), sizes=sizes)
    line = to_line(Request(id=1, ask=asked))
    assert len(line) < worker_process._MAX_LINE_BYTES
    message = pb.WorkerEvent()
    wire.put_union(message, read_event(line))
    assert message.ByteSize() < worker_process._MAX_LINE_BYTES
    heard = wire.read_union(message, "event")
    assert heard.ask == asked
    plan = EpochPlan.from_request(heard.ask)
    assert (list(plan.sizes), plan.sizes[7], plan.sizes[200]) == (order, 1000, 900)


@pytest.mark.parametrize("runs", [[[0, 1 << 40, 5]], [[0, 0, 5]], [[0, -3, 5]], [[0, 5, 5], [5, 1 << 26, 5]]])
def test_runs_that_no_data_has_are_refused_before_they_are_unrolled(runs: list[list[int]]) -> None:
    with pytest.raises(RowLedgerError, match="slices"):
        sizes_of(runs)
