"""Saved tables: any number of servers, nothing lost, nothing else accepted."""

import json
import shutil

import numpy as np
import pytest

from paddlewheel.pserver import saved_tables
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.errors import CheckpointError, LoadError
from paddlewheel.pserver.export import export_table
from paddlewheel.pserver.local import local_servers
from paddlewheel.pserver.lookup import Lookup
from tests.integration.pserver.conftest import RULES, TABLES, of_engine
from tests.support.needs import require

pytestmark = pytest.mark.processes
SEED = 5


@pytest.fixture(scope="module", params=["paddlewheel", "paddle"])
def engine(request):
    if request.param == "paddlewheel":
        require("our own tables")
    return request.param


@pytest.fixture(scope="module")
def tables(engine):
    return of_engine(TABLES, engine)


@pytest.fixture(scope="module")
def same(engine):
    """Compares what was restored: our engine loses nothing, Paddle's keeps six significant digits."""

    def compare(restored, values, **tolerance):
        if engine == "paddlewheel":
            np.testing.assert_array_equal(restored.view(np.uint32), values.view(np.uint32))
        else:
            np.testing.assert_allclose(restored, values, **{"rtol": 5e-6, "atol": 5e-8, **tolerance})

    return compare


@pytest.fixture(scope="module")
def saved(tmp_path_factory, engine, tables):
    """Tables trained on 2 servers and saved: (directory, keys, effective values per table)."""
    directory = tmp_path_factory.mktemp("saved") / "step-1"
    rng = np.random.default_rng(3)
    keys = np.unique(rng.integers(1, 1 << 64, 3000, dtype=np.uint64))
    with (
        local_servers(tables, 2, tmp_path_factory.mktemp("logs")) as servers,
        Client(tables, servers.endpoints, seed=SEED) as client,
    ):
        for name, config in TABLES.items():
            for _ in range(3):
                some = keys[rng.random(len(keys)) < 0.7]
                shows = rng.integers(1, 3, len(some)).astype(np.float32)
                grads = rng.normal(0, 0.1, (len(some), config.pull_width)).astype(np.float32)
                client.push(
                    name, some, grads, shows, np.minimum(shows, rng.integers(0, 2, len(some))).astype(np.float32)
                )
        made = client.save(directory)
        assert {n: t.num_rows for n, t in made.items()} == {n: sum(c) for n, c in client.num_keys().items()}
        values = {name: client.pull_with_counts(name, keys) for name in TABLES}
        with pytest.raises(CheckpointError, match="exists"):
            client.save(directory)  # never into another save
    return directory, keys, values


@pytest.mark.parametrize("num_servers", [1, 3])
def test_other_numbers_of_servers_give_the_same_vectors(saved, tables, same, tmp_path, num_servers):
    directory, keys, values = saved
    with (
        local_servers(tables, num_servers, tmp_path) as servers,
        Client(tables, servers.endpoints, seed=SEED) as client,
    ):
        client.load(directory)
        for name in TABLES:
            loaded = client.pull_with_counts(name, keys)
            same(loaded.values_UW, values[name].values_UW)
            np.testing.assert_array_equal(loaded.shows_U, values[name].shows_U)
            np.testing.assert_array_equal(loaded.admitted_U, values[name].admitted_U)
        # what is loaded saves again to the same rows
        again = client.save(tmp_path / "again")
    for name, table in again.items():
        assert content(table) == content(saved_tables.open_table(directory / name))


@pytest.mark.needs("our own tables")
def test_either_engine_goes_on_from_the_other_ones_checkpoint(saved, engine, tmp_path):
    directory, keys, values = saved
    other = "paddle" if engine == "paddlewheel" else "paddlewheel"
    tables = of_engine({name: TABLES[name] for name in (*RULES, "admitted-by-shows")}, other)
    with local_servers(tables, 3, tmp_path) as servers, Client(tables, servers.endpoints, seed=SEED) as client:
        client.load(directory)
        for name in tables:
            loaded = client.pull_with_counts(name, keys)
            np.testing.assert_array_equal(loaded.admitted_U, values[name].admitted_U)
            if engine == "paddlewheel":  # text can hold all digits: those that we write do
                np.testing.assert_array_equal(loaded.values_UW, values[name].values_UW)
            else:
                np.testing.assert_allclose(loaded.values_UW, values[name].values_UW, rtol=5e-6, atol=5e-8)
    assert not [p for p in directory.iterdir() if p.name.startswith(".")]  # the converted copies are gone


