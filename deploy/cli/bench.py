"""``paddlewheel bench ...``: measured speed, next to peers and ceilings, with what is needed to judge the figures."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter, validators

from paddlewheel.deploy.cli.arguments import Json, OptionError, Overrides, Threads, answer, say
from paddlewheel.deploy.cli.data import Rows
from paddlewheel.deploy.cli.parity import baselines, parity

if TYPE_CHECKING:
    from paddlewheel.deploy.bench.speed.report import Report
    from paddlewheel.deploy.bench.speed.runs import Options

app = App(name="bench", help="Measure speed on this machine, next to peers and ceilings; compare two measurements.")

app.command(
    "paddlewheel.deploy.cli.recovery:recovery",
    name="recovery",
    help="What the loss of a server costs, by size of the tables.",
)
app.command(parity)
app.command(baselines)

System = Literal["paddlewheel", "paddle-fleet", "torch-fp32", "torch-bf16"]
_SYSTEMS: tuple[System, ...] = ("paddlewheel", "paddle-fleet", "torch-fp32", "torch-bf16")

Passes = Annotated[
    int,
    Parameter(
        validator=validators.Number(gte=2),
        help="Passes over the rows in a repetition; the first warms up and does not count.",
    ),
]
Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Rule = Literal["sgd", "adagrad", "adagrad_elementwise", "adam", "adam_shared"]
Environment = Annotated[
    tuple[str, ...],
    Parameter(
        name="--env",
        negative=(),
        show_default=False,
        help="NAME=VALUE for every process of every system, ours and peers alike. May be given several times.",
    ),
]


def _some(_: Any, values: tuple[Any, ...]) -> None:
    if not values:
        raise ValueError("give at least one")


Many = Annotated[tuple[Count, ...], Parameter(consume_multiple=True, negative=(), validator=_some)]


# Options that several commands share; a class for each stretch of them in the help. Cyclopts fills in what is not given
# from the class itself, so another default is another class.


@Parameter(name="*")
@dataclass(frozen=True)
class Turns:
    """How often is measured."""

    repeat: Annotated[
        int, Parameter(validator=validators.Number(gte=1), help="Repetitions of every case, run in turns.")
    ] = 3
    passes: Passes = 2


@dataclass(frozen=True)
class ShortTurns(Turns):
    """The same where a pass is short."""

    passes: Passes = 3


@Parameter(name="*")
@dataclass(frozen=True)
class Run:
    """What is measured on, and what is kept."""

    seed: Annotated[int, Parameter(help="Fixes the rows.")] = 1
    work: Annotated[
        Path | None,
        Parameter(
            help="Folder where data sets are kept for the next run. By default in the folder for temporary files."
        ),
    ] = None
    out: Annotated[
        Path | None,
        Parameter(
            help="Folder for results.json, results.md and, with matplotlib, results.png. Without it nothing is kept."
        ),
    ] = None


_TURNS, _SHORT_TURNS, _RUN = Turns(), ShortTurns(), Run()


def _options(
    rows: int,
    turns: Turns,
    run: Run,
    *,
    threads: int | None = None,
    overrides: tuple[str, ...] = (),
    env: tuple[str, ...] = (),
) -> "Options":
    from paddlewheel.deploy.bench.speed.runs import Options
    from paddlewheel.deploy.bench.speed.workload import Workload

    for setting in env:
        if not setting.partition("=")[0] or "=" not in setting:
            raise OptionError(f"--env {setting}: write NAME=VALUE")
    return Options(
        Workload(rows=rows, seed=run.seed),
        repeat=turns.repeat,
        passes=turns.passes,
        threads=threads or len(os.sched_getaffinity(0)),
        work_directory=(run.work or Path(tempfile.gettempdir(), "paddlewheel-bench")).absolute(),
        overrides=overrides,
        environment=dict(setting.split("=", 1) for setting in env),
    )


def _finish(measuring: "Coroutine[Any, Any, Report]", out: Path | None, *, json: bool) -> int:
    try:
        report = asyncio.run(_ended_by_sigterm(measuring))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    return _written(report, out, json=json)


def _written(report: "Report", out: Path | None, *, json: bool) -> int:
    if out is not None:
        for path in report.write(out):
            say(f"wrote {path}")
    answer(report.to_json(), json=json, text=report.markdown)
    return 0


async def _ended_by_sigterm(measuring: "Coroutine[Any, Any, Report]") -> "Report":
    """So that SIGTERM, like Ctrl-C, leaves neither processes nor files."""
    task = asyncio.ensure_future(measuring)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


@app.command
def train(
    *,
    rows: Rows = 200_000,
    batch: Many = (2048, 512),
    turns: Turns = _TURNS,
    servers: Count = 1,
    trainers: Count = 1,
    only: Annotated[tuple[System, ...], Parameter(consume_multiple=True, negative=(), validator=_some)] = _SYSTEMS,
    device: Literal["cpu", "gpu"] = "cpu",
    ceilings: bool = True,
    torch_python: Path | None = None,
    threads: Threads = None,
    run: Run = _RUN,
    overrides: Overrides = (),
    env: Environment = (),
    json: Json = False,
) -> int:
    """Samples/s end to end on a DeepFM with 26 slots x (1 + 16), 13 dense columns and a tower of 400-400-400.

    Ours reads Parquet and runs with real servers. Next to it, in turns: Paddle's own path (fleet's asynchronous
    parameter server fed by QueueDataset from text) and, where it is installed, PyTorch with its tables in memory.

    Parameters
    ----------
    rows
        Rows of one pass, such as 200k or 1m.
    batch
        Rows a step; several make several cases.
    servers
        Parameter servers of ours and of Paddle's own path.
    trainers
        Trainers of ours; the peers have one.
    only
        Systems to run.
    device
        Where ours computes its dense part.
    ceilings
        Also measure what reading, the exchange with the servers and the dense part would each allow alone.
    torch_python
        A Python that has torch, pyarrow and numpy. Without it PyTorch does not run.
    """
    from paddlewheel.deploy.bench.speed import runs

    if device == "gpu":
        overrides = (*overrides, "train.device=gpu")
    options = _options(rows, turns, run, threads=threads, overrides=overrides, env=env)
    measuring = runs.train(
        options,
        batches=batch,
        only=only,
        servers=servers,
        trainers=trainers,
        torch_python=torch_python,
        ceilings=ceilings,
        say=say,
    )
    return _finish(measuring, run.out, json=json)


@app.command
def data(
    *,
    rows: Rows = 1_000_000,
    batch: Many = (2048,),
    threads: Many = (1, 2),
    turns: ShortTurns = _SHORT_TURNS,
    run: Run = _RUN,
    overrides: Overrides = (),
    json: Json = False,
) -> int:
    """Rows/s from Parquet to batches ready for a step, beside what pyarrow alone makes of the same columns.

    Parameters
    ----------
    rows
        Rows of one pass, such as 1m.
    batch
        Rows a batch.
    threads
        Threads of the loader; pyarrow has one, or its own pool.
    """
    from paddlewheel.deploy.bench.speed import reading

    options = _options(rows, turns, run, overrides=overrides)
    return _finish(reading.data(options, batches=batch, threads=threads, say=say), run.out, json=json)


@app.command
def ps(
    *,
    keys: Many = (2_000, 20_000, 100_000),
    width: Many = (16,),
    servers: Many = (1, 2),
    table_keys: Rows = 1_000_000,
    pass_keys: Rows = 2_000_000,
    turns: Turns = _TURNS,
    run: Run = _RUN,
    env: Environment = (),
    json: Json = False,
) -> int:
    """Keys/s of pulls and pushes, by keys in a call, width and servers, and what the loopback device would allow.

    Parameters
    ----------
    keys
        Keys in a call.
    width
        Floats of an embedding, beside the first-order weight.
    servers
        Parameter servers.
    table_keys
        Keys in the table, such as 1m.
    pass_keys
        Keys pulled or pushed in a pass, such as 2m; at least four calls.
    """
    from paddlewheel.deploy.bench.speed import runs

    if max(keys) > table_keys:
        raise OptionError(
            f"--keys {max(keys)}: a call cannot have more keys than the table (--table-keys {table_keys})"
        )
    options = _options(1_000, turns, run, env=env)
    measuring = runs.ps(
        options,
        keys_per_call=keys,
        widths=width,
        servers=servers,
        num_keys=table_keys,
        keys_per_pass=pass_keys,
        say=say,
    )
    return _finish(measuring, run.out, json=json)


@app.command
def tables(
    *,
    keys: Annotated[tuple[Rows, ...], Parameter(consume_multiple=True, negative=(), validator=_some)] = (
        1_000_000,
        5_000_000,
        20_000_000,
    ),
    servers: Count = 2,
    width: Count = 16,
    rule: Rule = "adagrad",
    dtype: Literal["float32", "bfloat16"] = "float32",
    engine: Annotated[tuple[Literal["paddlewheel", "paddle"], ...], Parameter(consume_multiple=True, negative=())] = (
        "paddlewheel",
        "paddle",
    ),
    project: Rows = 10_000_000_000,
    node_memory_gib: Count = 64,
    node_cores: Count = 16,
    run: Run = _RUN,
    json: Json = False,
) -> int:
    """Bytes a key, and the rates of inserts, pulls, pushes, saves and loads, as a table grows; a projection.

    Parameters
    ----------
    keys
        Sizes to measure at, such as 1m 5m 20m; the largest takes most of the time.
    servers
        Parameter servers.
    width
        Floats of an embedding, beside the first-order weight.
    rule
        The table's optimizer rule.
    dtype
        How servers keep embeddings; Paddle's engine knows float32 alone.
    engine
        Whose table: ours, Paddle's, or both, one after the other.
    project
        Keys of the projection, such as 10b.
    node_memory_gib
        Memory of a server's machine in the projection.
    node_cores
        Its cores.
    """
    from paddlewheel.deploy.bench.speed import tables as benchmark
    from paddlewheel.pserver.config import TableConfig

    async def measure() -> "Report":
        return await asyncio.to_thread(
            benchmark.tables,
            sizes=keys,
            num_servers=servers,
            config=TableConfig.model_validate({"width": width, "dtype": dtype, "optimizer": {"rule": rule}}),
            engines=engine,
            work_directory=run.work,
            projected_keys=project,
            nodes=benchmark.Nodes(memory_bytes=node_memory_gib << 30, cores=node_cores),
            seed=run.seed,
            say=say,
        )

    return _finish(measure(), run.out, json=json)


@app.command
def requests(
    *,
    threads: Many = (1, 2, 4, 8, 16),
    clients: Many = (1, 4, 16),
    table_keys: Rows = 1_000_000,
    keys: Count = 17_000,
    seconds: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 0.5,
    grow: Annotated[tuple[Rows, ...], Parameter(consume_multiple=True, negative=(), validator=_some)] = (
        1_000_000,
        5_000_000,
    ),
    width: Count = 16,
    rule: Rule = "adagrad",
    run: Run = _RUN,
    json: Json = False,
) -> int:
    """Our own table without servers: whether requests use several cores, and whether growth stops one.

    Parameters
    ----------
    threads
        Threads that may work on one request.
    clients
        Requests that are under way at once.
    table_keys
        Keys in the table while it is asked.
    keys
        Keys of a request.
    seconds
        How long each number of threads and clients is measured, for pulls and for pushes.
    grow
        Sizes up to which an empty table is then filled, each request timed.
    width
        Floats of an embedding, beside the first-order weight.
    rule
        The table's optimizer rule.
    """
    from paddlewheel.deploy.bench.speed import table_requests
    from paddlewheel.pserver.config import TableConfig

    if keys > table_keys:
        raise OptionError(f"--keys {keys}: a request cannot have more keys than the table (--table-keys {table_keys})")

    async def measure() -> "Report":
        return await asyncio.to_thread(
            table_requests.requests,
            config=TableConfig.model_validate({"width": width, "optimizer": {"rule": rule}}),
            threads=threads,
            clients=clients,
            load=table_requests.Load(table_keys, keys, seconds, run.seed),
            growth=grow,
            say=say,
        )

    return _finish(measure(), run.out, json=json)


@app.command
def dense(
    *,
    rows: Rows = 100_000,
    batch: Many = (2048, 512),
    threads: Many = (1, 2),
    turns: ShortTurns = _SHORT_TURNS,
    device: Literal["cpu", "gpu"] = "cpu",
    models: Annotated[tuple[Literal["deepfm", "dlrm", "dcn"], ...], Parameter(consume_multiple=True, negative=())] = (
        "deepfm",
        "dlrm",
        "dcn",
    ),
    precisions: Annotated[
        tuple[Literal["bfloat16", "tfloat32", "float32", "float16"], ...],
        Parameter(consume_multiple=True, negative=()),
    ] = ("bfloat16", "tfloat32"),
    torch_python: Path | None = None,
    modes: Annotated[
        tuple[Literal["eager", "compile", "graph"], ...], Parameter(consume_multiple=True, negative=())
    ] = ("eager", "compile"),
    run: Run = _RUN,
    overrides: Overrides = (),
    env: Environment = (),
    json: Json = False,
) -> int:
    """Samples/s of the dense part alone, and of its matrix products alone.

    Parameters
    ----------
    rows
        Rows to take batches from, such as 100k.
    batch
        Rows a step.
    threads
        Compute threads.
    device
        `gpu`: on this machine's first GPU, of the three `--models`; `--rows`, `--passes`, `--repeat` and `--threads` do
        not count.
    models, precisions
        On a GPU: the towers, and what their matrix products compute in.
    torch_python, modes
        On a GPU: a Python with PyTorch for CUDA, and how it runs the same towers (DeepFM, DLRM).
    """
    from paddlewheel.deploy.bench.speed import runs

    options = _options(rows, turns, run, overrides=overrides, env=env)
    if device == "gpu":
        report = runs.gpu_towers(
            options,
            batches=batch,
            models=models,
            precisions=precisions,
            torch_python=torch_python,
            modes=modes,
            say=say,
        )
        return _written(report, run.out, json=json)
    return _finish(runs.dense(options, batches=batch, threads=threads, say=say), run.out, json=json)


@app.command
def scaling(
    *,
    rows: Rows = 200_000,
    batch: Count = 2048,
    trainers: Many = (1, 2, 4),
    servers: Many = (1, 2, 4),
    turns: Turns = _TURNS,
    threads: Threads = None,
    run: Run = _RUN,
    overrides: Overrides = (),
    env: Environment = (),
    json: Json = False,
) -> int:
    """Samples/s, and CPU seconds per million rows, with more trainers and servers on this machine.

    Parameters
    ----------
    rows
        Rows of one pass, such as 200k.
    batch
        Rows a trainer and step.
    trainers
        Trainers.
    servers
        Parameter servers.
    """
    from paddlewheel.deploy.bench.speed import runs

    options = _options(rows, turns, run, threads=threads, overrides=overrides, env=env)
    return _finish(
        runs.scaling(options, batch_rows=batch, trainers=trainers, servers=servers, say=say), run.out, json=json
    )


@app.command
def compare(before: Path, after: Path, *, json: Json = False) -> None:
    """Compare two results case by case, and tell changes beyond the spread of the repetitions from noise.

    Parameters
    ----------
    before
        A results.json, or the folder that holds it.
    after
        The same of the later run.
    """
    from paddlewheel.deploy.bench.speed import report

    older, newer = report.Report.read(before), report.Report.read(after)
    text = report.compare(older, newer)
    answer({"before": older.to_json(), "after": newer.to_json(), "table": text}, json=json, text=lambda: text)
