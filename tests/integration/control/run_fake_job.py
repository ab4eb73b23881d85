"""python run_fake_job.py RUN_DIR CONTROL_JSON: the local launcher with fake children, as a process to be killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deploy.launcher import run_local
from trainer.config import JobConfig


def main() -> int:
    run_dir, control = sys.argv[1], json.loads(sys.argv[2])
    fake = [sys.executable, str(Path(__file__).with_name("fake_child.py"))]
    raw = {
        "name": "fake",
        "run_dir": run_dir,
        "data": {
            "train": "/nowhere",
            "labels": ["click"],
            "batch_rows": 10,
            "sparse": [{"name": "C1", "column": "C1"}],
        },
        "cluster": {"servers": 2, "trainers": 2},
        "control": {"heartbeat_seconds": 0.1, "silence_seconds": 2.0, "halt_seconds": 0.3, "backoff_seconds": 0.1}
        | control,
    }
    outcome = run_local(JobConfig.parse(raw), child_commands={"pserver": fake, "trainer": fake})
    sys.stdout.write(json.dumps(outcome.to_json()))
    sys.stderr.write(outcome.summary())
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
