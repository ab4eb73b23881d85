"""``paddlewheel model``: which models there are, and what a job's model consists of."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cyclopts import App

from paddlewheel.deploy.cli.arguments import JobFile, Json, Overrides, answer

if TYPE_CHECKING:
    from paddlewheel.trainer.dense.summary import Summary

app = App(name="model", help="List the models that a job can have, or look into a job's model.")


@app.command(name="ls")
def list_models(*, json: Json = False) -> None:
    """List the kinds of models: what each is, and its keys with their defaults."""
    from paddlewheel.trainer.models.config import KINDS

    kinds = {
        kind: {
            "about": " ".join((config.__doc__ or "").split()),
            "keys": {
                name: None if field.is_required() else field.get_default(call_default_factory=True)
                for name, field in config.model_fields.items()
                if name != "kind"
            },
        }
        for kind, config in KINDS.items()
    }

    def lines() -> Iterator[str]:
        width = max(map(len, kinds))
        for kind, facts in kinds.items():
            yield f"{kind:{width}}  {facts['about']}"
            if facts["keys"]:
                yield f"{'':{width}}  keys: {', '.join(facts['keys'])}"
        yield "Your own: `kind: my_models:MyModel`, a class in my_models.py beside the job file."

    answer(kinds, json=json, text=lambda: "\n".join(lines()))


@app.command
def summary(job: JobFile, *, overrides: Overrides = (), json: Json = False) -> None:
    """Build a job's model and send one batch through it: layers, output shapes, parameters, arithmetic.

    The batch is the first rows of data.train, or random numbers where these cannot be read. Nothing is trained, and no
    server is started: embeddings are random.
    """
    from paddlewheel.trainer.agent.paddle_environment import prepare_for_paddle
    from paddlewheel.trainer.job.config import JobConfig

    config = JobConfig.load(job, overrides)
    prepare_for_paddle()
    from paddlewheel.trainer.dense.summary import summarise

    found = summarise(config)
    answer(_plain(found), json=json, text=lambda: "\n".join(_lines(found)))


def _plain(found: "Summary") -> dict[str, object]:
    from dataclasses import asdict

    return {**asdict(found), "flops": found.flops}


def _lines(found: "Summary") -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("layer", "class", "output", "parameters", "FLOPs")]
    for layer in found.layers:
        shape = "" if layer.output is None else f"[{', '.join(map(str, layer.output))}]"
        rows.append((layer.name or "(itself)", layer.kind, shape, f"{layer.parameters:,}", f"{layer.flops:,}"))
    rows.append(("total", "", "", f"{found.parameters:,}", f"{found.flops:,}"))
    yield from _table(rows, right=2)
    yield ""
    used: list[tuple[str, ...]] = [("table", "floats a key", "keys of the batch", "features")]
    used += [(t.name, f"{t.width:,}", f"{t.keys:,}", ", ".join(t.features)) for t in found.tables]
    yield from _table(used)
    yield ""
    where = "data.train" if found.made_up is None else f"random numbers ({found.made_up})"
    yield f"batch        {found.rows:,} rows: {where}"
    yield f"FLOPs a row  {found.flops / found.rows:,.0f} forward; training takes about three times as many"
    if found.uncounted:
        yield f"not counted  {', '.join(found.uncounted)}: their arithmetic is not known"
    yield f"loss         {found.loss:.5f} before training, with random embeddings"
    means = ", ".join(f"{label} {mean:.4f}" for label, mean in found.mean_predictions.items())
    yield f"mean score   {means}"


def _table(rows: list[tuple[str, ...]], right: int = 0) -> Iterator[str]:
    """Columns side by side, the last `right` of them flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:>{width}}" if place >= len(row) - right else f"{cell:{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
