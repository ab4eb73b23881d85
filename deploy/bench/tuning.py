"""Search over a job's settings: ranges from a file, trials one after the other, resumable. Needs optuna (extra `tune`).

A search file names keys as `--set` does, and for each a range or choices:

    train.dense_optimizer.learning_rate: {low: 1e-4, high: 1e-2, log: true}
    model.dropout: {choices: [0.0, 0.2, 0.5]}
    tables.default.width: {low: 4, high: 32, step: 4}
"""

from __future__ import annotations

import contextlib
import csv
import json
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from typing_extensions import Self

from paddlewheel.deploy.bench.parity.lab import ParityError, Variant, execute
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError
from paddlewheel.trainer.job.train import HIGHER_IS_BETTER, Metric
from paddlewheel.trainer.models import own_module
from paddlewheel.trainer.models.config import CustomModelConfig

if TYPE_CHECKING:
    import optuna


class TuningError(ValueError):
    """A search that cannot be run."""


class Range(BaseModel):
    """Numbers between two ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: float
    high: float
    log: bool = Field(default=False, description="Search evenly in the logarithm.")
    step: float | None = Field(default=None, gt=0, description="Distance between tried values. None: any value.")

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs low > 0 and no step")
        return self

    def suggest(self, trial: optuna.Trial, key: str) -> float | int:
        """The value that a trial tries; a whole number where low and step (or both ends, without log) are whole."""
        parts = [self.low, self.high] if self.step is None else [self.low, self.step]
        if self.step is not None and all(p.is_integer() for p in parts):
            return trial.suggest_int(key, int(self.low), int(self.high), step=int(self.step))
        return trial.suggest_float(key, self.low, self.high, log=self.log, step=self.step)


class Choices(BaseModel):
    """Values from a list; each is anything that `--set` takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    choices: tuple[Any, ...] = Field(min_length=1)

    def suggest(self, trial: optuna.Trial, key: str) -> Any:
        """The value that a trial tries."""
        texts = [json.dumps(choice) for choice in self.choices]  # optuna keeps plain values only
        return json.loads(trial.suggest_categorical(key, texts))


Space = dict[str, Annotated[Range | Choices, Field(union_mode="left_to_right")]]
_SPACE: TypeAdapter[Space] = TypeAdapter(Space)


def load_space(path: Path) -> Space:
    """Reads a search file.

    Raises:
        TuningError: it cannot be read, or an entry is neither a range nor choices.
    """
    from paddlewheel.trainer.job.yaml_loader import read_yaml

    try:
        return _SPACE.validate_python(read_yaml(path))
    except ValidationError as error:
        found = sorted({str(item["loc"][0]) for item in error.errors() if item["loc"]})
        reasons = "; ".join(item["msg"] for item in error.errors() if item["type"] == "value_error")
        raise TuningError(
            f"{path}: {', '.join(found) or 'the file'} must be a range such as {{low: 1e-4, high: 1e-2, log: true}} or "
            f"{{choices: [...]}}{': ' + reasons if reasons else ''}"
        ) from None


@dataclass(frozen=True)
class Search:
    """What is searched, and how.

    Attributes:
        job: path of the job file; overrides: `--set` of every trial.
        space: key -> range or choices.
        metric: of the evaluation at the end of a run.
        variant: `single` for one process with tables in memory, or `SxT`: see `trainer.parity.lab`.
        seeds: runs a trial; their mean counts.
    """

    job: Path
    overrides: tuple[str, ...]
    space: Space
    metric: Metric
    variant: Variant
    seeds: int

    @property
    def sign(self) -> int:
        """1 where more is better."""
        return 1 if self.metric in HIGHER_IS_BETTER else -1

    def configured(self, values: Mapping[str, Any]) -> JobConfig:
        """The job with these values.

        Raises:
            ConfigError: as `JobConfig.load`.
        """
        return JobConfig.load(self.job, [*self.overrides, *settings(values)])


