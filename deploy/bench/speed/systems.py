"""The systems that `bench train` runs next to each other, and the stages of ours that run alone.

Each one trains the same rows with the same model a few times over; the first pass warms up (connections, memory, keys
that do not exist yet) and is told apart, for all of them in the same way.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paddlewheel.deploy.bench.speed.watch import Pass, Watch, watching
from paddlewheel.deploy.bench.speed.workload import Files, Workload
from paddlewheel.trainer.agent.paddle_environment import COMPUTE_THREADS, math_environment
from paddlewheel.trainer.distributed.subprocesses import port_of, reserve_port


@dataclass(frozen=True)
class Setting:
    """What a run is given, whichever the system.

    Attributes:
        work: rows and model.
        files: where the rows lie.
        batch_rows: rows a step.
        passes: passes over the rows, the first of which does not count; at least 2.
        threads: compute threads of the trainer.
        servers, trainers: of the systems that have them.
        overrides: `a.b=c` changes of our job.
        torch_python: a Python that has torch; None: PyTorch does not run.
        environment: variables for every process of every system, ours and peers alike.
        timeout_seconds: longer means failed.
    """

    work: Workload
    files: Files
    batch_rows: int
    passes: int = 2
    threads: int = 2
    servers: int = 1
    trainers: int = 1
    overrides: tuple[str, ...] = ()
    torch_python: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 900.0


@dataclass(frozen=True)
class Measured:
    """What one run showed.

    Attributes:
        rows_per_second: rows (or keys, where a stage counts keys) a second, over all passes but the first.
        facts: the other figures; names end in their unit.
        extra: what the program told beside its passes.
    """

    rows_per_second: float
    facts: dict[str, float]
    extra: dict[str, Any] = field(default_factory=dict)


def _measured(watch: Watch, told: Mapping[str, Any]) -> Measured:
    """From the passes that a program told: {"passes": [{"rows", "started", "ended"}]}, the first of which warms up."""
    first, *timed = [Pass(p["rows"], p["started"], p["ended"]) for p in told["passes"]]
    rows, seconds = sum(p.rows for p in timed), sum(p.seconds for p in timed)
    used = watch.cpu_seconds(timed)
    facts = {"first_pass/s": first.rows / first.seconds}
    facts |= {f"{role}_CPU_s/M": used[role] / (rows / 1e6) for role in sorted(used)}
    facts["all_CPU_s/M"] = sum(used.values()) / (rows / 1e6)
    facts |= {f"{role}_peak_MiB": peak / 2**20 for role, peak in sorted(watch.peak_bytes.items())}
    facts["cores_busy_by_others_%"] = 100 * watch.foreign_share(timed)
    return Measured(rows / seconds, facts, {k: v for k, v in told.items() if k != "passes"})


def job(setting: Setting, run_dir: Path) -> dict[str, Any]:
    """The job file of our system, as plain data."""
    work = setting.work
    optimizer = {"rule": "adagrad", "learning_rate": work.embedding_learning_rate}
    return {
        "name": "bench",
        "seed": work.seed,
        "run_dir": str(run_dir),
        "data": {
            "train": str(setting.files.parquet_directory),
            "batch_rows": setting.batch_rows,
            "labels": ["label"],
            "dense": {"columns": work.dense},
            "sparse": [{"name": name} for name in work.slots],
        },
        "tables": {"default": {"width": work.width, "optimizer": optimizer}},
        "model": {"kind": "deepfm", "tower": list(work.tower)},
        "train": {"epochs": setting.passes, "dense_optimizer": {"learning_rate": work.dense_learning_rate}},
        "cluster": {"servers": setting.servers, "trainers": setting.trainers, "trainer_threads": setting.threads},
        "checkpoint": {"keep": 1},
    }


async def paddlewheel(setting: Setting, directory: Path) -> Measured:
    """Ours, started as a user does, with everything it brings: coordinator, agents, servers, trainers."""
    run_dir = directory / "run"
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(job(setting, run_dir), sort_keys=False))
    command = [sys.executable, "-m", "paddlewheel.deploy.cli", "train", str(file), "--json"]
    command += [word for override in setting.overrides for word in ("--set", override)]
    async with watching(directory) as watch:
        await watch.start("control", command, environment=setting.environment, name="paddlewheel")
        await watch.finish("paddlewheel", seconds=setting.timeout_seconds)
    told = json.loads((run_dir / "result.json").read_text())["result"]
    shutil.rmtree(run_dir, ignore_errors=True)  # its checkpoint is large
    return _measured(watch, told)


async def paddle_fleet(setting: Setting, directory: Path) -> Measured:
    """Paddle's own path; see the module `paddle_fleet`."""
    holders = [reserve_port("127.0.0.1") for _ in range(setting.servers + 1)]  # the last one is the trainer's
    endpoints = [f"127.0.0.1:{port_of(holder)}" for holder in holders[:-1]]
    spec = {
        "work": asdict(setting.work),
        "text": [str(path) for path in setting.files.text],
        "batch_rows": setting.batch_rows,
        "threads": setting.threads,
        "passes": setting.passes,
        "directory": str(directory),
    }
    result = directory / "fleet.json"
    command = [sys.executable, "-m", "paddlewheel.deploy.bench.speed.paddle_fleet", json.dumps(spec), str(result)]
    # each of its threads runs the whole program; more threads within would only be in each other's way
    common = _threads(1) | {
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_TRAINER_ID": "0",
        "POD_IP": "127.0.0.1",
        "CPU_NUM": str(setting.threads),
        **setting.environment,
    }
    async with watching(directory) as watch:
        for rank, holder in enumerate(holders[:-1]):
            role = {"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": str(port_of(holder))}
            await watch.start("server", command, environment=common | role, name=f"fleet-server-{rank}")
        role = {"TRAINING_ROLE": "TRAINER", "PADDLE_PORT": str(port_of(holders[-1]))}
        await watch.start("trainer", command, environment=common | role, name="fleet-trainer")
        try:
            await watch.finish("fleet-trainer", seconds=setting.timeout_seconds)
        finally:
            for holder in holders:
                holder.close()
    return _measured(watch, json.loads(result.read_text()))


