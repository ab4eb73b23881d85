"""Stands in for both Paddle children: speaks their protocol, and misbehaves as FAKE_PLAN says. Needs no Paddle.

FAKE_PLAN is JSON: {"trainer 1": {"at_step": 5, "do": "kill", "attempts": [1]}, "*": {"steps": 20}}.
"do" is one of: kill, stop (SIGSTOP), hang, exit (with "code"), error (with "kind" and "message", then "code"); when
saving also full (a full disk) and refuse (a folder that can never be saved to).
"at" is "start", "loading", "saving" (trainer 0: in the middle of a save) or "cursor" (each trainer: before it asks).

A fake trainer trains `steps` slices of 100 rows in each of `epochs` epochs, one a step, by leases. Its model is the
list of rows it has seen; that it is what the cursor says is checked at each restore.
"""

from __future__ import annotations

import errno
import http.server
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROWS = 100
"""Of a slice."""
UNTOLD: dict[str, Any] = {
    **dict.fromkeys(("day", "seconds_left")),
    **dict.fromkeys(("epochs", "bad_steps", "bad_rows", "own_rows", "skipped_rows", "truncated_ids"), 0),
    **dict.fromkeys(("pulled_keys", "pulled_bytes", "pushed_bytes", "staleness_steps", "ready_batches"), 0),
    **{name: {} for name in ("phase_seconds", "tables", "new_keys_of_features", "durations")},
}
"""Of a progress event: what these trainers do not count."""


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    role = "trainer" if "servers" in spec else "pserver"
    plans = json.loads(os.environ.get("FAKE_PLAN", "{}"))
    mine = plans.get(f"{role} {spec['rank']}", {})
    if spec["attempt"] not in mine.get("attempts", [spec["attempt"]]):
        mine = {}
    plan = {**plans.get("*", {}), **mine}
    sys.stdout.write(f"fake {role} {spec['rank']} of attempt {spec['attempt']}\n")
    sys.stdout.flush()
    worker = Worker(plan)
    if role == "pserver":
        serve(spec, worker)
    else:
        Trainer(spec, worker).run()


class Worker:
    """Its plan, and its pipe to the agent."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self._events = os.fdopen(int(os.environ["PADDLEWHEEL_EVENT_FD"]), "w")

    def emit(self, event: str, **fields: object) -> None:
        self._events.write(json.dumps({"event": event, **fields}) + "\n")
        self._events.flush()

    def misbehave(self, **when: object) -> None:
        """If the plan says so for this moment."""
        if not all(self.plan.get(key) == value for key, value in when.items()):
            return
        match self.plan.get("do"):
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(3600)
            case "exit":
                sys.stdout.write("a word before the end\n")
                sys.stdout.flush()
                os._exit(self.plan["code"])
            case "full" | "refuse":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "error":
                plan = self.plan
                self.emit("error", kind=plan["kind"], message=plan["message"], traceback="Traceback: made up")
                os._exit(plan["code"])


def serve(spec: dict[str, Any], worker: Worker) -> None:
    class Pages(http.server.BaseHTTPRequestHandler):
        """Health, and by which a server's process is known, as brpc tells them."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            told = f"pid : {os.getpid()}\nrpc_server_{port}_start_time : now\n"
            self.wfile.write(told.encode() if self.path.startswith("/vars/") else b"OK")

        def log_message(self, *arguments: object) -> None:
            pass

    worker.misbehave(at="start")
    time.sleep(worker.plan.get("startup_timeout_seconds", 0))
    host, port = spec["endpoints"][spec["rank"]].rsplit(":", 1)
    server = http.server.ThreadingHTTPServer((host, int(port)), Pages)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if "at_seconds" in worker.plan:
        timer = threading.Timer(worker.plan["at_seconds"], worker.misbehave)
        timer.daemon = True
        timer.start()
    server.serve_forever()


