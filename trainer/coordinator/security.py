"""Channels and ports of the control plane: options, optional mutual TLS, and a token.

Secrets come from the environment or from files it names, never from a job file:

    PADDLEWHEEL_TOKEN or PADDLEWHEEL_TOKEN_FILE  every call must carry this token
    PADDLEWHEEL_TLS_CA                           file: the authority that signed all certificates; turns TLS on
    PADDLEWHEEL_TLS_CERT, PADDLEWHEEL_TLS_KEY    files: this process's certificate and key
    PADDLEWHEEL_TLS_NAME                         the name in the coordinator's certificate, if it is not its address
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    # http_proxy and its kin are for the outside world: the control plane never goes through a proxy.
    ("grpc.enable_http_proxy", 0),
    # A role that starts before its coordinator, or before its name resolves, must not wait long for the next try.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    # Two coordinators on one port would each get half of the agents.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
_TOKEN_KEY = "paddlewheel-token"  # noqa: S105 -- the name of the header, not its value
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
"""What answers without a token: probes have none."""


class SecurityError(ValueError):
    """The environment names secrets that cannot be used."""


@dataclass(frozen=True)
class Security:
    """What protects the control plane. Empty, it is open: for one machine or a private network."""

    token: str | None = field(default=None, repr=False)
    authority: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Security:
        """Reads the variables above.

        Raises:
            SecurityError: a named file cannot be read, or only a part of what TLS needs is given.
        """
        variables = os.environ if environment is None else environment

        def content(name: str) -> bytes | None:
            path = variables.get(name)
            if not path:
                return None
            try:
                return Path(path).read_bytes()
            except OSError as error:
                raise SecurityError(f"{name}={path} cannot be read: {error.strerror}") from error

        token_file = content("PADDLEWHEEL_TOKEN_FILE")
        token = token_file.decode().strip() if token_file is not None else variables.get("PADDLEWHEEL_TOKEN")
        names = ("PADDLEWHEEL_TLS_CA", "PADDLEWHEEL_TLS_CERT", "PADDLEWHEEL_TLS_KEY")
        authority, certificate, key = (content(name) for name in names)
        given = [name for name, value in zip(names, (authority, certificate, key), strict=True) if value is not None]
        if given and len(given) < len(names):
            missing = ", ".join(name for name in names if name not in given)
            raise SecurityError(
                f"{', '.join(given)} is set without {missing}: the control plane's TLS is mutual and needs all three"
            )
        return cls(token or None, authority, certificate, key, variables.get("PADDLEWHEEL_TLS_NAME") or None)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return ((_TOKEN_KEY, self.token),) if self.token else ()

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel to the coordinator (or another role) at 'host:port'."""
        if self.authority is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)
        names = (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()
        return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS + names)

    def server(self) -> grpc.aio.Server:
        """A server that refuses calls without the token."""
        interceptors = [_TokenCheck(self.token)] if self.token else []
        return grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Adds the port 'host:port' (port 0: any free one) to the server; returns its number.

        Raises:
            OSError: the port cannot be bound.
        """
        try:
            if self.authority is None or self.key is None or self.certificate is None:
                port = server.add_insecure_port(address)
            else:
                pair = [(self.key, self.certificate)]
                credentials = grpc.ssl_server_credentials(pair, self.authority, require_client_auth=True)
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"{address} cannot be listened on: {error}") from error
        if port == 0:
            raise OSError(f"{address} cannot be listened on")
        return int(port)


class _TokenCheck(grpc.aio.ServerInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        given = str(dict(handler_call_details.invocation_metadata or ()).get(_TOKEN_KEY, ""))
        is_open = handler_call_details.method.startswith(_OPEN_SERVICES)
        if handler is None or is_open or hmac.compare_digest(given.encode(), self._token):
            return handler
        return _refusal(handler)


def _refusal(handler: Any) -> Any:
    """A handler of the same kind that answers UNAUTHENTICATED."""
    text = "this control plane asks for a token: set PADDLEWHEEL_TOKEN or PADDLEWHEEL_TOKEN_FILE as for its coordinator"

    async def refuse(_request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    async def refuse_stream(_request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
        yield  # makes it the async generator that gRPC expects; never reached

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    answer: Any = refuse_stream if handler.response_streaming else refuse
    return make(answer, handler.request_deserializer, handler.response_serializer)