def test_another_number_of_shards(saved, tables, same, tmp_path):
    directory, keys, values = saved
    some = {n: tables[n].model_copy(update={"shards": 9}) for n in ("adagrad", "admitted-by-shows")}
    with local_servers(some, 3, tmp_path) as servers, Client(some, servers.endpoints, seed=SEED) as client:
        client.load(directory)
        for name in some:
            same(client.pull(name, keys), values[name].values_UW)
        counts = client.num_keys()["adagrad"]
    assert min(counts) > 0.7 * max(counts)
    assert not [p for p in directory.iterdir() if p.name.startswith(".")]  # the resharded copies are gone


def test_training_goes_on_where_it_stopped(saved, tables, same, tmp_path):
    """Accumulators and moments are restored too: the next steps are the same as without a stop."""
    directory, keys, _ = saved
    some = {rule: tables[rule] for rule in RULES}
    ones = np.ones(len(keys), np.float32)

    def step(client):
        for rule, config in some.items():
            client.push(rule, keys, np.full((len(keys), config.pull_width), 0.1, np.float32), ones, ones)

    with local_servers(some, 1, tmp_path) as servers, Client(some, servers.endpoints, seed=SEED) as client:
        client.load(directory)
        step(client)
        client.save(tmp_path / "mid")
        step(client)
        undisturbed = {rule: client.pull(rule, keys) for rule in some}
    with local_servers(some, 2, tmp_path) as servers, Client(some, servers.endpoints, seed=SEED) as client:
        client.load(tmp_path / "mid")
        step(client)
        for rule in some:
            same(client.pull(rule, keys), undisturbed[rule], rtol=1e-5, atol=5e-7)


def test_rows_read_without_paddle_are_what_the_servers_hold(saved):
    directory, keys, values = saved
    for name, config in TABLES.items():
        table = saved_tables.open_table(directory / name)
        rows = list(saved_tables.read_rows(table))
        read_keys = np.concatenate([r.keys_N for r in rows])
        assert len(np.unique(read_keys)) == len(read_keys) == table.num_rows
        order = np.argsort(read_keys)
        known = np.isin(keys, read_keys)
        np.testing.assert_array_equal(read_keys[order], keys[known])  # exact 64-bit keys
        pulled = values[name]
        np.testing.assert_array_equal(np.concatenate([r.shows_N for r in rows])[order], pulled.shows_U[known])
        np.testing.assert_array_equal(np.concatenate([r.clicks_N for r in rows])[order], pulled.clicks_U[known])
        if config.first_order:
            first = np.concatenate([r.first_order_N for r in rows])[order]
            np.testing.assert_allclose(first, pulled.values_UW[known, 0], rtol=5e-6)
        if config.admission_threshold is not None:
            has = np.concatenate([r.has_embedding_N for r in rows])[order]
            np.testing.assert_array_equal(has, pulled.admitted_U[known])
            assert 0 < has.sum() < len(has)


def test_export_and_lookup_give_what_a_client_pulled(saved, tmp_path):
    """Also for keys below admission, which have no embedding in training, and none in an export."""
    directory, keys, values = saved
    for name in TABLES:
        exported = export_table(saved_tables.open_table(directory / name), tmp_path / name)
        known = values[name].shows_U > 0
        assert exported.num_rows == known.sum()
        assert exported.num_embeddings == (values[name].admitted_U & known).sum()
    lookup = Lookup.build({name: tmp_path / name for name in TABLES}, tmp_path / "lookup")
    for name in TABLES:
        np.testing.assert_allclose(lookup.pull(name, keys), values[name].values_UW, rtol=5e-6, atol=5e-8)


