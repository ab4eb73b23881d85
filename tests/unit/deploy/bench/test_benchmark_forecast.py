from __future__ import annotations

from dataclasses import replace

import pytest

from paddlewheel.deploy.bench.speed.forecast import Costs, Nodes, efficiency, forecast, servers_needed

COSTS = Costs(
    trainer_seconds_per_row=100e-6,
    server_seconds_per_row=10e-6,
    batch_rows=2000,
    keys_per_row=10.0,
    pulled_floats=19,
    pushed_floats=20,
    dense_bytes=2_000_000,
)
NODES = Nodes(trainer_cores=10, server_cores=10, bytes_per_second=1e9, message_seconds=1e-4, busy=0.5)


def test_one_trainer_is_as_fast_as_its_cores() -> None:
    found = forecast(COSTS, NODES, 1, 1)
    assert found.rows_per_second == pytest.approx(10 / 100e-6)
    assert found.bound == "trainer's cores"


def test_allreduce_adds_its_ring_to_every_step() -> None:
    found = forecast(COSTS, NODES, 4, 4)
    step = 2000 * 100e-6 / 10 + 1.5 * 2e6 / 1e9 + 6 * 1e-4
    assert found.rows_per_second == pytest.approx(4 * 2000 / step)


def test_servers_bind_by_cores_or_by_network_and_enough_of_them_do_not() -> None:
    assert servers_needed(COSTS, NODES, 1) == 1
    assert servers_needed(COSTS, NODES, 20) == 4  # 20 x 10 cores need a tenth of it at servers half busy: 40 cores
    assert forecast(COSTS, NODES, 20, 1).bound == "servers' cores"
    assert forecast(COSTS, NODES, 20, 4).bound == "trainer's cores"
    slow = replace(NODES, bytes_per_second=2e8)
    assert forecast(COSTS, slow, 20, 4).bound == "servers' network"
    assert forecast(COSTS, slow, 20, servers_needed(COSTS, slow, 20)).bound == "trainer's cores"


def test_efficiency_falls_with_the_number_of_trainers() -> None:
    few = forecast(COSTS, NODES, 4, servers_needed(COSTS, NODES, 4)).rows_per_second / 4
    many = forecast(COSTS, NODES, 32, servers_needed(COSTS, NODES, 32)).rows_per_second / 32
    assert efficiency(COSTS, NODES, 4, 32) == pytest.approx(many / few)
    assert 0.5 < many / few < 1.0
