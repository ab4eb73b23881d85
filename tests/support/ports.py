"""A port that was free a moment ago."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Bound and released at once: another process could take it before the caller does, which tests accept."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
