import itertools

import numpy as np
import pytest

from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.local import local_servers
from tests.support.needs import require

RULES = ("sgd", "adagrad", "adagrad_elementwise", "adam", "adam_shared")


def table(rule, **fields):
    """Few parts (a part is a file), and a number of them that 1, 2 and 3 servers share evenly."""
    optimizer = {"rule": rule, "learning_rate": 0.05, **fields.pop("optimizer", {})}
    return TableConfig(**{"width": 6, "shards": 6, **fields, "optimizer": optimizer})


PLAIN = {"learning_rate": 0.2, "weight_bounds": (-0.3, 0.3), "gradient_reduction": "mean"}
# One table per rule and situation: a server with many tables starts as fast as with one.
TABLES = {
    **{rule: table(rule) for rule in RULES},
    **{f"{rule}-plain": table(rule, width=3, first_order=False, optimizer=PLAIN) for rule in RULES},
    "adagrad-sum": table("adagrad", optimizer={"gradient_reduction": "sum"}),
    "admitted-by-shows": table("sgd", width=4, admission_threshold=3),
    "admitted-by-score": table("adagrad", width=4, admission_threshold=2, unclicked_weight=0.1, clicked_weight=1.0),
    "default": TableConfig(width=16),
}


def of_engine(tables, engine):
    return {name: config.model_copy(update={"engine": engine}) for name, config in tables.items()}


@pytest.fixture(
    scope="session",
    params=[(1, "paddlewheel"), (2, "paddlewheel"), (2, "paddle")],
    ids=["1-server", "2-servers", "2-servers-of-paddle"],
)
def cluster(request, tmp_path_factory):
    """Servers that hold TABLES; tests share them, so each draws keys of its own."""
    num_servers, engine = request.param
    if engine == "paddlewheel":
        require("our own tables")
    with local_servers(of_engine(TABLES, engine), num_servers, tmp_path_factory.mktemp("servers")) as servers:
        yield servers


@pytest.fixture
def client(cluster):
    with Client(TABLES, cluster.endpoints, seed=5) as client:
        yield client


_streams = itertools.count()


@pytest.fixture
def draw_keys():
    """A function: number -> so many keys that no other test uses."""
    rng = np.random.default_rng([2026, next(_streams)])

    def draw(count):
        keys = rng.integers(1, 1 << 64, 2 * count, dtype=np.uint64)
        return np.unique(keys)[rng.permutation(count)]

    return draw
