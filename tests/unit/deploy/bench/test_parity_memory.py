"""Tables in memory follow the servers' rules: held against the float64 reference, push by push."""

from __future__ import annotations

import numpy as np
import pytest

from paddlewheel.deploy.bench.parity.memory import MemoryClient
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.initializer import Initializer
from tests.support.reference_rules import ReferenceTable

RULES = ["sgd", "adagrad", "adagrad_elementwise", "adam", "adam_shared"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("occurrences", ["sum", "mean"])
@pytest.mark.parametrize(("first_order", "admission"), [(True, None), (False, None), (True, 4)])
def test_every_rule(rule: str, occurrences: str, first_order: bool, admission: int | None) -> None:
    config = TableConfig(
        width=3,
        first_order=first_order,
        admission_threshold=admission,
        initial_range=0.1,
        optimizer={"rule": rule, "learning_rate": 0.2, "gradient_reduction": occurrences, "weight_bounds": (-0.4, 0.5)},
    )
    rng = np.random.default_rng(3)
    keys = rng.integers(1, 2**64, 60, dtype=np.uint64)
    client, reference = MemoryClient({"t": config}, seed=9), ReferenceTable(config)
    initial = Initializer("t", config, 9)
    for _ in range(12):
        chosen = rng.permutation(keys)[: rng.integers(1, 25)]
        shows = rng.integers(1, 4, len(chosen)).astype(np.float32)
        clicks = np.minimum(shows, rng.integers(0, 2, len(chosen))).astype(np.float32)
        grads = rng.standard_normal((len(chosen), config.pull_width)).astype(np.float32)
        client.push("t", chosen, grads, shows, clicks)
        for key, grad, show, click in zip(chosen, grads, shows, clicks, strict=True):
            reference.push(key, grad, show, click)
    got = client.pull("t", keys)
    for key, values in zip(keys, got, strict=True):
        row = reference.rows.get(int(key))
        expected = reference.change(key)
        embedding = initial.effective(np.zeros((1, config.pull_width), np.float32), keys[keys == key], np.ones(1, bool))
        if admission is None or (row and reference.score(row) >= admission):
            expected = expected + embedding[0]
        np.testing.assert_allclose(values, expected, rtol=2e-4, atol=2e-5)
    assert client.num_keys() == {"t": len(reference.rows)}


def test_unknown_keys_are_not_created_by_a_pull() -> None:
    client = MemoryClient({"t": TableConfig(width=2)}, seed=1)
    first = client.pull("t", np.array([5, 2**63], np.uint64))
    assert client.num_keys() == {"t": 0}
    np.testing.assert_array_equal(first, client.pull("t", np.array([5, 2**63], np.uint64)))
    assert client.pull("t", np.zeros(0, np.uint64)).shape == (0, 3)
