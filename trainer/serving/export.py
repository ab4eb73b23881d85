"""A trained model as files for serving: program, tables, and how raw columns become their inputs. Format: EXPORT.md.

<directory>/
    export.json                 what everything is (`ExportSpec`); sizes and hashes of all other files
    schema.json, README.md      JSON schema of export.json; EXPORT.md
    dense/model.pdmodel, .pdiparams     inference program, for Paddle alone; perhaps model.onnx
    dense.safetensors           dense parameters by name (for `warm_start`)
    tables/<table>/export-<n>.parquet   keys and vectors (`pserver.export`)
    unknown/<table>.npy         vectors of keys that are not in the table; absent where these are zeros
    fitted/                     fitted numbers and vocabularies, where the job has any
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from paddlewheel.data_pipeline.config import DataConfig
from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.input_spec import InputRules, describe
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.data_pipeline.signature import InputSignature
from paddlewheel.data_pipeline.statistics import Fitted
from paddlewheel.pserver import saved_tables
from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.export import Dtype, export_table
from paddlewheel.pserver.initializer import Initializer
from paddlewheel.pserver.lookup import Lookup
from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.checkpoint.trained_model import DENSE, SPEC, TrainedModel, trained_with
from paddlewheel.trainer.dense.inputs import TableLayout, layouts
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.distributed.process_group import SingleGroup
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.train import logit_shift
from paddlewheel.trainer.kernels import cpu
from paddlewheel.trainer.loop.evaluate import evaluate
from paddlewheel.trainer.serving.exported_program import ExportedProgram

FORMAT = 1
_PROGRAM, _FITTED, _UNKNOWN = "dense/model", "fitted/", "unknown"
_SECTIONS = ("name", "seed", "data", "tables", "model", "train")
_ONNX_OPSET, _ONNX_TOLERANCE = 13, 1e-3


class ExportError(ValueError):
    """The export was not made; nothing of it is left."""


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TableSpec(_Described):
    """One exported table."""

    folder: str
    """Its Parquet files, below the export."""

    keys: int
    """Rows; every key stands in one of them."""

    embeddings: int
    """Rows whose embedding is not null."""

    width: int
    """Floats of an embedding."""

    first_order: bool
    """Whether there is a first-order weight beside it; it is the first float of a program's row then."""

    dtype: Dtype
    """How embeddings are stored; see README.md for decoding."""

    unknown: str | None
    """float32 [65536, width] in NumPy's format: a key that the table lacks has first-order weight 0 and the row
    `key mod 65536` as its embedding. None: zeros."""


class ProgramInput(_Described):
    """An array that the program takes. B rows, F single-valued features of a table, L ids of a list, U its keys."""

    name: str
    """The program's name for it."""

    kind: str
    """`rows`: float32 [U, first_order + width], a table's values for the distinct keys of the batch in any order.
    `single`: int32 [B, F], for each feature the position of its key among them, from 1 on; 0: no id. `list`: int32
    [B, L], the same for the ids of a list, left-aligned. `weight`: float32 [B, L], weights of the ids. `dense`: float32
    [B, D]."""

    table: str | None
    """Of all but `dense`."""

    features: tuple[str, ...]
    """Features, or dense columns, in the array's order."""


class ProgramSpec(_Described):
    """The inference program."""

    paddle: str
    """`paddle.static.load_inference_model(<export>/ + this, executor)`; add .pdmodel and .pdiparams for
    `paddle.inference`."""

    onnx: str | None
    """The same for ONNX runtimes; None: it was not asked for."""

    inputs: tuple[ProgramInput, ...]
    """Arrays that it takes."""

    outputs: tuple[str, ...]
    """In order: log-odds float32 [B, labels], and probabilities, which are the sigmoid of these."""

    logit_shift: float
    """What the program adds to the first label's log-odds because negatives were left out in training; 0 mostly."""


