"""python soft_switch.py: carries IP packets between TUN devices, late and with losses: tc's netem without the kernel's.

The devices' descriptors are inherited; standard input brings JSON lines: {"ports": {address: descriptor}, "seed": n},
then {"delay_ms": d, "jitter_ms": j, "loss": p, "cut": [address, ...]} whenever that changes. Its end ends the process.
Packets between two hosts keep their order.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import selectors
import socket
import sys
import time

MAX_QUEUED = 20_000


class Switch:
    def __init__(self, ports: dict[str, int], seed: int) -> None:
        self.fd_of = {socket.inet_aton(address): fd for address, fd in ports.items()}
        self.random = random.Random(seed)
        self.delay = self.jitter = self.loss = 0.0
        self.cut: set[bytes] = set()
        self.queue: list[tuple[float, int, int, bytes]] = []
        self.number = 0
        self.last_due: dict[tuple[bytes, bytes], float] = {}

    def set(self, said: dict) -> None:
        self.delay, self.jitter = said.get("delay_ms", 0) / 1000, said.get("jitter_ms", 0) / 1000
        self.loss = said.get("loss", 0.0)
        self.cut = {socket.inet_aton(address) for address in said.get("cut", [])}

    def take(self, packet: bytes) -> None:
        if len(packet) < 20 or packet[0] >> 4 != 4:
            return
        source, target = packet[12:16], packet[16:20]
        if target not in self.fd_of or source in self.cut or target in self.cut or len(self.queue) > MAX_QUEUED:
            return
        if self.loss and self.random.random() < self.loss:
            return
        due = time.monotonic() + self.delay + self.jitter * self.random.random()
        due = self.last_due[source, target] = max(due, self.last_due.get((source, target), 0.0))
        self.number += 1
        heapq.heappush(self.queue, (due, self.number, self.fd_of[target], packet))

    def deliver(self) -> float | None:
        """Sends what is due; seconds until the next, None without one."""
        now = time.monotonic()
        while self.queue and self.queue[0][0] <= now:
            _, _, fd, packet = heapq.heappop(self.queue)
            with contextlib.suppress(OSError):  # a full queue or a device that is down loses packets, as anywhere
                os.write(fd, packet)
        return max(0.0, self.queue[0][0] - time.monotonic()) if self.queue else None


def main() -> None:
    first = json.loads(sys.stdin.buffer.raw.readline())
    switch = Switch(first["ports"], first["seed"])
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ, "orders")
    for fd in switch.fd_of.values():
        os.set_blocking(fd, False)
        selector.register(fd, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select(switch.deliver()):
            if key.data == "orders":
                line = sys.stdin.buffer.raw.readline()
                if not line:
                    return
                switch.set(json.loads(line))
                continue
            for _ in range(64):
                try:
                    packet = os.read(key.fd, 65_536)
                except BlockingIOError:
                    break
                switch.take(packet)


if __name__ == "__main__":
    main()
