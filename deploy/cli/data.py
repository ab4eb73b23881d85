"""`paddlewheel data ...`: from raw files to Parquet, and what a user should know about the data before training."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter, validators

from paddlewheel.deploy.cli.arguments import JobFile, Json, OptionError, Overrides, answer, say
from paddlewheel.trainer.job.exit_codes import EX_USAGE

if TYPE_CHECKING:
    from paddlewheel.data_pipeline.quality import Quality
    from paddlewheel.data_pipeline.recipes.delimited import Notes

app = App(name="data", help="Prepare, generate and check data.")
prepare = App(name="prepare", help="Raw files to Parquet.")
app.command(prepare)

Rows = Annotated[int, Parameter(converter=lambda _, tokens: parse_rows(tokens[0].value))]


def parse_rows(text: str) -> int:
    """`400k` -> 400,000; `1m` -> 1,000,000."""
    lower = text.strip().lower().replace("_", "").replace(",", "")
    factor = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}.get(lower[-1:], 1)
    try:
        number = float(lower[:-1] if factor > 1 else lower) * factor
    except ValueError:
        number = math.nan
    if not 1 <= number < 2**63 or number != int(number):
        raise ValueError(f"{text!r} is not a number of rows (examples: 50000, 400k, 1m)")
    return int(number)


@contextmanager
def _progress(title: str, unit: str = "rows") -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing otherwise. The callback takes (done, total)."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


_EXIT_WARNINGS = 3


@app.command
def check(
    job: JobFile,
    *,
    sample_rows: Rows | None = None,
    out: Path | None = None,
    server_memory_gb: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1e6))] = 16.0,
    overrides: Overrides = (),
    json: Json = False,
) -> int:
    """Read the training data once and say what a job will find in it.

    Exits with 0 if all is well, 3 if there are warnings only, 64 if there are errors.

    Parameters
    ----------
    sample_rows
        Read about so many rows, at even distances, instead of all.
    out
        Folder for data-check.json and data-check.html.
    server_memory_gb
        Memory of one parameter server, to say how many are needed.
    """
    import json as json_module

    from paddlewheel.data_pipeline import quality, quality_report
    from paddlewheel.data_pipeline.dataset import Dataset
    from paddlewheel.pserver import sizing
    from paddlewheel.trainer.job.config import JobConfig

    memory_bytes = server_memory_gb * 1e9
    sizing.servers_needed(0, memory_bytes)  # refused before the data is read, if it is too little
    config = JobConfig.load(job, overrides)
    data = config.data.model_copy(update={"on_bad_file": "skip"})
    with _progress("footers", "files") as tick:
        dataset = Dataset.open(data.train, data, require_fitted=False, on_progress=tick)
        evaluation = Dataset.open(data.eval, data, require_fitted=False) if data.eval else None
        if evaluation is not None:
            dataset.agree_with(evaluation)
    with _progress("rows") as tick:
        found = quality.check(dataset, config.data, evaluation=evaluation, sample_rows=sample_rows, on_progress=tick)
    sizes = {
        name: quality.KeySize(table.pull_width, sizing.bytes_per_key(table), sizing.saved_bytes_per_key(table))
        for name, table in config.tables.items()
    }
    quality.plan_capacity(found, config.data, sizes, lambda total: sizing.servers_needed(total, memory_bytes))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "data-check.json").write_text(json_module.dumps(found.to_json(), indent=1, ensure_ascii=False) + "\n")
        (out / "data-check.html").write_text(quality_report.page(found, str(job)))
        say(f"wrote {out / 'data-check.json'} and {out / 'data-check.html'}")
    answer(found.to_json(), json=json, text=lambda: _report(found))
    return EX_USAGE if found.errors else _EXIT_WARNINGS if found.warnings else 0


def _report(found: "Quality") -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 140)
    rate = "-" if found.label_rate is None else f"{found.label_rate:.4f}"
    table = Table(
        title=f"{found.rows:,} rows in {len(found.files):,} files, {found.rows_read:,} read, label rate {rate}"
    )
    for name in ("feature", "no id", "distinct", "smallest", "largest", "longest", "most frequent"):
        table.add_column(name, justify="left" if name in {"feature", "most frequent"} else "right", overflow="ellipsis")
    for f in found.features:
        top = ", ".join(f"{value} {count / max(1, f.ids):.0%}" for value, count in f.top[:2])
        ends = (f.smallest or "", f.largest or "")
        cells = (f"{f.null_rows / max(1, f.rows):.1%}", f"{f.distinct:,.0f}", *ends, str(f.longest_list), top)
        table.add_row(*map(Text, (f.name, *cells)))  # as text: a value such as "[/b]" is no markup
    for d in found.dense:
        numbers = ["" if v is None else f"{v:.4g}" for v in (d.smallest, d.largest)]
        table.add_row(Text(d.name), f"{d.null_rows / max(1, d.rows):.1%}", "(dense)", *numbers, "", "")
    tables = Table(title=f"expected tables; servers needed: {found.servers}")
    for name in ("table", "keys", "floats a key", "server memory", "checkpoint"):
        tables.add_column(name, justify="left" if name == "table" else "right")
    for t in found.tables:
        sizes = (f"{t.memory_bytes / 1e9:.2f} GB", f"{t.checkpoint_bytes / 1e9:.2f} GB")
        tables.add_row(t.name, f"{t.keys:,.0f}", str(t.width), *sizes)
    with console.capture() as text:
        console.print(table)
        console.print(tables)
        for line in found.errors:
            console.print(f"error: {line}", markup=False)
        for line in found.warnings:
            console.print(f"warning: {line}", markup=False)
    return text.get().rstrip()


@app.command
def fit(job: JobFile, *, overrides: Overrides = ()) -> None:
    """Find means, quantiles and vocabularies in the training data and write them to the job's data.statistics."""
    from paddlewheel.data_pipeline.dataset import Dataset
    from paddlewheel.data_pipeline.errors import DataError
    from paddlewheel.data_pipeline.fit import fit as fit_data
    from paddlewheel.data_pipeline.statistics import needs
    from paddlewheel.trainer.job.config import JobConfig

    data = JobConfig.load(job, overrides).data
    if not needs(data):
        raise DataError("this job needs no fit: no dense block has standardise, no feature a vocabulary or quantiles")
    dataset = Dataset.open(data.train, data, require_fitted=False)
    with _progress("fit") as tick:
        found = fit_data(dataset, data, on_progress=tick)
    kept = ", ".join(f"{name} {keys.size:,}" for name, keys in found.vocabularies.items())
    print(
        f"wrote {data.statistics}: {len(found.moments)} means, {len(found.boundaries)} quantile sets"
        + (f"; values kept: {kept}" if kept else "")
    )


