"""What an agent is told: declared here once, for `paddlewheel role` and for the agents that a launcher starts.

The module imports nothing but the standard library: `deploy.cli.role` makes arguments of a command from it, and an
agent that a launcher starts reads the flags that `to_arguments` has written, without a parser for people.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

_WORKERS = {"pserver": "paddlewheel.pserver.server_process", "trainer": "paddlewheel.trainer.worker"}


@dataclass(frozen=True)
class Option:
    """What a person may give for an option.

    Attributes:
        help: its meaning.
        variables: of the environment, which stand in for it; the first that is set.
        is_address: whether it is HOST:PORT.
        limits: the least and the largest number.
    """

    help: str
    variables: tuple[str, ...] = ()
    is_address: bool = False
    limits: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """What servers and trainers are told. Each may also come from the environment, as it does in a container."""

    role: str
    """pserver or trainer."""
    coordinator: Annotated[
        str,
        Option(
            "HOST:PORT of the coordinator. It need not run yet, and its name need not resolve yet.",
            ("PADDLEWHEEL_COORDINATOR",),
            is_address=True,
        ),
    ]
    rank: Annotated[
        int | None,
        Option(
            "Rank of this role, from 0; by default the lowest free one.",
            ("PADDLEWHEEL_RANK", "JOB_COMPLETION_INDEX"),
            limits=(0, 10_000),
        ),
    ] = None
    host: Annotated[
        str,
        Option(
            "Address of this machine under which the other roles reach it, and on which it listens.",
            ("PADDLEWHEEL_HOST",),
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int | None,
        Option("Port of the role's own service; by default a free one.", ("PADDLEWHEEL_PORT",), limits=(1, 65_535)),
    ] = None
    health: Annotated[
        str,
        Option(
            'HOST:PORT of the gRPC health service. Service `""`: it is alive; `ready`: it has joined as a member.',
            ("PADDLEWHEEL_HEALTH",),
            is_address=True,
        ),
    ] = "127.0.0.1:0"
    job_name: Annotated[str, Option("Name of the job in the metrics.", ("PADDLEWHEEL_JOB_NAME",))] = ""
    metrics: Annotated[
        str | None,
        Option(
            "HOST:PORT to serve /metrics on (default: off). If the port is in use, a warning is logged.",
            ("PADDLEWHEEL_METRICS",),
            is_address=True,
        ),
    ] = None
    targets: Annotated[
        Path | None,
        Option("Folder for the file that tells Prometheus about this role.", ("PADDLEWHEEL_TARGETS",)),
    ] = None
    join_seconds: Annotated[float, Option("Seconds to wait for the coordinator at the start.", limits=(0, 1e8))] = 300.0
    worker: str = ""
    """Command that replaces the Paddle worker, for tests."""

    @property
    def command(self) -> tuple[str, ...]:
        """The program of the worker."""
        return tuple(shlex.split(self.worker)) or (sys.executable, "-m", _WORKERS[self.role])

    def to_arguments(self) -> list[str]:
        """As the arguments of `python -m paddlewheel.trainer.agent.agent`: a flag a field, without those at default."""
        given = [(field, getattr(self, field.name)) for field in fields(self)]
        pairs = [(f"--{field.name.replace('_', '-')}", str(value)) for field, value in given if value != field.default]
        return [word for pair in pairs for word in pair]

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> AgentOptions:
        """What `to_arguments` was called on. Only launchers write these: people use `paddlewheel role`.

        Raises:
            ValueError: they are no pairs of a flag and its value, or a flag is unknown.
        """
        flags = [flag.removeprefix("--").replace("-", "_") for flag in arguments[::2]]
        given: dict[str, Any] = dict(zip(flags, arguments[1::2], strict=True))
        if unknown := sorted(set(given) - {field.name for field in fields(cls)}):
            raise ValueError(f"an agent has no option {unknown[0]!r}")
        for name, kind in {"rank": int, "port": int, "join_seconds": float, "targets": Path}.items():
            if name in given:
                given[name] = kind(given[name])
        return cls(**given)
