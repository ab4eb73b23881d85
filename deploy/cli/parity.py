"""``paddlewheel bench parity`` and ``bench baselines``: accuracy spread over many processes, and next to PyTorch."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from paddlewheel.deploy.cli.arguments import JobFile, Json, OptionError, Overrides, Threads, answer, say


def parity(
    job: JobFile,
    *,
    out: Annotated[Path, Parameter(help="Folder for the runs (kept, so that it can go on), a table and a plot.")],
    variants: Annotated[
        tuple[str, ...],
        Parameter(
            consume_multiple=True,
            negative=(),
            help="single, SxT (servers x trainers), SxT@k (at most k steps of staleness). By default single, 1x1@0, "
            "1x1@1, 2x2@0, 2x2@1, 2x2@4, 2x2@8.",
        ),
    ] = (),
    seeds: Annotated[int, Parameter(validator=validators.Number(gte=1), help="Seeds, counted from the job's own.")] = 5,
    overrides: Overrides = (),
    json: Json = False,
) -> None:
    """Accuracy of one job in one process and spread over many, seed by seed: AUC, its band, its difference.

    Trainers share the job's batch, so that a step sees as many rows in every variant.
    """
    from paddlewheel.deploy.bench.parity import lab
    from paddlewheel.trainer.job.config import JobConfig

    config = JobConfig.load(job, overrides)
    chosen = [lab.Variant.parse(text) for text in variants or lab.DEFAULT_VARIANTS]
    runs = lab.run_all(config, chosen, range(config.seed, config.seed + seeds), out, say)
    comparisons = lab.compare(runs)
    table = lab.markdown(comparisons)
    (out / "parity.md").write_text(table + "\n", encoding="utf-8")
    try:
        lab.plot(runs, out / "parity.png")
    except ImportError:
        say("no plot: matplotlib is not installed (extra `plot`)")
    answer([asdict(c) for c in comparisons], json=json, text=lambda: table)


def baselines(
    job: JobFile,
    *,
    torch_python: Annotated[Path, Parameter(help="A Python that has torch and numpy.")],
    out: Annotated[Path, Parameter(help="Folder for the results.")],
    models: Annotated[
        tuple[Literal["lr", "deepfm", "dcn", "din"], ...], Parameter(consume_multiple=True, negative=())
    ] = ("lr", "deepfm", "dcn"),
    seeds: Annotated[int, Parameter(validator=validators.Number(gte=1), help="Seeds, counted from the job's own.")] = 3,
    peer_rates: Annotated[
        tuple[float, ...],
        Parameter(
            consume_multiple=True, negative=(), help="Learning rate of PyTorch's Adam, one for all models or one each."
        ),
    ] = (1e-3,),
    peer_l2: Annotated[float, Parameter(help="L2 of PyTorch's Adam, on all parameters.")] = 1e-4,
    min_count: Annotated[
        int, Parameter(validator=validators.Number(gte=1), help="PyTorch: rarer ids share one embedding.")
    ] = 10,
    threads: Threads = None,
    overrides: Overrides = (),
    json: Json = False,
) -> None:
    """AUC of our models, in one process, next to plain PyTorch ones on the same rows, features and split.

    Both are judged at their best epoch of as many as the job has.
    """
    from paddlewheel.deploy.bench.parity import peers as lab
    from paddlewheel.trainer.job.config import JobConfig

    config = JobConfig.load(job, overrides)
    if len(peer_rates) not in {1, len(models)}:
        raise OptionError(f"--peer-rates has {len(peer_rates)} numbers for {len(models)} models: give one, or one each")
    rates = dict(zip(models, peer_rates * (len(models) // len(peer_rates)), strict=True))
    results = lab.run(
        {kind: lab.variant(config, kind) for kind in models},
        {kind: lab.PeerOptions(rates[kind], peer_l2, min_count, threads or 1) for kind in models},
        range(config.seed, config.seed + seeds),
        torch_python,
        out,
        say,
    )
    table = lab.markdown(results)
    (out / "peers.md").write_text(table + "\n", encoding="utf-8")
    answer([asdict(r) for r in results], json=json, text=lambda: table)
