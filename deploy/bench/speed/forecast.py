"""What the costs measured on one machine let expect of many: a model with its assumptions spelled out.

Nothing here is measured. The inputs are CPU seconds per row of each role, which `bench scaling` shows to stay the same
or not as roles are added, and the sizes of what goes over the network.

Assumptions:
1. A trainer's work for a row takes the same CPU seconds on any number of trainers, and its threads share it evenly.
2. Reading, pulls and pushes go on beside the dense part, so the longest sets the pace of a step; AllReduce does not.
3. AllReduce is a ring: each trainer sends and receives 2 (T - 1) / T of the gradient, in 2 (T - 1) messages.
4. Keys spread evenly over servers (they are mixed before they are placed).
5. The network carries full bandwidth in both directions and nothing else.

Legend: T trainers, S servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Of one row or step, as measured.

    Attributes:
        trainer_seconds_per_row, server_seconds_per_row: CPU seconds, all processes of the role.
        batch_rows: rows of a trainer's step.
        keys_per_row: unique keys that a row adds to its batch.
        pulled_floats: floats of a key that a server sends.
        pushed_floats: floats of a key that a trainer sends.
        dense_bytes: of the gradient that AllReduce sums.
    """

    trainer_seconds_per_row: float
    server_seconds_per_row: float
    batch_rows: int
    keys_per_row: float
    pulled_floats: int
    pushed_floats: int
    dense_bytes: int


@dataclass(frozen=True)
class Nodes:
    """The machines, each with one role.

    Attributes:
        trainer_cores, server_cores: of a trainer's and of a server's machine.
        bytes_per_second: of a machine's network, in each direction.
        message_seconds: from one machine to another, however small.
        busy: share of a server's cores that may be used; beyond it queues grow.
    """

    trainer_cores: int = 16
    server_cores: int = 16
    bytes_per_second: float = 25e9 / 8
    message_seconds: float = 50e-6
    busy: float = 0.7


@dataclass(frozen=True)
class Forecast:
    """Of one number of trainers and servers. `bound` names what sets the pace."""

    trainers: int
    servers: int
    rows_per_second: float
    bound: str


def servers_needed(costs: Costs, nodes: Nodes, trainers: int) -> int:
    """The fewest servers that neither their cores nor their network make the slowest part."""
    rows_per_second = trainers * nodes.trainer_cores / costs.trainer_seconds_per_row
    cores = rows_per_second * costs.server_seconds_per_row / nodes.busy
    network = (
        rows_per_second * costs.keys_per_row * max(_pulled_bytes(costs), _pushed_bytes(costs)) / nodes.bytes_per_second
    )
    return max(1, math.ceil(cores / nodes.server_cores - 1e-9), math.ceil(network - 1e-9))


def forecast(costs: Costs, nodes: Nodes, trainers: int, servers: int) -> Forecast:
    """Rows a second of T trainers and S servers."""
    rows = costs.batch_rows
    keys = rows * costs.keys_per_row
    widest = keys * max(_pulled_bytes(costs), _pushed_bytes(costs)) / nodes.bytes_per_second
    beside = {
        "trainer's cores": rows * costs.trainer_seconds_per_row / nodes.trainer_cores,
        "trainer's network": widest,
        "servers' cores": trainers * rows * costs.server_seconds_per_row / (servers * nodes.server_cores * nodes.busy),
        "servers' network": trainers * widest / servers,
    }
    reduce_seconds = 0.0
    if trainers > 1:
        share = 2 * (trainers - 1) / trainers
        reduce_seconds = share * costs.dense_bytes / nodes.bytes_per_second + 2 * (trainers - 1) * nodes.message_seconds
    bound = max(beside, key=lambda name: beside[name])
    return Forecast(trainers, servers, trainers * rows / (beside[bound] + reduce_seconds), bound)


def efficiency(costs: Costs, nodes: Nodes, few: int, many: int) -> float:
    """Speed per trainer of `many` trainers over that of `few`, each with the servers that it needs."""
    per_trainer = [
        forecast(costs, nodes, number, servers_needed(costs, nodes, number)).rows_per_second / number
        for number in (few, many)
    ]
    return per_trainer[1] / per_trainer[0]


def _pulled_bytes(costs: Costs) -> int:
    """Of a key, from server to trainer."""
    return 4 * costs.pulled_floats


def _pushed_bytes(costs: Costs) -> int:
    """Of a key, from trainer to server: its gradient, and the key itself twice (once for the pull, with a count)."""
    return 4 * costs.pushed_floats + 8 + 12
