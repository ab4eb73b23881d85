"""Everything about a job that can be refused before anything starts: the environment, the data, the ports."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paddlewheel.data_pipeline import native as encoder
from paddlewheel.data_pipeline import quality
from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.days import Day, day_of, find_days, parse_days
from paddlewheel.data_pipeline.files import SourceFile
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.deploy.checks.model_check import ModelCheck
from paddlewheel.pserver import requirements
from paddlewheel.trainer.checkpoint.folder_store import open_address, open_checkpoints
from paddlewheel.trainer.checkpoint.object_store import ObjectStore
from paddlewheel.trainer.checkpoint.store import Checkpoints
from paddlewheel.trainer.checkpoint.trained_model import inputs_of, trained_with
from paddlewheel.trainer.coordinator.resume import newest_complete
from paddlewheel.trainer.distributed.subprocesses import reserve_port
from paddlewheel.trainer.job.config import JobConfig, check_server_folders
from paddlewheel.trainer.job.errors import ConfigError, Problem
from paddlewheel.trainer.kernels import cpu as cpu_native
from paddlewheel.trainer.kernels.gpu import cuda_library
from paddlewheel.trainer.worker import warm_start


@dataclass(frozen=True)
class Preflight:
    """What was found on the way.

    Attributes:
        paddle: the installed Paddle distribution and its version.
        train_rows: rows of the training data; None where the mode does not read it.
        eval_rows: rows of the evaluation data; None without any.
        skipped_files: why files were left out (`data.on_bad_file: skip`).
        warnings: what deserves a look and does not stop the job, such as evaluation files that are trained, too.
    """

    paddle: str
    train_rows: int | None
    eval_rows: int | None
    skipped_files: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def check(
    job: JobConfig,
    mode: Literal["train", "evaluate"] = "train",
    *,
    here: bool = True,
    restore: str | None = None,
    resume: Literal["auto", "always", "never"] = "auto",
) -> Preflight:
    """Looks at the environment, the model, every file's footer, the first rows, and the folders, ports and store.

    Args:
        job: what is to run.
        mode: train or evaluate.
        here: whether trainers run on this machine.
        restore: checkpoint to begin with; None: the newest, as `resume` allows.
        resume: see `deploy.launcher.run_local`.

    Raises:
        ConfigError: the job lacks what the mode needs, its model cannot be built, or it has folders that cannot be
            written to or that servers cannot use.
        pserver.errors.RequirementError: wrong Paddle or protobuf.
        trainer.kernels.cpu.NativeError: the job insists on operators or products that this machine has not.
        trainer.kernels.gpu.cuda_library.GpuError: the job wants a GPU, and this machine has none or no kernels for it.
        data_pipeline.errors.DataError: a path, file, column or value that the job cannot use, or of another kind than
            the checkpoint was trained with.
        trainer.checkpoint.CheckpointError: the job would begin with another model, which is not there.
        trainer.distributed.subprocesses.PortTakenError: a port that the job names is in use.
        trainer.checkpoint.CheckpointError: checkpoints cannot be written to the object store that the job names.
    """
    paddle = requirements.check(import_core=False)
    if here:
        _check_processor(job, mode)
    needed: Literal["train", "eval"] = "train" if mode == "train" else "eval"
    if not getattr(job.data, needed):
        raise ConfigError(
            job.name,
            [Problem(f"data.{needed}", f"is empty; `paddlewheel {mode}` needs a file, a folder or a glob there")],
        )
    if mode == "train":
        _check_lifecycles(job)
    check_server_folders(job)
    check_folders(job)
    with ModelCheck(job, here=here) as model:
        found = _check_data(job, mode, paddle, restore, resume)
        model.finish()
    return found


def _check_data(job: JobConfig, mode: str, paddle: str, restore: str | None, resume: str) -> Preflight:
    datasets = {}
    for part in ("train", "eval"):
        paths = getattr(job.data, part)
        if paths and not (part == "train" and mode == "evaluate"):
            keep: Callable[[SourceFile], bool] = _every
            if part == "train" and job.train.days is not None and job.train.days.range is not None:
                wanted = set(parse_days(job.train.days.range))
                if not wanted.intersection(find_days(paths, job.train.days.column)):
                    continue  # the choice of days will tell, or they are trained already
                keep = _in_days(wanted, job.train.days.column)
            datasets[part] = Dataset.open(paths, job.data, keep=keep)
            _read_first_rows(datasets[part], job.data)
    if "train" in datasets and "eval" in datasets:
        datasets["train"].agree_with(datasets["eval"])
    kept = open_checkpoints(job.checkpoint_location)
    if mode == "train" and isinstance(kept, ObjectStore):
        kept.check_access()
    inputs = datasets["train"].signature if "train" in datasets else None
    _check_inputs(datasets, kept, mode, restore, resume)
    if mode == "train" and job.warm_start is not None and (resume == "never" or not kept.committed()):
        warm_start.plan(job, inputs)
    cluster = job.cluster
    for port in (*(cluster.server_ports or ()), cluster.coordinator_port):
        if port is not None:
            reserve_port(cluster.bind_address, port).close()
    return Preflight(
        paddle=paddle,
        train_rows=datasets["train"].num_rows if "train" in datasets else None,
        eval_rows=datasets["eval"].num_rows if "eval" in datasets else None,
        skipped_files=tuple(reason for dataset in datasets.values() for reason in dataset.skipped_files),
        warnings=tuple(quality.warnings(datasets["train"], datasets.get("eval"))) if "train" in datasets else (),
    )


def _check_inputs(
    datasets: Mapping[str, Dataset], kept: Checkpoints, mode: str, restore: str | None, resume: str
) -> None:
    """The data must be what the checkpoint that the run begins with was trained on. Raises DataError."""
    if mode == "train" and resume == "never":
        return
    kept, address = open_address(restore) if restore is not None else (kept, newest_complete(kept))
    known = inputs_of(kept.manifest(address), address) if address is not None else None
    if known is not None:
        for dataset in datasets.values():
            refitted = mode == "train" and resume == "always"
            dataset.signature.check(known, trained_with(address), refitted=refitted)


def check_folders(job: JobConfig) -> None:
    """Whether what a run writes can be written.

    Raises:
        ConfigError: a folder of the job is a file, lies below one, or may not be written to.
    """
    folders = {
        "run_dir": job.run_dir,
        "checkpoint.directory": job.checkpoint.directory,
        "checkpoint.staging": job.checkpoint.staging,
        "metrics.prometheus_sd_directory": job.metrics.prometheus_sd_directory,
        "data.quarantine_directory": job.data.quarantine_directory,
        "train.days.publish.directory": job.train.days.publish.directory
        if job.train.days and job.train.days.publish
        else None,
    }
    problems = [
        Problem(key, f"{reason}. Give another folder, or make this one writable")
        for key, folder in folders.items()
        if folder is not None and "://" not in folder and (reason := _unwritable(Path(folder).absolute())) is not None
    ]
    if problems:
        raise ConfigError(job.name, problems)


def _unwritable(folder: Path) -> str | None:
    """Why a folder cannot be made or written to; None if it can. Leaves nothing."""
    place = folder
    try:
        while not place.exists():
            if place.is_symlink():
                return f"{place} is a link to nothing"
            if place == place.parent:
                break
            place = place.parent
        if not place.is_dir():
            return f"{place} is a file, so it can hold nothing"
        Path(tempfile.mkdtemp(prefix=".paddlewheel-", dir=place)).rmdir()  # permissions alone do not tell, as in /proc
    except OSError as error:
        return f"{place} cannot be written to: {error.strerror}"
    return None


def _every(_: SourceFile) -> bool:
    return True


def _in_days(wanted: set[Day], column: str) -> Callable[[SourceFile], bool]:
    """Files of the days that a job trains; other days may not even be readable yet."""
    return lambda source: day_of(source, column) in wanted


def _check_lifecycles(job: JobConfig) -> None:
    """Decay and eviction happen at day boundaries: they must come."""
    idle = [
        name
        for name in job.data.tables
        if job.tables[name].lifecycle.changes_keys and job.tables[name].lifecycle.every_rows is None
    ]
    if idle and job.train.days is None:
        raise ConfigError(
            job.name,
            [
                Problem(
                    f"tables.{name}.lifecycle",
                    "decays or deletes keys at day boundaries, but this job has none: train by days (--days), or set "
                    f"tables.{name}.lifecycle.every_rows",
                )
                for name in idle
            ],
        )


def _check_processor(job: JobConfig, mode: Literal["train", "evaluate"]) -> None:
    """What is to encode rows and compute the dense part. Trainers on other machines check their own."""
    if job.data.encoder_backend == "native":
        encoder.choose("native")
    if job.train.device == "gpu":
        _check_gpu()
    else:
        precision = cpu_native.cpu_precision(job.train.precision, predicts=mode == "evaluate")
        cpu_native.check(job.train.cpu_backend, precision)


def _check_gpu() -> None:
    """What can be told without CUDA: a driver with a GPU, and kernels that were built. The trainers check the rest."""
    found = cuda_library.gpus()
    if not found:
        raise cuda_library.GpuError(
            "train.device: gpu, but nvidia-smi shows no GPU on this machine: install NVIDIA's driver, give the "
            "container its GPUs (--gpus all), or set train.device to cpu"
        )
    oldest = min(gpu.capability for gpu in found)
    if oldest < cuda_library.OLDEST_CAPABILITY:
        raise cuda_library.GpuError(
            f"train.device: gpu needs compute capability 7.0 (V100) or later, and this machine has {oldest / 10}: hide "
            "that GPU with CUDA_VISIBLE_DEVICES, or set train.device to cpu"
        )
    if not cuda_library.kernels_path().exists():
        raise cuda_library.GpuError(
            "train.device: gpu needs kernels built for this machine: run `paddlewheel gpu build`"
        )


def _read_first_rows(dataset: Dataset, config: DataConfig) -> None:
    """Reads one batch: a footer tells types, but only rows tell that a label is 2 or a number infinite."""
    slices = dataset.slices()[:1]
    with Loader(dataset, config, slices, seed=0, epoch=0, training=False) as loader:
        next(iter(loader), None)
