"""Sums with 16 bits a number on the wire: exact bookkeeping of what rounding leaves over, the same bits everywhere."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.trainer.dense.inputs import TableLayout
from paddlewheel.trainer.dense.program import DenseProgram, HostGradients
from paddlewheel.trainer.distributed.compression import CompressedSum
from paddlewheel.trainer.distributed.process_group import SingleGroup
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError
from paddlewheel.trainer.job.train import DenseOptimizerConfig
from paddlewheel.trainer.models import parse_model
from tests.support.fakes import ThreadGroup

WIRES = ("bfloat16", "float16")
DIGITS = {"bfloat16": 8, "float16": 11}


class Trainers:
    """All trainers of a run, each with its sum."""

    def __init__(self, num_trainers, num_floats, wire):
        self.places = ThreadGroup.of(num_trainers)
        self.sums = [CompressedSum(place, num_floats, wire) for place in self.places]

    def step(self, gradients_TN, exact_TM):
        """What every trainer has after the sum."""
        with ThreadPoolExecutor(len(self.sums)) as pool:
            list(pool.map(lambda s, g, e: s.all_reduce(g, e), self.sums, gradients_TN, exact_TM))
        return gradients_TN, exact_TM

    def keep(self):
        for each in self.sums:
            each.keep()

    @property
    def owed_TN(self):
        return np.stack([each.owed_N for each in self.sums])


def rounded(value, digits):
    """To `digits` binary digits, ties to even, by Python's exact arithmetic."""
    if value == 0.0:
        return 0.0
    unit = math.ldexp(1.0, math.frexp(value)[1] - digits)
    return round(value / unit) * unit