BREAKAGES = {
    "missing part": lambda folder, parts: parts[3].unlink(),
    "extra part": lambda folder, parts: shutil.copy(parts[3], folder / "part-000-00500"),
    "foreign file": lambda folder, parts: (folder / "notes.txt").write_text("?"),
    "truncated part": lambda folder, parts: parts[3].write_bytes(parts[3].read_bytes()[:-1]),
    "flipped byte": lambda folder, parts: parts[3].write_bytes(flip(parts[3].read_bytes())),
    "swapped parts": lambda folder, parts: swap(parts[3], parts[4]),
    "no description": lambda folder, parts: (folder.parent / "table.json").unlink(),
    "description changed": lambda folder, _: edit(
        folder.parent / "table.json", '"learning_rate": 0.05', '"learning_rate": 0.06'
    ),
    "broken description": lambda folder, parts: (folder.parent / "table.json").write_text("{}"),
}


def edit(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def flip(data):
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def swap(a, b):
    a_bytes, b_bytes = a.read_bytes(), b.read_bytes()
    a.write_bytes(b_bytes)
    b.write_bytes(a_bytes)


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_damage_is_found(saved, tmp_path, breakage):
    directory, _, _ = saved
    copy = tmp_path / "adagrad"
    shutil.copytree(directory / "adagrad", copy)
    saved_tables.verify(saved_tables.open_table(copy))  # a copy is fine
    folder = saved_tables.open_table(copy).folder
    BREAKAGES[breakage](folder, sorted(folder.iterdir()))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        saved_tables.verify(saved_tables.open_table(copy))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 12}, "width is 12.*saved with 6"),
        ({"first_order": False}, "first_order is False"),
        ({"optimizer": {"rule": "adam"}}, "rule is adam"),
        ({"initial_range": 0.5}, "initial_range is 0.5"),
    ],
)
def test_another_table_is_refused_before_a_server_is_asked(saved, change, words):
    directory, _, _ = saved
    config = TableConfig.model_validate({**TABLES["adagrad"].model_dump(), **change})
    with Client({"adagrad": config}, ["127.0.0.1:1"], seed=SEED) as client, pytest.raises(CheckpointError, match=words):
        client.load(directory)


def test_another_seed_is_refused(saved):
    tables = {"adagrad": TABLES["adagrad"]}
    with Client(tables, ["127.0.0.1:1"], seed=6) as client, pytest.raises(CheckpointError, match="seed is 6"):
        client.load(saved[0])


def test_loading_into_servers_that_hold_keys_is_noticed(saved, tmp_path):
    directory, _, _ = saved
    some = {"adagrad": TABLES["adagrad"]}
    with local_servers(some, 1, tmp_path) as servers, Client(some, servers.endpoints, seed=SEED) as client:
        other = np.array([12345], np.uint64)
        client.push("adagrad", other, client.pull("adagrad", other), np.ones(1, np.float32), np.zeros(1, np.float32))
        with pytest.raises(LoadError, match="empty servers"):
            client.load(directory)


def test_paths_that_a_shell_would_misread_are_refused(tmp_path):
    with Client({"t": TableConfig()}, ["127.0.0.1:1"]) as client:
        for name in ("with space", "a;b", "$(x)", "*", "é"):
            with pytest.raises(CheckpointError, match="shell"):
                client.save(tmp_path / name)


def content(table):
    """All rows, by key: what floats were written, to the last bit."""
    rows = saved_tables.Rows.concatenate(list(saved_tables.read_rows(table)))
    rows = rows.take(np.argsort(rows.keys_N))
    return {name: np.ascontiguousarray(column).tobytes() for name, column in vars(rows).items()}


def test_description_is_readable(saved):
    document = json.loads((saved[0] / "adagrad" / "table.json").read_text())
    assert document["name"] == "adagrad"
    assert sum(part["num_rows"] for part in document["parts"]) == saved_tables.open_table(saved[0] / "adagrad").num_rows
