"""``paddlewheel export``: a trained model as files for serving."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from paddlewheel.deploy.cli.arguments import Checkpoint, Json, Model, Overrides, answer, say

if TYPE_CHECKING:
    from paddlewheel.trainer.serving.export import Exported


def export(
    model: Model,
    *,
    to: Annotated[Path, Parameter(help="The new folder. It appears whole, or not at all.")],
    checkpoint: Checkpoint = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "int8"],
        Parameter(help="How embeddings are stored. What others than float32 cost in AUC is printed (from data.eval)."),
    ] = "float32",
    onnx: Annotated[
        bool, Parameter(negative=(), help="Also write the program for ONNX runtimes (extra: onnx).")
    ] = False,
    compare: Annotated[bool, Parameter(help="Score data.eval to tell what a smaller dtype costs.")] = True,
    overrides: Overrides = (),
    json: Json = False,
) -> None:
    """Export a trained model: inference program, tables as Parquet, and how raw columns become their inputs.

    Nothing of paddlewheel is needed to use it: README.md in the folder says how, export.json says everything else.
    """
    from paddlewheel.trainer.agent.paddle_environment import prepare_for_paddle

    prepare_for_paddle()
    from paddlewheel.deploy.cli.arguments import find_model
    from paddlewheel.trainer.serving.export import export_model

    with find_model(model, checkpoint, overrides) as (job, trained), _Phases(quiet=json) as phases:
        done = export_model(job, trained, to, dtype=dtype, onnx=onnx, compare=compare, on_phase=phases.begin)
    answer(_plain(done), json=json, text=lambda: "\n".join(_lines(done, dtype)))


class _Phases:
    """A line on standard error for each phase, with how long it took."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._name = ""
        self._began = 0.0

    def begin(self, name: str) -> None:
        import time

        self._end()
        self._name, self._began = name, time.monotonic()

    def __enter__(self) -> "_Phases":  # noqa: PYI034 -- private
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        import time

        if self._name and not self._quiet:
            say(f"{self._name}: {time.monotonic() - self._began:.1f} s")
        self._name = ""


def _plain(done: "Exported") -> dict[str, Any]:
    return {
        "directory": str(done.directory),
        "step": done.spec.step,
        "bytes": done.num_bytes,
        "keys": {name: table.keys for name, table in done.spec.tables.items()},
        "comparison": done.comparison,
    }


def _lines(done: "Exported", dtype: str) -> Iterator[str]:
    yield f"exported     {done.spec.job}, step {done.spec.step:,}: {done.num_bytes / (1 << 20):,.1f} MiB"
    for name, table in done.spec.tables.items():
        without = table.keys - table.embeddings
        note = f", {without:,} of them with a first-order weight alone" if without and table.first_order else ""
        yield f"table        {name}: {table.keys:,} keys of width {table.width}, {table.dtype}{note}"
    for label, reports in (done.comparison or {}).items():
        before, after = reports["float32"], reports[dtype]
        changes = ", ".join(
            _change(name, before[key], after[key]) for name, key in (("AUC", "auc"), ("logloss", "logloss"))
        )
        yield f"{dtype:12} {label}: {changes} on {after['rows']:,} rows of data.eval"
    if done.comparison is None and dtype != "float32":
        yield f"{dtype:12} not compared with float32: the job has no data.eval, or --no-compare was given"
    yield f"written to   {done.directory}"


def _change(name: str, before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return f"{name} undefined"
    return f"{name} {before:.6f} -> {after:.6f} ({after - before:+.6f})"
