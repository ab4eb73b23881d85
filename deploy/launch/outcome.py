"""How a run ended, for programs and for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlewheel.deploy.launch.display import duration
from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL, EX_USAGE, EXIT_DONE


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        exit_code: 0 done; 64 fix the job; 75 a retry may help; 130 and 143 stopped by a signal.
        cause: the first cause of a failure, naming the role; empty after success.
        detail: its traceback or the last lines of the failed_role's log.
        result: trainer 0's result event; empty without one.
        server_memory_bytes: largest resident memory seen, by server.
        checkpoint: the newest committed one, from which the next run goes on; empty without one.
        seconds: from the start of the first process to the end of the last.
    """

    exit_code: int
    cause: str
    failed_role: str
    detail: str
    result: Mapping[str, Any]
    run_dir: Path
    log_dir: Path
    seconds: float
    num_restarts: int
    server_memory_bytes: Mapping[int, int]
    checkpoint: str = ""

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "exit_code": self.exit_code,
            "cause": self.cause,
            "failed_role": self.failed_role,
            "detail": self.detail,
            "result": dict(self.result),
            "run_dir": str(self.run_dir),
            "log_dir": str(self.log_dir),
            "seconds": self.seconds,
            "num_restarts": self.num_restarts,
            "checkpoint": self.checkpoint,
            "server_memory_bytes": {str(rank): size for rank, size in self.server_memory_bytes.items()},
        }

    def summary(self) -> str:
        """For people: figures and places after success, the cause otherwise."""
        return "\n".join(_success_lines(self) if self.exit_code == EXIT_DONE else _failure_lines(self))


def _success_lines(outcome: RunOutcome) -> Iterator[str]:
    result = outcome.result
    if outcome.detail:
        yield outcome.detail
    if "rows" in result:
        speed = f"{result['rows_per_second']:,.0f} samples/s"
        yield f"trained      {result['rows']:,} rows in {duration(result['seconds'])}: {speed}"
        if result.get("loss") is not None:
            yield f"loss         {result['loss']:.5f} (training, mean)"
        if result.get("bad_steps"):
            rows = f"{result['bad_rows']:,} rows"
            yield f"skipped      {result['bad_steps']} steps ({rows}): loss or gradient was not finite"
    if warm := result.get("warm_start"):
        taken = [f"{mine}: {table['keys']:,} keys" for mine, table in warm["tables"].items()]
        yield f"warm start   {', '.join([*taken, *(['dense part'] if warm['dense'] else [])])} from {warm['source']}"
    if result.get("skipped_rows"):
        unreadable = f", {result['unreadable_rows']:,} of them in unreadable files" if result["unreadable_rows"] else ""
        yield f"left out     {result['skipped_rows']:,} rows that could not be used{unreadable}"
    if result.get("truncated_ids"):
        each = ", ".join(f"{name}: {ids:,}" for name, ids in result["truncated_ids"].items())
        yield f"truncated    ids beyond max_length: {each}"
    scores = result.get("eval") or {}
    if scores:
        named = {"AUC": ("auc", ".5f"), "logloss": ("logloss", ".5f"), "calibration": ("calibration", ".4f")}
        shown = [
            f"{name} {format(scores[key], form) if scores[key] is not None else 'undefined'}"
            for name, (key, form) in named.items()
            if key in scores
        ]
        yield f"evaluation   {', '.join(shown)} on {scores.get('rows', 0):,} rows"
    keys = result.get("keys") or {}
    if keys:
        yield f"tables       {', '.join(f'{name}: {number:,} keys' for name, number in keys.items())}"
    if outcome.server_memory_bytes:
        each = ", ".join(f"{size / 2**20:,.0f} MiB" for _, size in sorted(outcome.server_memory_bytes.items()))
        yield f"servers      {each} of memory at most"
    if result.get("checkpoint"):
        yield f"checkpoint   {result['checkpoint']}"
    yield f"written to   {outcome.run_dir} (logs in {outcome.log_dir})"
    if outcome.num_restarts:
        yield f"restarts     {outcome.num_restarts}"


def _failure_lines(outcome: RunOutcome) -> Iterator[str]:
    stopped = outcome.exit_code > 128
    yield f"the job {'was stopped' if stopped else 'failed'}: {outcome.cause}"
    if outcome.detail:
        yield from (f"    {line}" for line in outcome.detail.rstrip().splitlines())
    if outcome.failed_role:
        yield f"log of {outcome.failed_role}: {outcome.log_dir / (outcome.failed_role.replace(' ', '-') + '.log')}"
    else:
        yield f"logs: {outcome.log_dir}"
    if outcome.exit_code != EX_USAGE and outcome.checkpoint:
        yield f"Starting it again goes on from {outcome.checkpoint}"
    elif outcome.exit_code == EX_TEMPFAIL:
        yield "Starting it again may help."
    elif outcome.exit_code == EX_USAGE:
        yield "Starting it again as it is cannot help."
