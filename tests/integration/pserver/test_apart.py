"""Servers that share no disk: each saves to and loads from a folder of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddlewheel.pserver import host_parts
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.errors import CheckpointError
from paddlewheel.pserver.local import local_servers

pytestmark = pytest.mark.processes

TABLES = {"t": TableConfig(width=4), "u": TableConfig(width=2, shards=6)}
KEYS = np.arange(1, 3001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
ONES = np.ones(len(KEYS), np.float32)


def save(folders: list[Path], client: Client) -> tuple[dict, list]:
    found = []

    def collect():
        found.extend(host_parts.measure(folder, TABLES) for folder in folders)
        return found

    return client.save_per_host(folders, collect), found


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What two servers saved apart; the pulled values; the files of both together, as a store would hold them."""
    folder = tmp_path_factory.mktemp("apart")
    folders = [folder / "host-0" / "draft", folder / "host-1" / "draft"]
    with local_servers(TABLES, 2, folder) as servers, Client(TABLES, servers.endpoints, seed=3) as client:
        for name, config in TABLES.items():
            grads = np.random.default_rng(1).normal(size=(len(KEYS), config.pull_width)).astype(np.float32)
            client.push(name, KEYS, grads, ONES, ONES)
        values = {name: client.pull(name, KEYS) for name in TABLES}
        saved, _ = save(folders, client)
    assert saved["t"].num_rows == saved["u"].num_rows == len(KEYS)
    each = [{path.name for path in host.rglob("part-*")} for host in folders]
    assert each[0]
    assert each[1]
    assert not each[0] & each[1]
    store = folder / "store"
    for host in folders:
        for path in host.rglob("part-*"):
            target = store / path.relative_to(host)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return saved, values, store


@pytest.mark.parametrize("num_servers", [2, 3, 5])
def test_each_host_needs_its_own_parts_and_every_key_comes_back(kept, tmp_path, num_servers):
    """5 servers need other shards of `t` (and then every part); 6 shards of `u` do not fit 5, so `t` alone."""
    saved, values, store = kept
    tables = TABLES if num_servers != 5 else {"t": TABLES["t"]}
    folders = []
    for rank in range(num_servers):
        folders.append(tmp_path / f"host-{rank}" / "loaded")
        for name, config in tables.items():
            fetched = tmp_path / f"host-{rank}" / "fetched" / name
            fetched.mkdir(parents=True)
            parts = host_parts.needed(saved[name], rank, num_servers, config)
            assert len(parts) == len(saved[name].parts) // (1 if num_servers == 5 else num_servers)
            for part in parts:
                (fetched / part.name).write_bytes(next(store.glob(f"{name}/*/{part.name}")).read_bytes())
            host_parts.lay_out(saved[name], fetched, folders[rank], rank, num_servers, config)
    with local_servers(tables, num_servers, tmp_path) as servers, Client(tables, servers.endpoints, seed=3) as client:
        client.load_per_host(folders, saved)
        for name in tables:
            np.testing.assert_allclose(client.pull(name, KEYS), values[name], rtol=1e-5, atol=1e-6)


def test_a_host_that_lacks_a_part_is_found(kept, tmp_path):
    saved, _, _ = kept
    folders = [tmp_path / "host-0", tmp_path / "host-1"]
    with local_servers(TABLES, 2, tmp_path) as servers, Client(TABLES, servers.endpoints, seed=3) as client:
        client.push("t", KEYS, np.ones((len(KEYS), 5), np.float32), ONES, ONES)

        def lose_one():
            next(folders[1].rglob("part-*")).unlink()
            return [host_parts.measure(folder, TABLES) for folder in folders]

        with pytest.raises(CheckpointError, match="not one a shard"):
            client.save_per_host(folders, lose_one)
        other = {n: type(s)(s.directory, s.name, s.config, 4, s.parts) for n, s in saved.items()}
        with pytest.raises(CheckpointError, match="seed is 3"):
            client.load_per_host(folders, other)
        with pytest.raises(CheckpointError, match="unquoted"):
            client.save_per_host([tmp_path / "a b", tmp_path], list)