class ExportSpec(_Described):
    """export.json."""

    format: int
    """Version of this format; readers refuse others."""

    paddlewheel: str
    """Version that wrote it."""

    job: str
    """Name of the job."""

    step: int
    """Training steps of the model."""

    labels: tuple[str, ...]
    """What the program's outputs are probabilities of."""

    inputs: InputRules
    """From raw columns to keys and numbers."""

    tables: dict[str, TableSpec]
    """By name."""

    program: ProgramSpec
    """From keys' values and numbers to probabilities."""

    model: dict[str, Any]
    """The job's `model` block."""

    inputs_seen: InputSignature | None = None
    """What the columns held in training, and which fit it used: other data get keys and numbers that the model does not
    know. None: the checkpoint did not say."""

    settings: dict[str, Any]
    """Sections of the job, for paddlewheel itself; everything that another reader needs is said elsewhere."""

    files: dict[str, dict[str, Any]]
    """Size in bytes and xxh3-128 of every other file."""


class Exported(_Described):
    """What was written."""

    directory: Path
    """The export."""

    spec: ExportSpec
    """Its description."""

    num_bytes: int
    """Of all files."""

    comparison: dict[str, Any] | None
    """AUC and logloss on `data.eval` with float32 embeddings and with those written; None: not compared."""


