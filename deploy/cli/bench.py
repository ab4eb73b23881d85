"""``paddlewheel bench ...``: measured speed, next to peers and ceilings, with what is needed to judge the figures."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter, validators

from deploy.cli.arguments import JobFile, Json, Overrides, answer
from deploy.cli.data import Rows

if TYPE_CHECKING:
    from trainer.benchmark.report import Report
    from trainer.benchmark.runs import Options

app = App(name="bench", help="Measure speed on this machine, next to peers and ceilings; compare two measurements.")

app.command(
    "deploy.cli.recovery:recovery", name="recovery", help="What the loss of a server costs, by size of the tables."
)

System = Literal["paddlewheel", "paddle-fleet", "torch-fp32", "torch-bf16"]
_SYSTEMS: tuple[System, ...] = ("paddlewheel", "paddle-fleet", "torch-fp32", "torch-bf16")

Repeat = Annotated[int, Parameter(validator=validators.Number(gte=1), help="Repetitions of every case, run in turns.")]
Passes = Annotated[
    int,
    Parameter(
        validator=validators.Number(gte=2),
        help="Passes over the rows in a repetition; the first warms up and does not count.",
    ),
]
Threads = Annotated[
    int | None,
    Parameter(validator=validators.Number(gte=1), help="Compute threads of the trainer. By default one for each core."),
]
Seed = Annotated[int, Parameter(help="Fixes the rows.")]
Out = Annotated[
    Path | None,
    Parameter(
        help="Folder for results.json, results.md and, with matplotlib, results.png. Without it nothing is kept."
    ),
]
Work = Annotated[
    Path | None,
    Parameter(help="Folder where data sets are kept for the next run. By default in the folder for temporary files."),
]
Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Environment = Annotated[
    tuple[str, ...],
    Parameter(
        name="--env",
        negative=(),
        show_default=False,
        help="NAME=VALUE for every process of every system, ours and peers alike. May be given several times.",
    ),
]
Many = Annotated[tuple[Count, ...], Parameter(consume_multiple=True, negative=())]


class OptionError(ValueError):
    """An option has a value that cannot be used."""


def _options(
    rows: int,
    seed: int,
    repeat: int,
    passes: int,
    threads: int | None,
    work: Path | None,
    overrides: tuple[str, ...],
    environment: tuple[str, ...],
) -> "Options":
    from trainer.benchmark.runs import Options
    from trainer.benchmark.workload import Workload

    if passes < 2 or repeat < 1:
        raise OptionError(
            f"--passes {passes} --repeat {repeat}: at least 2 passes (the first warms up) and 1 repetition"
        )
    for setting in environment:
        if not setting.partition("=")[0] or "=" not in setting:
            raise OptionError(f"--env {setting}: write NAME=VALUE")
    return Options(
        Workload(rows=rows, seed=seed),
        repeat=repeat,
        passes=passes,
        threads=threads or len(os.sched_getaffinity(0)),
        work_directory=(work or Path(tempfile.gettempdir(), "paddlewheel-bench")).absolute(),
        overrides=overrides,
        environment=dict(setting.split("=", 1) for setting in environment),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _finish(measuring: "Coroutine[Any, Any, Report]", out: Path | None, *, json: bool) -> int:
    try:
        report = asyncio.run(_ended_by_sigterm(measuring))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    return _written(report, out, json=json)


def _written(report: "Report", out: Path | None, *, json: bool) -> int:
    if out is not None:
        for path in report.write(out):
            _say(f"wrote {path}")
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
    repeat: Repeat = 3,
    passes: Passes = 2,
    servers: Count = 1,
    trainers: Count = 1,
    only: Annotated[tuple[System, ...], Parameter(consume_multiple=True, negative=())] = _SYSTEMS,
    device: Literal["cpu", "gpu"] = "cpu",
    ceilings: bool = True,
    torch_python: Path | None = None,
    threads: Threads = None,
    seed: Seed = 1,
    work: Work = None,
    out: Out = None,
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
    from trainer.benchmark import runs

    if device == "gpu":
        overrides = (*overrides, "train.device=gpu")
    options = _options(rows, seed, repeat, passes, threads, work, overrides, env)
    measuring = runs.train(
        options,
        batches=batch,
        only=only,
        servers=servers,
        trainers=trainers,
        torch_python=torch_python,
        ceilings=ceilings,
        say=_say,
    )
    return _finish(measuring, out, json=json)


@app.command
def data(
    *,
    rows: Rows = 1_000_000,
    batch: Many = (2048,),
    threads: Many = (1, 2),
    repeat: Repeat = 3,
    passes: Passes = 3,
    seed: Seed = 1,
    work: Work = None,
    out: Out = None,
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
    from trainer.benchmark import reading

    options = _options(rows, seed, repeat, passes, None, work, overrides, ())
    return _finish(reading.data(options, batches=batch, threads=threads, say=_say), out, json=json)


@app.command
def ps(
    *,
    keys: Many = (2_000, 20_000, 100_000),
    width: Many = (16,),
    servers: Many = (1, 2),
    table_keys: Rows = 1_000_000,
    pass_keys: Rows = 2_000_000,
    repeat: Repeat = 3,
    passes: Passes = 2,
    seed: Seed = 1,
    work: Work = None,
    out: Out = None,
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
    from trainer.benchmark import runs

    if max(keys) > table_keys:
        raise OptionError(
            f"--keys {max(keys)}: a call cannot have more keys than the table (--table-keys {table_keys})"
        )
    options = _options(1_000, seed, repeat, passes, None, work, (), env)
    measuring = runs.ps(
        options,
        keys_per_call=keys,
        widths=width,
        servers=servers,
        num_keys=table_keys,
        keys_per_pass=pass_keys,
        say=_say,
    )
    return _finish(measuring, out, json=json)


@app.command
def tables(
    *,
    keys: Annotated[tuple[Rows, ...], Parameter(consume_multiple=True, negative=())] = (
        1_000_000,
        5_000_000,
        20_000_000,
    ),
    servers: Count = 2,
    width: Count = 16,
    rule: Literal["sgd", "adagrad", "adagrad_elementwise", "adam", "adam_shared"] = "adagrad",
    project: Rows = 10_000_000_000,
    node_memory_gib: Count = 64,
    node_cores: Count = 16,
    seed: Seed = 1,
    work: Work = None,
    out: Out = None,
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
    project
        Keys of the projection, such as 10b.
    node_memory_gib
        Memory of a server's machine in the projection.
    node_cores
        Its cores.
    """
    from pserver.config import TableConfig
    from trainer.benchmark import tables as benchmark

    async def measure() -> "Report":
        return await asyncio.to_thread(
            benchmark.tables,
            sizes=keys,
            num_servers=servers,
            config=TableConfig.model_validate({"width": width, "optimizer": {"rule": rule}}),
            work_directory=work,
            projected_keys=project,
            nodes=benchmark.Nodes(memory_bytes=node_memory_gib << 30, cores=node_cores),
            seed=seed,
            say=_say,
        )

    return _finish(measure(), out, json=json)


