"""``paddlewheel bench recovery``: what the loss of a server costs, by size of the tables."""

import json as json_module
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from paddlewheel.deploy.cli.arguments import Json, answer
from paddlewheel.deploy.cli.data import Rows


def recovery(
    *,
    keys: Annotated[
        tuple[Rows, ...],
        Parameter(consume_multiple=True, negative=(), help="Keys in the tables; one drill for each number."),
    ] = (100_000, 1_000_000),
    servers: Annotated[int, Parameter(help="Parameter servers.")] = 2,
    width: Annotated[int, Parameter(help="Floats of an embedding.")] = 16,
    engine: Annotated[
        Literal["paddlewheel", "paddle"] | None,
        Parameter(help="Whose table holds the rows. By default ours where it works, else Paddle's."),
    ] = None,
    seed: Annotated[int, Parameter(help="Fixes the rows.")] = 0,
    out: Annotated[
        Path | None, Parameter(help="Folder for recovery.json, recovery.md and, with matplotlib, .png.")
    ] = None,
    json: Json = False,
) -> None:
    """Kill a server of a real job after a checkpoint, and measure: seconds to notice, seconds until it trains again,
    rows trained twice, seconds and MB/s of the checkpoint; with a projection to a billion keys.
    """
    from paddlewheel.deploy.bench import recovery

    costs = [
        recovery.drill(number, seed=seed, width=width, num_servers=servers, engine=engine or "auto") for number in keys
    ]
    found = recovery.to_json(costs)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "recovery.json").write_text(json_module.dumps(found, indent=1) + "\n", encoding="utf-8")
        (out / "recovery.md").write_text("\n".join(recovery.table(costs)) + "\n", encoding="utf-8")
        recovery.plot(costs, out / "recovery.png")
    answer(found, json=json, text=lambda: "\n".join(recovery.table(costs)))
