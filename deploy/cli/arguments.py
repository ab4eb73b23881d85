"""Arguments that several commands share, and how they print an answer."""

import contextlib
import json as json_module
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, validators

from paddlewheel.deploy.cli.streams import give_up

if TYPE_CHECKING:
    from paddlewheel.trainer.checkpoint.trained_model import TrainedModel
    from paddlewheel.trainer.job.config import JobConfig

JobFile = Annotated[Path, Parameter(help="The job file (YAML).")]

Model = Annotated[
    str, Parameter(help="A job file, a checkpoint (its `step-<n>` folder, or s3://...), or a run folder.")
]

Checkpoint = Annotated[
    str | None,
    Parameter(help="With a job file: a checkpoint (its `step-<n>` folder, or s3://...); by default the newest."),
]

Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        negative=(),
        show_default=False,
        help="Change one value of the job, for example `--set cluster.trainers=4`. May be given several times.",
    ),
]


def check_host_and_port(_: Any, address: Any) -> None:
    """Validator of an option that takes HOST:PORT. Raises ValueError."""
    for one in address if isinstance(address, tuple) else (address,):
        host, _colon, port = (one or "").rpartition(":")
        if one is not None and (not re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[^\s:/]+", host) or not _is_port(port)):
            raise ValueError(f"{one!r} is no address: write HOST:PORT, such as 127.0.0.1:7070 or [::1]:7070")


def _is_port(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,5}", text)) and int(text) < 65536


Json = Annotated[
    bool,
    Parameter(
        name="--json",
        negative=(),
        show_default=False,
        help="Print one JSON object for machines instead of text for people.",
    ),
]

LogFormat = Annotated[
    Literal["auto", "text", "json"],
    Parameter(
        help="What is written to standard error. auto: a bar on a terminal; elsewhere lines of text, or with --json "
        "one JSON object a line. text, json: such lines in any case."
    ),
]

Threads = Annotated[
    int | None,
    Parameter(validator=validators.Number(gte=1), help="Compute threads of the trainer. By default one for each core."),
]


class OptionError(ValueError):
    """An option has a value that cannot be used."""


def say(line: str) -> None:
    """Print progress to stderr; stdout is reserved for the result."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class AnswerLostError(RuntimeError):
    """Standard output did not take the answer of a command (a full disk)."""


def answer(data: Any, *, json: bool, text: Callable[[], str]) -> None:
    """Prints the answer of a command: `data` as JSON for machines, or what `text` makes of it for people.

    A reader that has gone (such as `head`) is no error: the command goes on, and its exit code says what it did.

    Raises:
        AnswerLostError: it cannot be written otherwise.
    """
    try:
        print(json_module.dumps(data, indent=2, ensure_ascii=False) if json else text(), flush=True)
    except BrokenPipeError:
        give_up(sys.stdout)
    except OSError as error:
        give_up(sys.stdout)
        raise AnswerLostError(f"the answer cannot be written to standard output: {error.strerror}") from error


class OtherModelError(ValueError):
    """A checkpoint is not of the job that it was to be used with."""


@contextlib.contextmanager
def find_model(
    model: str, checkpoint: str | None, overrides: Iterable[str]
) -> "Iterator[tuple[JobConfig, TrainedModel]]":
    """The job and the trained model that a command's arguments name; a copy of it where it is in an object store.

    Raises:
        ConfigError: the job cannot be used.
        CheckpointError: there is no trained model.
        OtherModelError: the checkpoint is of a job with another model or other features.
        ModelError: the module of a user's own model is not there, or another one.
    """
    from paddlewheel.trainer.checkpoint.store import is_remote
    from paddlewheel.trainer.checkpoint.trained_model import open_model
    from paddlewheel.trainer.job.config import JobConfig
    from paddlewheel.trainer.models import own_module
    from paddlewheel.trainer.models.config import CustomModelConfig

    job = None if is_remote(model) or Path(model).is_dir() else JobConfig.load(model, overrides)
    with _local(checkpoint or (model if job is None else job.checkpoint_location)) as path:
        trained = open_model(path)
        if job is None:
            job = JobConfig.from_settings(trained.settings, overrides, str(trained.path))
        else:
            check_same(job, trained.settings, str(trained.path), typed=trained.inputs is None)
        if isinstance(job.model, CustomModelConfig):
            own_module.find(job.model)
        yield job, trained


@contextlib.contextmanager
def _local(location: str) -> Iterator[Path]:
    """A folder on this machine that holds a checkpoint, or checkpoints."""
    from paddlewheel.trainer.checkpoint.folder_store import open_address, open_checkpoints
    from paddlewheel.trainer.checkpoint.manifest import CheckpointError, step_of
    from paddlewheel.trainer.checkpoint.store import is_remote

    if not is_remote(location):
        yield Path(location)
        return
    kept, address = open_address(location)
    if step_of(address.rpartition("/")[2]) is None:
        kept = open_checkpoints(address)
        committed = kept.committed()
        if not committed:
            raise CheckpointError(f"{location} holds no committed checkpoint")
        address = committed[-1]
    with kept.local_copy(address) as path:
        yield path


def check_same(
    job: "JobConfig", trained: Mapping[str, Any], path: str, *, typed: bool = True, shapes_alone: bool = False
) -> None:
    """Whether a model was trained by a job with the same features, tables and model.

    Args:
        job: the job that is to use it.
        trained: the settings of the job that trained it.
        path: where it is, for the message.
        typed: whether the declared types of features count; no where the model knows what it was trained on.
        shapes_alone: of tables, only what their rows consist of must be the same.

    Raises:
        OtherModelError: a value differs that the model depends on.
        ModelError: the file of a user's own model has changed.
    """
    from paddlewheel.trainer.coordinator.resume import differences, without_types
    from paddlewheel.trainer.models import own_module

    before: Mapping[str, Any] = trained
    now: Mapping[str, Any] = job.model_dump(mode="json")
    own_module.check_same_file(before["model"], now["model"])
    before, now = ({**job, "model": own_module.without_place(job["model"])} for job in (before, now))
    if not typed:
        before, now = without_types(before), without_types(now)
    features = ("labels", "dense", "sparse")
    sections: dict[str, tuple[str, ...] | None] = {"seed": None, "model": None, "tables": None, "data": features}
    if shapes_alone:
        sections = {"model": None, "data": features, "tables": job.data.tables}
        before = {**before, "tables": _shapes(before, job.data.tables)}
        now = {**now, "tables": _shapes(now, job.data.tables)}
    changed = [
        line
        for section, keys in sections.items()
        for line in differences(_part(before, section, keys), _part(now, section, keys), section)
    ]
    if changed:
        more = f"\n  and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise OtherModelError(
            f"{path} was trained by a job with other values:\n  " + "\n  ".join(changed[:5]) + more + "\n"
            "Use the job file that trained it, or name the checkpoint alone: it knows its job"
        )


def _shapes(settings: Mapping[str, Any], used: Iterable[str]) -> dict[str, Any]:
    rows = ("width", "first_order")
    return {name: {key: settings["tables"].get(name, {}).get(key) for key in rows} for name in used}


def _part(settings: Any, section: str, keys: tuple[str, ...] | None) -> Any:
    whole = settings[section]
    return whole if keys is None else {key: whole[key] for key in keys}
