"""Our client and Paddle's own speak of the same table: what one pushes, the other pulls, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import TableConfig, Tables
from paddlewheel.pserver.local import local_servers

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("num_servers", [1, 2])
def test_the_same_values_through_either_client(tmp_path, num_servers):
    tables = {"t": TableConfig(width=3, initial_range=0.0, optimizer={"rule": "sgd", "learning_rate": 0.1})}
    keys = np.arange(1001, 1005, dtype=np.uint64)
    ones = np.ones(4, np.float32)
    grads = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    with (
        local_servers(tables, num_servers, tmp_path) as servers,
        Client(tables, servers.endpoints) as client,
    ):
        client.push("t", keys, grads, ones * 2, ones)
        client.push("t", keys, grads, ones * 2, ones)
        before = client.pull_with_counts("t", keys)
        done = subprocess.run(
            [sys.executable, Path(__file__).parent / "paddle_client.py", ",".join(servers.endpoints), "6"],
            input=TypeAdapter(Tables).dump_json(tables).decode() + "\n",
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        after = client.pull_with_counts("t", keys)
    theirs_before, theirs_after = json.loads(done.stdout.splitlines()[-1])
    for ours, theirs in ((before, theirs_before), (after, theirs_after)):
        np.testing.assert_array_equal(
            np.column_stack([ours.shows_U, ours.clicks_U, ours.values_UW]), np.array(theirs, np.float32)
        )
    np.testing.assert_allclose(after.values_UW, before.values_UW - 0.1 * 0.5, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(after.shows_U, before.shows_U + 1)
