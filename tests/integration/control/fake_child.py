"""Stands in for both Paddle children: speaks their event protocol, and misbehaves as FAKE_PLAN says. Needs no Paddle.

FAKE_PLAN is JSON: {"trainer 1": {"at_step": 5, "do": "kill", "incarnations": [1]}, "*": {"steps": 20}}.
"do" is one of: kill, stop (SIGSTOP), hang, exit (with "code"), error (with "kind" and "message", then "code").
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
import time


def main() -> None:
    events = os.fdopen(int(os.environ["PADDLEWHEEL_EVENT_FD"]), "w")

    def emit(event: str, **fields: object) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")
        events.flush()

    spec = json.loads(sys.stdin.readline())
    role = "trainer" if "servers" in spec else "pserver"
    plans = json.loads(os.environ.get("FAKE_PLAN", "{}"))
    mine = plans.get(f"{role} {spec['rank']}", {})
    if spec["incarnation"] not in mine.get("incarnations", [spec["incarnation"]]):
        mine = {}
    plan = {**plans.get("*", {}), **mine}
    sys.stdout.write(f"fake {role} {spec['rank']} of incarnation {spec['incarnation']}\n")
    sys.stdout.flush()

    def misbehave() -> None:
        match plan.get("do"):
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
                os._exit(plan["code"])
            case "error":
                emit("error", kind=plan["kind"], message=plan["message"], traceback="Traceback: made up")
                os._exit(plan["code"])

    if role == "pserver":
        serve(spec, plan, misbehave)
    else:
        train(spec, plan, emit, misbehave)


def serve(spec, plan, misbehave) -> None:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"OK")

        def log_message(self, *arguments: object) -> None:
            pass

    if plan.get("at") == "start":
        misbehave()
    time.sleep(plan.get("start_seconds", 0))
    host, port = spec["endpoints"][spec["rank"]].rsplit(":", 1)
    server = http.server.ThreadingHTTPServer((host, int(port)), Health)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if "at_seconds" in plan:
        timer = threading.Timer(plan["at_seconds"], misbehave)
        timer.daemon = True
        timer.start()
    server.serve_forever()


def train(spec, plan, emit, misbehave) -> None:
    stop = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            if json.loads(line).get("command") == "stop":
                stop.set()
        os._exit(75)

    threading.Thread(target=read, daemon=True).start()
    if plan.get("at") == "start":
        misbehave()
    emit("ready")
    steps = plan.get("steps", 10)
    for step in range(1, steps + 1):
        if plan.get("at_step") == step:
            misbehave()
        time.sleep(plan.get("step_seconds", 0.02))
        emit(
            "progress",
            step=step,
            epoch=0,
            rows=step * 100,
            total_rows=steps * 100,
            loss=1 / step,
            auc=0.5,
            rows_per_second=1000.0,
        )
        if stop.is_set():
            os._exit(0)
    if plan.get("at_step") == "end":
        misbehave()
    emit(
        "result",
        mode=spec["mode"],
        rows=steps * 100,
        seconds=1.0,
        rows_per_second=100.0 * steps,
        loss=0.5,
        keys={"default": 7},
    )
    os._exit(0)


if __name__ == "__main__":
    main()