@app.command
def dense(
    *,
    rows: Rows = 100_000,
    batch: Many = (2048, 512),
    threads: Many = (1, 2),
    repeat: Repeat = 3,
    passes: Passes = 3,
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
    seed: Seed = 1,
    work: Work = None,
    out: Out = None,
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
    from trainer.benchmark import runs

    options = _options(rows, seed, repeat, passes, None, work, overrides, env)
    if device == "gpu":
        report = runs.gpu_towers(
            options,
            batches=batch,
            models=models,
            precisions=precisions,
            torch_python=torch_python,
            modes=modes,
            say=_say,
        )
        return _written(report, out, json=json)
    return _finish(runs.dense(options, batches=batch, threads=threads, say=_say), out, json=json)


@app.command
def scaling(
    *,
    rows: Rows = 200_000,
    batch: Count = 2048,
    trainers: Many = (1, 2, 4),
    servers: Many = (1, 2, 4),
    repeat: Repeat = 3,
    passes: Passes = 2,
    threads: Threads = None,
    seed: Seed = 1,
    work: Work = None,
    out: Out = None,
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
    from trainer.benchmark import runs

    options = _options(rows, seed, repeat, passes, threads, work, overrides, env)
    return _finish(
        runs.scaling(options, batch_rows=batch, trainers=trainers, servers=servers, say=_say), out, json=json
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
    from trainer.benchmark import report

    older, newer = report.Report.read(before), report.Report.read(after)
    text = report.compare(older, newer)
    answer({"before": older.to_json(), "after": newer.to_json(), "table": text}, json=json, text=lambda: text)


@app.command
def parity(
    job: JobFile,
    *,
    out: Annotated[Path, Parameter(help="Folder for the runs (kept, so that it can go on), a table and a plot.")],
    variants: Annotated[
        tuple[str, ...],
        Parameter(
            consume_multiple=True,
            negative=(),
            help="single, SxT (servers x trainers), SxT@k (at most k steps of staleness). By default single, 1x1@0, "
            "1x1@1, 2x2@0, 2x2@1, 2x2@4, 2x2@8.",
        ),
    ] = (),
    seeds: Annotated[int, Parameter(validator=validators.Number(gte=1), help="Seeds, counted from the job's own.")] = 5,
    overrides: Overrides = (),
    json: Json = False,
) -> None:
    """Accuracy of one job in one process and spread over many, seed by seed: AUC, its band, its difference.

    Trainers share the job's batch, so that a step sees as many rows in every variant.
    """
    from trainer.config import JobConfig
    from trainer.parity import lab

    config = JobConfig.load(job, overrides)
    chosen = [lab.Variant.parse(text) for text in variants or lab.DEFAULT_VARIANTS]
    runs = lab.run_all(config, chosen, range(config.seed, config.seed + seeds), out, _say)
    comparisons = lab.compare(runs)
    table = lab.markdown(comparisons)
    (out / "parity.md").write_text(table + "\n", encoding="utf-8")
    try:
        lab.plot(runs, out / "parity.png")
    except ImportError:
        _say("no plot: matplotlib is not installed (extra `plot`)")
    answer([asdict(c) for c in comparisons], json=json, text=lambda: table)


@app.command
def peers(
    job: JobFile,
    *,
    torch_python: Annotated[Path, Parameter(help="A Python that has torch and numpy.")],
    out: Annotated[Path, Parameter(help="Folder for the results.")],
    models: Annotated[
        tuple[Literal["lr", "deepfm", "dcn", "din"], ...], Parameter(consume_multiple=True, negative=())
    ] = ("lr", "deepfm", "dcn"),
    seeds: Annotated[int, Parameter(validator=validators.Number(gte=1), help="Seeds, counted from the job's own.")] = 3,
    peer_rates: Annotated[
        tuple[float, ...],
        Parameter(
            consume_multiple=True, negative=(), help="Learning rate of PyTorch's Adam, one for all models or one each."
        ),
    ] = (1e-3,),
    peer_l2: Annotated[float, Parameter(help="L2 of PyTorch's Adam, on all parameters.")] = 1e-4,
    min_count: Annotated[
        int, Parameter(validator=validators.Number(gte=1), help="PyTorch: rarer ids share one embedding.")
    ] = 10,
    threads: Threads = None,
    overrides: Overrides = (),
    json: Json = False,
) -> None:
    """AUC of our models, in one process, next to plain PyTorch ones on the same rows, features and split.

    Both are judged at their best epoch of as many as the job has.
    """
    from trainer.config import JobConfig
    from trainer.parity import peers as lab

    config = JobConfig.load(job, overrides)
    if len(peer_rates) not in {1, len(models)}:
        raise OptionError(f"--peer-rates has {len(peer_rates)} numbers for {len(models)} models: give one, or one each")
    rates = dict(zip(models, peer_rates * (len(models) // len(peer_rates)), strict=True))
    results = lab.run(
        {kind: lab.variant(config, kind) for kind in models},
        {kind: lab.PeerOptions(rates[kind], peer_l2, min_count, threads or 1) for kind in models},
        range(config.seed, config.seed + seeds),
        torch_python,
        out,
        _say,
    )
    table = lab.markdown(results)
    (out / "peers.md").write_text(table + "\n", encoding="utf-8")
    answer([asdict(r) for r in results], json=json, text=lambda: table)
