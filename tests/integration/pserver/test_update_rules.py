"""The servers' updates against NumPy: every rule, several steps, duplicates, two clients, keys that come later."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from paddlewheel.pserver.client import Client
from tests.integration.pserver.conftest import TABLES
from tests.support.reference_rules import ReferenceTable

pytestmark = pytest.mark.processes

# The servers compute in float32 (partly float64) and steps are about 0.05: 40 steps differ by less than this.
TOLERANCE = {"atol": 2e-6, "rtol": 2e-5}


@pytest.mark.parametrize("table", [name for name in TABLES if name != "default"])
def test_every_rule_follows_its_formula(cluster, draw_keys, table):
    config = TABLES[table]
    reference = ReferenceTable(config)
    rng = np.random.default_rng(11)
    keys = draw_keys(60)
    with Client(TABLES, cluster.endpoints, seed=5) as a, Client(TABLES, cluster.endpoints, seed=5) as b:
        initial = a.pull(table, keys)
        for step in range(12):
            for client in (a, b):  # two trainers take turns
                known = keys[: 20 + 4 * step]  # some keys come later than others
                batch = rng.permutation(known)[: rng.integers(5, len(known))]
                shows = rng.integers(1, 5, len(batch)).astype(np.float32)
                clicks = np.minimum(rng.integers(0, 2, len(batch)), shows).astype(np.float32)
                grads = rng.normal(0, 1, (len(batch), config.pull_width)).astype(np.float32)
                client.push(table, batch, grads, shows, clicks)
                for row in zip(batch, grads, shows, clicks, strict=True):
                    reference.push(*row)
        pulled = b.pull_with_counts(table, keys)
    first = int(config.first_order)
    expected = np.array([reference.change(key) for key in keys])
    if config.admission_threshold is None:
        expected += initial
    else:
        np.testing.assert_array_equal(initial[:, first:], 0)  # nobody was admitted yet
        start = a_initial(config, table, keys)
        admitted = np.array([k in reference.rows and reference.rows[k]["embedding"] is not None for k in keys.tolist()])
        assert 0 < admitted.sum() < len(keys)
        np.testing.assert_array_equal(pulled.admitted_U, admitted)
        expected[:, first:] += start * admitted[:, None]
    np.testing.assert_allclose(pulled.values_UW, expected, **TOLERANCE)
    np.testing.assert_allclose(pulled.shows_U, [reference.rows.get(k, {"show": 0})["show"] for k in keys.tolist()])
    np.testing.assert_allclose(pulled.clicks_U, [reference.rows.get(k, {"click": 0})["click"] for k in keys.tolist()])


def a_initial(config, table, keys):
    from paddlewheel.pserver.initializer import codebook

    return codebook(table, config.width, config.initial_range, 5)[(keys & np.uint64(0xFFFF)).astype(int)]


def test_the_same_id_a_thousand_times_equals_the_summed_gradient(client, draw_keys):
    (key,) = draw_keys(1)
    keys, one = np.array([key]), np.ones(1, np.float32)
    start = client.pull("sgd", keys)
    width = start.shape[1]
    client.push("sgd", keys, np.zeros((1, width), np.float32), one, one * 0)
    client.push("sgd", keys, np.full((1, width), 1000 * 0.01, np.float32), one * 1000, one * 0)
    np.testing.assert_allclose(client.pull("sgd", keys) - start, -0.05 * 10, rtol=1e-5)


def test_adagrad_takes_the_mean_per_occurrence_unless_told_otherwise(client, draw_keys):
    keys = draw_keys(1)
    four = np.full(1, 4, np.float32)
    for table, factor in (("adagrad", 1.0), ("adagrad-sum", 4.0)):
        start = client.pull(table, keys)[:, :1]
        client.push(table, keys, np.full((1, 7), 4 * 0.5, np.float32), four, four * 0)
        np.testing.assert_allclose(client.pull(table, keys)[:, :1] - start, -0.05 * 0.5 * factor, rtol=1e-5)


def test_the_push_that_creates_a_key_trains_its_first_order_weight_only(client, draw_keys):
    keys, one = draw_keys(3), np.ones(3, np.float32)
    start = client.pull("sgd", keys)
    client.push("sgd", keys, np.ones_like(start), one, one)
    step = client.pull("sgd", keys) - start
    np.testing.assert_allclose(step[:, 0], -0.05)
    np.testing.assert_array_equal(step[:, 1:], 0)


def test_bounds_hold_the_change(client, draw_keys):
    keys, one = draw_keys(2), np.ones(2, np.float32)
    start = client.pull("sgd-plain", keys)
    for _ in range(5):
        client.push("sgd-plain", keys, np.full_like(start, 100), one, one * 0)
    np.testing.assert_allclose(client.pull("sgd-plain", keys) - start, -0.3, rtol=1e-5)


def test_many_requests_make_one_pull_or_push(cluster, draw_keys, monkeypatch):
    keys, ones = draw_keys(5000), np.ones(5000, np.float32)
    grads = np.random.default_rng(2).normal(size=(5000, 7)).astype(np.float32)
    with Client(TABLES, cluster.endpoints, seed=5) as whole:
        monkeypatch.setattr("paddlewheel.pserver.client._MAX_REQUEST_BYTES", 1000)
        with Client(TABLES, cluster.endpoints, seed=5) as cut:
            cut.push("sgd", keys, grads, ones, ones)
            np.testing.assert_array_equal(cut.pull("sgd", keys), whole.pull("sgd", keys))
            np.testing.assert_array_equal(whole.pull_with_counts("sgd", keys).shows_U, 1)


def test_pulls_and_pushes_from_several_threads_at_once(client, draw_keys):
    keys, ones = draw_keys(2000), np.ones(2000, np.float32)
    start = client.pull("sgd", keys)
    grads = np.full_like(start, 0.01)

    def push_all(_):
        for _ in range(25):
            client.push("sgd", keys, grads, ones, ones)

    def pull_all(_):
        for _ in range(25):
            steps = (start - client.pull("sgd", keys))[:, 0] / (0.05 * 0.01)
            np.testing.assert_allclose(steps, steps.round(), atol=0.02)  # whole updates only
            assert steps.max() <= 50.02

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, None) for work in (push_all, pull_all) for _ in range(2)]:
            done.result()
    client.flush()
    np.testing.assert_array_equal(client.pull_with_counts("sgd", keys).shows_U, 50)
    np.testing.assert_allclose((start - client.pull("sgd", keys))[:, 0], 50 * 0.05 * 0.01, rtol=1e-4)


def test_no_push_no_change(client, draw_keys):
    keys = draw_keys(500)
    before = client.num_keys()["default"]
    np.testing.assert_array_equal(client.pull("default", keys), client.pull("default", keys))
    assert client.num_keys()["default"] == before  # a pull creates nothing