class Trainer:
    """Trains by leases. Real trainers agree by AllReduce; these meet through files in the run folder."""

    def __init__(self, spec: dict[str, Any], worker: Worker) -> None:
        self.spec, self.worker, self.plan = spec, worker, worker.plan
        self.rank, self.num_trainers = spec["rank"], spec["num_trainers"]
        self.numbers, self.replies = itertools.count(1), queue.SimpleQueue[dict[str, Any]]()
        self.stop = self.checkpoint = False
        self.epochs = spec["job"]["train"]["epochs"]
        self.steps = self.plan.get("steps", 10)
        self.step = self.rows = self.epoch = 0
        self.seen: list[list[int]] = []  # the model: epoch, slice, first row, rows
        self.spans: list[list[int]] = []
        self.meetings = itertools.count()
        self.place = Path(spec["job"]["run_dir"], f"meet-{spec['attempt']}")
        self.place.mkdir(exist_ok=True)

    def read(self) -> None:
        for line in sys.stdin:
            said = json.loads(line)
            if said["command"] == "reply":
                self.replies.put(said)
                continue
            self.checkpoint |= said["command"] == "checkpoint" or said["checkpoint"]
            self.stop |= said["command"] == "stop"
        os._exit(75)

    def ask(self, what: str, **fields: object) -> dict[str, Any]:
        number = next(self.numbers)
        self.worker.emit("request", id=number, ask={"what": what, **fields})
        reply = self.replies.get()
        assert reply["id"] == number, reply
        answer = reply["answer"]
        if answer["what"] == "refusal":
            self.worker.emit("error", kind=answer["kind"], message=answer["error"], traceback="")
            os._exit(64 if answer["kind"] == "data" else 75)
        return answer

    def agree(self, *wishes: int) -> list[int]:
        """The sums of all trainers' wishes: an AllReduce that takes its time."""
        number = next(self.meetings)
        mine = self.place / f"{number}-{self.rank}"
        mine.with_suffix(".new").write_text(json.dumps(wishes))
        mine.with_suffix(".new").rename(mine)
        total = [0] * len(wishes)
        for rank in range(self.num_trainers):
            path = self.place / f"{number}-{rank}"
            while not path.exists():
                time.sleep(0.002)
            total = [a + b for a, b in zip(total, json.loads(path.read_text()), strict=True)]
        if number > 1:
            (self.place / f"{number - 2}-{self.rank}").unlink()
        return total

    def run(self) -> None:
        threading.Thread(target=self.read, daemon=True).start()
        self.worker.misbehave(at="start")
        self.restore()
        self.worker.emit("ready", step=self.step, bad_steps=0, bad_rows=0, load_seconds=0.0)
        for epoch in range(self.epoch, self.epochs if self.spec["mode"] == "train" else 0):
            self.epoch = epoch
            self.worker.emit("phase", phase="training")
            if not self.train():
                os._exit(143)
        if self.spec["mode"] == "train":
            self.save()
        self.worker.misbehave(at_step="end")
        figures = {"mode": self.spec["mode"], "rows": self.rows, "seconds": 1.0, "rows_per_second": 1.0}
        self.worker.emit("result", figures={**figures, "loss": 0.5, "keys": {}})
        os._exit(0)

    def restore(self) -> None:
        self.worker.emit("phase", phase="loading")
        self.worker.misbehave(at="loading")
        if self.spec["restore"] is None:
            return
        from paddlewheel.trainer.checkpoint import manifest as checkpoint

        try:
            saved = checkpoint.read(Path(self.spec["restore"]))
        except checkpoint.CheckpointError as error:
            self.worker.emit("error", kind="checkpoint", message=str(error))
            os._exit(75)
        self.seen = json.loads((saved.sparse / "seen.json").read_text())
        self.step, self.rows = saved.cursor["step"], saved.cursor["rows"]
        self.epoch = saved.cursor["position"]["epoch"]
        assert sum(rows for *_, rows in self.seen) == self.rows

    def train(self) -> bool:
        """One epoch; False after an agreed stop."""
        slices, sizes = list(range(self.steps)), [[0, self.steps, ROWS]]
        data = {"fingerprint": str(self.steps), "order": "o", "seed": 1}
        reply = self.ask("epoch", epoch=self.epoch, **data, slices=slices, sizes=sizes)
        done = dict(reply["done"])
        slices = []
        while True:
            self.worker.misbehave(at_step=self.step + 1)
            if not slices:
                slices = self.ask("lease", epoch=self.epoch)["slices"]
            trained = 0
            if slices:
                index = slices.pop(0)
                start = done.get(index, 0)
                trained = ROWS - start
                self.spans.append([self.epoch, index, start, trained])
                time.sleep(self.plan.get("step_timeout_seconds", 0.02))
            every = self.spec["job"]["checkpoint"]["every_steps"]
            due = every is not None and self.rank == 0 and (self.step + 1) % every == 0
            stop = self.stop  # read first: the checkpoint that comes with it was noted before
            rows, checkpoint, stop = self.agree(trained, self.checkpoint or due, stop)
            self.step += 1
            self.rows += rows
            self.worker.emit(
                "progress",
                step=self.step,
                epoch=self.epoch,
                rows=self.rows,
                total_rows=self.steps * ROWS * self.epochs,
                loss=1 / self.step,
                auc=0.5,
                rows_per_second=1000.0,
                **UNTOLD,
            )
            if rows == 0:
                return True
            if checkpoint:
                self.checkpoint = False
                self.save()
                self.worker.emit("phase", phase="training")
            if stop:
                return False

    def save(self) -> None:
        self.worker.emit("phase", phase="saving")
        self.worker.misbehave(at="cursor")
        reply = self.ask("cursor", step=self.step, epoch=self.epoch, spans=self.spans, skipped=[])
        self.spans = []
        if self.rank == 0:
            self.write(reply["cursor"], reply["draft"])
        self.agree()

    def write(self, cursor: dict[str, Any], name: str) -> None:
        import numpy as np

        from paddlewheel.trainer.checkpoint import manifest as checkpoint

        directory = self.spec["job"]["checkpoint"]["directory"] or str(Path(self.spec["job"]["run_dir"], "checkpoints"))
        try:
            draft = checkpoint.Draft(Path(directory), name, self.step)
            self.seen += cursor["spans"]
            (draft.sparse / "seen.json").write_text(json.dumps(self.seen))
            self.worker.misbehave(at="saving")
            if self.plan.get("pad_bytes"):
                (draft.sparse / "pad").write_bytes(b"x" * self.plan["pad_bytes"])
            draft.finish(dense={"w": np.ones(4, np.float32)}, cursor=cursor, facts={"job": "fake", "tables": {}})
        except OSError as error:
            kind = "job" if self.plan.get("do") == "refuse" else "runtime"
            answer = self.ask("save_failed", step=self.step, error=str(error), kind=kind)
        else:
            answer = self.ask("commit", step=self.step, draft=str(draft.path), seconds=0.1)
        if answer["what"] == "not_committed":
            self.seen = self.seen[: len(self.seen) - len(cursor["spans"])]
            if answer["stop"]:
                time.sleep(3600)  # the coordinator ends this process
        self.worker.misbehave(at="committed")


if __name__ == "__main__":
    main()
