"""The same job, data and seeds in one process and spread over many: what does it do to AUC?

A variant is `single` (one process, tables in memory) or `SxT` with S servers and T trainers, `SxT@k` for at most k
steps of staleness. Trainers share the job's batch: each reads batch_rows / T, so that a step sees as many rows in every
variant and only the distribution differs. Every run is one line of `runs.jsonl`, so an interrupted lab goes on where it
was.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paddlewheel.trainer.distributed.subprocesses import tied
from paddlewheel.trainer.job.config import JobConfig

DEFAULT_VARIANTS = ("single", "1x1@0", "1x1@1", "2x2@0", "2x2@1", "2x2@4", "2x2@8")
_FORM = re.compile(r"(\d+)x(\d+)(?:@(\d+))?")
_RUN_SECONDS = 3600


class ParityError(ValueError):
    """A variant that cannot be run, or a run that failed."""


@dataclass(frozen=True)
class Variant:
    """How a job is spread.

    Attributes:
        name: as given.
        servers, trainers: None for the single process.
        staleness_steps: None leaves the job's own.
    """

    name: str
    servers: int | None = None
    trainers: int | None = None
    staleness_steps: int | None = None

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Raises ParityError for anything but `single`, `SxT` and `SxT@k`."""
        if text == "single":
            return cls(text)
        found = _FORM.fullmatch(text)
        if found is None or not int(found[1]) or not int(found[2]):
            raise ParityError(f"{text!r} is no variant: write single, or 2x4 for 2 servers and 4 trainers, or 2x4@8")
        return cls(text, int(found[1]), int(found[2]), None if found[3] is None else int(found[3]))

    def job(self, job: JobConfig, seed: int, run_dir: Path) -> JobConfig:
        """The job of one run.

        Raises:
            ParityError: the batch cannot be shared evenly.
        """
        raw = job.model_dump(mode="json")
        raw |= {"seed": seed, "run_dir": str(run_dir)}
        raw["checkpoint"] |= {"directory": None, "every_minutes": None, "every_steps": None, "keep": 1}
        raw["train"]["evaluation"] = {}
        if self.trainers is not None:
            if job.data.batch_rows % self.trainers:
                raise ParityError(f"data.batch_rows = {job.data.batch_rows} is no multiple of {self.trainers} trainers")
            raw["data"]["batch_rows"] = job.data.batch_rows // self.trainers
            raw["cluster"] |= {"servers": self.servers, "trainers": self.trainers, "server_ports": None}
        if self.staleness_steps is not None:
            raw["train"]["max_staleness_steps"] = self.staleness_steps
        return JobConfig.parse(raw, source=f"variant {self.name}")


@dataclass(frozen=True)
class Run:
    """One run's accuracy on the evaluation rows."""

    variant: str
    seed: int
    auc: float
    logloss: float
    rows: int
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """A variant over all its seeds.

    Attributes:
        auc, logloss: means; auc_sd: standard deviation over seeds (0 with one seed).
        difference: mean of AUC minus the single process's AUC of the same seed; None without common seeds.
        difference_half_width: half of the 95 % interval of that mean (Student's t); None with fewer than two pairs.
        logloss_difference: the same of logloss.
    """

    variant: str
    seeds: int
    auc: float
    auc_sd: float
    logloss: float
    difference: float | None
    difference_half_width: float | None
    logloss_difference: float | None


def run_all(
    job: JobConfig,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    out: Path,
    say: Callable[[str], None],
) -> list[Run]:
    """Runs what `out/runs.jsonl` does not hold yet, seed by seed, so that an early end leaves whole comparisons.

    Raises:
        ParityError: no evaluation data, an uneven batch, or a run that failed.
    """
    if not job.data.eval:
        raise ParityError("data.eval is missing: without rows to evaluate there is nothing to compare")
    for variant in variants:
        variant.job(job, 0, out)
    out.mkdir(parents=True, exist_ok=True)
    store = out / "runs.jsonl"
    _refuse_another_job(job, out / "job.json")
    runs = read(store)
    store.write_text("".join(map(_line, runs)), encoding="utf-8")  # without a last line that was cut off
    done = {(run.variant, run.seed) for run in runs}
    for seed in seeds:
        for variant in variants:
            if (variant.name, seed) in done:
                continue
            result = execute(variant, variant.job(job, seed, out / "run"), out)
            score = result["eval"]
            if score["auc"] is None:
                raise ParityError("the evaluation rows have one class only, so there is no AUC to compare")
            run = Run(variant.name, seed, score["auc"], score["logloss"], result["rows"], result["seconds"])
            with store.open("a", encoding="utf-8") as stream:
                stream.write(_line(run))
            runs.append(run)
            say(f"{variant.name:>8}  seed {seed}: AUC {run.auc:.5f}, logloss {run.logloss:.5f}, {run.seconds:.0f} s")
    return runs


def _line(run: Run) -> str:
    return json.dumps(asdict(run)) + "\n"


