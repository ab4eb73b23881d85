"""The trainer's Paddle process: `python -m paddlewheel.trainer.worker`, started by its agent, which speaks JSON lines
with it.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from contextlib import ExitStack

from paddlewheel.data_pipeline.errors import DataError, UnavailableError
from paddlewheel.pserver.errors import CheckpointError as SavedTableError
from paddlewheel.pserver.errors import RequirementError, ServerError
from paddlewheel.pserver.messages import ErrorKind, WorkerError
from paddlewheel.pserver.requirements import check
from paddlewheel.trainer.checkpoint.manifest import CheckpointError
from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.distributed.process_group import PeerLostError
from paddlewheel.trainer.job.errors import ConfigError
from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL, EX_USAGE, EXIT_DONE, EXIT_TERMINATED
from paddlewheel.trainer.loop.train import BadStepsError, RowsLostError, Signals
from paddlewheel.trainer.protocol.messages import Result
from paddlewheel.trainer.worker.agent_channel import AgentChannel
from paddlewheel.trainer.worker.coordinator_client import RefusedError
from paddlewheel.trainer.worker.trainer import Trainer


class _FixJobError(ValueError):
    """Building the trainer refused something that the job or its files say."""


class _RestoreError(Exception):
    """The checkpoint to begin with is damaged, gone, or of another job; which of them, the coordinator finds out."""


def run(spec_line: str, link: AgentChannel, signals: Signals) -> int:
    """One attempt from its spec; the process's exit code. Errors become an `error` event."""
    try:
        check()
        with ExitStack() as resources:
            try:
                spec = TrainerSpec.model_validate_json(spec_line)
            except ValueError as error:
                raise _FixJobError(str(error)) from error
            try:
                attempt = Trainer(spec, link, signals, resources)
            except (CheckpointError, SavedTableError) as error:
                raise (_FixJobError if spec.restore is None else _RestoreError)(str(error)) from error
            except ValueError as error:
                raise _FixJobError(str(error)) from error
            gc.freeze()  # what building made stays to the end: the collector need not go through it at every step
            link.send(attempt.ready)
            result = attempt.run()
            if result is None:
                return EXIT_TERMINATED
            link.send(Result(figures=result))
    except (DataError, RowsLostError) as error:
        return _failed(link, "data", str(error), EX_USAGE)
    except (ConfigError, RefusedError, RequirementError, BadStepsError, _FixJobError) as error:
        return _failed(link, "job", str(error), EX_USAGE)
    except UnavailableError as error:
        return _failed(link, "runtime", str(error), EX_TEMPFAIL)
    except _RestoreError as error:
        return _failed(link, "checkpoint", str(error), EX_TEMPFAIL)
    except (PeerLostError, ServerError) as error:
        return _failed(link, "peer", str(error), EX_TEMPFAIL)
    except Exception as error:  # noqa: BLE001  whatever it is, the agent must hear of it
        return _failed(link, "runtime", f"{type(error).__name__}: {error}", EX_TEMPFAIL)
    return EXIT_DONE


def _failed(link: AgentChannel, kind: ErrorKind, message: str, code: int) -> int:
    link.send(WorkerError(kind=kind, message=message, traceback=traceback.format_exc()))
    return code


def main() -> None:
    """Read the spec, run, exit with the code. Never returns."""
    signals = Signals()
    link = AgentChannel(signals.obey)
    line = sys.stdin.readline()
    if not line:
        sys.exit(EX_TEMPFAIL)
    link.listen()
    code = run(line, link, signals)
    sys.stdout.flush()
    sys.stderr.flush()
    # threads of gloo and of the reader may still wait for peers; nothing is left to save
    os._exit(code)


if __name__ == "__main__":
    main()
