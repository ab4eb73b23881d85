"""Real trainer processes on real servers, without agents: the test is the agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack

from tests.ports import free_port


def run_trainers(job, endpoints, log_directory, *, mode="train", restore=None, timeout=120):
    """Runs `job.cluster.trainers` children to their end; returns each one's (exit code, events)."""
    num_trainers, store = job.cluster.trainers, f"127.0.0.1:{free_port()}"
    found = []
    with ExitStack() as stack:
        children = []
        for rank in range(num_trainers):
            read, write = os.pipe()
            log = stack.enter_context((log_directory / f"trainer-{rank}.log").open("w"))
            child = subprocess.Popen(
                [sys.executable, "-m", "trainer.child"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PADDLEWHEEL_EVENT_FD": str(write)},
                pass_fds=[write],
                text=True,
            )
            os.close(write)
            events = stack.enter_context(os.fdopen(read))
            spec = {
                "job": job.model_dump(mode="json"),
                "mode": mode,
                "rank": rank,
                "num_trainers": num_trainers,
                "servers": list(endpoints),
                "store": store,
                "interface": "lo",
                "restore": restore,
            }
            child.stdin.write(json.dumps(spec) + "\n")
            child.stdin.flush()
            children.append((child, events))
        for child, events in children:
            lines = [json.loads(line) for line in events]
            found.append((child.wait(timeout=timeout), lines))
            child.stdin.close()
    return found


def result_of(events):
    """The `result` event among a child's events; fails with the child's error otherwise."""
    for event in events:
        if event["event"] == "result":
            return event
    raise AssertionError([e for e in events if e["event"] == "error"] or events)
