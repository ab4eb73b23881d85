"""The benchmarks: which cases there are, and how they are repeated in turns."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paddlewheel.deploy.bench.speed import machine, systems
from paddlewheel.deploy.bench.speed.forecast import Costs, Nodes, efficiency, forecast, servers_needed
from paddlewheel.deploy.bench.speed.report import Case, Report, ratios
from paddlewheel.deploy.bench.speed.systems import SYSTEMS, Measured, PeerError, Setting
from paddlewheel.deploy.bench.speed.workload import Workload, keys_per_row, prepare
from paddlewheel.trainer.kernels.gpu import cuda_library

Say = Callable[[str], None]
_SLOWEST_ROWS_PER_SECOND = 300
"""A run that is slower than this counts as hung."""
STAGE_BATCHES = 40
"""Batches that the stages `exchange` and `dense` go round; enough for keys and arrays not to stay in the caches."""


@dataclass(frozen=True)
class Planned:
    """A case that is to be measured. `run` gets a folder of its own for each repetition."""

    name: str
    params: dict[str, Any]
    unit: str
    run: Callable[[Path], Awaitable[Measured]]


async def measure(planned: Sequence[Planned], repeat: int, work_directory: Path, say: Say) -> list[Case]:
    """Every case `repeat` times, in turns: all cases, then all again the other way round, and so on."""
    values: dict[str, list[Measured]] = {plan.name: [] for plan in planned}
    assert len(values) == len(planned), "two cases have one name"
    for repetition in range(repeat):
        for plan in planned if repetition % 2 == 0 else reversed(planned):
            with systems.scratch(work_directory) as directory:
                measured = await plan.run(Path(directory))
            values[plan.name].append(measured)
            say(f"{repetition + 1}/{repeat} {plan.name}: {measured.rows_per_second:,.0f} {plan.unit}")
    return [_case(plan, values[plan.name]) for plan in planned]


def _case(plan: Planned, found: Sequence[Measured]) -> Case:
    facts: dict[str, list[float]] = {}
    for measured in found:
        for name, value in measured.facts.items():
            facts.setdefault(name, []).append(value)
    return Case(plan.name, plan.params, plan.unit, [m.rows_per_second for m in found], facts)


@dataclass(frozen=True)
class Options:
    """What all benchmarks share.

    Attributes:
        repeat: repetitions of every case.
        passes: passes over the rows in a repetition, the first of which does not count.
        threads: compute threads of a trainer.
        work_directory: data sets are kept here, and runs happen here.
        overrides: `a.b=c` changes of our job.
        environment: variables for every process of every system.
    """

    work: Workload
    repeat: int
    passes: int
    threads: int
    work_directory: Path
    overrides: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def setting(self, **changes: Any) -> Setting:
        """A run's setting; makes the data set when it is not there."""
        files = prepare(self.work, self.work_directory)
        base = Setting(
            self.work,
            files,
            2048,
            passes=self.passes,
            threads=self.threads,
            overrides=self.overrides,
            environment=self.environment,
            timeout_seconds=600 + self.work.rows * self.passes / _SLOWEST_ROWS_PER_SECOND,
        )
        return replace(base, **changes)

    def config(self, **more: Any) -> dict[str, Any]:
        """For the report."""
        plain = {k: v for k, v in asdict(self).items() if k not in {"work_directory", "overrides"}}
        return {**plain, "overrides": list(self.overrides), **more}


def _report(
    benchmark: str, config: dict[str, Any], cases: list[Case], environment: dict[str, Any], date: str
) -> Report:
    return Report(benchmark, date, environment, config, cases)


