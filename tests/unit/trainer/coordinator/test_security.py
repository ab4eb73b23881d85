"""The control plane's token and mutual TLS: who may not come in, does not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import coordinator_pb2_grpc as pb_grpc
from paddlewheel.trainer.coordinator.security import Security, SecurityError
from tests.support.authorities import make_authority


class _Answers(pb_grpc.CoordinatorServicer):
    async def GetStatus(self, request: pb.StatusRequest, context: object) -> pb.JobStatus:
        return pb.JobStatus(name="here")

    async def WatchStatus(self, request: pb.StatusRequest, context: object):
        yield pb.JobStatus(name="here")

    async def Attend(self, request_iterator: object, context: object):
        yield pb.AgentCommand(pulse=pb.Pulse())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, `ours` and `other`; each has signed a certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    for who in ("ours", "other"):
        make_authority(folder, who)
    return folder


def tls(folder: Path, authority: str = "ours", pair: str = "ours", **more: str) -> Security:
    return Security.from_environment(
        {
            "PADDLEWHEEL_TLS_CA": str(folder / f"{authority}.ca"),
            "PADDLEWHEEL_TLS_CERT": str(folder / f"{pair}.cert"),
            "PADDLEWHEEL_TLS_KEY": str(folder / f"{pair}.key"),
            **more,
        }
    )


def ask(server_side: Security, client_side: Security, method: str = "GetStatus") -> object:
    """What a client gets from a server; grpc.RpcError if it is refused."""

    async def run() -> object:
        server = server_side.server()
        pb_grpc.add_CoordinatorServicer_to_server(_Answers(), server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = server_side.listen(server, "127.0.0.1:0")
        await server.start()
        try:
            async with client_side.channel(f"127.0.0.1:{port}") as channel:
                if method == "health":
                    stub = health_pb2_grpc.HealthStub(channel)
                    return await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                stub = pb_grpc.CoordinatorStub(channel)
                metadata = client_side.metadata
                if method == "GetStatus":
                    return (await stub.GetStatus(pb.StatusRequest(), metadata=metadata, timeout=5)).name
                if method == "WatchStatus":
                    return [s.name async for s in stub.WatchStatus(pb.StatusRequest(), metadata=metadata, timeout=5)]
                call = stub.Attend(metadata=metadata, timeout=5)
                return await call.read()
        finally:
            await server.stop(0)

    return asyncio.run(run())


@pytest.mark.parametrize("method", ["GetStatus", "WatchStatus", "Attend"])
@pytest.mark.parametrize("token", [None, "", "wrong", "secret "])
def test_no_call_without_the_token(method: str, token: str | None) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        ask(Security(token="secret"), Security(token=token), method)
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "PADDLEWHEEL_TOKEN" in refusal.value.details()


def test_the_right_token_opens_and_probes_need_none() -> None:
    assert ask(Security(token="secret"), Security(token="secret")) == "here"
    assert ask(Security(token="secret"), Security(), "health").status == health_pb2.HealthCheckResponse.SERVING
    assert ask(Security(), Security(token="not asked for")) == "here"


def test_a_token_file_beats_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("from the file\n")
    found = Security.from_environment({"PADDLEWHEEL_TOKEN": "x", "PADDLEWHEEL_TOKEN_FILE": str(path)})
    assert found.token == "from the file"
    assert "from the file" not in repr(found)


def test_mutual_tls(certificates: Path) -> None:
    assert ask(tls(certificates), tls(certificates)) == "here"


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(lambda folder: Security(), id="plain text"),
        pytest.param(lambda folder: tls(folder, pair="other"), id="certificate of another authority"),
        pytest.param(lambda folder: tls(folder, authority="other"), id="trusts another authority"),
        pytest.param(lambda folder: Security(authority=(folder / "ours.ca").read_bytes()), id="no certificate"),
        pytest.param(lambda folder: tls(folder, PADDLEWHEEL_TLS_NAME="elsewhere"), id="expects another name"),
    ],
)
def test_tls_keeps_others_out(certificates: Path, client) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        ask(tls(certificates), client(certificates))
    assert refusal.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


def test_a_client_with_tls_does_not_talk_to_a_plain_server(certificates: Path) -> None:
    with pytest.raises(grpc.RpcError):
        ask(Security(), tls(certificates))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PADDLEWHEEL_TOKEN_FILE": "/nowhere/token"}, "PADDLEWHEEL_TOKEN_FILE=/nowhere/token cannot be read"),
        ({"PADDLEWHEEL_TLS_CA": "{ca}"}, "without PADDLEWHEEL_TLS_CERT, PADDLEWHEEL_TLS_KEY"),
        ({"PADDLEWHEEL_TLS_CERT": "{ca}", "PADDLEWHEEL_TLS_KEY": "{ca}"}, "without PADDLEWHEEL_TLS_CA"),
    ],
)
def test_half_a_secret_is_refused(certificates: Path, environment: Mapping[str, str], message: str) -> None:
    with pytest.raises(SecurityError, match=message):
        Security.from_environment({k: v.format(ca=certificates / "ours.ca") for k, v in environment.items()})


def test_a_proxy_for_the_outside_world_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert ask(Security(), Security()) == "here"
