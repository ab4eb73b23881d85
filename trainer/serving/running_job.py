"""The servers of a running job, for somebody who only reads: found, and allowed, by its coordinator.

Paddle's servers lock nothing: a pull during a load or a day boundary can end one, and with it the job's attempt.
Who is no trainer of the job cannot know when these happen, so it asks: the coordinator says whether all loads are over,
and the job itself whether it has boundaries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddlewheel.pserver import admin
from paddlewheel.pserver.config import TableConfig

_ANSWER_SECONDS = 5.0
_RUNNING = "running"


class NotReadableError(ConnectionError):
    """The job's servers cannot be read now: nobody answers, or they are being filled. Trying again may help."""


class BoundariesError(ValueError):
    """The job's servers must never be read from outside."""


@dataclass(frozen=True)
class RunningServers:
    """All servers of a job, filled, and not to be filled again as long as these processes live.

    Attributes:
        endpoints: "ip:port" in rank order.
        server_uids: of their processes, as `pserver.client.Client` takes them: a server that was started again is
            refused, because it is empty and may be about to load.
    """

    endpoints: tuple[str, ...]
    server_uids: tuple[str, ...]


def check_no_boundaries(settings: Mapping[str, Any]) -> None:
    """Refuse a job (as plain data) that has day boundaries.

    Raises:
        BoundariesError: it has.
    """
    tables = {name: TableConfig.model_validate(table) for name, table in settings["tables"].items()}
    by_rows = [name for name, table in tables.items() if table.lifecycle.every_rows is not None]
    key = f"tables.{min(by_rows)}.lifecycle.every_rows" if by_rows else "train.days"
    if by_rows or settings["train"].get("days") is not None:
        raise BoundariesError(
            f"--coordinator: this job has day boundaries ({key}), and a server that is read during one can crash. "
            "Score from its newest checkpoint: leave --coordinator out"
        )


def find(address: str) -> RunningServers:
    """The servers of the job whose coordinator listens at an address.

    Raises:
        NotReadableError: nobody answers there, or the job is not running (its servers may be loading).
    """
    before = _status(address)
    members = sorted((m.rank, m.host, m.port) for m in before.members if m.role == _pserver())
    hosts = [(f"[{host}]" if ":" in host else host, host, port) for _, host, port in members]
    try:
        server_uids = tuple(admin.server_uid(host, port) for _, host, port in hosts)
    except OSError as error:
        raise NotReadableError(f"--coordinator {address}: {error}") from error
    # Asked again: only if no attempt began meanwhile are these processes the ones that were filled.
    after = _status(address)
    if after.attempt != before.attempt:
        raise NotReadableError(f"--coordinator {address}: the job has just started again; try again when it trains")
    return RunningServers(tuple(f"{host}:{port}" for host, _, port in hosts), server_uids)


def _pserver() -> int:
    from paddlewheel.trainer.coordinator import coordinator_pb2 as pb

    return int(pb.ROLE_PSERVER)


def _status(address: str) -> Any:
    status = asyncio.run(_ask(address))
    if status.phase != _RUNNING or status.over:
        raise NotReadableError(
            f"--coordinator {address}: {status.name} is not training (it is {status.phase}), so its servers may be "
            "loading. Try again when it trains, or leave --coordinator out and score from its newest checkpoint"
        )
    return status


async def _ask(address: str) -> Any:
    import grpc

    from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
    from paddlewheel.trainer.coordinator import coordinator_pb2_grpc as pb_grpc
    from paddlewheel.trainer.coordinator.security import Security

    security = Security.from_environment()
    async with security.channel(address) as channel:
        try:
            return await pb_grpc.CoordinatorStub(channel).GetStatus(
                pb.StatusRequest(), metadata=security.metadata, timeout=_ANSWER_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            details = f"{error.code().name.lower()}, {error.details()}"
            raise NotReadableError(f"--coordinator {address}: no coordinator answers there: {details}") from None