class Oracle:
    """The scheme in float64: every trainer rounds what it sends, the owner of a number rounds the sum."""

    def __init__(self, num_trainers, num_floats, wire):
        self.chunk, self.digits = -(-num_floats // num_trainers), DIGITS[wire]
        self.owed_TN = np.zeros((num_trainers, num_floats))
        self.left_TN = self.owed_TN.copy()

    def step(self, gradients_TN):
        due_TN = gradients_TN.astype(np.float64) + self.owed_TN
        sums_N = np.zeros(due_TN.shape[1])
        for n in range(due_TN.shape[1]):
            owner = n // self.chunk
            total = 0.0
            for trainer in range(len(due_TN)):
                if trainer != owner:
                    sent = rounded(due_TN[trainer, n], self.digits)
                    self.left_TN[trainer, n] = due_TN[trainer, n] - sent
                    total += sent
            total += due_TN[owner, n]
            sums_N[n] = rounded(total, self.digits)
            self.left_TN[owner, n] = total - sums_N[n]
        return sums_N


@given(
    wire=st.sampled_from(WIRES),
    num_trainers=st.integers(2, 5),
    num_floats=st.integers(1, 23),
    kept=st.lists(st.booleans(), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_was_applied_and_what_is_owed_is_what_was_given(wire, num_trainers, num_floats, kept, seed):
    """In integers, which float32 adds exactly. Steps that are not kept (bad ones) are as if they had not been."""
    rng = np.random.default_rng(seed)
    trainers, oracle = Trainers(num_trainers, num_floats, wire), Oracle(num_trainers, num_floats, wire)
    applied_N, given_N = np.zeros(num_floats), np.zeros(num_floats)
    for keep in kept:
        gradients_TN = rng.integers(-5000, 5001, (num_trainers, num_floats)).astype(np.float32)
        gradients_TN[rng.integers(num_trainers)] *= rng.integers(2)  # perhaps a trainer without rows
        exact_TM = rng.integers(-(2**20), 2**20, (num_trainers, 3)).astype(np.float32)
        true_N, true_M, expected_N = gradients_TN.sum(0), exact_TM.sum(0), oracle.step(gradients_TN)
        largest = np.abs(gradients_TN).max() + np.abs(trainers.owed_TN).max()
        owed_TN = trainers.owed_TN
        sums_TN, sums_TM = trainers.step(gradients_TN, exact_TM)

        np.testing.assert_array_equal(sums_TN, np.tile(expected_N, (num_trainers, 1)))
        np.testing.assert_array_equal(sums_TM, np.tile(true_M, (num_trainers, 1)))
        np.testing.assert_array_equal(trainers.owed_TN, owed_TN)
        if keep:
            trainers.keep()
            oracle.owed_TN = oracle.left_TN.copy()
            applied_N += expected_N
            given_N += true_N
            # half a unit in the last place of what was rounded: numbers of one trainer, or sums of them
            assert np.abs(trainers.owed_TN).max() <= num_trainers * largest * 2.0 ** -DIGITS[wire]
        np.testing.assert_array_equal(trainers.owed_TN, oracle.owed_TN)
    np.testing.assert_array_equal(applied_N + trainers.owed_TN.sum(0), given_N)


@pytest.mark.parametrize("wire", WIRES)
def test_without_feedback_small_gradients_would_be_lost(wire):
    """A number far below the unit of the largest sum still arrives, some steps later."""
    trainers = Trainers(2, 2, wire)
    applied_N = np.zeros(2)
    for _ in range(2**9):
        sums_TN, _ = trainers.step(np.array([[4096.0, 0], [0.25, 0]], np.float32), np.zeros((2, 1), np.float32))
        trainers.keep()
        applied_N += sums_TN[0]
    assert abs(applied_N[0] - 2**9 * 4096.25) <= 32
    assert rounded(4096.25, DIGITS[wire]) == 4096  # what a step would have applied without


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [1e18, 7e4, 1.0, 1e-20, 1e-37])
def test_no_size_overflows_or_vanishes(wire, size):
    """float16 holds nothing above 65504 nor below 6e-8; the scale of each message brings numbers there."""
    rng = np.random.default_rng(0)
    gradients_TN = (rng.standard_normal((3, 50)) * size).astype(np.float32)
    true_N = gradients_TN.astype(np.float64).sum(0)
    sums_TN, _ = Trainers(3, 50, wire).step(gradients_TN, np.zeros((3, 1), np.float32))
    assert np.isfinite(sums_TN).all()
    np.testing.assert_allclose(sums_TN[0], true_N, atol=4 * size * 2.0 ** -DIGITS[wire] * 3)
    assert np.abs(sums_TN).max() > size / 2


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("num_trainers", [2, 3, 4, 8])
def test_bytes_that_a_trainer_sends(wire, num_trainers):
    """4 (T - 1) / T a number, and for each peer two words of scale and the exact numbers."""
    num_floats, num_exact = 840, 7
    trainers = Trainers(num_trainers, num_floats, wire)
    trainers.step(np.ones((num_trainers, num_floats), np.float32), np.ones((num_trainers, num_exact), np.float32))
    for place in trainers.places:
        gradient = 4 * (num_trainers - 1) * num_floats // num_trainers
        assert place.num_sent_bytes == gradient + (num_trainers - 1) * (2 * 2 + 4 * num_exact)


def _program():
    return DenseProgram(
        [TableLayout("t", 3, True, ("a",))],
        num_dense=2,
        num_labels=1,
        model=parse_model({"kind": "lr"}),
        optimizer=DenseOptimizerConfig(),
        seed=0,
        rank=0,
    )


def test_a_step_that_is_not_applied_leaves_the_residual_alone():
    """As the loop does it: sum, and apply only what all found good."""
    program = _program()
    sync, place = ThreadGroup.of(2)
    other = CompressedSum(place, program.num_floats, "bfloat16")
    buffer = program.buffer(3, "bfloat16")

    def step(values_N, tail, *, apply):
        buffer.clear()
        flat_N = np.append(values_N, tail[:2]).astype(np.float32)
        buffer.take(HostGradients(flat_N, {}, np.zeros((1, 1), np.float32)))
        buffer.tail[2:] = tail[2:]
        peer = threading.Thread(
            target=other.all_reduce, args=(np.zeros(program.num_floats, np.float32), np.ones(3, np.float32))
        )
        peer.start()
        buffer.sum(sync)
        peer.join()
        if apply:
            other.keep()
            buffer.apply(1.0)
        return buffer._compressed.owed_N.copy()

    values_N = np.linspace(1, 2, program.num_floats, dtype=np.float32) / 3
    owed_N = step(values_N, [1, 2, 3], apply=True)
    assert list(buffer.tail) == [2, 3, 4]
    assert np.abs(owed_N).max() > 0
    np.testing.assert_array_equal(step(values_N * 7, [1, 2, 3], apply=False), owed_N)
    assert np.any(step(values_N * 7, [1, 2, 3], apply=True) != owed_N)


def test_a_step_without_a_batch_adds_nothing_of_the_one_before():
    """A buffer keeps the last sum until the next gradient is written over it."""
    program = _program()
    buffer, alone = program.buffer(3), SingleGroup()
    buffer.clear()
    buffer.take(HostGradients(np.ones(program.num_floats + 2, np.float32), {}, np.zeros((1, 1), np.float32)))
    buffer.sum(alone)
    assert (buffer._gradient_N == 1).all()
    buffer.clear()
    buffer.sum(alone)
    assert (buffer._all_N == 0).all()


@pytest.mark.parametrize("wire", WIRES)
def test_gpus_sum_float32(wire):
    data = {"train": "x", "labels": ["y"], "sparse": [{"name": "a"}]}
    with pytest.raises(
        ConfigError, match=rf"train\.allreduce_dtype: {wire} is for trainers on CPUs.*train\.device: cpu"
    ):
        JobConfig.parse({"name": "j", "data": data, "train": {"allreduce_dtype": wire, "device": "gpu"}})
    assert (
        JobConfig.parse({"name": "j", "data": data, "train": {"allreduce_dtype": wire}}).train.allreduce_dtype == wire
    )
