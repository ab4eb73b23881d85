import itertools

import numpy as np
import pytest

from pserver.client import Client
from pserver.config import TableConfig
from pserver.local import local_servers

RULES = ("sgd", "adagrad", "adagrad_elementwise", "adam", "adam_shared")
# One table per rule and situation: a server with many tables starts as fast as with one.
TABLES = {
    **{rule: TableConfig(width=6, optimizer={"rule": rule, "learning_rate": 0.05}) for rule in RULES},
    **{
        f"{rule}-plain": TableConfig(
            width=3,
            first_order=False,
            optimizer={"rule": rule, "learning_rate": 0.2, "weight_bounds": (-0.3, 0.3), "occurrences": "mean"},
        )
        for rule in RULES
    },
    "adagrad-sum": TableConfig(width=6, optimizer={"rule": "adagrad", "occurrences": "sum"}),
    "admitted-by-shows": TableConfig(width=4, admission=3, optimizer={"rule": "sgd"}),
    "admitted-by-score": TableConfig(
        width=4, admission=2, unclicked_weight=0.1, clicked_weight=1.0, optimizer={"rule": "adagrad"}
    ),
    "default": TableConfig(width=16),
}


@pytest.fixture(scope="session", params=[1, 2], ids=["1-server", "2-servers"])
def cluster(request, tmp_path_factory):
    """Servers that hold TABLES; tests share them, so each draws keys of its own."""
    with local_servers(TABLES, request.param, tmp_path_factory.mktemp("servers")) as servers:
        yield servers


@pytest.fixture
def client(cluster):
    with Client(TABLES, cluster.endpoints, seed=5) as client:
        yield client


_streams = itertools.count()


@pytest.fixture
def draw_keys():
    """draw_keys(n): n keys that no other test uses."""
    rng = np.random.default_rng([2026, next(_streams)])

    def draw(count):
        keys = rng.integers(1, 1 << 64, 2 * count, dtype=np.uint64)
        return np.unique(keys)[rng.permutation(count)]

    return draw
