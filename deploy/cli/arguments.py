"""Arguments that several commands share, and how they print an answer."""

import json as json_module
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

JobFile = Annotated[Path, Parameter(help="The job file (YAML).")]

Overrides = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        negative=(),
        show_default=False,
        help="Change one value of the job, for example `--set cluster.trainers=4`. May be given several times.",
    ),
]

Json = Annotated[
    bool,
    Parameter(
        name="--json",
        negative=(),
        show_default=False,
        help="Print one JSON object for machines instead of text for people.",
    ),
]


def answer(data: Any, *, json: bool, text: Callable[[], str]) -> None:
    """Prints the answer of a command: `data` as JSON for machines, or what `text` makes of it for people."""
    print(json_module.dumps(data, indent=2, ensure_ascii=False) if json else text())
