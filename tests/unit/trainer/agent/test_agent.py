"""Parts of the agent that need no job: its port, and orders that cannot be carried out."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlewheel.trainer.agent import agent
from paddlewheel.trainer.agent.agent import Agent, AgentOptions
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator.security import Security
from paddlewheel.trainer.distributed.subprocesses import reserve_port


def options(port: int | None = None) -> AgentOptions:
    return AgentOptions(role="pserver", rank=0, coordinator="127.0.0.1:1", port=port)


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
        assert agent.run_agent(options(port)) == os.EX_TEMPFAIL
    assert f"port {port} of 127.0.0.1 cannot be used" in capfd.readouterr().out
    reserve_port("127.0.0.1", port).close()


class _Surprised:
    """A host of checkpoints with a mistake in it."""

    def obey(self, order: Any) -> Any:
        raise KeyError(order.draft)


class _Worker:
    attempt = 3


@pytest.mark.parametrize(
    ("host", "attempt", "order", "words"),
    [
        (_Surprised(), 3, {"upload": pb.UploadDraft(draft="d")}, "KeyError"),
        (_Surprised(), 3, {}, "HostRequest.order is missing"),
        (None, 3, {}, "its server is gone"),
        (_Surprised(), 4, {}, "its server is gone"),
    ],
)
def test_an_order_is_always_answered(host: Any, attempt: int, order: Any, words: str) -> None:
    async def ask() -> pb.HostResponse:
        found = Agent(options(), Security())
        found._host, found._worker = host, _Worker()  # type: ignore[assignment]
        await found._carry_out(pb.HostRequest(attempt=attempt, **order))
        return found._outbox.get_nowait().host_response

    answer = asyncio.run(ask())
    assert answer.attempt == attempt
    assert words in answer.failed.error


@pytest.mark.parametrize("role", ["pserver", "trainer"])
def test_the_program_of_a_worker_is_there(role: str) -> None:
    _, option, module = AgentOptions(role=role, coordinator="127.0.0.1:1").command
    assert option == "-m"
    assert importlib.util.find_spec(module) is not None


FLAGS = st.builds(
    AgentOptions,
    role=st.sampled_from(["pserver", "trainer"]),
    coordinator=st.text(min_size=1),
    rank=st.none() | st.integers(0, 10_000),
    host=st.text(),
    port=st.none() | st.integers(1, 65_535),
    job_name=st.text(),
    metrics=st.none() | st.text(),
    targets=st.none() | st.just(Path("/some where/--targets")),
    join_seconds=st.floats(0, 1e8),
    worker=st.text(),
)


@given(FLAGS)
def test_an_agent_is_told_what_its_launcher_meant(options: AgentOptions) -> None:
    assert AgentOptions.from_arguments(options.to_arguments()) == options


@pytest.mark.parametrize("arguments", [["--role"], ["--role", "trainer", "--colour", "red"]])
def test_flags_that_no_launcher_writes_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=r"no option 'colour'|shorter"):
        AgentOptions.from_arguments(arguments)
