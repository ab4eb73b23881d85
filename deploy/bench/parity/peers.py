"""Our models next to plain PyTorch ones: the same rows, features, split, batch and number of epochs.

The rows are encoded once by our data pipeline and handed over as arrays, so that both sides see the same ids, buckets,
lists and numbers. Both are judged at their best epoch on the evaluation rows, which flatters both alike.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.data_pipeline.dataset import Dataset
from paddlewheel.data_pipeline.loader import Loader
from paddlewheel.deploy.bench.parity.lab import ParityError, Variant, execute
from paddlewheel.trainer.distributed.subprocesses import tied
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.models import KINDS as KIND_CONFIGS

_SCRIPT = Path(__file__).with_name("torch_models.py")
_SECONDS = 3600
KINDS = ("lr", "deepfm", "dcn", "din")


@dataclass(frozen=True)
class PeerOptions:
    """What the PyTorch side is told, beyond what it takes from the job (tower, dropout, width, batch, epochs).

    Attributes:
        learning_rate, l2: of its Adam.
        min_count: ids with fewer occurrences in the training rows share one embedding.
        threads: compute threads.
    """

    learning_rate: float = 5e-4
    l2: float = 1e-4
    min_count: int = 10
    threads: int = 2


def encode(job: JobConfig, path: Path, min_count: int) -> None:
    """Writes training and evaluation rows as arrays: ids from 1 (0: no id, 1 in each table: a rare id)."""
    parts = {part: _read(job, paths) for part, paths in (("train", job.data.train), ("eval", job.data.eval)) if paths}
    singles = {f.name: f.table for f in job.data.sparse if not f.multi_valued}
    lists = {f.name: f.table for f in job.data.sparse if f.multi_valued}
    arrays: dict[str, NDArray[Any]] = {}
    sizes = {}
    for table in job.data.tables:
        mine = [name for name, its in {**singles, **lists}.items() if its == table]
        seen, counts = np.unique(np.concatenate([parts["train"][n].ravel() for n in mine]), return_counts=True)
        kept = seen[(counts >= min_count) & (seen != 0)]
        sizes[table] = len(kept) + 1
        for part, columns in parts.items():
            for name in mine:
                arrays[f"{part}/{name}"] = _number(columns[name], kept)
    targets = {}
    for feature in job.data.sparse:
        if feature.pooling == "none":
            targets[feature.name] = next(n for n, table in singles.items() if table == feature.table)
    layout = {
        "singles": singles,
        "lists": {f.name: f.pooling for f in job.data.sparse if f.multi_valued},
        "list_tables": lists,
        "targets": targets,
        "sizes": sizes,
        "dense": len(job.data.dense_columns),
    }
    for part, columns in parts.items():
        arrays[f"{part}/label"], arrays[f"{part}/dense"] = columns["label "], columns["dense "]
    np.savez(path, layout=np.array(json.dumps(layout)), **arrays)  # type: ignore[arg-type]


def _read(job: JobConfig, paths: Sequence[str]) -> dict[str, NDArray[Any]]:
    """All rows in file order: keys by feature, and (under names that no feature can have) numbers and the label."""
    data = job.data.model_copy(update={"batch_rows": 4096, "group": None, "slice_metrics_by": ()})
    dataset = Dataset.open(paths, data)
    columns: dict[str, list[NDArray[Any]]] = {}
    with Loader(dataset, data, list(dataset.slices()), seed=0, epoch=0, training=False) as loader:
        for batch in loader:
            columns.setdefault("label ", []).append(batch.labels_BL[:, 0].copy())
            columns.setdefault("dense ", []).append(batch.dense_BD.copy())
            for keys in batch.tables.values():
                padded = np.concatenate([np.zeros(1, np.uint64), keys.keys_U])
                for name, index in keys.index.items():
                    columns.setdefault(name, []).append(padded[index])
    return {name: _stack(pieces) for name, pieces in columns.items()}


def _stack(pieces: list[NDArray[Any]]) -> NDArray[Any]:
    if pieces[0].ndim == 1 or len({p.shape[1] for p in pieces}) == 1:
        return np.concatenate(pieces)
    longest = max(p.shape[1] for p in pieces)
    return np.concatenate([np.pad(p, ((0, 0), (0, longest - p.shape[1]))) for p in pieces])


def _number(keys: NDArray[np.uint64], kept: NDArray[np.uint64]) -> NDArray[np.int64]:
    """0 for no id, 1 for a rare or unknown one, then the kept ids in their order."""
    numbers: NDArray[np.int64] = (keys != 0).astype(np.int64)
    if len(kept):
        at = np.minimum(np.searchsorted(kept, keys), len(kept) - 1)
        known = kept[at] == keys
        numbers[known] = at[known] + 2
    return numbers


@dataclass(frozen=True)
class Result:
    """One model on both sides; means over seeds at the best epoch of each run."""

    kind: str
    seeds: int
    our_auc: float
    our_auc_sd: float
    our_logloss: float
    peer_auc: float
    peer_auc_sd: float
    peer_logloss: float

    @property
    def difference(self) -> float:
        """Our AUC minus the peer's."""
        return self.our_auc - self.peer_auc


