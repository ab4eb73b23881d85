"""``paddlewheel deltas``: the bases and deltas that a job publishes day by day (`train.days.publish`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from paddlewheel.deploy.cli.arguments import Json, answer

if TYPE_CHECKING:
    from paddlewheel.pserver.delta_chain import Link

app = App(name="deltas", help="Bases and deltas of a table, as a job publishes them day by day.")

Directory = Annotated[
    Path, Parameter(help="The chain of one table (`published/<table>` in the run folder, or the job's own folder).")
]


@app.command
def ls(directory: Directory, *, json: Json = False) -> None:
    """List them: number, base or delta, day, and how many rows changed or are gone."""
    from paddlewheel.pserver import delta_chain
    from paddlewheel.pserver.errors import CheckpointError

    found = delta_chain.links(directory)
    if not found:
        raise CheckpointError(f"{directory} holds neither a base nor a delta")
    answer([link.model_dump() for link in found], json=json, text=lambda: "\n".join(map(_line, found)))


@app.command
def apply(
    directory: Directory,
    *,
    to: Annotated[Path, Parameter(help="New folder for the export (Parquet).")],
    day: Annotated[str | None, Parameter(help="A day of the chain, such as 2026-01-05; by default the newest.")] = None,
    json: Json = False,
) -> None:
    """Make of a base and its deltas the table that a full export of the day would hold.

    A chain with a link missing, out of order, or of other content is refused.
    """
    from paddlewheel.pserver import delta_chain

    made = delta_chain.follow(directory, to, day=day)
    facts = {"rows": made.exported.num_rows, "bytes": made.exported.num_bytes, "content_id": made.content_id}
    answer(facts, json=json, text=lambda: f"{facts['rows']:,} rows in {to}")


def _line(link: "Link") -> str:
    what = "all" if link.kind == "base" else "changed"
    return f"{link.number:06d}  {link.kind:5}  {link.day}  {link.num_rows:,} rows {what}, {link.num_removed:,} gone"
