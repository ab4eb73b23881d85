"""MovieLens 100k (u.data, u.item, u.user) and 1M (ratings.dat, movies.dat, users.dat), plain or .gz.

The label is rating >= 4. Beside user and item attributes a row has the film's genres (a list) and the user's history:
the last films that the user had liked strictly before. The split is by time: the latest ratings evaluate.
"""

import gzip
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.data_pipeline.recipes.preparation import Progress

_GENRES_100K = [
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
]
_LIKED = 4


def prepare(
    source: str | Path,
    directory: str | Path,
    *,
    eval_fraction: float = 0.1,
    max_history: int = 50,
    on_progress: Progress | None = None,
) -> dict[str, int]:
    """Reads the folder `source`, writes `train/` and `eval/` below `directory`. Returns row counts."""
    if not 0 < eval_fraction < 1:
        raise DataError(f"eval fraction {eval_fraction} must lie between 0 and 1")
    folder, root = Path(source), Path(directory)
    if _find(folder, "u.data") is not None:
        ratings, items, users = _read_100k(folder)
    elif _find(folder, "ratings.dat") is not None:
        ratings, items, users = _read_1m(folder)
    else:
        raise DataError(f"{folder}: neither u.data (MovieLens 100k) nor ratings.dat (1M) is here, plain or .gz")
    table = _join(ratings, items, users, max_history, on_progress)
    order = np.argsort(ratings[:, 3], kind="stable")
    num_train = len(order) - round(len(order) * eval_fraction)
    if not 0 < num_train < len(order):
        raise DataError(f"{folder}: {len(order)} ratings leave one part empty")
    work = root / ".work"
    shutil.rmtree(work, ignore_errors=True)
    counts = {}
    for part, rows in (("train", order[:num_train]), ("eval", order[num_train:])):
        (work / part).mkdir(parents=True)
        chosen = table.take(pa.array(rows))
        pq.write_table(chosen, work / part / "part-00000.parquet", compression="zstd", row_group_size=1 << 16)
        counts[f"{part}_rows"] = chosen.num_rows
    for part in ("train", "eval"):
        shutil.rmtree(root / part, ignore_errors=True)
        (work / part).rename(root / part)
    work.rmdir()
    return counts


def _find(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)


def _lines(folder: Path, name: str, separator: str, fields: int) -> Iterator[list[str]]:
    path = _find(folder, name)
    if path is None:
        raise DataError(f"{folder}: {name} is missing")
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as raw:
        lines = io.TextIOWrapper(raw, encoding="latin-1")
        for number, line in enumerate(lines, 1):
            parts = line.rstrip("\r\n").split(separator)
            if parts == [""]:
                continue
            if len(parts) != fields:
                raise DataError(f"{path}, line {number}: {len(parts)} fields, {fields} are expected")
            yield parts


def _ratings(folder: Path, name: str, separator: str) -> Any:
    try:
        return np.array(
            [[int(v) for v in line] for line in _lines(folder, name, separator, 4)], dtype=np.int64
        ).reshape(-1, 4)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder / name}: {error}") from error


def _read_100k(
    folder: Path,
) -> tuple[Any, dict[int, tuple[list[str], int | None]], dict[int, tuple[int, str, str, str]]]:
    items: dict[int, tuple[list[str], int | None]] = {}
    for line in _lines(folder, "u.item", "|", 24):
        genres = [g for g, flag in zip(_GENRES_100K, line[5:], strict=True) if flag == "1"]
        items[int(line[0])] = (genres, int(line[2][-4:]) if line[2][-4:].isdigit() else None)
    users = {int(u[0]): (int(u[1]), u[2], u[3], u[4]) for u in _lines(folder, "u.user", "|", 5)}
    return _ratings(folder, "u.data", "\t"), items, users


def _read_1m(folder: Path) -> tuple[Any, dict[int, tuple[list[str], int | None]], dict[int, tuple[int, str, str, str]]]:
    items: dict[int, tuple[list[str], int | None]] = {}
    for number, title, genres in _lines(folder, "movies.dat", "::", 3):
        year = title.rstrip()[-5:-1]
        items[int(number)] = (genres.split("|"), int(year) if year.isdigit() else None)
    users = {int(u[0]): (int(u[2]), u[1], u[3], u[4]) for u in _lines(folder, "users.dat", "::", 5)}
    return _ratings(folder, "ratings.dat", "::"), items, users


def _join(
    ratings: Any,
    items: dict[int, tuple[list[str], int | None]],
    users: dict[int, tuple[int, str, str, str]],
    max_history: int,
    on_progress: Progress | None,
) -> pa.Table:
    user, item, rating, stamp = ratings.T
    unknown = next((int(i) for i in item if int(i) not in items), None)
    if unknown is not None:
        raise DataError(f"film {unknown} is rated but not described")
    nobody = next((int(u) for u in user if int(u) not in users), None)
    if nobody is not None:
        raise DataError(f"user {nobody} rates but is not described")
    history: list[list[int]] = [[] for _ in range(len(ratings))]
    liked: dict[int, list[int]] = {}
    waiting: dict[int, tuple[int, list[int]]] = {}
    for done, row in enumerate(np.lexsort((item, stamp))):
        who, when = int(user[row]), int(stamp[row])
        before, fresh = waiting.get(who, (when, []))
        if before != when:  # ratings of the same second know nothing of each other
            liked.setdefault(who, []).extend(fresh)
            fresh = []
        history[row] = liked.get(who, [])[-max_history:]
        if rating[row] >= _LIKED:
            fresh = [*fresh, int(item[row])]
        waiting[who] = (when, fresh)
        if on_progress is not None and done % 10_000 == 0:
            on_progress(done, len(ratings))
    people = [users[int(u)] for u in user]
    films = [items[int(i)] for i in item]
    return pa.table(
        {
            "click": pa.array((rating >= _LIKED).astype(np.int8)),
            "rating": pa.array(rating.astype(np.int8)),
            "user": pa.array(user),
            "item": pa.array(item),
            "time": pa.array(stamp).cast(pa.timestamp("s")),
            "age": pa.array([p[0] for p in people], pa.int32()),
            "gender": pa.array([p[1] for p in people]).dictionary_encode(),
            "occupation": pa.array([p[2] for p in people]).dictionary_encode(),
            "zip": pa.array([p[3] for p in people]).dictionary_encode(),
            "year": pa.array([f[1] for f in films], pa.int32()),
            "genres": pa.array([f[0] for f in films], pa.list_(pa.string())),
            "history": pa.array(history, pa.list_(pa.int64())),
        }
    )


def data_section(directory: str | Path) -> dict[str, Any]:
    """A `data` section: the history shares its table with the items, and is averaged."""
    root = Path(directory)
    return {
        "train": str(root / "train"),
        "eval": str(root / "eval"),
        "batch_rows": 512,
        "labels": ["click"],
        "dense": {"columns": ["age"], "clip": [0, 100]},
        "sparse": [
            {"name": "user"},
            {"name": "item", "table": "item"},
            *({"name": n} for n in ("gender", "occupation", "year")),
            {"name": "genres", "pooling": "mean", "max_length": 6},
            {"name": "history", "table": "item", "pooling": "mean", "max_length": 50, "truncate": "last"},
        ],
    }
