"""``paddlewheel tune``: search over a job's settings."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from paddlewheel.deploy.cli.arguments import JobFile, Json, Overrides, answer, say

Metric = Literal[
    "auc",
    "weighted_auc",
    "gauc",
    "gauc_by_clicks",
    "logloss",
    "weighted_logloss",
    "normalised_entropy",
    "calibration_error",
]


def tune(
    job: JobFile,
    space: Annotated[
        Path,
        Parameter(help="YAML file: key -> {low, high, log, step} or {choices: [...]}, keys as `--set` names them."),
    ],
    *,
    out: Annotated[Path, Parameter(help="Folder for trials, table, plot and the best job. A search there goes on.")],
    trials: Annotated[int, Parameter(validator=validators.Number(gte=1), help="Trials in all.")] = 30,
    seeds: Annotated[int, Parameter(validator=validators.Number(gte=1), help="Runs a trial; their mean counts.")] = 1,
    metric: Annotated[Metric, Parameter(help="Of the evaluation at the end of each run.")] = "auc",
    run_as: Annotated[
        str, Parameter(help="single: one process, tables in memory. SxT: with S servers and T trainers.")
    ] = "single",
    overrides: Overrides = (),
    json: Json = False,
) -> None:
    """Search for better settings of a job on this machine, one run after the other (Optuna's TPE).

    The best value is chosen on the evaluation rows, so it flatters: judge the best job on rows of their own.
    """
    from paddlewheel.deploy.bench import tuning
    from paddlewheel.deploy.bench.parity.lab import Variant

    search = tuning.Search(job, overrides, tuning.load_space(space), metric, Variant.parse(run_as), seeds)
    study = tuning.run(search, trials, out, say)
    files = tuning.write(search, study, out)
    table = tuning.markdown(search, study)
    (out / "trials.md").write_text(table + "\n", encoding="utf-8")
    best = study.best_trial
    answer(
        {"best": {"trial": best.number, metric: best.value, "params": best.params}, "files": [str(f) for f in files]},
        json=json,
        text=lambda: f"{table}\n\nbest job: {out / 'best.yaml'}",
    )
