"""``paddlewheel checkpoint``: what was saved, and whether it is whole."""

import json as json_module
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from deploy.cli.arguments import Json, answer

app = App(name="checkpoint", help="List and verify checkpoints.")

Directory = Annotated[
    Path, Parameter(help="Folder of checkpoints (`checkpoint.directory` of the job), or one step-<n> folder.")
]


@app.command
def ls(directory: Directory, *, json: Json = False) -> None:
    """List the committed checkpoints of a folder, oldest first."""
    rows = [_facts(path) for path in _committed(directory)]
    answer(rows, json=json, text=lambda: "\n".join(map(_line, rows)))


@app.command
def verify(directory: Directory, *, json: Json = False) -> None:
    """Read every file of the checkpoints of a folder and compare it with its manifest; exit code 64 at damage."""
    from trainer import checkpoint

    paths = _committed(directory)
    for path in paths:
        checkpoint.read(path)
    rows = [_facts(path) for path in paths]
    answer(rows, json=json, text=lambda: "\n".join(f"{_line(row)}  whole" for row in rows))


def _committed(directory: Path) -> list[Path]:
    from trainer import checkpoint

    if (directory / "MANIFEST.json").is_file():
        return [directory]
    found = checkpoint.committed(directory)
    if not found:
        raise checkpoint.CheckpointError(
            f"{directory} holds no committed checkpoint (a step-<n> folder with MANIFEST.json)"
        )
    return found


def _facts(path: Path) -> dict[str, Any]:
    manifest = json_module.loads((path / "MANIFEST.json").read_text(encoding="utf-8"))
    return {
        "path": str(path),
        "step": manifest["step"],
        "job": manifest.get("job"),
        "keys": {name: table["keys"] for name, table in manifest.get("tables", {}).items()},
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
    }


def _line(row: dict[str, Any]) -> str:
    keys = ", ".join(f"{name}: {number:,} keys" for name, number in row["keys"].items())
    return f"{row['path']}  {row['bytes'] / (1 << 20):,.1f} MiB  {keys}"
