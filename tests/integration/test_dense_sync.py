"""AllReduce between real processes: sums, identical bits, and a peer that dies."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from tests.support.ports import free_port

_PROGRAM = """
import json, os, sys
import numpy as np
from paddlewheel.trainer.distributed.process_group import GlooGroup, PeerLostError

import paddle

rank, trainers, port, dies = (int(a) for a in sys.argv[1:])
paddle.enable_static()
sync = GlooGroup(rank, trainers, f"127.0.0.1:{port}", interface="lo")
floats = np.random.default_rng(rank).standard_normal(100_003).astype(np.float32)
sync.all_reduce(floats)
found = {"bits": floats.tobytes().hex()[:4000], "sum": float(floats.sum())}
found |= {"gather": sync.all_gather(rank * 10**15 + 1)}
if dies == rank:
    os.kill(os.getpid(), 9)
try:
    for _ in range(3):
        sync.all_reduce(floats)
    found["lost"] = None
except PeerLostError as error:
    found["lost"] = str(error)
print(json.dumps(found), flush=True)
os._exit(0)
"""


def _run(trainers: int, dies: int = -1, *, program: str = _PROGRAM, arguments: Sequence[str] = ()) -> list[dict]:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments, str(rank), str(trainers), str(port), str(dies)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(trainers)
    ]
    outputs = [p.communicate(timeout=60)[0] for p in processes]
    return [json.loads(o.splitlines()[-1]) for rank, o in enumerate(outputs) if rank != dies]


def test_every_trainer_gets_the_same_bits() -> None:
    found = _run(3)
    assert all(f == found[0] for f in found)
    assert found[0]["gather"] == [1, 10**15 + 1, 2 * 10**15 + 1]
    assert found[0]["lost"] is None


def test_a_dead_peer_ends_the_sum_on_all_others() -> None:
    found = _run(3, dies=1)
    assert len(found) == 2
    assert all(f["lost"] is not None for f in found)


_COMPRESSED = """
import hashlib, json, os, sys
import numpy as np
from paddlewheel.trainer.distributed.compression import CompressedSum
from paddlewheel.trainer.distributed.process_group import GlooGroup, PeerLostError

wire = sys.argv[1]
rank, trainers, port, dies = (int(a) for a in sys.argv[2:])
sync = GlooGroup(rank, trainers, f"127.0.0.1:{port}", interface="lo")
compressed, rng = CompressedSum(sync, 100_003, wire), np.random.default_rng(rank)
bits, applied, given = hashlib.sha256(), 0.0, 0.0
try:
    for step in range(5):
        if step == 3 and dies == rank:
            os.kill(os.getpid(), 9)
        floats = rng.integers(-1000, 1001, 100_003).astype(np.float32)
        given = given + floats.astype(np.float64)
        counts = np.full(2, 10**6 + rank, np.float32)
        compressed.all_reduce(floats, counts)
        compressed.keep()
        applied = applied + floats.astype(np.float64)
        bits.update(floats.tobytes() + counts.tobytes())
    owed = given + compressed.owed_N * -1.0
    sync.all_reduce(owed)
    found = {"bits": bits.hexdigest(), "missing": float(np.abs(owed - applied).max()), "count": float(counts[0])}
except PeerLostError as error:
    found = {"lost": str(error)}
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("trainers", [2, 3])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_16_bits_on_the_wire_give_every_trainer_the_same_bits_and_lose_nothing(wire: str, trainers: int) -> None:
    found = _run(trainers, program=_COMPRESSED, arguments=[wire])
    assert all(f == found[0] for f in found)
    assert found[0]["count"] == 10**6 * trainers + sum(range(trainers))
    assert found[0]["missing"] == 0


def test_a_dead_peer_ends_a_sum_in_16_bits_on_all_others() -> None:
    found = _run(3, dies=1, program=_COMPRESSED, arguments=["bfloat16"])
    assert len(found) == 2
    assert all("lost" in f for f in found), found


_LATE = """
import sys, time
import numpy as np
from paddlewheel.trainer.distributed.process_group import GlooGroup

import paddle

rank, port = (int(a) for a in sys.argv[1:])
paddle.enable_static()
sync = GlooGroup(rank, 2, f"127.0.0.1:{port}", interface="lo")
for late in (1, 0):
    if rank == late:
        time.sleep(34)
    sync.long_barrier()
    print(sync.all_gather(rank + 1), flush=True)
import os
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_who_is_later_than_gloo_waits_is_waited_for() -> None:
    """As trainer 0 is while it saves or loads large tables. Either may be the late one."""
    port = free_port()
    started = time.monotonic()
    processes = [
        subprocess.Popen([sys.executable, "-c", _LATE, str(rank), str(port)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [p.communicate(timeout=140)[0].splitlines()[-2:] for p in processes] == [["[1, 2]", "[1, 2]"]] * 2
    assert time.monotonic() - started > 2 * 34