def now() -> str:
    """The time for a report: UTC, ISO 8601."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


async def train(
    options: Options,
    *,
    batches: Sequence[int],
    only: Sequence[str],
    servers: int,
    trainers: int,
    torch_python: Path | None,
    ceilings: bool,
    say: Say,
) -> Report:
    """End to end: ours next to the peers, and what each part of ours would allow by itself."""
    environment, date = machine.describe(), now()
    if torch_python is not None:
        environment["versions"]["torch"] = systems.torch_version(torch_python)
    names = [name for name in SYSTEMS if name in only and (torch_python or not name.startswith("torch"))]
    if not names:
        raise PeerError(f"nothing to run: {', '.join(only)} needs --torch-python (a Python that has torch and pyarrow)")
    planned = []
    for batch_rows in batches:
        setting = options.setting(batch_rows=batch_rows, servers=servers, trainers=trainers, torch_python=torch_python)
        for name in names:
            run = _bind(SYSTEMS[name], setting)
            planned.append(
                Planned(f"{name}, batch {batch_rows}", {"system": name, "batch_rows": batch_rows}, "samples/s", run)
            )
        if ceilings:
            planned += [_ceiling(stage, setting) for stage in ("read", "exchange", "dense")]
    cases = await measure(planned, options.repeat, options.work_directory, say)
    config = options.config(batches=list(batches), servers=servers, trainers=trainers)
    report = _report("train", config, cases, environment, date)
    report.ratios = ratios([c for c in cases if c.params["system"] in names], of="paddlewheel", same="batch_rows")
    report.notes = [
        (
            f"Samples/s end to end, {servers} server(s), {trainers} trainer(s), over passes 2 to {options.passes} of "
            f"the same {options.work.rows:,} rows; the first pass, in which connections are made and keys created, has "
            "a column of its own."
        ),
        "CPU seconds are per million rows, of every process; `control` is the launcher, coordinator and agents.",
        "paddle-fleet reads text written beforehand, PyTorch reads Parquet, both in file order; ours mixes rows.",
    ]
    if ceilings and "paddlewheel" in names:
        report.notes += [_binding(cases, batch_rows, environment["cores"]) for batch_rows in batches]
    return report


def _bind(
    run: Callable[[Setting, Path], Awaitable[Measured]], setting: Setting
) -> Callable[[Path], Awaitable[Measured]]:
    return lambda directory: run(setting, directory)


def _ceiling(stage: str, setting: Setting) -> Planned:
    name = f"{stage} alone, batch {setting.batch_rows}"
    params = {"system": f"{stage} alone", "batch_rows": setting.batch_rows}
    num_batches = max(1, min(STAGE_BATCHES, setting.work.rows // setting.batch_rows))
    return Planned(
        name, params, "samples/s", lambda directory: systems.stage(stage, setting, directory, max_batches=num_batches)
    )


def _binding(cases: Sequence[Case], batch_rows: int, cores: int) -> str:
    """Which ceiling is the lowest, and how near to it the whole is."""
    here = {case.params["system"]: case for case in cases if case.params["batch_rows"] == batch_rows}
    whole = here["paddlewheel"]
    limits = {name.removesuffix(" alone"): case.median for name, case in here.items() if name.endswith(" alone")}
    cpu = whole.fact("all_CPU_s/M")
    if cpu:
        limits[f"{cores} cores fully busy at the CPU seconds it takes"] = cores * 1e6 / cpu
    name, limit = min(limits.items(), key=lambda item: item[1])
    listed = ", ".join(f"{what} {value:,.0f}" for what, value in limits.items())
    return (
        f"Ceilings of paddlewheel at batch {batch_rows} (samples/s): {listed}. The lowest is {name}; "
        f"the whole reaches {whole.median / limit:.0%} of it."
    )


async def ps(
    options: Options,
    *,
    keys_per_call: Sequence[int],
    widths: Sequence[int],
    servers: Sequence[int],
    num_keys: int,
    keys_per_pass: int,
    say: Say,
) -> Report:
    """Pulls and pushes of one client, by keys in a call, width and servers, under the loopback device's ceiling."""
    environment, date = machine.describe(), now()
    planned = []
    for operation in ("pull", "push"):
        for count in keys_per_call:
            for width in widths:
                told = {
                    "operation": operation,
                    "keys_per_call": count,
                    "num_keys": num_keys,
                    "num_calls": max(4, keys_per_pass // count),
                }
                planned += [_calls("calls", told, width, number, options) for number in servers]
                planned.append(_calls("loopback", told, width, 1, options))
    cases = await measure(planned, options.repeat, options.work_directory, say)
    config = options.config(
        keys_per_call=list(keys_per_call),
        widths=list(widths),
        servers=list(servers),
        num_keys=num_keys,
        keys_per_pass=keys_per_pass,
    )
    report = _report("ps", config, cases, environment, date)
    report.notes = [
        (
            f"Keys/s of one client in one thread, one call after the other, in tables of {num_keys:,} keys that all "
            "exist; CPU seconds are per million keys."
        ),
        "loopback: the same bytes over a TCP connection of this machine, with no server behind it.",
        *_server_ceilings(cases, environment["cores"]),
    ]
    return report


def _calls(stage: str, told: dict[str, Any], width: int, servers: int, options: Options) -> Planned:
    setting = replace(options.setting(servers=servers), work=replace(options.work, width=width))
    where = f"{servers} server{'s' if servers > 1 else ''}" if stage == "calls" else "loopback"
    operation, count = told["operation"], told["keys_per_call"]
    params = {"system": where, "operation": operation, "keys_per_call": count, "width": width, "servers": servers}
    name = f"{operation} {count:,} keys x {width}, {where}"
    return Planned(name, params, "keys/s", lambda directory: systems.stage(stage, setting, directory, **told))


def _server_ceilings(cases: Sequence[Case], cores: int) -> list[str]:
    found = []
    for case in cases:
        server, client = case.fact("server_CPU_s/M"), case.fact("trainer_CPU_s/M")
        if server and client:
            found.append((case.name, 1e6 / server, 1e6 / client))
    if not found:
        return []
    name, per_server_core, per_client_core = max(found, key=lambda item: item[1])
    best = f"a core of a server serves {per_server_core:,.0f} keys/s, a core of a client handles {per_client_core:,.0f}"
    return [f"At best {best} ({name}); {cores} cores here are shared by both."]


async def dense(options: Options, *, batches: Sequence[int], threads: Sequence[int], say: Say) -> Report:
    """The dense part alone, under the ceiling of its matrix products."""
    environment, date = machine.describe(), now()
    planned = []
    for batch_rows in batches:
        for number in threads:
            setting = options.setting(batch_rows=batch_rows, threads=number)
            num_batches = max(1, min(STAGE_BATCHES, setting.work.rows // batch_rows))
            planned += [_dense_case("dense", label, overrides, setting, num_batches) for label, overrides in _DENSE]
            planned.append(_dense_case("matmul", "matmul", (), setting, num_batches))
    cases = await measure(planned, options.repeat, options.work_directory, say)
    flops = options.work.tower_flops_per_row
    for case in cases:
        case.facts["GFLOP/s"] = [value * flops / 1e9 for value in case.values]
    report = _report(
        "dense", options.config(batches=list(batches), thread_counts=list(threads)), cases, environment, date
    )
    report.ratios = ratios(cases, of="dense", same="setting")
    report.notes = [
        (
            f"Samples/s of forward, backward and Adam with embeddings in memory; the tower's matrix products are "
            f"{flops:,} floating-point operations a row, which GFLOP/s counts alone."
        ),
        (
            "dense: as `train.cpu_backend` and `train.precision` choose by themselves on this machine; the two others: "
            "our operators with float32 products, and Paddle's operators."
        ),
        "matmul: those products alone, in fp32 with NumPy's BLAS.",
    ]
    return report


_DENSE = (
    ("dense", ()),
    ("dense float32", ("train.precision=float32",)),
    ("dense paddle", ("train.cpu_backend=paddle", "train.precision=auto")),
)


def _dense_case(stage: str, label: str, overrides: tuple[str, ...], setting: Setting, num_batches: int) -> Planned:
    what = f"batch {setting.batch_rows}, {setting.threads} thread{'s' if setting.threads > 1 else ''}"
    params = {"system": label, "batch_rows": setting.batch_rows, "threads": setting.threads, "setting": what}
    setting = replace(setting, overrides=(*setting.overrides, *overrides))
    return Planned(
        f"{label}, {what}",
        params,
        "samples/s",
        lambda directory: systems.stage(
            stage, setting, directory, max_batches=num_batches, tower_sizes=setting.work.tower_sizes
        ),
    )


async def scaling(
    options: Options, *, batch_rows: int, trainers: Sequence[int], servers: Sequence[int], say: Say
) -> Report:
    """Ours with more trainers and servers on this machine."""
    environment, date = machine.describe(), now()
    cores = environment["cores"]
    planned = []
    for number in trainers:
        for count in servers:
            setting = options.setting(
                batch_rows=batch_rows, servers=count, trainers=number, threads=max(1, options.threads // number)
            )
            params = {"system": "paddlewheel", "servers": count, "trainers": number}
            run = _bind(systems.paddlewheel, setting)
            planned.append(Planned(f"{number} trainers, {count} servers", params, "samples/s", run))
    cases = await measure(planned, options.repeat, options.work_directory, say)
    config = options.config(batch_rows=batch_rows, trainers=list(trainers), servers=list(servers))
    report = _report("scaling", config, cases, environment, date)
    for case in cases:
        with contextlib.suppress(KeyError, ZeroDivisionError):
            costs = zip(case.facts["all_CPU_s/M"], case.values, strict=True)
            case.facts["cores_busy_%"] = [100 * cost * value / 1e6 / cores for cost, value in costs]
            pairs = zip(case.facts["server_CPU_s/M"], case.facts["trainer_CPU_s/M"], strict=True)
            case.facts["servers_per_trainer"] = [server / trainer for server, trainer in pairs]
    report.notes = [
        (
            f"All processes share {cores} cores, so more roles cannot make it faster here: what counts is whether the "
            "CPU seconds per million rows stay the same as roles are added; a machine for each role would show that as "
            "speed."
        ),
        "servers_per_trainer: CPU seconds of servers over those of trainers: server cores that a trainer core needs.",
        *_expected(options.work, batch_rows, cases),
    ]
    return report


def _expected(work: Workload, batch_rows: int, cases: Sequence[Case]) -> list[str]:
    """How far the forecast's first assumption holds here, and what it then makes of the costs of the smallest case."""
    spread = []
    for role in ("trainer", "server"):
        found = [cost for case in cases if (cost := case.fact(f"{role}_CPU_s/M"))]
        if not found:
            return []
        spread.append(f"{role}s {min(found):.1f} to {max(found):.1f}")
    trainer, server = (cases[0].fact(f"{role}_CPU_s/M") for role in ("trainer", "server"))
    assert trainer is not None
    assert server is not None
    costs = Costs(
        trainer_seconds_per_row=trainer / 1e6,
        server_seconds_per_row=server / 1e6,
        batch_rows=batch_rows,
        keys_per_row=keys_per_row(work, batch_rows),
        pulled_floats=work.width + 3,
        pushed_floats=work.width + 4,
        dense_bytes=work.tower_bytes,
    )
    nodes = Nodes()
    many = forecast(costs, nodes, 32, servers_needed(costs, nodes, 32))
    return [
        f"CPU seconds per million rows over all cases: {', '.join(spread)}.",
        (
            f"Forecast, not measured (assumptions in the module `forecast`), from the costs of {cases[0].name}: with "
            f"{nodes.trainer_cores} cores a machine and {nodes.bytes_per_second * 8 / 1e9:g} Gbit/s, 32 trainers need "
            f"{many.servers} servers, train {many.rows_per_second:,.0f} samples/s, and are "
            f"{efficiency(costs, nodes, 4, 32):.0%} as fast each as 4; {many.bound} set the pace."
        ),
    ]


COPY_BYTES_PER_SECOND, MATRIX_FLOPS_PER_SECOND = 4.3e12, 790e12
"""What an H200 reaches at best: a large copy (bytes read and written), a large bfloat16 product."""


def gpu_towers(
    options: Options,
    *,
    batches: Sequence[int],
    models: Sequence[str],
    precisions: Sequence[str],
    torch_python: Path | None,
    modes: Sequence[str],
    say: Say,
) -> Report:
    """The dense part on one GPU, next to PyTorch's on the same inputs, and the limits of memory and arithmetic."""
    environment, date = machine.describe(), now()
    options.work_directory.mkdir(parents=True, exist_ok=True)
    if torch_python is not None:
        environment["versions"]["torch"] = systems.torch_version(torch_python)
    environment["gpu"] = [f"{gpu.name}, driver {gpu.driver}" for gpu in cuda_library.gpus()]
    work = asdict(options.work)
    spec = {"work": work, "models": list(models), "precisions": list(precisions), "batches": list(batches)}
    with systems.scratch(options.work_directory) as directory:
        command = [sys.executable, "-m", "paddlewheel.deploy.bench.speed.gpu"]
        found = _told(command, spec, Path(directory, "ours.json"), say)["cases"]
        cases = [case for told in found for case in _gpu_cases(told)]
        if torch_python is not None:
            cases += _torch_cases(options, torch_python, found, modes, Path(directory), say)
    report = _report("dense", options.config(device="gpu", **spec), cases, environment, date)
    report.ratios = ratios(cases, of="paddlewheel", same="setting")
    report.notes = [
        (
            "Samples/s of forward, backward, Adam. paddlewheel: the replayed graphs, inputs on the GPU, as PyTorch's. "
            "with copies: the trainer's own calls, from NumPy and back, one step after the other."
        ),
        *(_limits(told) for told in found),
    ]
    return report


def _gpu_cases(told: Mapping[str, Any]) -> list[Case]:
    return [
        _gpu_case("paddlewheel", told, told["replay_ms"]),
        _gpu_case("with copies", told, [told["step_ms"]]),
    ]


def _gpu_case(system: str, told: Mapping[str, Any], milliseconds: Sequence[float]) -> Case:
    """Of a system; told: model, precision and batch_rows."""
    rows, what = told["batch_rows"], f"{told['model']}, {told['precision']}, batch {told['batch_rows']}"
    params = {"setting": what, "model": told["model"], "precision": told["precision"], "batch_rows": rows}
    rates = [rows / ms * 1e3 for ms in milliseconds]
    return Case(f"{system}, {what}", {**params, "system": system}, "samples/s", rates, {})


def _torch_cases(
    options: Options,
    python: Path,
    found: Sequence[Mapping[str, Any]],
    modes: Sequence[str],
    directory: Path,
    say: Say,
) -> list[Case]:
    """PyTorch on the same inputs, in one process, as it takes long to start; a case that fails there is left out."""
    from paddlewheel.deploy.bench.speed.gpu import batch_of

    asked: list[dict[str, Any]] = []
    for told in found:
        rows = told["batch_rows"]
        inputs = directory / f"batch-{rows}.npz"
        if not inputs.exists():
            batch, values = batch_of(options.work, rows)
            index_BF = batch.tables["default"].single_BF
            np.savez(inputs, rows=values["default"], index=index_BF, dense=batch.dense_BD, label=batch.labels_BL)
        named = {name: told[name] for name in ("model", "precision", "batch_rows")}
        if told["model"] in {"deepfm", "dlrm"}:
            asked += [{**named, "mode": mode, "inputs": str(inputs)} for mode in modes]
    spec = {"work": asdict(options.work), "cases": asked}
    script, result = Path(__file__).with_name("torch_gpu_peer.py"), directory / "torch.json"
    try:
        answers = _told([str(python), str(script)], spec, result, say)["cases"]
    except PeerError as error:
        say(f"torch ended early: {error}")
        answers = json.loads(result.read_text())["cases"] if result.exists() else []
    cases = []
    for told, answer in zip(asked, answers, strict=False):
        case = _gpu_case(f"torch {told['mode']}", told, answer.get("ms", ()))
        if "error" in answer:
            say(f"{case.name} left out: {answer['error']}")
        else:
            cases.append(case)
    return cases


def _told(command: Sequence[str], spec: Mapping[str, Any], result: Path, say: Say) -> dict[str, Any]:
    done = subprocess.run([*command, json.dumps(spec), str(result)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerError(f"{' '.join(command)}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    told: dict[str, Any] = json.loads(result.read_text())
    say(f"{' '.join(command)}: done")
    return told


def _limits(told: Mapping[str, Any]) -> str:
    ms = sorted(told["replay_ms"])[len(told["replay_ms"]) // 2]
    arithmetic = told["flops"] / MATRIX_FLOPS_PER_SECOND * 1e3
    least, moved = (told[key] / COPY_BYTES_PER_SECOND * 1e3 for key in ("least_bytes", "bytes"))
    parts = sorted(told["kernels_ms"].items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {part:.3f}" for name, part in parts[:8])
    return (
        f"{told['model']}, {told['precision']}, batch {told['batch_rows']} ({told['keys']:,} keys): {ms:.3f} ms a step "
        f"in {told['calls']} calls. Limits: {arithmetic:.3f} ms for {told['flops'] / 1e9:.1f} GFLOP of matrix products "
        f"at 790 TFLOP/s, {least:.3f} ms for inputs and results once at 4.3 TB/s, {moved:.3f} ms for what its calls "
        f"move. Copies: {told['copies_ms']:.3f} ms for {told['uploaded_bytes'] / 1e6:.1f} MB there and "
        f"{told['downloaded_bytes'] / 1e6:.1f} MB back. Each call alone, summed by kernel (ms): {listed}."
    )
