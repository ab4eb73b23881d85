"""The small HTTP server of agents and coordinator: /metrics and the status page, read-only; password and TLS if wished.

Secrets come from the environment or from files it names, as for the control plane (trainer.coordinator.security):

    PADDLEWHEEL_HTTP_USER, PADDLEWHEEL_HTTP_PASSWORD or PADDLEWHEEL_HTTP_PASSWORD_FILE    basic authentication
    PADDLEWHEEL_HTTP_TLS_CERT, PADDLEWHEEL_HTTP_TLS_KEY    files: certificate chain and key; turn TLS on
    PADDLEWHEEL_HTTP_TLS_CLIENT_CA                         file: clients must show a certificate signed by it
    PADDLEWHEEL_HTTP_HOSTS                                 names by which browsers reach it, besides this machine's own

Without password and client certificate a page of a stranger could read this one through the browser of someone who sees
both: its name would point here (DNS rebinding). So only names are answered that nobody else can own, and those above.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import ipaddress
import os
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.registry import Collector
from typing_extensions import Self

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
_REQUEST_SECONDS = 10.0
"""A client that is not answered by then, because it says its request byte by byte or reads nothing, is cut off."""
_CROWDED_SECONDS = 1.0
"""When all places are taken, the oldest client that is older than this makes room."""
_MAX_CLIENTS = 32
_OWN_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".svc.cluster.local")
"""Of names that no stranger can own."""
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
]


class WebSecurityError(ValueError):
    """The environment names secrets that cannot be used: better no endpoint than an open one."""


@dataclass(frozen=True)
class WebSecurity:
    """What protects the endpoint. Without anything it is open, which is meant for one machine or a private network."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    certificate: Path | None = None
    key: Path | None = None
    client_authority: Path | None = None
    hosts: frozenset[str] = frozenset()
    """Further names under which browsers may reach it, in lower case."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> WebSecurity:
        """Reads the variables above.

        Raises:
            WebSecurityError: a named file cannot be read, or only a part of what belongs together is given.
        """
        variables = os.environ if environment is None else environment
        prefix = "PADDLEWHEEL_HTTP_"
        user, password = variables.get(f"{prefix}USER"), variables.get(f"{prefix}PASSWORD")
        if path := variables.get(f"{prefix}PASSWORD_FILE"):
            try:
                password = Path(path).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise WebSecurityError(f"{prefix}PASSWORD_FILE={path} cannot be read: {error.strerror}") from error
        if bool(user) != bool(password):
            raise WebSecurityError(
                f"{prefix}USER needs {prefix}PASSWORD or {prefix}PASSWORD_FILE, and they need it; give both"
            )
        certificate, key, authority = (
            Path(variables[name]) if variables.get(name) else None
            for name in (f"{prefix}TLS_CERT", f"{prefix}TLS_KEY", f"{prefix}TLS_CLIENT_CA")
        )
        if bool(certificate) != bool(key) or (authority and not certificate):
            raise WebSecurityError(
                f"{prefix}TLS_CERT and {prefix}TLS_KEY belong together, and {prefix}TLS_CLIENT_CA needs both"
            )
        names = (variables.get(f"{prefix}HOSTS") or "").replace(",", " ").lower().split()
        security = cls(user or None, password or None, certificate, key, authority, frozenset(names))
        security.context()
        return security

    def context(self) -> ssl.SSLContext | None:
        """For the listening socket; None without TLS. Raises WebSecurityError."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_authority is not None:
                context.load_verify_locations(self.client_authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # ssl.SSLError is one
            raise WebSecurityError(f"the TLS files of the HTTP endpoint cannot be used: {error}") from error
        return context

    def admits(self, authorization: str) -> bool:
        """Whether this Authorization header may pass."""
        if self.user is None or self.password is None:
            return True
        scheme, _, text = authorization.partition(" ")
        try:
            given = base64.b64decode(text.strip(), validate=True)
        except (binascii.Error, ValueError):
            given = b""
        return scheme.lower() == "basic" and hmac.compare_digest(given, f"{self.user}:{self.password}".encode())

    def knows(self, host: str) -> bool:
        """Whether a request with this Host header may be answered."""
        if self.user is not None or self.client_authority is not None or not host:
            return True  # a browser has neither for another site's page, and always names a host
        name = host.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        name = name.removesuffix(".")
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.partition("%")[0])
            return True
        own = {"localhost", socket.gethostname().lower()} | self.hosts
        return name in own or "." not in name or name.endswith(_OWN_SUFFIXES)


