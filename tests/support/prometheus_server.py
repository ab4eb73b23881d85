"""A real Prometheus server for tests, on loopback, gone afterwards."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from paddlewheel.deploy.monitoring.preview import Prometheus
from tests.support.needs import require


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def prometheus_server(config: dict[str, Any], folder: Path) -> Iterator[tuple[Prometheus, str]]:
    """Starts the server with this configuration; yields a client and its address once it is ready."""
    require("prometheus")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"),
        *(f"--web.listen-address={address}", "--log.level=warn"),
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        client = Prometheus(f"http://{address}")
        deadline = time.monotonic() + 30
        while True:
            try:
                client.get("/api/v1/status/buildinfo")
                break
            except (OSError, RuntimeError):  # not listening yet, or not ready
                log_text = (folder / "prometheus.log").read_text()
                assert process.poll() is None, log_text
                assert time.monotonic() < deadline, log_text
                time.sleep(0.1)
        yield client, f"http://{address}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