def export_model(
    job: JobConfig,
    trained: TrainedModel,
    directory: Path,
    *,
    dtype: Dtype = "float32",
    onnx: bool = False,
    compare: bool = True,
    on_phase: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Writes the new folder `directory`: it appears whole, when everything is on disk, or not at all.

    Args:
        job: the job of the checkpoint.
        trained: the checkpoint.
        directory: must not exist yet.
        dtype: of embeddings; first-order weights stay float32.
        onnx: whether to add the program for ONNX runtimes (needs paddle2onnx and onnxruntime).
        compare: whether to score `data.eval`, if there is one, with float32 embeddings and with `dtype` ones.
        on_phase: told what begins.

    Raises:
        DataError: `data.statistics` is not what the checkpoint was trained with, or `data.eval` has other kinds of
            columns.
        ExportError: the folder exists, the checkpoint is of another model than the job's, or ONNX cannot be had.
        CheckpointError: the checkpoint is damaged.
    """
    check_target(directory)
    if trained.is_export:
        raise ExportError(f"{trained.path} is an export already: give a job or a checkpoint")
    if onnx:
        _onnx_modules()
    is_compared = compare and dtype != "float32" and bool(job.data.eval)
    _check_inputs(job, trained, evaluates=is_compared)
    on_phase("verifying the checkpoint")
    saved = manifest.read(trained.path)
    used = {name: job.tables[name] for name in job.data.tables}
    with _appearing(directory) as folder:
        on_phase("writing the program")
        program = _write_program(job, used, saved, folder)
        if onnx:
            on_phase("writing the program for ONNX")
            _write_onnx(folder, layouts(job.data, used), len(job.data.dense_columns))
        tables = {}
        for name in used:
            on_phase(f"writing table {name}")
            tables[name] = _write_table(saved.sparse / name, folder, name, dtype)
        inputs = _write_inputs(job.data, folder)
        comparison = None
        if is_compared:
            on_phase(f"scoring data.eval with float32 and {dtype}")
            comparison = _compare(job, saved, folder, dtype)
        spec = ExportSpec(
            format=FORMAT,
            paddlewheel=version("paddlewheel"),
            job=job.name,
            step=trained.step,
            labels=job.data.labels,
            inputs=inputs,
            tables=tables,
            program=program.model_copy(update={"onnx": f"{_PROGRAM}.onnx" if onnx else None}),
            model=job.model.model_dump(mode="json"),
            inputs_seen=trained.inputs,
            settings={name: value for name, value in job.model_dump(mode="json").items() if name in _SECTIONS},
            files={},
        )
        (folder / "README.md").write_text(
            (resources.files("paddlewheel.trainer.serving") / "EXPORT.md").read_text(encoding="utf-8")
        )
        (folder / "schema.json").write_text(json.dumps(ExportSpec.model_json_schema(), indent=1) + "\n")
        on_phase("waiting for the disk")
        spec = spec.model_copy(update={"files": manifest.to_disk(folder)})
        (folder / SPEC).write_text(spec.model_dump_json(indent=1) + "\n", encoding="utf-8")
        manifest.to_disk(folder)
    num_bytes = sum(file["bytes"] for file in spec.files.values())
    return Exported(directory=directory, spec=spec, num_bytes=num_bytes, comparison=comparison)


def _check_inputs(job: JobConfig, trained: TrainedModel, *, evaluates: bool) -> None:
    if trained.inputs is not None:
        relation = trained_with(trained.path)
        InputSignature().with_fit(Fitted.load(job.data), job.data).check(trained.inputs, relation)
        if evaluates:
            Dataset.open(job.data.eval, job.data).signature.check(trained.inputs, relation)


def check_target(path: Path) -> None:
    """Refuse to overwrite.

    Raises:
        ExportError: something is there.
    """
    if path.exists() or path.is_symlink():
        raise ExportError(f"{path} exists already: remove it, or choose another place with --to")


class ExportedModel:
    """An export, opened for scoring: its job, its program, its tables by `pull`. Needs Paddle, but no server.

    Args:
        directory: the export.
        overrides: `a.b=value` texts for the job's settings.
        lookup: folder for the sorted tables, made if it is not there; it can be used again.

    Raises:
        CheckpointError: the export is incomplete or damaged, or the lookup is of another one.
    """

    def __init__(self, directory: Path, lookup: Path, overrides: tuple[str, ...] = ()) -> None:
        self.spec = read_spec(directory)
        manifest.verify_files(directory, {n: f for n, f in self.spec.files.items() if not n.startswith("tables/")})
        self.job = settings_of(directory, overrides)
        used = {name: self.job.tables[name] for name in self.job.data.tables}
        folders = {name: directory / table.folder for name, table in self.spec.tables.items()}
        if not lookup.exists():  # it is read through in any case, and the lookup then is of what was verified
            manifest.verify_files(directory, {n: f for n, f in self.spec.files.items() if n.startswith("tables/")})
        self.tables = Lookup.open(lookup) if lookup.exists() else Lookup.build(folders, lookup)
        self.tables.check_made_from(folders)
        self.program = ExportedProgram(directory / self.spec.program.paddle, layouts(self.job.data, used))


def settings_of(directory: Path, overrides: tuple[str, ...] = ()) -> JobConfig:
    """The job of an export, with what was fitted from inside the export. Raises as `read_spec`, and ConfigError."""
    settings = dict(read_spec(directory).settings)
    fitted = str(directory.absolute() / _FITTED) if (directory / _FITTED / "fitted.json").is_file() else None
    settings["data"] = {**settings["data"], "statistics": fitted}
    return JobConfig.from_settings(settings, overrides, str(directory / SPEC))


def read_spec(directory: Path) -> ExportSpec:
    """What an export says, its files counted.

    Raises:
        CheckpointError: it is none, of another format, or files are missing, changed in size or too many.
    """
    path = directory / SPEC
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise manifest.CheckpointError(f"{path} has format {raw['format']}, this version reads {FORMAT}")
        spec = ExportSpec.model_validate(raw)
        for name in (*spec.files, *(table.folder for table in spec.tables.values()), spec.program.paddle):
            if not manifest.is_inside(name):
                raise manifest.CheckpointError(f"{path}: {name!r} is no name of a file in an export")
    except FileNotFoundError as error:
        raise manifest.CheckpointError(f"{directory} is no export: it has no {SPEC}") from error
    except (OSError, KeyError, TypeError, ValidationError, json.JSONDecodeError) as error:
        raise manifest.CheckpointError(f"{path} cannot be read: {error}") from error
    manifest.check_files(directory, spec.files, besides=SPEC)
    return spec


@contextmanager
def _appearing(directory: Path) -> Iterator[Path]:
    """A folder under a hidden name, which gets the real one when the block ends well and is removed otherwise."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        hidden.chmod(0o777 & ~_umask())
        yield hidden
        check_target(directory)
        hidden.rename(directory)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def dense_program(
    job: JobConfig, used: Mapping[str, TableConfig], operators: cpu.Precision | None = None
) -> DenseProgram:
    """The dense part of a job, for prediction; operators as for `DenseProgram`. An export has Paddle's own alone."""
    return DenseProgram(
        layouts(job.data, dict(used)),
        num_dense=len(job.data.dense_columns),
        num_labels=len(job.data.labels),
        model=job.model,
        optimizer=job.train.dense_optimizer,
        seed=job.seed,
        rank=0,
        logit_shift=logit_shift(job.train.negative_sampling),
        operators=operators,
    )


def restored_program(
    job: JobConfig,
    used: Mapping[str, TableConfig],
    saved: manifest.Checkpoint,
    operators: cpu.Precision | None = None,
) -> DenseProgram:
    """The same, with the parameters of a checkpoint.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    program = dense_program(job, used, operators)
    try:
        program.load_state(saved.dense())
    except ValueError as error:
        raise manifest.CheckpointError(f"{saved.path}: {error}") from error
    return program


def _write_program(
    job: JobConfig, used: Mapping[str, TableConfig], saved: manifest.Checkpoint, folder: Path
) -> ProgramSpec:
    from safetensors.numpy import save_file

    program = restored_program(job, used, saved)
    (folder / _PROGRAM).parent.mkdir()
    program.save_inference(folder / _PROGRAM)
    save_file(program.parameters(), folder / DENSE)
    (folder / DENSE).chmod(0o666 & ~_umask())  # safetensors makes it its owner's alone
    return ProgramSpec(
        paddle=_PROGRAM,
        onnx=None,
        inputs=tuple(_program_inputs(layouts(job.data, dict(used)), job.data, program.input_names)),
        outputs=("log_odds", "probability"),
        logit_shift=logit_shift(job.train.negative_sampling),
    )


def _program_inputs(tables: list[TableLayout], data: DataConfig, names: list[str]) -> Iterator[ProgramInput]:
    for layout in tables:
        for name in layout.input_names:
            _, kind, *feature = name[len(layout.name) :].split("/", 2)
            features = {"rows": (), "single": tuple(layout.single)}.get(kind, tuple(feature))
            yield ProgramInput(name=name, kind=kind, table=layout.name, features=features)
    if "dense" in names:
        yield ProgramInput(name="dense", kind="dense", table=None, features=data.dense_columns)


def _write_table(source: Path, folder: Path, name: str, dtype: Dtype) -> TableSpec:
    saved = saved_tables.open_table(source)
    relative = f"tables/{name}"
    done = export_table(saved, folder / relative, dtype=dtype)
    config = saved.config
    unknown = None
    if config.admission_threshold is None and config.initial_range:
        unknown = f"{_UNKNOWN}/{name}.npy"  # not among the Parquet files: readers take a table's whole folder
        (folder / _UNKNOWN).mkdir(exist_ok=True)
        np.save(folder / unknown, Initializer(name, config, saved.seed).new_embeddings())
    return TableSpec(
        folder=relative,
        keys=done.num_rows,
        embeddings=done.num_embeddings,
        width=config.width,
        first_order=config.first_order,
        dtype=dtype,
        unknown=unknown,
    )


def _write_inputs(data: DataConfig, folder: Path) -> InputRules:
    fitted = Fitted.load(data)
    if data.statistics is not None:
        (folder / _FITTED).mkdir()
        for file in ("fitted.json", "vocabulary.parquet"):
            if (Path(data.statistics) / file).exists():
                shutil.copyfile(Path(data.statistics) / file, folder / _FITTED / file)
    return describe(data, fitted, vocabulary_folder=_FITTED)


def _compare(job: JobConfig, saved: manifest.Checkpoint, folder: Path, dtype: Dtype) -> dict[str, Any]:
    """Metrics on `data.eval` with float32 embeddings and with those just written."""
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as temporary:
        place = Path(temporary)
        for name in job.data.tables:
            export_table(saved_tables.open_table(saved.sparse / name), place / "float32" / name)
        found = {
            "float32": _evaluate(job, folder, place / "float32", place / "lookup-float32"),
            dtype: _evaluate(job, folder, folder / "tables", place / f"lookup-{dtype}"),
        }
    labels = {}
    for label in job.data.labels:
        reports = {kind: report.get("labels", {}).get(label, report) for kind, report in found.items()}
        labels[label] = {
            kind: {metric: report[metric] for metric in ("rows", "auc", "logloss")} for kind, report in reports.items()
        }
    return labels


def _evaluate(job: JobConfig, folder: Path, tables: Path, lookup: Path) -> dict[str, Any]:
    used = {name: job.tables[name] for name in job.data.tables}
    program = ExportedProgram(folder / _PROGRAM, layouts(job.data, used))
    pulls = Lookup.build({name: tables / name for name in used}, lookup)
    data = Dataset.open(job.data.eval, job.data)
    config = job.data.model_copy(update={"slice_metrics_by": (), "group": None})
    with Loader(data, config, data.slices(), seed=0, epoch=0, training=False) as loader:
        return evaluate(
            program,
            pulls,
            SingleGroup(),
            iter(loader),
            labels=job.data.labels,
        )


# ----------------------------------------------------------------------------------------------------------------- ONNX


def _onnx_modules() -> tuple[Any, Any]:
    try:
        import onnxruntime
        import paddle2onnx
    except ImportError as error:
        raise ExportError(f"--onnx: {error}; install the extra: pip install 'paddlewheel[onnx]'") from error
    return paddle2onnx, onnxruntime


def _write_onnx(folder: Path, tables: list[TableLayout], num_dense: int) -> None:
    """Convert the program, run both on the same made-up rows, and refuse what does not agree."""
    paddle2onnx, onnxruntime = _onnx_modules()
    target = folder / f"{_PROGRAM}.onnx"
    try:
        paddle2onnx.export(
            *(str(folder / f"{_PROGRAM}.{kind}") for kind in ("pdmodel", "pdiparams")),
            save_file=str(target),
            opset_version=_ONNX_OPSET,
            verbose=False,
        )
        session = onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
        worst = 0.0
        program = ExportedProgram(folder / _PROGRAM, tables)
        for num_rows in (1, 37):
            feed = _made_up(tables, num_dense, num_rows)
            expected = program.run(feed)
            found = session.run(None, {one.name: feed[one.name] for one in session.get_inputs()})
            worst = max(worst, float(np.abs(found[0] - expected).max()))
    except RuntimeError as error:
        raise ExportError(f"--onnx: this model cannot be converted: {error}") from error
    if not worst <= _ONNX_TOLERANCE:
        raise ExportError(
            f"--onnx: the converted program does not compute the same: log-odds differ by {worst:.2g} (allowed: "
            f"{_ONNX_TOLERANCE:g}). Leave --onnx out; the Paddle program is right"
        )


def _made_up(tables: list[TableLayout], num_dense: int, num_rows: int) -> dict[str, Any]:
    """Inputs of the program with lists of all lengths."""
    random = np.random.RandomState(num_rows)
    num_keys, longest = 50, 6
    feed: dict[str, Any] = {"dense": random.standard_normal((num_rows, num_dense)).astype(np.float32)}
    for layout in tables:
        feed[f"{layout.name}/rows"] = random.uniform(-1, 1, (num_keys, layout.pull_width)).astype(np.float32)
        feed[f"{layout.name}/single"] = random.randint(0, num_keys + 1, (num_rows, len(layout.single))).astype(np.int32)
        for feature in layout.lists:
            here = np.arange(longest) < random.randint(0, longest + 1, (num_rows, 1))
            ids = random.randint(1, num_keys + 1, (num_rows, longest)) * here
            feed[f"{layout.name}/list/{feature.name}"] = ids.astype(np.int32)
            feed[f"{layout.name}/weight/{feature.name}"] = (random.random_sample(ids.shape) * here).astype(np.float32)
    return feed
