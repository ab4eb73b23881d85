"""python run_fake_job.py RUN_DIR CHANGES_JSON: the local launcher with fake children, as a process to be killed.

CHANGES_JSON: {"control": {...}, "checkpoint": {...}, "train": {...}, "cluster": {...}, "tables": {...},
"resume": "auto", "restore": null, "real_servers": false}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from paddlewheel.deploy.launch.launcher import run_local
from paddlewheel.trainer.job.config import JobConfig


def main() -> int:
    run_dir, changes = sys.argv[1], json.loads(sys.argv[2])
    fake = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
    quick = {
        "heartbeat_seconds": 0.1,
        "heartbeat_timeout_seconds": 2.0,
        "kill_grace_seconds": 0.3,
        "backoff_seconds": 0.1,
    }
    raw = {
        "name": "fake",
        "run_dir": run_dir,
        "data": {
            "train": "/nowhere",
            "labels": ["click"],
            "batch_rows": 10,
            "sparse": [{"name": "C1", "column": "C1"}],
        },
        "train": changes.get("train", {}),
        "cluster": {"servers": 2, "trainers": 2} | changes.get("cluster", {}),
        "checkpoint": changes.get("checkpoint", {}),
        "control": quick | {"max_restarts": 0} | changes.get("control", {}),
    }
    if "tables" in changes:
        raw["tables"] = changes["tables"]
        raw["data"]["sparse"] = [{"name": name, "table": name} for name in changes["tables"]]
    children = {"trainer": fake} if changes.get("real_servers") else {"pserver": fake, "trainer": fake}
    outcome = run_local(
        JobConfig.parse(raw),
        resume=changes.get("resume", "auto"),
        restore=changes.get("restore"),
        worker_commands=children,
    )
    sys.stdout.write(json.dumps(outcome.to_json()))
    with contextlib.suppress(OSError):
        sys.stderr.write(outcome.summary())
        sys.stderr.flush()
    return outcome.exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # what standard error does not take is no part of what is tested