def settings(values: Mapping[str, Any]) -> list[str]:
    """Values as `--set` takes them."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def run(search: Search, trials: int, out: Path, say: Callable[[str], None], *, seed: int = 0) -> optuna.Study:
    """Runs trials until the study in `out` holds `trials` finished ones; a study that was broken off goes on.

    Raises:
        TuningError: optuna is missing, or the folder holds another search.
        ConfigError: a key or value of the space does not fit the job (checked before the first run).
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise TuningError("a search needs optuna: pip install 'paddlewheel[tune]'") from error
    _check(search)
    out.mkdir(parents=True, exist_ok=True)
    _refuse_another_search(search, out / "search.json")
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a failed trial is told below
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its notes on experimental features
        storage = JournalStorage(JournalFileBackend(str(out / "trials.journal")))
        study = optuna.create_study(
            study_name="search",
            storage=storage,
            direction="maximize" if search.sign > 0 else "minimize",
            # the seed of a sampler that starts in the middle must not repeat the draws before
            sampler=optuna.samplers.TPESampler(seed=seed + _num_finished(storage)),
            load_if_exists=True,
        )

    def objective(trial: optuna.Trial) -> float:
        values = {key: entry.suggest(trial, key) for key, entry in search.space.items()}
        try:
            scores = [_score(search, values, seed, out) for seed in range(search.seeds)]
        except ParityError as error:
            say(f"trial {trial.number}: failed: {error}  {'  '.join(settings(values))}")
            raise
        mean = statistics.fmean(scores)
        spread = f" ± {statistics.stdev(scores):.5f}" if len(scores) > 1 else ""
        say(f"trial {trial.number}: {search.metric} {mean:.5f}{spread}  {'  '.join(settings(values))}")
        return mean

    left = trials - len([t for t in study.trials if t.state.is_finished()])
    if left > 0:
        study.optimize(objective, n_trials=left, catch=(ParityError,))
    return study


def _num_finished(storage: Any) -> int:
    found = storage.get_all_studies()
    return len(storage.get_all_trials(found[0]._study_id)) if found else 0  # noqa: SLF001  it has no public name


def _check(search: Search) -> None:
    """Both ends of every range and every choice must fit the job, before hours are spent."""
    if not search.space:
        raise TuningError("the search file names no key")
    for key, entry in search.space.items():
        ends = entry.choices if isinstance(entry, Choices) else (entry.low, entry.high)
        for value in ends:
            whole = isinstance(value, float) and value.is_integer()
            job = search.configured({key: int(value) if whole else value})
            if isinstance(job.model, CustomModelConfig):
                own_module.find(job.model)


def _score(search: Search, values: Mapping[str, Any], seed: int, out: Path) -> float:
    try:
        job = search.configured(values)
    except ConfigError as error:  # two values that do not go together
        raise ParityError(str(error)) from error
    if not job.data.eval:
        raise TuningError("data.eval is missing: a search needs rows to evaluate")
    result = execute(search.variant, search.variant.job(job, job.seed + seed, out / "run"), out)
    value = result["eval"].get(search.metric)
    if value is None:
        raise ParityError(f"{search.metric} is undefined or missing in this evaluation")
    return float(value)


def _refuse_another_search(search: Search, path: Path) -> None:
    text = json.dumps(
        {
            "job": JobConfig.load(search.job, search.overrides).model_dump(mode="json"),
            "space": {key: entry.model_dump() for key, entry in search.space.items()},
            "metric": search.metric,
            "variant": search.variant.name,
            "seeds": search.seeds,
        },
        indent=1,
    )
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise TuningError(f"{path.parent} holds another search, or another job: take another folder")
    path.write_text(text, encoding="utf-8")