@app.command
def synth(
    directory: Path, *, rows: Rows = 400_000, seed: int = 1, eval_fraction: float = 0.2, days: str | None = None
) -> None:
    """Write seeded click data whose best possible AUC is known.

    Parameters
    ----------
    directory
        New or empty folder; gets train/, eval/, best.json.
    rows
        Rows in all, such as 400k or 1m.
    seed
        The same seed gives the same data.
    eval_fraction
        Part of the rows that goes to eval/.
    days
        Share the training rows out to folders day=..., such as 2026-01-01..2026-01-07.
    """
    from paddlewheel.data_pipeline import synthetic
    from paddlewheel.data_pipeline.days import parse_days

    names = [day.isoformat() for day in parse_days(days)] if days is not None else []
    with _progress("synth") as tick:
        result = synthetic.generate(directory, rows, seed, eval_fraction=eval_fraction, days=names, on_progress=tick)
    print(
        f"{result.train_rows:,} training and {result.eval_rows:,} evaluation rows in "
        f"{result.directory}, {result.click_rate:.1%} clicks"
    )
    print(f"best possible on eval/: AUC {result.best_auc:.4f}, logloss {result.best_logloss:.4f}")


SplitKind = Literal["random", "order", "permutation"]
EvalFraction = Annotated[float, Parameter(help="Part of the rows that goes to eval/.")]
Seed = Annotated[int, Parameter(help="Seed of the split.")]
Threads = Annotated[
    int, Parameter(validator=validators.Number(gte=1, lte=256), help="Source files that are converted at a time.")
]
Kind = Annotated[
    SplitKind,
    Parameter(
        help="random: each row by a seeded hash. order: the last rows. permutation: the first train-rows rows of "
        "numpy.random.RandomState(seed).permutation(rows) train, the others evaluate."
    ),
]
TrainRows = Annotated[Rows | None, Parameter(help="Number of training rows instead of eval-fraction.")]


