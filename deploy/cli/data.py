"""`paddlewheel data ...`: from raw files to Parquet, and what a user should know about the data before training."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

app = App(name="data", help="Prepare, generate and check data.")
prepare = App(name="prepare", help="Raw files to Parquet.")
app.command(prepare)

Rows = Annotated[int, Parameter(converter=lambda _, tokens: parse_rows(tokens[0].value))]


def parse_rows(text: str) -> int:
    """`400k` -> 400,000; `1m` -> 1,000,000."""
    lower = text.strip().lower().replace("_", "").replace(",", "")
    factor = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}.get(lower[-1:], 1)
    number = float(lower[:-1] if factor > 1 else lower) * factor
    if number != int(number) or number < 1:
        raise ValueError(f"{text!r} is not a number of rows (examples: 50000, 400k, 1m)")
    return int(number)


@contextmanager
def _progress(title: str, unit: str = "rows") -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing otherwise. The callback takes (done, total)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
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


@app.command
def synth(directory: Path, *, rows: Rows = 400_000, seed: int = 1, eval_fraction: float = 0.2) -> None:
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
    """
    from data_pipeline import synthetic

    with _progress("synth") as tick:
        result = synthetic.generate(directory, rows, seed, eval_fraction=eval_fraction, on_progress=tick)
    print(
        f"{result.train_rows:,} training and {result.eval_rows:,} evaluation rows in {result.directory}, {result.click_rate:.1%} clicks"
    )
    print(f"best possible on eval/: AUC {result.best_auc:.4f}, logloss {result.best_logloss:.4f}")


@prepare.command
def criteo(
    source: Path,
    directory: Path,
    *,
    eval_fraction: float = 0.1,
    split: Literal["random", "order", "permutation"] = "random",
    seed: int = 0,
    train_rows: Rows | None = None,
) -> None:
    """Criteo click logs (Kaggle or 1TB lines, plain or .gz) to train/ and eval/.

    Parameters
    ----------
    source
        Tab-separated file: label, I1-I13, C1-C26.
    directory
        Output folder.
    eval_fraction
        Part of the rows that goes to eval/.
    split
        random: each row by a seeded draw. order: the last rows. permutation: the first train-rows rows of
        numpy.random.RandomState(seed).permutation(rows) train, the others evaluate.
    seed
        Seed of the split.
    train_rows
        Number of training rows instead of eval-fraction.
    """
    from data_pipeline.recipes import criteo as recipe

    with _progress("criteo") as tick:
        counts = recipe.prepare(
            source,
            directory,
            eval_fraction=eval_fraction,
            split=split,
            seed=seed,
            train_rows=train_rows,
            on_progress=tick,
        )
    print(f"{counts['train_rows']:,} training and {counts['eval_rows']:,} evaluation rows in {directory}")
