"""Whether a job's dense part can be built, told before anything starts: `python -m
paddlewheel.deploy.checks.model_check`.

A process of its own builds the programs as a trainer would (same interpreter, so the same module is found for a user's
own model) and holds no parameters. The command that asks keeps its memory small, goes on
looking at data meanwhile, and outlives whatever a user's own module does when it is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from types import TracebackType
from typing import Any

import psutil
from typing_extensions import Self

from paddlewheel.trainer.agent.paddle_environment import math_environment
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError, Problem
from paddlewheel.trainer.models.config import CustomModelConfig

_SECONDS = 120.0
"""A user's module that has not been imported after this time never will be."""
_BYTES_PER_FLOAT = 20
"""Of a dense parameter in a trainer: itself, two moments, its gradient, and the gradient that is summed."""


_SENT = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""What somebody else ends a process with; by any other signal it ends of its own doing."""


class CheckLostError(RuntimeError):
    """The process that builds the model was killed by somebody: that tells nothing of the model."""


class ModelCheck:
    """Builds a job's dense part in a worker process, from the block's beginning; `finish` waits for what it found."""

    def __init__(self, job: JobConfig, *, here: bool = True) -> None:
        """here: whether trainers run on this machine; else a user's own module and the memory are other machines'."""
        self._job, self._here = job, here
        self._worker: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if self._here or not isinstance(self._job.model, CustomModelConfig):
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "paddlewheel.deploy.checks.model_check"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **math_environment(os.environ), "GLOG_minloglevel": "2"},
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()

    def finish(self) -> None:
        """Waits for the worker.

        Raises:
            ConfigError: the model cannot be built, or is larger than this machine's memory.
            CheckLostError: it is not known, because somebody has killed the worker.
        """
        if self._worker is None:
            return
        try:
            out, said = self._worker.communicate(self._job.model_dump_json(), timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._refused(f"building it takes more than {_SECONDS:.0f} s: what does its module do?") from None
        if -self._worker.returncode in _SENT:
            name = signal.Signals(-self._worker.returncode).name
            hint = "; if it was the kernel, for want of memory, make room or take smaller layers" * (name == "SIGKILL")
            raise CheckLostError(f"the process that builds the model was killed by {name}: try again{hint}")
        lines = out.splitlines()
        found: dict[str, Any] = json.loads(lines[-1]) if self._worker.returncode == 0 and lines else {}
        if "error" in found:
            raise self._refused(found["error"])
        if "floats" not in found:
            last = "\n".join(said.strip().splitlines()[-15:])
            raise self._refused(f"building it ended with exit code {self._worker.returncode}:\n{last}")
        needed, there = found["floats"] * _BYTES_PER_FLOAT, psutil.virtual_memory().total
        if self._here and needed > there:
            raise self._refused(
                f"its {found['floats']:,} dense parameters need {needed / 1e9:,.1f} GB in each trainer, and this "
                f"machine has {there / 1e9:,.1f} GB: take smaller layers"
            )

    def _refused(self, message: str) -> ConfigError:
        return ConfigError(self._job.name, [Problem("" if message.startswith("model.") else "model", message)])


def num_floats(job: JobConfig) -> int:
    """Builds the programs of a job; how many dense parameters they have.

    Raises:
        ModelError: they cannot be built.
    """
    from paddlewheel.trainer.dense.inputs import layouts
    from paddlewheel.trainer.dense.program import DenseProgram
    from paddlewheel.trainer.models.config import ModelError

    used = {name: job.tables[name] for name in job.data.tables}
    try:
        program = DenseProgram(
            layouts(job.data, used),
            num_dense=len(job.data.dense_columns),
            num_labels=len(job.data.labels),
            model=job.model,
            optimizer=job.train.dense_optimizer,
            seed=job.seed,
            rank=None,
        )
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"{job.model.kind} cannot be built: {type(error).__name__}: {error}{_place(error)}") from error
    return program.num_floats


def _place(error: BaseException) -> str:
    """The line that a person can look at: the innermost one outside of Paddle and of this package."""
    ours = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 -- as frames spell it
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((ours, "<frozen")) and "site-packages" not in frame.filename:
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def main() -> None:
    """Reads a job as JSON, prints what was found as one line of JSON."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's module prints is no answer
    importlib.import_module("paddlewheel.trainer.dense.program")  # Paddle, while the command looks at the data
    job = JobConfig.parse(json.loads(sys.stdin.read()))
    found: dict[str, Any]
    try:
        found = {"floats": num_floats(job)}
    except ValueError as error:
        found = {"error": str(error)}
    print(json.dumps(found), file=answer, flush=True)
    os._exit(0)  # Paddle's and a user's own threads and handlers have nothing left to do


if __name__ == "__main__":
    main()