def write(search: Search, study: optuna.Study, out: Path) -> list[Path]:
    """The trials as a table and, with matplotlib, as a plot; the best one as a job file. Returns the files."""
    finished = _ranked(search, study)
    if not finished:
        raise TuningError("no trial has finished: see the messages of the failed ones")
    keys = list(search.space)
    table = out / "trials.csv"
    with table.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["trial", search.metric, *keys])
        writer.writerows([t.number, t.value, *(_value(search, t.params, key) for key in keys)] for t in finished)
    best = out / "best.yaml"
    values = {key: _value(search, finished[0].params, key) for key in keys}
    config = search.configured(values)
    top = finished[0]
    head = f"# {search.metric} {top.value:.5f} in trial {top.number}, the best of {len(finished)} that finished\n"
    best.write_text(head + config.to_yaml(short=True), encoding="utf-8")
    files = [table, best]
    with contextlib.suppress(ImportError):
        files.append(_plot(search, finished, keys, out / "trials.png"))
    return files


def markdown(search: Search, study: optuna.Study, most: int = 10) -> str:
    """The best trials as a table."""
    finished = _ranked(search, study)
    keys = list(search.space)
    lines = [f"| trial | {search.metric} | " + " | ".join(keys) + " |", "|" + "---|" * (len(keys) + 2)]
    for trial in finished[:most]:
        cells = [_cell(_value(search, trial.params, key)) for key in keys]
        lines.append(f"| {trial.number} | {trial.value:.5f} | " + " | ".join(cells) + " |")
    failed = sum(t.state.name == "FAIL" for t in study.trials)
    if failed:
        lines.append(f"\n{failed} {'trial' if failed == 1 else 'trials'} failed.")
    return "\n".join(lines)


def _ranked(search: Search, study: optuna.Study) -> list[Any]:
    """Finished trials, the best first."""
    finished: list[Any] = [t for t in study.trials if t.value is not None]
    return sorted(finished, key=lambda t: -search.sign * t.value)


def _value(search: Search, params: Mapping[str, Any], key: str) -> Any:
    return json.loads(params[key]) if isinstance(search.space[key], Choices) else params[key]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def _plot(search: Search, finished: Sequence[Any], keys: Sequence[str], path: Path) -> Path:
    """The metric by trial, and against each key."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    columns = min(3, len(keys) + 1)
    rows = -(-(len(keys) + 1) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    in_order = sorted(finished, key=lambda t: t.number)
    best, so_far = [], None
    for trial in in_order:
        better = so_far is None or search.sign * trial.value > search.sign * so_far
        so_far = trial.value if better else so_far
        best.append(so_far)
    numbers = [t.number for t in in_order]
    top = in_order.index(finished[0])
    panels[0].plot(numbers, [t.value for t in in_order], "o", color="#2563eb", alpha=0.45, ms=5)
    panels[0].plot([numbers[top]], [finished[0].value], "o", color="#d97706", ms=7, label="best trial")
    panels[0].step(numbers, best, where="post", color="#d97706", label="best so far")
    panels[0].set(xlabel="trial", ylabel=search.metric)
    panels[0].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].legend(frameon=False)
    for axes, key in zip(panels[1:], keys, strict=False):
        entry = search.space[key]
        shown = [_value(search, t.params, key) for t in in_order]
        if isinstance(entry, Choices):
            places = [entry.choices.index(_as_given(entry, value)) for value in shown]
            axes.set_xticks(range(len(entry.choices)), [_cell(c) for c in entry.choices], fontsize=8)
            axes.set_xlim(-0.5, len(entry.choices) - 0.5)
        else:
            places = shown
            if entry.log:
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=5))
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.xaxis.set_minor_locator(NullLocator())
        axes.plot(places, [t.value for t in in_order], "o", color="#2563eb", alpha=0.45, ms=5)
        axes.plot([places[top]], [finished[0].value], "o", color="#d97706", ms=7)
        axes.set(xlabel=key)
    for axes in panels[: len(keys) + 1]:
        axes.grid(color="#e5e7eb")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in panels[len(keys) + 1 :]:
        axes.set_visible(False)
    figure.savefig(path)
    return path


def _as_given(entry: Choices, value: Any) -> Any:
    return next(choice for choice in entry.choices if json.loads(json.dumps(choice)) == value)
