"""``paddlewheel plot``: what a run has learnt, as PNG files and a page."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from paddlewheel.deploy.cli.arguments import Json, answer


def plot(
    run_dir: Annotated[Path, Parameter(help="The run folder of a job (`run_dir`).")],
    out: Annotated[
        Path | None, Parameter(help="Folder for the files. By default `report` inside the run folder.")
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Draw what a run has learnt: loss, evaluations, reliability, and the values of `data.slice_metrics_by`."""
    from paddlewheel.deploy.reports import learning_curves

    files = learning_curves.write(run_dir, out or run_dir / "report")
    answer({"files": [str(file) for file in files]}, json=json, text=lambda: "\n".join(map(str, files)))
