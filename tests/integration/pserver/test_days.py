"""Day boundaries against NumPy: decay, eviction by score and by unseen days, and what a restore makes of them."""

import numpy as np
import pytest

from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.export import export_table
from paddlewheel.pserver.local import local_servers
from paddlewheel.pserver.lookup import Lookup
from paddlewheel.pserver.saved_tables import open_table, read_rows

pytestmark = pytest.mark.processes

DECAY = 0.5
TABLES = {
    "by-score": TableConfig(
        width=2,
        shards=6,
        optimizer={"rule": "sgd"},
        unclicked_weight=0.1,
        clicked_weight=1.0,
        lifecycle={"show_click_decay": DECAY, "delete_below_score": 0.3},
    ),
    "by-days": TableConfig(width=2, shards=6, optimizer={"rule": "sgd"}, lifecycle={"delete_after_unseen_days": 1}),
    "admitted": TableConfig(
        width=2, shards=6, admission_threshold=4, optimizer={"rule": "sgd"}, lifecycle={"show_click_decay": DECAY}
    ),
}
NUM_DAYS = 5


class Days:
    """The reference: shows and clicks (float32, as on the server) and unseen days of each key of one table."""

    def __init__(self, config):
        self.config, self.rows = config, {}

    def push(self, key, shows, clicks):
        row = self.rows.setdefault(key, [np.float32(0), np.float32(0), 0])
        row[0], row[1], row[2] = row[0] + np.float32(shows), row[1] + np.float32(clicks), 0

    def advance_day(self):
        for row in self.rows.values():
            row[2] += 1

    def end_day(self):
        life, config = self.config.lifecycle, self.config
        for key, row in list(self.rows.items()):
            row[:2] = row[0] * np.float32(life.show_click_decay), row[1] * np.float32(life.show_click_decay)
            score = (row[0] - row[1]) * np.float32(config.unclicked_weight)
            score += row[1] * np.float32(config.clicked_weight)
            too_old = life.delete_after_unseen_days is not None and row[2] > life.delete_after_unseen_days
            if score < np.float32(life.delete_below_score) or too_old:
                del self.rows[key]


def train_day(day, clients, references, keys):
    rng = np.random.default_rng(day)
    for table in TABLES:
        some = keys[rng.random(len(keys)) < 0.35]
        shows = rng.integers(1, 5, len(some)).astype(np.float32)
        clicks = np.minimum(shows, rng.integers(0, 2, len(some))).astype(np.float32)
        for client in clients:
            client.push(table, some, np.ones((len(some), 3), np.float32), shows, clicks)
        for row in zip(some.tolist(), shows, clicks, strict=True):
            references[table].push(*row)


def assert_same(client, references, keys):
    for table, reference in references.items():
        pulled = client.pull_with_counts(table, keys)
        expected = np.array([reference.rows.get(key, (0, 0))[:2] for key in keys.tolist()], np.float32)
        np.testing.assert_allclose(np.column_stack([pulled.shows_U, pulled.clicks_U]), expected, rtol=1e-5)
        assert sum(client.num_keys()[table]) == len(reference.rows)


def test_days_follow_the_reference_and_survive_a_restore(tmp_path):
    keys = np.unique(np.random.default_rng(1).integers(1, 1 << 64, 400, dtype=np.uint64))
    references = {table: Days(config) for table, config in TABLES.items()}
    sizes = []
    with local_servers(TABLES, 2, tmp_path) as servers, Client(TABLES, servers.endpoints) as client:
        for day in range(NUM_DAYS):
            train_day(day, [client], references, keys)
            assert_same(client, references, keys)
            client.save(tmp_path / f"day-{day}", advance_day=True)
            for reference in references.values():
                reference.advance_day()
            client.end_day()
            for reference in references.values():
                reference.end_day()
            assert_same(client, references, keys)
            sizes.append({table: len(reference.rows) for table, reference in references.items()})
        undisturbed = {table: client.pull_with_counts(table, keys) for table in TABLES}
    assert sizes[-1]["by-score"] < len(keys)  # something was evicted
    assert sizes[-1]["by-days"] < sizes[-1]["admitted"]

    # A day's save holds the state before its boundary: whoever restores it does the boundary again.
    with local_servers(TABLES, 1, tmp_path) as servers, Client(TABLES, servers.endpoints) as client:
        client.load(tmp_path / f"day-{NUM_DAYS - 2}")
        client.save(tmp_path / "again", advance_day=True)
        client.end_day()
        references = {table: Days(config) for table, config in TABLES.items()}
        train_day(NUM_DAYS - 1, [client], references, keys)
        client.save(tmp_path / "again-2", advance_day=True)
        client.end_day()
        for table in ("by-score", "by-days"):
            restored = client.pull_with_counts(table, keys)
            np.testing.assert_allclose(restored.shows_U, undisturbed[table].shows_U, rtol=1e-5)
            np.testing.assert_allclose(restored.values_UW, undisturbed[table].values_UW, rtol=1e-5, atol=1e-6)


def test_a_key_that_decays_below_admission_has_no_embedding(tmp_path):
    keys = np.array([11, 12], np.uint64)
    table = "admitted"
    with local_servers(TABLES, 1, tmp_path) as servers, Client(TABLES, servers.endpoints) as client:
        for shows in (5.0, 5.0):
            client.push(
                table, keys, np.ones((2, 3), np.float32), np.full(2, shows, np.float32), np.zeros(2, np.float32)
            )
        assert client.pull_with_counts(table, keys).admitted_U.all()  # 10 shows
        client.end_day()
        assert client.pull_with_counts(table, keys).admitted_U.all()  # 5
        client.end_day()
        below = client.pull_with_counts(table, keys)  # 2.5
        assert not below.admitted_U.any()
        np.testing.assert_array_equal(below.values_UW[:, 1:], 0)
        assert below.values_UW[:, 0].all()
        saved = client.save(tmp_path / "saved")
    export_table(saved[table], tmp_path / "export")
    lookup = Lookup.build({table: tmp_path / "export"}, tmp_path / "lookup")
    np.testing.assert_allclose(lookup.pull(table, keys), below.values_UW, rtol=1e-5)
    with local_servers(TABLES, 1, tmp_path) as servers, Client(TABLES, servers.endpoints) as client:
        client.load(tmp_path / "saved")
        np.testing.assert_allclose(client.pull(table, keys), below.values_UW, rtol=1e-5)


def test_a_boundary_of_one_table_leaves_the_others_alone(tmp_path):
    keys = np.arange(1, 31, dtype=np.uint64)
    with local_servers(TABLES, 2, tmp_path) as servers, Client(TABLES, servers.endpoints) as client:
        for table in TABLES:
            shows = np.where(keys <= 10, 5, 1).astype(np.float32)
            client.push(table, keys, np.ones((30, 3), np.float32), shows, 0 * shows)
        saved = client.save(tmp_path / "saved", advance_day=["by-days"])
        client.end_day(["by-score"])  # scores of 0.25 and 0.05 are below 0.3
        assert {name: sum(found) for name, found in client.num_keys().items()} == {
            "by-score": 0,
            "by-days": 30,
            "admitted": 30,
        }
        client.save(tmp_path / "after")
        unseen = {
            name: {
                float(day) for rows in read_rows(open_table(tmp_path / "after" / name)) for day in rows.unseen_days_N
            }
            for name in ("by-days", "admitted")
        }
        assert unseen == {"by-days": {1.0}, "admitted": {0.0}}
        assert saved["by-score"].num_rows == 30
        np.testing.assert_array_equal(client.pull_with_counts("admitted", keys[:1]).shows_U, [5.0])