OnBadLine = Annotated[
    Literal["fail", "skip"],
    Parameter(help="A line with another number of fields ends the conversion, or is left out and counted."),
]
Nulls = Annotated[
    tuple[str, ...],
    Parameter(
        negative=(),
        allow_leading_hyphen=True,
        help="A word that means a missing value, such as NULL; an empty field always does. May be given several times.",
    ),
]


def _done(counts: dict[str, int], directory: Path, notes: "Notes | None" = None) -> None:
    for line in notes.lines() if notes is not None else ():
        say(f"note: {line}")
    print(f"{counts['train_rows']:,} training and {counts['eval_rows']:,} evaluation rows in {directory}")


@prepare.command
def criteo(
    *paths: Path,
    on_bad_line: OnBadLine = "fail",
    eval_fraction: EvalFraction = 0.1,
    split: Kind = "random",
    seed: Seed = 0,
    train_rows: TrainRows = None,
    threads: Threads = 2,
) -> None:
    """Criteo click logs (Kaggle, or 1TB day files; plain or .gz) to train/ and eval/.

    An interrupted run goes on where it was when it is started again.

    Parameters
    ----------
    paths
        Source files or folders (label, I1-I13, C1-C26, tab-separated), then the output folder.
    """
    from paddlewheel.data_pipeline.recipes import criteo as recipe
    from paddlewheel.data_pipeline.recipes.delimited import Notes
    from paddlewheel.data_pipeline.recipes.preparation import Split

    sources, directory = _sources_and_target(paths)
    notes = Notes()
    with _progress("criteo", "bytes") as tick:
        how = Split(split, eval_fraction, seed, train_rows)
        counts = recipe.prepare(
            sources, directory, how, on_bad_line=on_bad_line, threads=threads, notes=notes, on_progress=tick
        )
    _done(counts, directory, notes)


@prepare.command
def avazu(
    *paths: Path,
    on_bad_line: OnBadLine = "fail",
    eval_fraction: EvalFraction = 0.1,
    split: Kind = "order",
    seed: Seed = 0,
    train_rows: TrainRows = None,
    threads: Threads = 2,
) -> None:
    """Avazu click logs (train.csv, plain or .gz) to train/ and eval/; by default the end of the file evaluates.

    Parameters
    ----------
    paths
        Source files or folders, then the output folder.
    """
    from paddlewheel.data_pipeline.recipes import avazu as recipe
    from paddlewheel.data_pipeline.recipes.delimited import Notes
    from paddlewheel.data_pipeline.recipes.preparation import Split

    sources, directory = _sources_and_target(paths)
    notes = Notes()
    with _progress("avazu", "bytes") as tick:
        how = Split(split, eval_fraction, seed, train_rows)
        counts = recipe.prepare(
            sources, directory, how, on_bad_line=on_bad_line, threads=threads, notes=notes, on_progress=tick
        )
    _done(counts, directory, notes)


@prepare.command
def movielens(source: Path, directory: Path, *, eval_fraction: EvalFraction = 0.1, max_history: int = 50) -> None:
    """MovieLens 100k or 1M to train/ and eval/: label rating >= 4, genres, history of liked films; the latest evaluate.

    Parameters
    ----------
    source
        Folder with u.data, u.item, u.user, or ratings.dat, movies.dat, users.dat; plain or .gz.
    directory
        Output folder.
    max_history
        Films of a user's history.
    """
    from paddlewheel.data_pipeline.recipes import movielens as recipe

    with _progress("movielens") as tick:
        counts = recipe.prepare(
            source, directory, eval_fraction=eval_fraction, max_history=max_history, on_progress=tick
        )
    _done(counts, directory)