async def _torch(setting: Setting, directory: Path, *, bf16: bool) -> Measured:
    assert setting.torch_python is not None
    spec = {
        "work": asdict(setting.work),
        "parquet": [str(path) for path in setting.files.parquet],
        "batch_rows": setting.batch_rows,
        "threads": setting.threads,
        "passes": setting.passes,
        "bf16": bf16,
    }
    result = directory / "torch.json"
    script = Path(__file__).with_name("torch_peer.py")
    async with watching(directory) as watch:
        command = [str(setting.torch_python), str(script), json.dumps(spec), str(result)]
        await watch.start("trainer", command, environment=_environment(setting), name="torch")
        await watch.finish("torch", seconds=setting.timeout_seconds)
    return _measured(watch, json.loads(result.read_text()))


async def torch_fp32(setting: Setting, directory: Path) -> Measured:
    """PyTorch with tables in memory; see the module `torch_peer`."""
    return await _torch(setting, directory, bf16=False)


async def torch_bf16(setting: Setting, directory: Path) -> Measured:
    """The same with the tower under bfloat16 autocast."""
    return await _torch(setting, directory, bf16=True)


SYSTEMS = {
    "paddlewheel": paddlewheel,
    "paddle-fleet": paddle_fleet,
    "torch-fp32": torch_fp32,
    "torch-bf16": torch_bf16,
}


async def stage(name: str, setting: Setting, directory: Path, **options: Any) -> Measured:
    """Runs a program of the module `stages`."""
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(job(setting, directory / "run"), sort_keys=False))
    spec = {"job": str(file), "overrides": setting.overrides, "passes": setting.passes, **options}
    result = directory / f"{name}.json"
    command = [sys.executable, "-m", "paddlewheel.deploy.bench.speed.stages", name, json.dumps(spec), str(result)]
    environment = _environment(setting)
    if name == "matmul":  # it computes with NumPy's library, which a trainer keeps to one thread
        environment = {"OPENBLAS_NUM_THREADS": str(setting.threads), **environment}
    environment |= math_environment(os.environ | environment)  # as an agent gives it to its worker
    async with watching(directory) as watch:
        await watch.start("trainer", command, environment=environment, name=name)
        await watch.finish(name, seconds=setting.timeout_seconds)
    return _measured(watch, json.loads(result.read_text()))


def scratch(work_directory: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for one run."""
    work_directory.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="run-", dir=work_directory)


class PeerError(ValueError):
    """A peer that was asked for cannot run here."""


def torch_version(python: Path) -> str:
    """Of the PyTorch that a Python has.

    Raises:
        PeerError: it cannot run the PyTorch peer.
    """
    command = [str(python), "-c", "import torch, pyarrow, numpy; print(torch.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        raise PeerError(f"--torch-python {python}: {error}") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it failed"])[-1]
        raise PeerError(f"--torch-python {python}: {last}. It needs torch, pyarrow and numpy.")
    return done.stdout.strip().splitlines()[-1]


def _environment(setting: Setting) -> dict[str, str]:
    return _threads(setting.threads) | dict(setting.environment)


def _threads(number: int) -> dict[str, str]:
    """How many threads the libraries that compute a dense part may use."""
    return dict.fromkeys(COMPUTE_THREADS, str(number))
