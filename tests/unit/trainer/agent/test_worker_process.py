"""A worker in the hands of its agent: what it says is not lost, and cannot use up the agent's memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from paddlewheel.trainer.agent import worker_process
from paddlewheel.trainer.agent.worker_process import WorkerProcess
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.distributed.subprocesses import kill_leftovers
from paddlewheel.trainer.protocol.messages import WorkerEvent

pytestmark = pytest.mark.processes


def run(program: str, observe: Callable[[WorkerEvent], None] = lambda _: None) -> tuple[int, list[Any], WorkerProcess]:
    """A worker with this program to its end: exit code, events, and the worker."""

    async def hold() -> tuple[int, list[Any], WorkerProcess]:
        outbox: asyncio.Queue[pb.AgentMessage] = asyncio.Queue()
        command = [sys.executable, "-c", f"import os, sys\nevents = os.fdopen(3, 'w')\n{program}"]
        worker = await WorkerProcess.start(command, 1, outbox, observe, {})
        code = await worker.wait()
        events = [wire.read_union(outbox.get_nowait().worker_event, "event") for _ in range(outbox.qsize())]
        return code, events, worker

    return asyncio.run(hold())


def test_events_that_are_still_in_the_pipe_when_it_ends_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: the agent may be busy."""
    monkeypatch.setattr(worker_process, "_QUIET_SECONDS", 0.2)
    number = 2_000  # in pipe and buffers at the exit; at a millisecond each

    _, events, _ = run(
        f"for i in range({number}): "
        'print(\'{"event": "log", "level": "info", "message": "%d"}\' % i, file=events)\n'
        "events.flush()\nos._exit(0)",
        lambda _: time.sleep(0.001),
    )
    assert [int(event.message) for event in events] == list(range(number))


def test_an_event_too_long_for_a_message_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_MAX_LINE_BYTES", 1 << 16)
    code, events, _ = run(
        "events.write('{\"event\": \"request\", \"slices\": [' + '1, ' * 200_000 + '1]}\\n'); events.flush()\n"
        "import time; time.sleep(60)"
    )
    assert code == -signal.SIGKILL
    assert [event.event for event in events] == ["error"]
    assert events[0].kind == "job"
    assert "larger row groups" in events[0].message


def test_output_without_line_ends_is_kept_in_part(capfd: pytest.CaptureFixture[str]) -> None:
    _, _, worker = run("sys.stdout.write('a' * 3_000_000 + 'the end'); sys.stdout.flush()")
    assert worker.tail.endswith("the end")
    assert len(worker.tail) <= 1 << 16
    assert len(capfd.readouterr().out) == 3_000_007


def test_nesting_that_no_parser_takes_is_a_remark() -> None:
    _, events, _ = run("print('[' * 100_000, file=events); events.flush()")
    assert events[0].event == "log"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"event": "dance"}, "Input tag 'dance'"),
        ({"event": "request", "id": 1, "ask": {"what": "lease"}}, "request.ask.lease.epoch: Field required"),
        (
            {"event": "request", "id": 1, "ask": {"what": "lease", "epoch": "0"}},
            "epoch: Input should be a valid int",
        ),
        ({"event": "log", "level": "info", "message": "m", "n": 1}, "log.n: Extra inputs are not permitted"),
        (
            {"event": "ready", "step": 1 << 70, "bad_steps": 0, "bad_rows": 0, "load_seconds": 0.0},
            "cannot be passed",
        ),
    ],
)
def test_an_event_that_is_none_is_an_error_that_names_the_field(line: dict[str, Any], words: str) -> None:
    """Not a remark: a trainer whose request nobody understands would wait for ever."""
    _, events, _ = run(f"print({json.dumps(json.dumps(line))}, file=events); events.flush()")
    (event,) = events
    assert (event.event, event.kind) == ("error", "runtime")
    assert words in event.message


def test_what_a_worker_has_started_ends_with_it(eventually: Callable[..., None]) -> None:
    """Though it holds the worker's output open, and would do so for longer than any test may take."""
    _, events, _ = run(
        "import subprocess\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        'print(\'{"event": "log", "level": "info", "message": "%d"}\' % p.pid, file=events)\n'
        "events.flush(); os._exit(0)"
    )
    pid = int(events[0].message)
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_number_that_is_somebody_elses_by_now_is_left_alone() -> None:
    """As if the kernel had given the number of a worker that was waited for to the leader of another group."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as other:
        assert os.getpgid(other.pid) == other.pid
        kill_leftovers(other.pid)
        other.communicate(b"\n", timeout=30)
        assert other.returncode == 0