class WebServer:
    """Serves `routes` (path -> WSGI application) from threads of its own until `close`.

    Args:
        address: 'host:port'; port 0 takes any free one.
        routes: every other path is answered with 404.
        security: from the environment by default.
        name: under which other machines reach it, if that is not the address.

    Raises:
        OSError: the address cannot be listened on.
        WebSecurityError: see WebSecurity.
    """

    def __init__(
        self, address: str, routes: Mapping[str, App], security: WebSecurity | None = None, name: str = ""
    ) -> None:
        given = security or WebSecurity.from_environment()
        names = {name.lower(), address.rpartition(":")[0].lower()} - {""}
        self._security = replace(given, hosts=given.hosts | names)
        self._routes = dict(routes)
        context = self._security.context()
        self.scheme = "https" if context else "http"
        host, _, port = address.rpartition(":")
        self._server = _Server(host.strip("[]") or "0.0.0.0", int(port), self._answer)  # noqa: S104 -- as ":9000" asks for
        if context is not None:
            # The handshake belongs to the client's own thread: a silent client must not keep the others out.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            return start_response(status, [*headers, *_HEADERS], *more)

        def refuse(status: str, *headers: tuple[str, str]) -> Iterable[bytes]:
            start(status, [("Content-Type", "text/plain; charset=utf-8"), *headers])
            return [f"{status}\n".encode()]

        if not self._security.knows(environ.get("HTTP_HOST", "")):
            start("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"421 Misdirected Request: PADDLEWHEEL_HTTP_HOSTS does not name this host\n"]
        if not self._security.admits(environ.get("HTTP_AUTHORIZATION", "")):
            return refuse("401 Unauthorized", ("WWW-Authenticate", 'Basic realm="paddlewheel", charset="UTF-8"'))
        if environ["REQUEST_METHOD"] not in {"GET", "HEAD"}:
            return refuse("405 Method Not Allowed", ("Allow", "GET, HEAD"))
        app = self._routes.get(environ.get("PATH_INFO", ""))
        return refuse("404 Not Found") if app is None else app(environ, start)


def metrics_app(registry: Collector) -> App:
    """Prometheus text or OpenMetrics, as the client asks; compressed if it may be."""
    return make_wsgi_app(registry)


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the base's name
        """Silence access logs."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, host: str, port: int, app: App) -> None:
        self._places = threading.Semaphore(_MAX_CLIENTS)
        self._began: dict[Any, float] = {}  # by connection, oldest first
        self._lock = threading.Lock()
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        # Without the base's look-up of this machine's name, which takes long where names do not resolve.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False) and not self._make_room():
            self.shutdown_request(request)
            return
        with self._lock:
            self._began[request] = time.monotonic()
        super().process_request(request, client_address)

    def _make_room(self) -> bool:
        """Whoever is slow must not keep the others out: it is cut off, and its thread gives its place back."""
        return bool(self._cut_off(_CROWDED_SECONDS, most=1)) and self._places.acquire(timeout=_CROWDED_SECONDS)

    def service_actions(self) -> None:
        """Called between requests, and ten times a second."""
        self._cut_off(_REQUEST_SECONDS)

    def _cut_off(self, seconds: float, most: int = _MAX_CLIENTS) -> int:
        """Ends connections that are older; how many."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, began in self._began.items() if now - began > seconds][:most]
            for request in late:
                del self._began[request]
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(request, socket.SHUT_RDWR)  # of TLS, too, without its handshake
        return len(late)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(_REQUEST_SECONDS)
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._began.pop(request, None)
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore client disconnects and failed handshakes."""
