"""Parts of the agent that need no job: its port, and orders that cannot be carried out."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
from typing import Any

import pytest

from paddlewheel.trainer.agent import agent
from paddlewheel.trainer.agent.agent import Agent, AgentOptions
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator.security import Security
from paddlewheel.trainer.distributed.subprocesses import reserve_port


def options(port: int | None = None) -> AgentOptions:
    return AgentOptions("pserver", 0, "127.0.0.1:1", "127.0.0.1", port)


def test_a_port_that_a_dying_server_still_has_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_PORT_RETRY_SECONDS", 0.01)

    async def reserve() -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            reserving = asyncio.ensure_future(Agent(options(server.getsockname()[1]), Security())._reserve())
            for _ in range(10):
                await asyncio.sleep(0.01)
            assert not reserving.done()
        return await reserving

    asyncio.run(reserve()).close()


def test_a_port_that_stays_taken_is_no_mistake_in_the_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "_PORT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        arguments = ["--role", "pserver", "--coordinator", "127.0.0.1:1", "--port", str(port)]
        assert agent.main(arguments) == os.EX_TEMPFAIL
    assert f"port {port} of 127.0.0.1 cannot be used" in capfd.readouterr().out
    reserve_port("127.0.0.1", port).close()


class _Surprised:
    """A host of checkpoints with a mistake in it."""

    def obey(self, order: Any) -> Any:
        raise KeyError(order["draft"])


class _Worker:
    attempt = 3


@pytest.mark.parametrize(
    ("host", "attempt", "text", "words"),
    [
        (_Surprised(), 3, '{"draft": "d"}', "KeyError"),
        (_Surprised(), 3, "{", "JSONDecodeError"),
        (None, 3, "{}", "its server is gone"),
        (_Surprised(), 4, "{}", "its server is gone"),
    ],
)
def test_an_order_is_always_answered(host: Any, attempt: int, text: str, words: str) -> None:
    async def ask() -> pb.HostResponse:
        found = Agent(options(), Security())
        found._host, found._worker = host, _Worker()  # type: ignore[assignment]
        await found._carry_out(pb.HostRequest(attempt=attempt, json=text))
        return found._outbox.get_nowait().host_response

    answer = asyncio.run(ask())
    assert answer.attempt == attempt
    assert words in json.loads(answer.json)["error"]


@pytest.mark.parametrize("role", ["pserver", "trainer"])
def test_the_program_of_a_worker_is_there(role: str) -> None:
    _, option, module = AgentOptions(role, 0, "127.0.0.1:1", "127.0.0.1").command
    assert option == "-m"
    assert importlib.util.find_spec(module) is not None