def read(store: Path) -> list[Run]:
    """The runs of an earlier lab; a line that was cut off is left out."""
    if not store.exists():
        return []
    runs = []
    for line in store.read_text(encoding="utf-8").splitlines():
        try:
            runs.append(Run(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return runs


def _refuse_another_job(job: JobConfig, path: Path) -> None:
    text = json.dumps(job.model_dump(mode="json", exclude={"seed", "run_dir"}), indent=1)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ParityError(f"{path.parent} holds runs of another job or of other settings: take another folder")
    path.write_text(text, encoding="utf-8")


def execute(variant: Variant, job: JobConfig, out: Path) -> dict[str, Any]:
    """One run; the fields of its `result`. Its files are removed.

    Raises:
        ParityError: the run failed.
    """
    shutil.rmtree(job.run_dir, ignore_errors=True)
    file = out / "variant.json"
    file.write_text(job.model_dump_json(), encoding="utf-8")
    if variant.trainers is None:
        command = [sys.executable, "-m", "paddlewheel.deploy.bench.parity.single", str(file)]
    else:
        command = [sys.executable, "-m", "paddlewheel.deploy.cli", "train", str(file), "--json"]
    done = subprocess.run(tied(command), capture_output=True, text=True, timeout=_RUN_SECONDS, check=False)
    shutil.rmtree(job.run_dir, ignore_errors=True)  # its checkpoint is large
    if done.returncode:
        raise ParityError(f"{variant.name}, seed {job.seed}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1] if variant.trainers is None else done.stdout)
    result: dict[str, Any] = told.get("result", told)
    return result


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Every variant over its seeds, in the order in which variants first appear."""
    by_variant: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, {})[run.seed] = run
    single = by_variant.get("single", {})
    result = []
    for name, by_seed in by_variant.items():
        aucs = [run.auc for run in by_seed.values()]
        pairs = [] if name == "single" else [(by_seed[s], single[s]) for s in by_seed if s in single]
        differences = [one.auc - other.auc for one, other in pairs]
        result.append(
            Comparison(
                variant=name,
                seeds=len(aucs),
                auc=statistics.fmean(aucs),
                auc_sd=statistics.stdev(aucs) if len(aucs) > 1 else 0.0,
                logloss=statistics.fmean(run.logloss for run in by_seed.values()),
                difference=statistics.fmean(differences) if differences else None,
                difference_half_width=_half_width(differences),
                logloss_difference=statistics.fmean(a.logloss - b.logloss for a, b in pairs) if pairs else None,
            )
        )
    return result


# Student's t for a two-sided 95 % interval, by degrees of freedom; beyond the table 2 is close, and on the safe side.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def _half_width(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else 2.1
    return t * statistics.stdev(values) / math.sqrt(len(values))


def markdown(comparisons: Sequence[Comparison]) -> str:
    """The comparison as a table."""
    lines = [
        "| variant | seeds | AUC | sd over seeds | logloss | AUC minus single | 95 % of it | logloss minus single |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c in comparisons:
        difference = "" if c.difference is None else f"{c.difference:+.5f}"
        width = "" if c.difference_half_width is None else f"± {c.difference_half_width:.5f}"
        loss = "" if c.logloss_difference is None else f"{c.logloss_difference:+.5f}"
        own = f"| {c.variant} | {c.seeds} | {c.auc:.5f} | {c.auc_sd:.5f} | {c.logloss:.5f} |"
        lines.append(f"{own} {difference} | {width} | {loss} |")
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """AUC of every run, and its difference to the single process of the same seed; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    comparisons = compare(runs)
    names = [c.variant for c in comparisons]
    single = {run.seed: run.auc for run in runs if run.variant == "single"}
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(names)), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for place, c in enumerate(comparisons):
        mine = [run for run in runs if run.variant == c.variant]
        left.plot([run.auc for run in mine], [place] * len(mine), "o", color="#2563eb", alpha=0.35, ms=5)
        left.plot([c.auc], [place], "|", color="#1f2937", ms=16, mew=2)
        paired = [run.auc - single[run.seed] for run in mine if run.seed in single and run.variant != "single"]
        right.plot(paired, [place] * len(paired), "o", color="#2563eb", alpha=0.35, ms=5)
        if c.difference is not None:
            width = c.difference_half_width or 0.0
            right.errorbar([c.difference], [place], xerr=[width], fmt="|", color="#1f2937", ms=16, mew=2, capsize=3)
    right.axvline(0.0, color="#d97706", linewidth=1.2, linestyle="--")
    left.set(xlabel="AUC (a dot a seed, the mark is the mean)", yticks=range(len(names)), ylim=(len(names) - 0.5, -0.5))
    left.set_yticklabels(names)
    right.set(xlabel="AUC minus single process, same seed (95 % interval)")
    for axes in (left, right):
        axes.grid(color="#e5e7eb")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path)
