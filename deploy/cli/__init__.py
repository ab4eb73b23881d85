"""The ``paddlewheel`` command.

Each command lives in a module of its own that is imported when the command runs, so ``paddlewheel --help`` needs no
Paddle, pyarrow or gRPC. A command returns None or its exit code; errors come up to `run`, which alone turns them
into words and exit codes:

    0        done
    64       fix the job: a wrong command line, job file, data set or environment; trying again cannot help
    75       trying again may help: a lost process, a full disk, a crash
    129, 130, 143  stopped after an ordered stop: its terminal hung up (SIGHUP), Ctrl-C, SIGTERM
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from paddlewheel.deploy.cli.streams import give_up
from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL, EX_USAGE, EXIT_INTERRUPTED

_ANSWERS = {"job", "model", "checkpoint", "deltas", "plot", "report", "status", "deploy", "doctor", "version"}
"""Commands that print an answer and do nothing else for which a reader would be needed."""

_OURS = {"paddlewheel"}

_COMMANDS = {
    "train": ("paddlewheel.deploy.cli.train:train", "Train a job on this machine, with its servers and trainers."),
    "evaluate": ("paddlewheel.deploy.cli.train:evaluate", "Evaluate a checkpoint of a job on this machine."),
    "export": ("paddlewheel.deploy.cli.export:export", "Write a trained model as files for serving."),
    "predict": ("paddlewheel.deploy.cli.predict:predict", "Score Parquet files with a trained model."),
    "data": ("paddlewheel.deploy.cli.data:app", "Prepare, generate and check data."),
    "job": ("paddlewheel.deploy.cli.job:app", "Look at a job file: its keys, its values, whether it can run."),
    "model": ("paddlewheel.deploy.cli.model:app", "List the kinds of models, or look into a job's model."),
    "checkpoint": (
        "paddlewheel.deploy.cli.checkpoint:app",
        "Look at checkpoints, rewrite them, or ask a running job for one.",
    ),
    "deltas": (
        "paddlewheel.deploy.cli.deltas:app",
        "List or apply the bases and deltas that a job publishes day by day.",
    ),
    "tune": ("paddlewheel.deploy.cli.tune:tune", "Search for better settings of a job."),
    "plot": (
        "paddlewheel.deploy.cli.plot:plot",
        "Draw what a run has learnt: loss, evaluations, reliability, slices.",
    ),
    "report": ("paddlewheel.deploy.cli.report:report", "Prove from a run's journal that every row was trained once."),
    "status": ("paddlewheel.deploy.cli.status:status", "Show what a running job is doing."),
    "deploy": ("paddlewheel.deploy.cli.deploy:app", "Write what a cluster needs to run a job."),
    "role": ("paddlewheel.deploy.cli.role:app", "Run one role of a job: what a container or another machine starts."),
    "gpu": ("paddlewheel.deploy.cli.gpu:app", "Build and check the kernels for NVIDIA GPUs."),
    "bench": ("paddlewheel.deploy.cli.bench:app", "Measure speed on this machine, next to peers and ceilings."),
    "doctor": (
        "paddlewheel.deploy.cli.doctor:doctor",
        "Say what this environment has and lacks, with a remedy for each.",
    ),
    "version": ("paddlewheel.deploy.cli.doctor:version", "Print the versions that matter in a bug report."),
}


def build_app(asked: str | None = None) -> App:
    """The command with all its sub-commands, none of them imported yet.

    Args:
        asked: the command that will run: its help is its docstring, not the summary of the list.
    """
    app = App(
        name="paddlewheel",
        help="Train click-through-rate models with parameter servers and AllReduce trainers.",
        version_flags=(),
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for name, (where, summary) in _COMMANDS.items():
        app.command(where, name=name, **({} if name == asked else {"help": summary}))
    return app


def run(arguments: Sequence[str]) -> int:
    """Runs one command; returns its exit code. Errors go to standard error, with ``--json`` to standard output too."""
    for argument in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):  # how Python carries bytes that are no UTF-8
            return _fail("usage", f"the argument {argument!r} is no UTF-8: rename what it names", EX_USAGE, arguments)
    try:
        code = build_app(*arguments[:1])(list(arguments))
    except CycloptsError as error:
        words = " ".join(["paddlewheel", *(error.command_chain or ())])
        return _fail("usage", f"{error}\nTry: {words} --help", EX_USAGE, arguments)
    except KeyboardInterrupt:
        return _fail("interrupted", "interrupted", EXIT_INTERRUPTED, arguments)
    except BrokenPipeError:
        give_up(sys.stdout)
        if arguments and arguments[0] in _ANSWERS:
            return 0  # the reader of its answer (such as `head`) has gone; nothing is left to be said to it
        return _fail("BrokenPipeError", "a connection broke", EX_TEMPFAIL, arguments)
    except Exception as error:  # noqa: BLE001 -- the last stop before the user
        if type(error) is OSError and error.filename is None and arguments and arguments[0] in _ANSWERS:
            return _lost_answer(error, arguments)
        kind = type(error)
        if isinstance(error, OSError) and kind.__module__ == "builtins" and error.errno is not None:
            return _failed_by_the_system(error, arguments)
        if kind.__module__.partition(".")[0] not in _OURS:
            traceback.print_exc()
            return _fail(kind.__name__, f"this is a mistake in paddlewheel: {error}", EX_TEMPFAIL, arguments)
        if os.environ.get("PADDLEWHEEL_TRACEBACK"):
            traceback.print_exc()
        return _fail(kind.__name__, str(error), EX_USAGE if isinstance(error, ValueError) else EX_TEMPFAIL, arguments)
    return code if isinstance(code, int) else 0


_REFUSALS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.EINVAL, errno.ENOTSUP),
}
"""What a system says of a path or address that will not do tomorrow either."""


def _failed_by_the_system(error: OSError, arguments: Sequence[str]) -> int:
    """What the operating system refuses is no mistake of ours: a path that cannot be used, or a full disk."""
    if os.environ.get("PADDLEWHEEL_TRACEBACK"):
        traceback.print_exception(error)
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    message = f"{names}: {error.strerror}" if names else str(error.strerror)
    return _fail(type(error).__name__, message, EX_USAGE if error.errno in _REFUSALS else EX_TEMPFAIL, arguments)


def _lost_answer(error: OSError, arguments: Sequence[str]) -> int:
    give_up(sys.stdout)
    reason = f"the answer cannot be written to standard output: {error.strerror or error}"
    return _fail("AnswerLostError", reason, EX_TEMPFAIL, arguments)


def _fail(kind: str, message: str, code: int, arguments: Sequence[str]) -> int:
    text = message.encode(errors="backslashreplace").decode()
    with contextlib.suppress(OSError):
        if _logs_json(arguments):
            print(json.dumps({"level": "error", "message": text, "kind": kind, "exit_code": code}), file=sys.stderr)
        else:
            print(f"paddlewheel: {text}", file=sys.stderr)
    if "--json" in arguments:
        with contextlib.suppress(OSError):
            print(json.dumps({"error": {"kind": kind, "message": message, "exit_code": code}}))
    return code


def _logs_json(arguments: Sequence[str]) -> bool:
    """Whether standard error holds JSON objects alone: an error may come before the command line is understood."""
    return "--log-format=json" in arguments or ("--log-format", "json") in itertools.pairwise(arguments)


def main() -> None:
    """Entry point of the ``paddlewheel`` script."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        give_up(sys.stdout)
    except OSError as error:
        code = code or _lost_answer(error, [])
    try:
        sys.stderr.flush()
    except OSError:
        give_up(sys.stderr)
    sys.exit(code)
