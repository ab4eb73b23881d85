"""The test hosts themselves: addresses, names, delay, loss, an unplugged cable."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support.networks import Host, Network, network

pytestmark = [pytest.mark.needs("network namespaces"), pytest.mark.processes, pytest.mark.timeout(120)]

_ECHO = """
import socket, threading
server = socket.create_server(("0.0.0.0", 7000))
print("listening", flush=True)
while True:
    client, _ = server.accept()
    def serve(client=client):
        while data := client.recv(65536):
            client.sendall(data)
    threading.Thread(target=serve, daemon=True).start()
"""
_ASK = """
import socket, sys, time
client = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))
started = time.monotonic()
for _ in range(10):
    client.sendall(b"x" * 20000)
    left = 20000
    while left:
        left -= len(client.recv(left))
print((time.monotonic() - started) / 10)
"""


def ask(host: Host, name: str, *, timeout: float = 10) -> float | None:
    """Seconds for 20 kB to go and come back; None when nobody answers."""
    command = [*host.prefix, sys.executable, "-c", _ASK, name, str(timeout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout) if done.returncode == 0 else None


def listen(host: Host) -> subprocess.Popen:
    server = host.run([sys.executable, "-c", _ECHO], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"listening\n"
    return server


def test_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with network({"a": "10.77.0.1", "b": "10.77.0.2"}) as net:
        server = listen(net.hosts["b"])
        try:
            check(net)
        finally:
            server.kill()
            server.communicate()


def check(net: Network) -> None:
    a, b = net.hosts["a"], net.hosts["b"]
    quick = ask(a, "b")
    assert quick is not None
    assert quick < 0.2
    net.impair(delay_ms=40)
    slow = ask(a, "b")
    assert slow is not None
    assert slow >= 0.08
    net.impair(delay_ms=5, loss=0.05)
    assert ask(a, "b") is not None, "TCP sends again what is lost"
    net.impair(cut=("b",))
    assert ask(a, "b", timeout=1) is None
    net.impair()
    assert ask(a, "b") is not None
    assert ask(a, "later", timeout=1) is None
    started = time.monotonic()
    a.learn({"later": b.address})
    assert ask(a, "later") is not None
    assert time.monotonic() - started < 10
