"""The HTTP endpoint: ports, passwords, TLS, and clients that behave badly."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddlewheel.trainer.telemetry import Telemetry, WebSecurity, WebSecurityError, WebServer, metrics_app, web
from tests.support.needs import require


@pytest.fixture
def routes() -> dict:
    return {"/metrics": metrics_app(Telemetry("trainer", "job", rank=0).registry)}


def ask(
    server: WebServer, path: str = "/metrics", *, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_serves_the_registry_as_text_and_as_openmetrics(routes: dict) -> None:
    with WebServer("127.0.0.1:0", routes, WebSecurity()) as server:
        status, text, headers = ask(server)
        assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
        assert 'paddlewheel_agent_joined{job_name="job",rank="0",role="trainer"} 0.0' in text
        status, text, headers = ask(server, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        assert text.endswith("# EOF\n")


def test_reads_only_and_knows_its_paths(routes: dict) -> None:
    with WebServer("127.0.0.1:0", routes, WebSecurity()) as server:
        assert ask(server, "/other")[0] == 404
        assert ask(server, "/metrics/../etc/passwd")[0] == 404
        assert ask(server, method="POST")[0] == 405


def test_a_taken_port_is_an_error_and_two_free_ones_differ(routes: dict) -> None:
    with WebServer("127.0.0.1:0", routes, WebSecurity()) as one, WebServer("127.0.0.1:0", routes, WebSecurity()) as two:
        assert one.port != two.port
        with pytest.raises(OSError, match="in use"):
            WebServer(f"127.0.0.1:{one.port}", routes, WebSecurity())
    with WebServer(f"127.0.0.1:{one.port}", routes, WebSecurity()) as again:  # closed ports are free at once
        assert ask(again)[0] == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Basic " + base64.b64encode(b"prom:wrong").decode(), 401),
        ("Basic " + base64.b64encode(b"prom").decode(), 401),
        ("Basic not-base64!", 401),
        ("Bearer " + base64.b64encode(b"prom:secret").decode(), 401),
        ("Basic " + base64.b64encode(b"prom:secret").decode(), 200),
        ("basic " + base64.b64encode(b"prom:secret").decode(), 200),
    ],
)
def test_password(routes: dict, tmp_path: Path, header: str | None, status: int) -> None:
    (tmp_path / "password").write_text("secret\n")
    security = WebSecurity.from_environment(
        {"PADDLEWHEEL_HTTP_USER": "prom", "PADDLEWHEEL_HTTP_PASSWORD_FILE": str(tmp_path / "password")}
    )
    assert "secret" not in repr(security)
    with WebServer("127.0.0.1:0", routes, security) as server:
        got, text, headers = ask(server, headers={"Authorization": header} if header else {})
        assert got == status
        assert ("paddlewheel_" in text) == (status == 200)
        assert (headers["WWW-Authenticate"] is not None) == (status == 401)
        assert ask(server, "/other")[0] == 401  # nothing is told without the password


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PADDLEWHEEL_HTTP_USER": "prom"}, "PADDLEWHEEL_HTTP_PASSWORD"),
        ({"PADDLEWHEEL_HTTP_PASSWORD": "x"}, "PADDLEWHEEL_HTTP_USER"),
        ({"PADDLEWHEEL_HTTP_USER": "prom", "PADDLEWHEEL_HTTP_PASSWORD_FILE": "/nowhere"}, "/nowhere cannot be read"),
        ({"PADDLEWHEEL_HTTP_TLS_CERT": "/nowhere"}, "belong together"),
        ({"PADDLEWHEEL_HTTP_TLS_CERT": "/nowhere", "PADDLEWHEEL_HTTP_TLS_KEY": "/nowhere"}, "cannot be used"),
        ({"PADDLEWHEEL_HTTP_TLS_CLIENT_CA": "/nowhere"}, "needs both"),
    ],
)
def test_half_of_a_secret_is_refused_rather_than_serving_openly(environment: dict[str, str], message: str) -> None:
    with pytest.raises(WebSecurityError, match=message):
        WebSecurity.from_environment(environment)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    require("openssl")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return folder


def test_tls_and_a_client_that_never_shakes_hands(routes: dict, certificates: Path) -> None:
    security = WebSecurity(certificate=certificates / "cert.pem", key=certificates / "key.pem")
    with WebServer("127.0.0.1:0", routes, security) as server:
        assert server.scheme == "https"
        silent = socket.create_connection(("127.0.0.1", server.port))
        context = ssl.create_default_context(cafile=certificates / "cert.pem")
        connection = http.client.HTTPSConnection("localhost", server.port, timeout=5, context=context)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200
        connection.close()
        silent.close()


def test_client_certificates(routes: dict, certificates: Path) -> None:
    cert, key = certificates / "cert.pem", certificates / "key.pem"
    with WebServer("127.0.0.1:0", routes, WebSecurity(certificate=cert, key=key, client_authority=cert)) as server:

        def status(context: ssl.SSLContext) -> int:
            connection = http.client.HTTPSConnection("localhost", server.port, timeout=5, context=context)
            try:
                connection.request("GET", "/metrics")
                return connection.getresponse().status
            finally:
                connection.close()

        anonymous, known = (ssl.create_default_context(cafile=cert) for _ in range(2))
        known.load_cert_chain(cert, key)
        assert status(known) == 200
        with pytest.raises((OSError, http.client.HTTPException)):
            status(anonymous)


def test_many_silent_clients_do_not_use_up_threads_without_bound(routes: dict) -> None:
    with WebServer("127.0.0.1:0", routes, WebSecurity()) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(31)]
        try:
            assert ask(server)[0] == 200
        finally:
            for client in silent:
                client.close()


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9", "localhost", "LOCALHOST:80", "[::1]:9", "10.0.0.7", "box", "a.b.svc:1"]
)
def test_names_that_nobody_else_can_own_are_answered(routes: dict, host: str) -> None:
    with WebServer("127.0.0.1:0", routes, WebSecurity()) as server:
        assert ask(server, headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example."]
)
def test_a_strangers_name_that_points_here_is_refused(routes: dict, host: str) -> None:
    """A page of evil.example in a browser on this machine, whose name now has the address of this endpoint."""
    with WebServer("127.0.0.1:0", routes, WebSecurity()) as server:
        status, text, _ = ask(server, headers={"Host": host})
        assert status == 421
        assert "PADDLEWHEEL_HTTP_HOSTS" in text
        assert "paddlewheel_" not in text
    named = WebSecurity.from_environment({"PADDLEWHEEL_HTTP_HOSTS": f"x.example, {host.partition(':')[0].rstrip('.')}"})
    with WebServer("127.0.0.1:0", routes, named) as server:
        assert ask(server, headers={"Host": host})[0] == 200
    with WebServer("127.0.0.1:0", routes, WebSecurity(), name=host.partition(":")[0].rstrip(".")) as server:
        assert ask(server, headers={"Host": host})[0] == 200
    with WebServer("127.0.0.1:0", routes, WebSecurity("u", "p")) as server:
        assert ask(server, headers={"Host": host})[0] == 401


def drip(server: WebServer, number: int) -> list[socket.socket]:
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(number)]
    for client in clients:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    return clients


def test_clients_that_say_their_request_byte_by_byte_do_not_keep_the_others_out(
    routes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_CROWDED_SECONDS", 0.2)
    with WebServer("127.0.0.1:0", routes, WebSecurity()) as server:
        clients = drip(server, 32)
        try:
            deadline = time.monotonic() + 30
            while True:
                for client in clients:
                    with contextlib.suppress(OSError):
                        client.sendall(b"x")
                try:
                    assert ask(server)[0] == 200
                    break
                except (OSError, http.client.HTTPException):  # as long as all of them are young
                    assert time.monotonic() < deadline
        finally:
            for client in clients:
                client.close()


def test_a_request_has_a_deadline_of_its_own_however_often_a_byte_comes(
    routes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_REQUEST_SECONDS", 0.5)
    with WebServer("127.0.0.1:0", routes, WebSecurity()) as server:
        (client,) = drip(server, 1)
        deadline = time.monotonic() + 30
        with client, contextlib.suppress(ConnectionError):
            while True:
                client.sendall(b"x")
                client.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    if client.recv(1) == b"":
                        break
                assert time.monotonic() < deadline, "the drip is still listened to"
