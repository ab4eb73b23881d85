"""python -m paddlewheel.deploy.docker.healthcheck: asks this container's gRPC health service. Exit code 0: it serves,
1: not.

The address is PADDLEWHEEL_HEALTH (servers and trainers) or the coordinator's usual port. TLS and token as for the role.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paddlewheel.trainer.coordinator.security import Security

_COORDINATOR = "127.0.0.1:7070"
_SECONDS = 2.0


async def is_serving(address: str, security: Security) -> bool:
    """Whether the process at 'host:port' says that it serves."""
    async with security.channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_SECONDS, metadata=security.metadata)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def check() -> bool:
    """Whether this container's role serves."""
    security = Security.from_environment()
    own = os.environ.get("PADDLEWHEEL_HEALTH", "").replace("0.0.0.0", "127.0.0.1")  # noqa: S104 -- only to ask ourselves
    addresses = [address for address in (own, _COORDINATOR) if address]
    return any(await asyncio.gather(*(is_serving(address, security) for address in addresses)))


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(check()) else 1)
