"""``paddlewheel checkpoint``: what was saved, whether it is whole, and how it differs; or a new one now."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter, validators

from paddlewheel.deploy.cli.arguments import Json, answer, check_host_and_port
from paddlewheel.trainer.job.exit_codes import EX_USAGE

if TYPE_CHECKING:
    from paddlewheel.trainer.checkpoint.store import Checkpoints


app = App(name="checkpoint", help="Look at checkpoints, rewrite them, or ask a running job for one.")

Location = Annotated[
    str,
    Parameter(
        help="Where checkpoints are (`checkpoint.directory` of the job: a folder, s3://...), or one `step-<n>` in it."
    ),
]
Address = Annotated[str, Parameter(help="A checkpoint: its `step-<n>` folder, or `s3://.../step-<n>`.")]
Folder = Annotated[Path, Parameter(help="A checkpoint (its `step-<n>` folder).")]


class CheckpointFailedError(RuntimeError):
    """The running job made no checkpoint."""


@app.command
def ls(location: Location, *, json: Json = False) -> None:
    """List the committed checkpoints of a folder or object store, oldest first."""
    kept, addresses = _committed(location)
    rows = [_facts(kept, address) for address in addresses]
    answer(rows, json=json, text=lambda: "\n".join(map(_line, rows)))


@app.command
def verify(location: Location, *, json: Json = False) -> int:
    """Read every byte of the checkpoints of a folder or object store and compare it with its manifest.

    Any changed byte, missing file or file too many is found; exit code 64 then.
    """
    from paddlewheel.trainer.checkpoint.manifest import CheckpointError

    rows = []
    kept, addresses = _committed(location)
    for address in addresses:
        row = _facts(kept, address)
        if "damage" not in row:
            try:
                kept.verify(address)
            except CheckpointError as error:
                row["damage"] = str(error)
        rows.append(row)

    def text() -> str:
        return "\n".join(row["damage"] if row.get("damage") else f"{_line(row)}  whole" for row in rows)

    answer(rows, json=json, text=text)
    return EX_USAGE if any(row.get("damage") for row in rows) else 0


@app.command
def create(
    address: Annotated[
        str, Parameter(validator=check_host_and_port, help="HOST:PORT of the coordinator of the running job.")
    ],
    *,
    timeout_seconds: Annotated[
        float, Parameter(validator=validators.Number(gt=0, lte=1e8), help="How long to wait until it is committed.")
    ] = 600.0,
    json: Json = False,
) -> None:
    """Ask a running job for a checkpoint at its next step, and wait until it is committed."""
    found = asyncio.run(_ask(address, timeout_seconds))
    answer(found, json=json, text=lambda: str(found["path"]))


@app.command
def diff(first: Address, second: Address, *, json: Json = False) -> int:
    """Compare two checkpoints: job, rows seen, dense parameters, and every key of every table.

    Exit code 0 when they hold the same model, 1 when they differ.
    """
    from paddlewheel.deploy.reports import checkpoint_diff
    from paddlewheel.trainer.checkpoint.folder_store import open_address

    (kept, one), (also_kept, other) = open_address(first), open_address(second)
    with kept.local_copy(one) as before, also_kept.local_copy(other) as after:
        found = checkpoint_diff.compare(before, after)
    answer(found.to_json(), json=json, text=lambda: "\n".join(found.lines()))
    return 0 if found.same_model else 1


@app.command
def prune(
    location: Annotated[str, Parameter(help="Folder of checkpoints, or s3://....")],
    *,
    keep: Annotated[int, Parameter(help="How many of the newest to keep; the best one stays in any case.")] = 1,
    json: Json = False,
) -> None:
    """Remove all but the newest checkpoints of a folder or object store.

    A folder must not be in use by a job. A job that writes to an object store goes on undisturbed.
    """
    from paddlewheel.trainer.checkpoint.manifest import CheckpointError

    if keep < 1:
        raise CheckpointError("--keep must be at least 1: remove the folder itself to remove everything")
    kept, _ = _committed(location)
    with kept.beside_owner():
        removed = kept.prune(keep)
    answer(removed, json=json, text=lambda: "\n".join(f"removed {path}" for path in removed) or "nothing to remove")


@app.command
def reshard(
    source: Folder,
    target: Annotated[Path, Parameter(help="The new checkpoint's folder: `step-<n>` of the same step, not there yet.")],
    *,
    shards: Annotated[int, Parameter(help="Shards of every table; a multiple of the number of servers.")],
    json: Json = False,
) -> None:
    """Copy a checkpoint with another number of shards. (Servers do this by themselves when they restore one.)"""
    from paddlewheel.deploy.reports import checkpoint_diff
    from paddlewheel.trainer.checkpoint.folder_store import open_address

    row = _facts(*open_address(str(checkpoint_diff.rewrite(source, target.absolute(), shards))))
    answer(row, json=json, text=lambda: _line(row))


@app.command
def compact(
    source: Address,
    target: Annotated[
        Path | None,
        Parameter(help="The full checkpoint's folder: `step-<n>` of the same step, not there yet. Default: in place."),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Make a full checkpoint of one that holds only what changed since another (`checkpoint.full_every`).

    In place, no job may use the folder or store, and no other checkpoint may lead on from this one. `prune` can then
    remove those that it led on from. In an object store, a job that goes on all the same can commit nothing more.
    """
    from paddlewheel.deploy.reports import checkpoint_diff
    from paddlewheel.trainer.checkpoint.folder_store import open_address
    from paddlewheel.trainer.checkpoint.object_store import ObjectStore

    kept, address = open_address(source)
    if target is not None:
        with kept.local_copy(address) as copy:
            written = str(checkpoint_diff.rewrite(copy, target.absolute()))
    elif isinstance(kept, ObjectStore):
        with tempfile.TemporaryDirectory(prefix="paddlewheel-") as temporary:

            def whole(copy: Path) -> Path:
                return checkpoint_diff.rewrite(copy, Path(temporary, copy.name))

            written = kept.replace(address, whole)
    else:
        with kept.beside_owner():
            written = str(checkpoint_diff.rewrite(Path(address), Path(address)))
    row = _facts(*open_address(written))
    answer(row, json=json, text=lambda: _line(row))