def variant(job: JobConfig, kind: str) -> JobConfig:
    """The job with another model; a sequence is averaged where the model reads none.

    Raises:
        ParityError: a kind that has no peer, or DIN without a sequence.
    """
    if kind not in KINDS:
        raise ParityError(f"{kind!r} has no PyTorch peer here; there are {', '.join(KINDS)}")
    raw = job.model_dump(mode="json")
    known = KIND_CONFIGS[kind].model_fields
    raw["model"] = {k: v for k, v in raw["model"].items() if k in known} | {"kind": kind}
    sequences = [f for f in raw["data"]["sparse"] if f["pooling"] == "none"]
    if kind == "din" and not sequences:
        raise ParityError("din needs a feature with `pooling: none`")
    if kind != "din":
        for feature in sequences:
            feature["pooling"] = "mean"
    return JobConfig.parse(raw, source=f"the job as {kind}")


def run(
    jobs: Mapping[str, JobConfig],
    peer: Mapping[str, PeerOptions],
    seeds: Sequence[int],
    torch_python: Path,
    out: Path,
    say: Callable[[str], None],
) -> list[Result]:
    """Runs every kind of `jobs` on both sides, our side in one process.

    Raises:
        ParityError: a run failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for kind, job in jobs.items():
        options = peer[kind]
        encode(job, out / "rows.npz", options.min_count)
        ours = [_ours(job, seed, out) for seed in seeds]
        theirs = [_theirs(kind, job, options, seed, torch_python, out) for seed in seeds]
        result = Result(kind, len(seeds), *_summary(ours), *_summary(theirs))
        say(f"{kind}: ours {result.our_auc:.5f}, peer {result.peer_auc:.5f}, difference {result.difference:+.5f}")
        results.append(result)
    (out / "peers.json").write_text(json.dumps([asdict(r) for r in results], indent=1), encoding="utf-8")
    return results


def _summary(runs: Sequence[Mapping[str, float]]) -> tuple[float, float, float]:
    aucs = [run["auc"] for run in runs]
    return (
        statistics.fmean(aucs),
        statistics.stdev(aucs) if len(aucs) > 1 else 0.0,
        statistics.fmean(run["logloss"] for run in runs),
    )


def _ours(job: JobConfig, seed: int, out: Path) -> Mapping[str, float]:
    """Our best epoch, in one process."""
    raw = job.model_dump(mode="json")
    raw |= {"seed": seed, "run_dir": str(out / "run")}
    raw["train"]["evaluation"] = {"every_epochs": 1}
    result = execute(Variant("single"), JobConfig.parse(raw), out)
    epochs: list[dict[str, float]] = [*result["evaluations"], result["eval"]]
    return max(epochs, key=lambda e: e["auc"])


def _theirs(
    kind: str, job: JobConfig, options: PeerOptions, seed: int, torch_python: Path, out: Path
) -> Mapping[str, float]:
    """The peer's best epoch."""
    model = job.model.model_dump()
    spec = {
        "kind": kind,
        "rows": str(out / "rows.npz"),
        "width": next(iter(job.tables.values())).width,
        "tower": model.get("tower", []),
        "dropout": model.get("dropout", 0.0),
        "cross_layers": model.get("cross_layers", 0),
        "attention": model.get("attention", []),
        "initial_range": 0.01,
        "batch_rows": job.data.batch_rows,
        "epochs": job.train.epochs,
        "seed": seed,
        "learning_rate": options.learning_rate,
        "l2": options.l2,
        "threads": options.threads,
    }
    file = out / "peer.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    command = tied([str(torch_python), str(_SCRIPT), str(file)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise ParityError(f"the PyTorch {kind}, seed {seed}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    epochs: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])["epochs"]
    return max(epochs, key=lambda e: e["auc"])


def markdown(results: Sequence[Result]) -> str:
    """The results as a table."""
    lines = [
        "| model | seeds | our AUC | our logloss | PyTorch AUC | PyTorch logloss | AUC difference |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.kind} | {r.seeds} | {r.our_auc:.5f} ± {r.our_auc_sd:.5f} | {r.our_logloss:.5f} | "
        f"{r.peer_auc:.5f} ± {r.peer_auc_sd:.5f} | {r.peer_logloss:.5f} | {r.difference:+.5f} |"
        for r in results
    ]
    return "\n".join(lines)
