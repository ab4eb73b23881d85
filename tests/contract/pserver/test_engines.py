"""Both engines answer the same requests with the same bits, as long as nothing beyond Paddle is asked of ours."""

import contextlib
import threading

import numpy as np
import pytest

from paddlewheel.pserver import row_parts
from paddlewheel.pserver.admin import table_statistics
from paddlewheel.pserver.client import Client, Since
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.errors import ServerError
from paddlewheel.pserver.local import local_servers
from paddlewheel.pserver.saved_tables import Base
from tests.contract.pserver.raw_requests import RawClient

pytestmark = [pytest.mark.processes, pytest.mark.needs("our own tables")]

LIFECYCLE = {"show_click_decay": 0.9, "delete_below_score": 0.5, "delete_after_unseen_days": 1}
CASES = {
    "sgd": {"optimizer": {"rule": "sgd"}, "width": 8},
    "adagrad": {"optimizer": {"rule": "adagrad", "learning_rate": 0.07}, "width": 16},
    "adagrad-admission": {
        "optimizer": {"rule": "adagrad", "weight_bounds": [-0.3, 0.2]},
        "width": 16,
        "admission_threshold": 3,
        "unclicked_weight": 0.3,
        "lifecycle": LIFECYCLE,
    },
    "adagrad_elementwise": {"optimizer": {"rule": "adagrad_elementwise"}, "width": 5, "admission_threshold": 2},
    "adam": {"optimizer": {"rule": "adam", "beta1": 0.8}, "width": 3, "lifecycle": LIFECYCLE},
    "adam_shared": {"optimizer": {"rule": "adam_shared", "epsilon": 1e-5}, "width": 1, "admission_threshold": 2},
}


@pytest.fixture(scope="module", params=[1, 2], ids=["1 server", "2 servers"])
def both(request, tmp_path_factory):
    """Servers of either engine with a table of each case: {engine: LocalServers}, and the number of servers."""
    with contextlib.ExitStack() as stack:
        yield (
            {
                engine: stack.enter_context(
                    local_servers(
                        {name: TableConfig(engine=engine, **case) for name, case in CASES.items()},
                        request.param,
                        tmp_path_factory.mktemp(engine),
                    )
                )
                for engine in ("paddlewheel", "paddle")
            },
            request.param,
        )


def pushed_rows(rng, count, width):
    rows = np.zeros((count, 4 + width), np.float32)
    rows[:, 1] = rng.integers(1, 5, count)
    rows[:, 2] = np.minimum(rows[:, 1], rng.integers(0, 3, count))
    rows[:, 3:] = rng.normal(size=(count, 1 + width))
    return rows


@pytest.mark.parametrize("case", CASES)
def test_the_same_requests_give_the_same_bits(both, tmp_path, case):
    engines, num_servers = both
    config = TableConfig(**CASES[case])
    shards = config.num_shards(num_servers)
    rng = np.random.default_rng(5)
    pool = np.unique(rng.integers(1, 1 << 64, 6000, dtype=np.uint64))

    def of_server(keys, server):
        return (keys % np.uint64(shards)) // np.uint64(shards // num_servers) == server

    with contextlib.ExitStack() as stack:
        clients = {
            engine: [stack.enter_context(RawClient(e, case, config.width)) for e in servers.endpoints]
            for engine, servers in engines.items()
        }
        for step in range(24):
            keys = np.unique(pool[rng.zipf(1.3, 3000) % len(pool)])
            rng.shuffle(keys)
            rows = pushed_rows(rng, len(keys), config.width)
            if step % 7 == 0:
                rows[:, 3:] *= 1000  # into the bounds
            asked = rng.choice(pool, 2000, replace=False)
            for server in range(num_servers):
                here, there = of_server(keys, server), of_server(asked, server)
                answers = []
                for engine in engines:
                    clients[engine][server].push(keys[here], rows[here])
                    # + 0: Paddle makes new zeros as 0 * uniform(-1, 1), so their sign is random
                    answers.append(clients[engine][server].pull(asked[there]) + np.float32(0))
                np.testing.assert_array_equal(answers[0].view(np.uint32), answers[1].view(np.uint32))
            if step % 10 == 9:  # a day boundary, as Client.save and Client.end_day make it
                for engine in engines:
                    directory = tmp_path / engine / str(step)
                    directory.mkdir(parents=True)
                    for client in clients[engine]:
                        client.save(directory, b"3")
                    for client in clients[engine]:
                        client.end_day()
            counts = [[c.statistics()[0] for c in clients[engine]] for engine in engines]
            assert counts[0] == counts[1]
        assert sum(counts[0]) > 1000
        assert [c.statistics()[1] < 0 for engine in engines for c in clients[engine]] == [True] * num_servers + [
            False
        ] * num_servers