@prepare.command
def csv(
    *paths: Path,
    schema: str,
    delimiter: str = ",",
    header: bool = True,
    quotes: bool = True,
    null: Nulls = (),
    trim: Annotated[bool, Parameter(negative=())] = False,
    encoding: str = "utf-8",
    list_delimiter: str = "|",
    on_bad_line: OnBadLine = "fail",
    eval_fraction: EvalFraction = 0.1,
    split: Kind = "random",
    seed: Seed = 0,
    train_rows: TrainRows = None,
    threads: Threads = 2,
) -> None:
    """Any delimited text to train/ and eval/; plain, or packed with gzip, bz2, zstd or lz4.

    Parameters
    ----------
    paths
        Source files or folders, then the output folder.
    schema
        Columns and types, such as `click:int8, user:int64, tags:list<string>`. Types: int8 to int64, uint64, float32,
        float64, bool, string, date, timestamp, hex, and `list<...>` of these.
    delimiter
        The character between fields; a tab may be written as in C.
    header
        Whether the first line names the columns. Without one, --schema names all columns in their order.
    quotes
        Whether "..." around a field makes delimiters and line breaks in it a part of the value.
    trim
        Cut spaces off names and values.
    encoding
        Of the text, such as latin-1, cp1252 or utf-16.
    list_delimiter
        Between the values of a list. Empty values are left out.
    """
    from paddlewheel.data_pipeline.recipes import csv as recipe
    from paddlewheel.data_pipeline.recipes.delimited import Format, Notes
    from paddlewheel.data_pipeline.recipes.preparation import Split

    form = Format(_unescaped(delimiter), header, quotes, encoding, null, trim, on_bad_line)
    columns = recipe.parse_schema(schema)
    sources, directory = _sources_and_target(paths)
    notes = Notes()
    with _progress("csv", "bytes") as tick:
        how = Split(split, eval_fraction, seed, train_rows)
        counts = recipe.prepare(
            sources,
            directory,
            how,
            columns,
            form=form,
            list_delimiter=_unescaped(list_delimiter),
            threads=threads,
            notes=notes,
            on_progress=tick,
        )
    _done(counts, directory, notes)


@prepare.command(name=("libsvm", "libfm"))
def libsvm(
    *paths: Path,
    on_bad_line: OnBadLine = "fail",
    eval_fraction: EvalFraction = 0.1,
    split: Kind = "random",
    seed: Seed = 0,
    train_rows: TrainRows = None,
    threads: Threads = 2,
) -> None:
    """Libsvm or libfm text (`label index:value ...`) to train/ and eval/: columns label, ids, values, qid.

    In a job: `sparse: [{name: ids, weights: values, max_length: 256}]`, and for -1/1 labels
    `label_rule: {positive: 1}`.

    Parameters
    ----------
    paths
        Source files or folders, then the output folder.
    """
    from paddlewheel.data_pipeline.recipes import libsvm as recipe
    from paddlewheel.data_pipeline.recipes.delimited import Notes
    from paddlewheel.data_pipeline.recipes.preparation import Split

    sources, directory = _sources_and_target(paths)
    notes = Notes()
    with _progress("libsvm", "bytes") as tick:
        how = Split(split, eval_fraction, seed, train_rows)
        counts = recipe.prepare(
            sources, directory, how, on_bad_line=on_bad_line, threads=threads, notes=notes, on_progress=tick
        )
    _done(counts, directory, notes)


def _unescaped(text: str) -> str:
    """A tab and the like may be typed as in C."""
    try:
        return text.encode("ascii").decode("unicode_escape") if "\\" in text else text
    except UnicodeError:
        return text


def _sources_and_target(paths: tuple[Path, ...]) -> tuple[list[Path], Path]:
    if len(paths) < 2:
        raise OptionError("give one or more sources and then the output folder")
    return list(paths[:-1]), paths[-1]
