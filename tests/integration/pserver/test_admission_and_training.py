"""A key that has lost its admission is not trained where nobody sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddlewheel.data_pipeline.batch import Batch, TableKeys
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.local import local_servers
from paddlewheel.trainer.loop.embedding_pipeline import EmbeddingPipeline


def _batch() -> Batch:
    single = np.array([[1]], np.int32)
    keys = TableKeys(np.array([17], np.uint64), {"a": single[:, 0]}, single, ("a",))
    return Batch(1, np.zeros((1, 0), np.float32), np.zeros((1, 1), np.float32), {"default": keys}, ())


def _push(client: Client, tables: dict[str, TableConfig], gradient: float, times: int) -> None:
    with EmbeddingPipeline(client, iter([_batch()] * times), max_staleness_steps=0, tables=tables) as pipeline:
        for item in pipeline:
            item.push({"default": np.full((1, 3), gradient, np.float32)})
        pipeline.drain()


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_what_was_learnt_is_there_again_when_the_key_is_admitted_again(tmp_path: Path, rule: str) -> None:
    optimizer = {"rule": rule, "learning_rate": 0.1}
    config = TableConfig(
        width=2, admission_threshold=3, initial_range=0.0, optimizer=optimizer, lifecycle={"show_click_decay": 0.4}
    )
    tables, key = {"default": config}, np.array([17], np.uint64)
    with local_servers(tables, 1, tmp_path) as servers, Client(tables, servers.endpoints, seed=1) as client:
        _push(client, tables, 1.0, 6)
        before = client.pull_with_counts("default", key)
        assert before.admitted_U[0]
        assert before.values_UW[0, 1:].all()
        client.end_day()  # 6 shows become 2.4
        assert not client.pull_with_counts("default", key).admitted_U[0]
        _push(client, tables, 50.0, 1)  # computed at an embedding of zeros, and admits the key again
        after = client.pull_with_counts("default", key)
        assert after.admitted_U[0]
        np.testing.assert_allclose(after.values_UW[0, 1:], before.values_UW[0, 1:], rtol=1e-6)
        assert after.values_UW[0, 0] != before.values_UW[0, 0], "the first-order weight learns all along"
