"""Several hosts on this machine: network namespaces with addresses and names of their own, joined by a software switch.

Needs root, iproute2 and /dev/net/tun. Nothing leaves the machine: the namespaces have no way out.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.needs import require

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


@dataclass
class Host:
    """One namespace. `run` starts a program inside of it."""

    name: str
    namespace: str
    address: str
    tun: int

    @property
    def prefix(self) -> list[str]:
        """What goes before a command to run it there."""
        return ["ip", "netns", "exec", self.namespace]

    def run(self, command: list[str], **options: Any) -> subprocess.Popen:
        return subprocess.Popen([*self.prefix, *command], **options)

    def learn(self, names: Mapping[str, str]) -> None:
        """Its /etc/hosts; programs that run there see the change at once."""
        lines = "".join(f"{address} {name}\n" for name, address in names.items())
        with Path(f"/etc/netns/{self.namespace}/hosts").open(
            "r+", encoding="utf-8"
        ) as file:  # the same inode: it is mounted
            file.truncate()
            file.write("127.0.0.1 localhost\n" + lines)


@dataclass
class Network:
    """Hosts and the switch between them."""

    hosts: dict[str, Host] = field(default_factory=dict)
    switch: subprocess.Popen | None = None

    def impair(self, *, delay_ms: float = 0, jitter_ms: float = 0, loss: float = 0, cut: tuple[str, ...] = ()) -> None:
        """From now on every packet comes late, or not at all; the hosts in `cut` are unplugged."""
        assert self.switch is not None
        assert self.switch.stdin is not None
        addresses = [self.hosts[name].address for name in cut]
        order = {"delay_ms": delay_ms, "jitter_ms": jitter_ms, "loss": loss, "cut": addresses}
        self.switch.stdin.write(json.dumps(order).encode() + b"\n")
        self.switch.stdin.flush()


@contextlib.contextmanager
def network(addresses: Mapping[str, str], *, names: Mapping[str, str] | None = None) -> Iterator[Network]:
    """Makes hosts (name -> IPv4 address, all in one /24). names: what every /etc/hosts tells; else the hosts' own."""
    require("network namespaces")
    known = dict(addresses) if names is None else dict(names)
    net = Network()
    with contextlib.ExitStack() as undo:
        for name, address in addresses.items():
            net.hosts[name] = _host(name, address, undo)
            net.hosts[name].learn(known)
        fds = [host.tun for host in net.hosts.values()]
        net.switch = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("soft_switch.py"))], stdin=subprocess.PIPE, pass_fds=fds
        )
        undo.callback(_stop, net.switch)
        assert net.switch.stdin is not None
        first = {"ports": {host.address: host.tun for host in net.hosts.values()}, "seed": 1}
        net.switch.stdin.write(json.dumps(first).encode() + b"\n")
        net.switch.stdin.flush()
        yield net


def _host(name: str, address: str, undo: contextlib.ExitStack) -> Host:
    namespace = f"pw-{uuid.uuid4().hex[:8]}"
    folder = Path("/etc/netns", namespace)
    folder.mkdir(parents=True)
    undo.callback(shutil.rmtree, folder, ignore_errors=True)
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")  # no name server: only the file answers
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    _ip("netns", "add", namespace)
    undo.callback(_ip, "netns", "del", namespace)
    tun = _tun(namespace)
    undo.callback(os.close, tun)
    _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "lan0")
    _ip("-n", namespace, "link", "set", "lan0", "up")
    return Host(name, namespace, address, tun)


def _tun(namespace: str) -> int:
    """A TUN device `lan0` in the namespace, which a thread enters to make it; its descriptor works from here."""
    made: list[int | BaseException] = []

    def make() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path("/run/netns", namespace).open() as entry:
                if libc.setns(entry.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            fd = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"lan0", _IFF_TUN | _IFF_NO_PI))
            made.append(fd)
        except BaseException as error:  # noqa: BLE001 -- raised again below
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, BaseException):
        raise result
    return result


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _stop(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(10)
