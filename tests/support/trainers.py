"""Real trainer processes on real servers, without agents and coordinator: the test answers their requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.protocol.messages import to_line
from tests.support.plans import trainer_spec
from tests.support.ports import free_port


class _Referee:
    """What the coordinator would answer in a run without losses: static leases, every checkpoint is committed."""

    def __init__(self, job):
        self.job, self.attempts = job, 0
        self.cursors = {}
        self.rank_of_turn = threading.Condition()

    def answer(self, rank, request):
        return {"what": request["what"], **getattr(self, request["what"])(rank, request)}

    def epoch(self, rank, request):
        return {"done": []}

    def cursor(self, rank, request):
        """Answers when all trainers have asked for this step."""
        with self.rank_of_turn:
            asked = self.cursors.setdefault(request["step"], {})
            asked[rank] = request["spans"]
            self.rank_of_turn.notify_all()
            assert self.rank_of_turn.wait_for(lambda: len(asked) == self.job.cluster.trainers, 60)
        cursor = {
            "step": request["step"],
            "rows": sum(span[3] for spans in asked.values() for span in spans),
            "position": {"epoch": request["epoch"] + 1},
        }
        return {"cursor": cursor, "draft": f".draft-{request['step']}"}

    def commit(self, rank, request):
        path = manifest.commit(Path(request["draft"]), request["step"], self.job.checkpoint.keep)
        return {"what": "committed", "path": str(path)}


def run_trainers(job, endpoints, log_directory, *, mode="train", restore=None, timeout=120):
    """Runs `job.cluster.trainers` children to their end; returns each one's (exit code, events)."""
    num_trainers, store = job.cluster.trainers, f"127.0.0.1:{free_port()}"
    referee, found = _Referee(job), [[] for _ in range(num_trainers)]

    def listen(rank, worker, lines):
        for line in lines:
            event = json.loads(line)
            found[rank].append(event)
            if event["event"] == "request":
                reply = {"command": "reply", "id": event["id"], "answer": referee.answer(rank, event["ask"])}
                worker.stdin.write(json.dumps(reply) + "\n")
                worker.stdin.flush()

    with ExitStack() as stack:
        children = []
        for rank in range(num_trainers):
            read, write = os.pipe()
            log = stack.enter_context((log_directory / f"trainer-{rank}.log").open("w"))
            worker = subprocess.Popen(
                [sys.executable, "-m", "paddlewheel.trainer.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PADDLEWHEEL_EVENT_FD": str(write)},
                pass_fds=[write],
                text=True,
            )
            os.close(write)
            spec = trainer_spec(
                job,
                rank,
                num_trainers,
                mode=mode,
                servers=tuple(endpoints),
                store=store,
                interface="lo",
                restore=restore,
            )
            worker.stdin.write(to_line(spec) + "\n")
            worker.stdin.flush()
            listener = threading.Thread(target=listen, args=(rank, worker, stack.enter_context(os.fdopen(read))))
            listener.start()
            children.append((worker, listener))
        for worker, listener in children:
            worker.wait(timeout=timeout)
            listener.join()
            worker.stdin.close()
    return [(worker.returncode, events) for (worker, _), events in zip(children, found, strict=True)]


def result_of(events):
    """The figures of the `result` event among a worker's events; fails with the worker's error otherwise."""
    for event in events:
        if event["event"] == "result":
            return event["figures"]
    raise AssertionError([e for e in events if e["event"] == "error"] or events)
