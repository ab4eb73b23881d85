"""Features of one table with thresholds of their own: pulled, trained, saved, restored and exported by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddlewheel.pserver import saved_tables
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.delta import apply_deltas, write_delta
from paddlewheel.pserver.export import export_table
from paddlewheel.pserver.local import local_servers
from paddlewheel.pserver.lookup import Lookup

pytestmark = pytest.mark.needs("our own tables")

CLASSES = (2, 5, None)
CONFIG = TableConfig(
    width=2,
    admission_threshold=CLASSES[0],
    admission_by_feature={"rare": CLASSES[1], "any": CLASSES[2]},
    lifecycle={"show_click_decay": 0.5},
)
KEYS = (np.arange(1, 91, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
KEY_CLASS = (np.arange(90) % 3).astype(np.uint8)
SHOWS = (np.arange(90) // 15 + 1).astype(np.float32)  # 1 to 6


def _admitted(shows: np.ndarray) -> np.ndarray:
    least = np.array([-1 if each is None else each for each in CLASSES])
    return shows >= least[KEY_CLASS]


def _push(client: Client, shows: np.ndarray) -> None:
    client.push("t", KEYS, np.ones((90, 3), np.float32), shows, 0 * shows, class_U=KEY_CLASS)


def _export(saved: saved_tables.SavedTable, folder: Path) -> Lookup:
    done = export_table(saved, folder)
    assert done.num_embeddings == saved_tables.count_embeddings(saved)
    return Lookup.build({"t": folder}, folder.with_name(folder.name + "-lookup"))


def test_every_reader_and_any_servers_keep_to_a_keys_own_threshold(tmp_path: Path) -> None:
    tables = {"t": CONFIG}
    with local_servers(tables, 2, tmp_path) as servers, Client(tables, servers.endpoints, seed=3) as client:
        fresh = client.pull_with_counts("t", KEYS, class_U=KEY_CLASS)
        np.testing.assert_array_equal(fresh.admitted_U, KEY_CLASS == 2)
        np.testing.assert_array_equal(fresh.values_UW[:, 1:].any(axis=1), KEY_CLASS == 2)
        _push(client, SHOWS)
        once = client.pull_with_counts("t", KEYS, class_U=KEY_CLASS)
        np.testing.assert_array_equal(once.admitted_U, _admitted(SHOWS))
        _push(client, SHOWS)
        pulled = client.pull_with_counts("t", KEYS, class_U=KEY_CLASS)
        np.testing.assert_array_equal(pulled.admitted_U, _admitted(2 * SHOWS))
        moved = (pulled.values_UW[:, 1:] != once.values_UW[:, 1:]).any(axis=1)
        np.testing.assert_array_equal(moved, _admitted(2 * SHOWS))  # trained, or seen for the first time
        saved = client.save(tmp_path / "saved")["t"]
        client.end_day()
        decayed = client.pull_with_counts("t", KEYS, class_U=KEY_CLASS)
        np.testing.assert_array_equal(decayed.admitted_U, _admitted(SHOWS))
        after = client.save(tmp_path / "after")["t"]

    assert saved_tables.count_embeddings(saved) == _admitted(2 * SHOWS).sum()
    lookup, later = _export(saved, tmp_path / "export"), _export(after, tmp_path / "later")
    np.testing.assert_array_equal(lookup.pull("t", KEYS, class_U=KEY_CLASS), pulled.values_UW)
    np.testing.assert_array_equal(later.pull("t", KEYS, class_U=KEY_CLASS), decayed.values_UW)
    unknown = lookup.pull("t", KEYS + np.uint64(2), class_U=KEY_CLASS)
    np.testing.assert_array_equal(unknown[:, 1:].any(axis=1), KEY_CLASS == 2)

    write_delta(saved, after, tmp_path / "delta", count_decay=0.5)
    apply_deltas(tmp_path / "export", [tmp_path / "delta"], tmp_path / "applied")
    applied = Lookup.build({"t": tmp_path / "applied"}, tmp_path / "applied-lookup")
    np.testing.assert_array_equal(applied.pull("t", KEYS), decayed.values_UW)

    resharded = saved_tables.reshard(saved, tmp_path / "resharded" / "t", 5)
    assert saved_tables.count_embeddings(resharded) == saved_tables.count_embeddings(saved)
    other = {"t": CONFIG.model_copy(update={"shards": 3})}
    with local_servers(other, 3, tmp_path) as servers, Client(other, servers.endpoints, seed=3) as client:
        client.load(tmp_path / "resharded")
        restored = client.pull_with_counts("t", KEYS, class_U=KEY_CLASS)
        np.testing.assert_array_equal(restored.values_UW, pulled.values_UW)
        again = client.save(tmp_path / "again")["t"]
    by_key = {}
    for where in (saved, again):
        rows = saved_tables.Rows.concatenate(list(saved_tables.read_rows(where)))
        by_key[where.directory] = rows.class_N[np.argsort(rows.keys_N)]
        np.testing.assert_array_equal(by_key[where.directory], KEY_CLASS[np.argsort(KEYS)])


def test_a_checkpoint_without_classes_takes_the_tables_own_until_the_next_push(tmp_path: Path) -> None:
    before = {"t": CONFIG.model_copy(update={"admission_by_feature": {}})}
    tables, ones = {"t": CONFIG}, np.ones(90, np.float32)
    with local_servers(before, 1, tmp_path) as servers, Client(before, servers.endpoints, seed=3) as client:
        client.push("t", KEYS, np.ones((90, 3), np.float32), ones, 0 * ones)
        client.save(tmp_path / "saved")
    with local_servers(tables, 1, tmp_path) as servers, Client(tables, servers.endpoints, seed=3) as client:
        client.load(tmp_path / "saved")
        first = client.save(tmp_path / "first")["t"]
        assert saved_tables.count_embeddings(first) == 0
        np.testing.assert_array_equal(client.pull_with_counts("t", KEYS, class_U=KEY_CLASS).admitted_U, KEY_CLASS == 2)
        _push(client, ones)
        second = client.save(tmp_path / "second")["t"]
        assert saved_tables.count_embeddings(second) == _admitted(2 * ones).sum()
