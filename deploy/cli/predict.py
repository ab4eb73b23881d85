"""``paddlewheel predict``: scores beside columns of Parquet files."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paddlewheel.deploy.cli.arguments import Checkpoint, Json, Model, Overrides, answer, check_host_and_port

if TYPE_CHECKING:
    from paddlewheel.trainer.checkpoint.trained_model import TrainedModel
    from paddlewheel.trainer.job.config import JobConfig
    from paddlewheel.trainer.serving.predict import Prediction


def predict(
    model: Model | None = None,
    *,
    to: Annotated[Path, Parameter(help="The new Parquet file. It appears whole, or not at all.")],
    data: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(), show_default=False, help="Parquet files, folders, globs to score; by default data.eval."
        ),
    ] = (),
    columns: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            consume_multiple=True,
            show_default=False,
            help="Columns of the data to write beside the scores.",
        ),
    ] = (),
    export: Annotated[Path | None, Parameter(help="Score from an export, without any server.")] = None,
    lookup: Annotated[
        Path | None,
        Parameter(help="With --export: folder for its tables, sorted, so that the next call finds them made."),
    ] = None,
    coordinator: Annotated[
        str | None,
        Parameter(
            validator=check_host_and_port,
            help="Score from the servers of a running job: HOST:PORT of its coordinator, as `train` prints it.",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    overrides: Overrides = (),
    json: Json = False,
) -> None:
    """Score Parquet files: from an export, from a checkpoint (local servers are started), or from running servers.

    The output has a row for every row read, in their order: the chosen columns, and `score_<label>`, a probability, for
    each label. Label columns need not be there. Rows that cannot be scored follow data.on_bad_row: `skip` and
    `quarantine` leave their scores null and say why in the column `problem`.

    With --coordinator, vectors come from the job's servers as they are now and the dense part from the checkpoint;
    nothing is changed or created there. Only while the job trains: servers that are loading must not be read; and not
    for a job with day boundaries (train.days, lifecycle.every_rows), whose servers must not be read during one.
    """
    import time

    from paddlewheel.trainer.agent.paddle_environment import prepare_for_paddle

    prepare_for_paddle()
    from paddlewheel.deploy.cli.arguments import find_model
    from paddlewheel.trainer.serving.predict import PredictError, Request
    from paddlewheel.trainer.serving.predict import predict as score

    if (model is None) == (export is None):
        raise PredictError("give either a job file or a checkpoint, or --export DIRECTORY")
    if export is not None and (coordinator or checkpoint):
        raise PredictError("--export needs neither --coordinator nor --checkpoint")
    if lookup is not None and export is None:
        raise PredictError("--lookup goes with --export")
    began = time.monotonic()
    with ExitStack() as resources:
        place = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="paddlewheel-predict-")))
        if export is not None:
            from paddlewheel.trainer.checkpoint.trained_model import open_model
            from paddlewheel.trainer.serving.export import ExportedModel, settings_of

            settings = settings_of(export, overrides)
            request = Request.check(settings, data, columns, to, trained=open_model(export))
            opened = ExportedModel(export, lookup or place / "lookup", overrides)
            program: Any = opened.program
            tables: Any = opened.tables
        else:
            assert model is not None
            job, trained = resources.enter_context(find_model(model, checkpoint, overrides))
            request = Request.check(job, data, columns, to, trained=trained)
            program, tables = _from_checkpoint(job, trained, coordinator, place, resources)
        ready = time.monotonic() - began
        done = score(request, program, tables, on_rows=_progress(request.dataset.num_rows))
    answer({**done.to_json(), "ready_seconds": ready}, json=json, text=lambda: "\n".join(_lines(done, ready)))


def _from_checkpoint(
    job: "JobConfig", trained: "TrainedModel", coordinator: str | None, place: Path, resources: ExitStack
) -> tuple[Any, Any]:
    """Program and client: of running servers, or of some that are started and filled."""
    from paddlewheel.pserver import requirements
    from paddlewheel.pserver.client import Client
    from paddlewheel.pserver.local import local_servers
    from paddlewheel.trainer.checkpoint import manifest as checkpoints
    from paddlewheel.trainer.dense.backend import cpu_operators
    from paddlewheel.trainer.serving.export import restored_program
    from paddlewheel.trainer.serving.predict import PredictError, check_servers
    from paddlewheel.trainer.serving.running_job import check_no_boundaries, find

    if trained.is_export:
        raise PredictError(f"{trained.path} is an export: give it with --export")
    requirements.check(import_core=False)
    endpoints: tuple[str, ...]
    server_uids = None
    if coordinator is not None:
        for settings in (job.model_dump(mode="json"), trained.settings):
            check_no_boundaries(settings)
        running = find(coordinator)
        endpoints, server_uids = running.endpoints, running.server_uids
    saved = checkpoints.read(trained.path)
    used = {name: job.tables[name] for name in job.data.tables}
    program = restored_program(job, used, saved, cpu_operators(job, predicts=True).precision)
    if coordinator is None:
        endpoints = resources.enter_context(local_servers(used, job.cluster.servers, place)).endpoints
    timeout = job.control.pull_timeout_seconds
    client = resources.enter_context(
        Client(used, endpoints, seed=job.seed, server_uids=server_uids, pull_timeout_seconds=timeout)
    )
    if coordinator is None:
        client.load(saved.sparse)
    else:
        check_servers(client, saved.sparse, used)
    return program, client


def _progress(total: int) -> Callable[[int], None]:
    """Tells a person at a terminal how far it is, twice a second."""
    import sys
    import time

    told = time.monotonic()

    def tell(rows: int) -> None:
        nonlocal told
        if sys.stderr.isatty() and (time.monotonic() - told > 0.5 or rows == total):
            told = time.monotonic()
            end = "\n" if rows == total else ""
            with contextlib.suppress(OSError):
                print(f"\r{rows:,} of {total:,} rows", end=end, file=sys.stderr, flush=True)

    return tell


def _lines(done: "Prediction", ready: float) -> Iterator[str]:
    speed = f"{done.rows_per_second:,.0f} rows/s"
    yield f"scored       {done.rows - done.unscored_rows:,} rows in {done.seconds:.1f} s: {speed}"
    yield f"ready after  {ready:.1f} s"
    if done.unscored_rows:
        yield f"not scored   {done.unscored_rows:,} rows: their column `problem` says why"
    if done.skipped_files:
        yield f"left out     {done.unreadable_rows:,} rows of unreadable files, such as: {done.skipped_files[0]}"
    yield f"written to   {done.path} ({', '.join(done.columns)})"