@app.command
def fetch(
    address: Address,
    target: Annotated[Path, Parameter(help="The copy's folder: `step-<n>` of the same step, not there yet.")],
) -> None:
    """Copy a checkpoint out of an object store into a folder, verified: what needs a folder can use it then.

    The copy is full, also of one that holds only what changed since another.
    """
    from paddlewheel.deploy.reports import checkpoint_diff
    from paddlewheel.trainer.checkpoint.folder_store import open_address
    from paddlewheel.trainer.checkpoint.manifest import CheckpointError, read_manifest

    name = address.rstrip("/").rpartition("/")[2]
    if target.exists() or target.name != name:
        raise CheckpointError(f"{target} cannot be the copy: it must not exist, and be named {name}")
    kept, full = open_address(address)
    with kept.local_copy(full) as copy:
        target.parent.mkdir(parents=True, exist_ok=True)
        if read_manifest(copy).get("base") is not None:
            checkpoint_diff.rewrite(copy, target.absolute())
        else:
            shutil.copytree(copy, target)
    answer({"path": str(target)}, json=False, text=lambda: str(target))


def _committed(location: str) -> "tuple[Checkpoints, list[str]]":
    from paddlewheel.trainer.checkpoint.folder_store import open_address, open_checkpoints
    from paddlewheel.trainer.checkpoint.manifest import CheckpointError, step_of

    kept, address = open_address(location)
    if step_of(address.rpartition("/")[2].removesuffix(".damaged")) is not None:
        return kept, [address]
    kept = open_checkpoints(address)
    found = kept.committed()
    if not found:
        raise CheckpointError(f"{location} holds no committed checkpoint (a step-<n> folder with MANIFEST.json)")
    return kept, found


def _facts(kept: "Checkpoints", address: str) -> dict[str, Any]:
    try:
        manifest, cursor = kept.manifest(address), kept.cursor(address)
    except (OSError, ValueError) as error:
        return {"path": address, "damage": str(error)}
    return {
        "path": address,
        "step": manifest["step"],
        "base": (manifest.get("base") or {}).get("checkpoint"),
        "job": manifest.get("job"),
        "epoch": cursor.get("position", {}).get("epoch"),
        "rows": cursor.get("rows"),
        "keys": {name: table["keys"] for name, table in manifest.get("tables", {}).items()},
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "time": kept.saved_at(address),
    }


def _line(row: dict[str, Any]) -> str:
    if "step" not in row:
        return f"{row['path']}  DAMAGED: {row['damage']}"
    parts: Iterator[str] = (f"{name}: {number:,} keys" for name, number in row["keys"].items())
    rows = f"{row['rows']:,} rows" if row["rows"] is not None else ""
    base = f"changes since {row['base']}" if row["base"] else ""
    size = f"{row['bytes'] / (1 << 20):,.1f} MiB"
    return "  ".join(filter(None, [row["path"], size, rows, ", ".join(parts), base]))


async def _ask(address: str, timeout_seconds: float) -> dict[str, Any]:
    import grpc

    from paddlewheel.deploy.cli.status import NoCoordinatorError
    from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
    from paddlewheel.trainer.coordinator import coordinator_pb2_grpc as pb_grpc
    from paddlewheel.trainer.coordinator.security import Security

    security = Security.from_environment()
    async with security.channel(address) as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        request = pb.CheckpointRequest(timeout_seconds=timeout_seconds)
        try:
            reply = await stub.CheckpointNow(request, metadata=security.metadata, timeout=timeout_seconds + 10)
        except grpc.aio.AioRpcError as error:
            details = f"{error.code().name.lower()}, {error.details()}"
            raise NoCoordinatorError(f"no coordinator answers at {address}: {details}") from None
    if not reply.committed:
        raise CheckpointFailedError(f"no checkpoint: {reply.error}")
    return {"step": reply.step, "path": reply.path}