def test_our_table_tells_of_itself_while_it_serves(tmp_path):
    """Statistics of one that is full, the words of an error, and a learning rate of its own: all beyond Paddle's."""
    tables = {"t": TableConfig(width=4, max_keys=1000, shards=2, optimizer={"rule": "sgd", "learning_rate": 0.5})}
    keys = np.random.default_rng(1).integers(1, 1 << 64, 3000, dtype=np.uint64)
    ones = np.ones(len(keys), np.float32)
    with local_servers(tables, 1, tmp_path) as servers, Client(tables, servers.endpoints) as client:
        client.push("t", keys, np.ones((len(keys), 5), np.float32), ones, 0 * ones, rate=0.5)
        host, port = servers.endpoints[0].split(":")
        found = table_statistics(host, int(port), "t")
        assert found.rows == sum(client.num_keys()["t"]) <= 1000
        assert found.evicted == 3000 - found.rows
        assert found.max_rows == 1000
        assert set(client.pull_with_counts("t", keys).values_UW[:, 0].tolist()) == {0.0, -0.25}
        with pytest.raises(ServerError, match="no mark of-another is waiting to be saved"):
            client.save_marked(tmp_path / "saved", "of-another")
        assert client.can_mark()
        since = Since(client.mark(), {})
        assert client.save_bytes(since) == (0,)
        client.push("t", keys[:10], np.ones((10, 5), np.float32), ones[:10], 0 * ones[:10])
        gone = table_statistics(host, int(port), "t").evicted - found.evicted
        row_bytes = row_parts.row_type(tables["t"]).itemsize
        assert client.save_bytes(since) == (10 * row_bytes + 8 * gone,), "room for what can have changed is enough"
        assert client.save_bytes() == (sum(client.num_keys()["t"]) * row_bytes,)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_marked_state_is_saved_while_pushes_go_on(tmp_path, num_servers):
    tables = {"t": TableConfig(width=4, shards=6)}
    keys = np.random.default_rng(1).integers(1, 1 << 64, 20_000, dtype=np.uint64)
    ones, gradients = np.ones(len(keys), np.float32), np.ones((len(keys), 5), np.float32)
    pushed = threading.Event()
    with local_servers(tables, 2, tmp_path) as servers, Client(tables, servers.endpoints, seed=1) as client:
        for _ in range(2):
            client.push("t", keys[:15_000], gradients[:15_000], ones[:15_000], ones[:15_000] * 0)
        state = client.pull("t", keys[:15_000])
        mark = client.mark()

        def train():
            while not pushed.is_set():
                client.push("t", keys, gradients, ones, 0 * ones)

        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            saved = client.save_marked(tmp_path / "saved", mark)
        finally:
            pushed.set()
            trainer.join()
        assert saved["t"].num_rows == 15_000
        assert client.pull_with_counts("t", keys).shows_U.min() >= 1
    other = {"t": TableConfig(width=4, shards=6)}
    with local_servers(other, num_servers, tmp_path) as servers, Client(other, servers.endpoints, seed=1) as client:
        client.load(tmp_path / "saved")
        np.testing.assert_array_equal(client.pull("t", keys[:15_000]), state)
        assert not client.pull_with_counts("t", keys[15_000:]).shows_U.any()


@pytest.mark.slow
def test_a_chain_of_saves_is_loaded_by_any_servers_and_led_on_from(tmp_path):
    """Two servers save; three go on from there; one of either engine has the same table in the end."""
    life = {"delete_after_unseen_days": 1}
    tables = {"t": TableConfig(width=4, lifecycle=life), "u": TableConfig(width=2)}
    rng = np.random.default_rng(1)
    keys = rng.integers(1, 1 << 64, 3000, dtype=np.uint64)

    def push(client, some):
        for name, config in tables.items():
            values = rng.normal(size=(len(some), 1 + config.width)).astype(np.float32)
            client.push(name, some, values, np.ones(len(some), np.float32), np.zeros(len(some), np.float32))

    def since(mark, saved):
        return Since(
            mark, {name: Base(f"../../{t.directory.parent.name}/{name}", t.checksum) for name, t in saved.items()}
        )

    def state(client):
        return {name: client.pull_with_counts(name, keys) for name in tables}

    with (
        local_servers(tables, 2, tmp_path, logs_removed=True) as servers,
        Client(tables, servers.endpoints, seed=1) as client,
    ):
        push(client, keys[:2000])
        one = client.mark()
        saved = client.save_marked(tmp_path / "one", one)
        push(client, keys[:100])
        for _ in range(2):
            client.drop_mark(client.mark(advance_day=True))
            client.end_day(["t"])
            push(client, keys[:100])
        two = client.mark()
        saved = client.save_marked(tmp_path / "two", two, since=since(one, saved))
        assert {name: (t.num_rows, t.num_keys) for name, t in saved.items()} == {"t": (100, 100), "u": (100, 2000)}
        with pytest.raises(ServerError, match="nothing is known of changes since never"):
            client.save_marked(tmp_path / "never", client.mark(), since=since("never", saved))
    (tmp_path / "logs").mkdir()
    with (
        local_servers(tables, 3, tmp_path / "logs", logs_removed=True) as servers,
        Client(tables, servers.endpoints, seed=1) as client,
    ):
        loaded = client.load(tmp_path / "two")
        assert client.num_keys()["t"] != ()
        push(client, keys[50:150])
        three = client.mark()
        saved = client.save_marked(tmp_path / "three", three, since=since(loaded, saved))
        assert {name: (t.num_rows, t.num_keys) for name, t in saved.items()} == {"t": (100, 150), "u": (100, 2000)}
        expected = state(client)
    for engine in ("paddlewheel", "paddle"):
        others = {name: config.model_copy(update={"engine": engine}) for name, config in tables.items()}
        (tmp_path / engine).mkdir()
        with (
            local_servers(others, 1, tmp_path / engine) as servers,
            Client(others, servers.endpoints, seed=1) as client,
        ):
            mark = client.load(tmp_path / "three")
            assert (mark is None) == (engine == "paddle")
            for name, found in state(client).items():
                for before, now in zip(expected[name], found, strict=True):
                    np.testing.assert_array_equal(now, before)
            if engine == "paddlewheel":
                with pytest.raises(ServerError, match="nothing is known of changes"):
                    client.save_marked(tmp_path / "four", client.mark(), since=since(mark, saved))
