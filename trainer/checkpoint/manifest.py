"""Checkpoints: sparse tables, dense part and cursor in one folder that is complete and verified, or does not exist.

    <directory>/step-<n>/
        sparse/<table>/...      what the servers saved
        dense.safetensors       parameters and Adam's state
        cursor.json             which rows the model has seen
        MANIFEST.json           written last: job, tables, and size and hash of every file
    <directory>/LATEST          name of the newest committed folder
    <directory>/BEST            name of the one whose evaluation was best, when the job keeps it

A checkpoint whose manifest names a `base` holds only what changed in the tables since that one, a folder beside it (or
beside the folder that it was put aside in); the base may have one, too, down to a full checkpoint. Dense part and
cursor are always whole. The manifest has a hash of the base's manifest, so no other can take its place.

A folder is built under a name that starts with `.` and renamed when everything in it is on disk, so `step-<n>` never
names a half-written one. Importable without Paddle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from paddlewheel.pserver.config import check_table_name
from paddlewheel.pserver.errors import is_for_good

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paddlewheel.pserver.client import Client, Since
    from paddlewheel.pserver.saved_tables import SavedTable

FORMAT = 2
MANIFEST, DENSE, CURSOR = "MANIFEST.json", "dense.safetensors", "cursor.json"
_LATEST, _BEST = "LATEST", "BEST"
_DIGEST = "manifest_xxh3_128"
_CHUNK_BYTES = 1 << 22
_MAX_LINKS = 10_000
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete, damaged, or of another job. Nothing was loaded from it."""


class UnavailableError(OSError):
    """A checkpoint cannot be read just now, for a reason that may pass: it is not said to be damaged."""


def step_of(name: str) -> int | None:
    """The step of a committed checkpoint by the name of its folder; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Base:
    """The checkpoint that one of changes leads on from.

    Attributes:
        name: of its folder.
        identity: hash of its manifest, but for where its files lie.
        tables: checksum of each of its tables.
        mark: what the servers call that state, as long as they live.
        num_links: checkpoints that a restore of it reads, itself included.
        before: its own base, while the servers know of that state, too.
    """

    name: str
    identity: str
    tables: Mapping[str, str] = field(default_factory=dict)
    mark: str = ""
    num_links: int = 1
    before: Base | None = None

    def since(self) -> Since:
        """What the servers' client is told."""
        from paddlewheel.pserver import client, saved_tables

        return client.Since(
            self.mark,
            {
                table: saved_tables.Base(f"../../../{self.name}/sparse/{table}", checksum)
                for table, checksum in self.tables.items()
            },
        )

    def facts(self) -> dict[str, Any]:
        """For the manifest of the checkpoint that leads on."""
        return {"base": {"checkpoint": self.name, "manifest_xxh3_128": self.identity, "links": self.num_links}}


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint whose files agree with its manifest.

    Attributes:
        path: its folder.
        manifest: step, job name, tables with rows and widths, metrics, files with size and hash.
        cursor: what rows the model has seen; written and understood by the data side.
    """

    path: Path
    manifest: Mapping[str, Any]
    cursor: Mapping[str, Any]

    def dense(self) -> dict[str, NDArray[Any]]:
        """Parameters and optimizer state by name."""
        from safetensors.numpy import load_file

        loaded: dict[str, NDArray[Any]] = load_file(self.path / DENSE)
        return loaded

    readable = True
    """Whether the parts of `tables` can be read here."""

    def tables(self) -> dict[str, SavedTable]:
        """By name. Raises CheckpointError of the servers: a description is damaged."""
        from paddlewheel.pserver.saved_tables import open_table

        return {name: open_table(self.sparse / name) for name in self.manifest.get("tables", {})}

    @property
    def sparse(self) -> Path:
        """Folder that `pserver.client.Client.load` takes."""
        return self.path / "sparse"


class Draft:
    """A checkpoint under construction: `save` (or fill `sparse`), then `finish`; whoever decides calls `commit`.

    Args:
        directory: folder of the job's checkpoints; made if it is not there.
        name: of the folder to fill; starts with `.`, so that nobody takes it for a checkpoint. The coordinator gives
            one that no other attempt has.
        step: what the checkpoint is of.
    """

    readable = True

    def __init__(self, directory: Path, name: str, step: int) -> None:
        assert name.startswith("."), name
        self.path, self.step = directory / name, step
        if self.path.exists():
            shutil.rmtree(self.path)
        self.sparse = self.path / "sparse"
        self.sparse.mkdir(parents=True)

    @property
    def address(self) -> str:
        """The folder, as text."""
        return str(self.path)

    def save(
        self,
        client: Client,
        *,
        advance_day: Collection[str] = (),
        mark: str | None = None,
        base: Base | None = None,
    ) -> dict[str, SavedTable]:
        """Have the servers save their tables: as they are (advance_day: see `Client.save`), or as at a mark.

        base: at a mark, save only what changed since that checkpoint. Raises CheckpointError or ServerError.
        """
        if mark is not None:
            return client.save_marked(self.sparse, mark, since=None if base is None else base.since())
        return client.save(self.sparse, advance_day=advance_day)

    def finish(
        self, *, dense: Mapping[str, NDArray[Any]], cursor: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the dense part, the cursor and, last, the manifest; returns the manifest. Everything is on disk then.

        Args:
            dense: parameters and optimizer state by name.
            cursor: what rows the model has seen; JSON values.
            facts: what else the manifest tells (job, tables, metrics); JSON values.
        """
        import numpy as np
        from safetensors.numpy import save_file

        save_file({k: np.ascontiguousarray(v) for k, v in dense.items()}, self.path / DENSE)
        (self.path / CURSOR).write_text(json.dumps(cursor), encoding="utf-8")
        files = to_disk(self.path)
        manifest = {"format": FORMAT, "step": self.step, **facts, "files": files}
        text = manifest_text(manifest)
        _write(self.path / MANIFEST, text)
        return manifest


def commit(draft: Path, step: int, keep: int) -> Path:
    """Give a finished draft its name, point LATEST to it, and remove all but the newest `keep`; returns its new path.

    Raises:
        CheckpointError: the draft is not complete. Nothing has changed then.
        OSError: from the disk. If the new folder is there afterwards, it is whole.

    The new checkpoint stays, whatever there is of later steps.
    """
    check_complete(draft)
    directory, final = draft.parent, draft.parent / f"step-{step}"
    replaced = directory / f".replaced-{step}"
    if replaced.exists():
        shutil.rmtree(replaced)
    if final.exists():  # the same step again after a restart from an older checkpoint
        final.rename(replaced)
    draft.rename(final)
    _write(directory / _LATEST, final.name + "\n")
    if replaced.exists():
        shutil.rmtree(replaced)
    prune(directory, keep, spare=final)
    return final


def mark_best(path: Path) -> None:
    """Point BEST to a committed folder; `prune` then keeps it, however old it gets."""
    _write(path.parent / _BEST, path.name + "\n")


def best(directory: Path) -> Path | None:
    """The committed folder that BEST names, or None."""
    try:
        path = directory / (directory / _BEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return path if path in committed(directory) else None


def prune(directory: Path, keep: int, *, spare: Path | None = None) -> list[Path]:
    """Remove all but the newest `keep` committed folders, the best one and `spare`; returns the removed ones.

    What any that stays leads on from stays, too, also for one that was put aside.
    """
    found = committed(directory)
    kept = {path for path in (*found[-max(1, keep) :], best(directory), spare) if path is not None}
    kept |= {path for aside in directory.glob("set-aside-*") for path in committed(aside)}
    needed = {base for path in kept for base in _bases(path)}
    removed = [path for path in found if path not in kept | needed]
    for path in removed:
        hidden = path.with_name(f".removed-{path.name}")  # so that no half-removed folder has a checkpoint's name
        path.rename(hidden)
        shutil.rmtree(hidden)
    return removed


def committed(directory: Path) -> list[Path]:
    """Committed folders, oldest step first."""
    steps = {p: step_of(p.name) for p in directory.glob("step-*") if (p / MANIFEST).is_file()}
    found = {p: step for p, step in steps.items() if step is not None}
    return sorted(found, key=found.__getitem__)


def latest(directory: Path) -> Path | None:
    """The newest committed folder, or None. LATEST is for people: the folders themselves decide."""
    found = committed(directory)
    return found[-1] if found else None


def check_complete(path: Path) -> Mapping[str, Any]:
    """The manifest of a folder whose manifest is whole and whose files are all there and of the right size.

    Raises:
        CheckpointError: anything else, also of a checkpoint that it leads on from. Contents are not read: `read` does.
    """
    manifest = _check_alone(path)
    for base in chain(path, manifest)[:-1]:
        try:
            _check_alone(base)
        except CheckpointError as error:
            raise CheckpointError(f"{path} leads on from one that is not whole: {error}. {BROKEN_REMEDY}") from error
    return manifest


BROKEN_REMEDY = "Bring that one back as it was, or go on from an older checkpoint."


def _check_alone(path: Path) -> Mapping[str, Any]:
    manifest = read_manifest(path)
    compare_files(str(path), manifest, {name: p.stat().st_size for name, p in _files(path) if name != MANIFEST})
    return manifest


def chain(path: Path, manifest: Mapping[str, Any] | None = None) -> list[Path]:
    """All folders that a restore reads, the full checkpoint first and this one last; manifest: of this one, if known.

    Raises:
        CheckpointError: one is missing or is not the one that was led on from; says which.
    """
    manifest = read_manifest(path) if manifest is None else manifest
    found = [path]
    while (told := manifest.get("base")) is not None:
        base = _place_of_base(found[0], told["checkpoint"])
        manifest = check_base(str(found[0]), str(base), told, read_manifest(base) if base.is_dir() else None)
        found.insert(0, base)
        if len(found) > _MAX_LINKS:
            raise CheckpointError(f"{path} leads on from more than {_MAX_LINKS} checkpoints, or from itself")
    return found


def check_base(where: str, base: str, told: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The manifest of a base, if it is there and is the one that was told of. Raises CheckpointError."""
    if manifest is None:
        raise CheckpointError(f"{where} holds only what changed since {base}, which is missing. {BROKEN_REMEDY}")
    if identity(manifest) != told["manifest_xxh3_128"]:
        raise CheckpointError(
            f"{where} holds only what changed since {base}, which is another checkpoint now. {BROKEN_REMEDY}"
        )
    return manifest


def _place_of_base(path: Path, name: str) -> Path:
    """Beside it; or, when it was put aside and its base was not, beside the folder that it was put in."""
    beside = path.parent / name
    above = path.parent.parent / name
    return above if not beside.exists() and path.parent.name.startswith("set-aside-") else beside


def _bases(path: Path) -> list[Path]:
    """What a checkpoint leads on from, as far as that can be found out."""
    found: list[Path] = []
    while len(found) < _MAX_LINKS:
        try:
            told = read_manifest(found[-1] if found else path).get("base")
        except (CheckpointError, UnavailableError):
            break
        if told is None:
            break
        found.append(_place_of_base(found[-1] if found else path, told["checkpoint"]))
    return found


def leading_on_from(path: Path) -> list[Path]:
    """Committed checkpoints beside this one whose base it is, or among those put aside there."""
    places = [path.parent, *path.parent.glob("set-aside-*")]
    return [other for place in places for other in committed(place) if path in _bases(other)[:1]]


def identity(body: Mapping[str, Any]) -> str:
    """Hash of a manifest, the same wherever its files lie."""
    content = {key: value for key, value in body.items() if key != "data"}
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def num_links(body: Mapping[str, Any]) -> int:
    """How many checkpoints a restore of this one reads, by its manifest."""
    return 1 + int(body["base"]["links"]) if body.get("base") is not None else 1


def compare_files(where: str, manifest: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raise CheckpointError unless the files that are there (bytes by name) are those of the manifest."""
    files: Mapping[str, Mapping[str, Any]] = manifest["files"]
    missing, extra = sorted(set(files) - set(sizes)), sorted(set(sizes) - set(files))
    if missing or extra:
        raise CheckpointError(f"{where} is damaged: missing files {missing[:5]}, unexpected files {extra[:5]}")
    for name, expected in files.items():
        if sizes[name] != expected["bytes"]:
            raise CheckpointError(
                f"{where}/{name} is damaged: {sizes[name]} bytes, the manifest says {expected['bytes']}"
            )


def read_manifest(path: Path) -> Mapping[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        CheckpointError: there is none, it was changed, or another version wrote it.
        UnavailableError: it cannot be read just now.
    """
    return parse_manifest(_read(path, MANIFEST), str(path))


def parse_manifest(text: bytes, where: str) -> Mapping[str, Any]:
    """A manifest from its file's text, without the hash of itself. Raises CheckpointError, which names `where`.

    Whoever wrote it: names in it become parts of paths, so they cannot lead out of the checkpoint.
    """
    try:
        manifest: dict[str, Any] = json.loads(text)
        version = manifest["format"]
        body = {key: value for key, value in manifest.items() if key != _DIGEST}
        is_whole = version != FORMAT or manifest_text(body).encode() == text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is no complete checkpoint: its {MANIFEST} cannot be read ({error})") from error
    if version != FORMAT:
        raise CheckpointError(f"{where} has checkpoint format {version!r}, this version reads {FORMAT}")
    if not is_whole:
        raise CheckpointError(f"{where}/{MANIFEST} is damaged: it differs from its own hash")
    if problem := _problem_of(body):
        raise CheckpointError(f"{where}/{MANIFEST} is not one that paddlewheel writes: {problem}")
    return body


def _problem_of(body: Mapping[str, Any]) -> str | None:
    """What is wrong with a manifest that agrees with its own hash; None: nothing."""
    if not _is_count(body.get("step")):
        return f"its step is {body.get('step')!r}"
    files, tables = body.get("files"), body.get("tables", {})
    if not isinstance(files, dict):
        return "it lists no files"
    for name, facts in files.items():
        if not is_inside(name):
            return f"{name!r} is no name of a file in a checkpoint"
        if not (isinstance(facts, dict) and _is_count(facts.get("bytes")) and isinstance(facts.get("xxh3_128"), str)):
            return f"it does not say size and hash of {name}"
    if not isinstance(tables, dict):
        return "it does not say which tables there are"
    for name, table in tables.items():
        try:
            check_table_name(name)
        except ValueError as error:
            return str(error)
        if not (isinstance(table, dict) and _is_count(table.get("keys"))):
            return f"it does not say how many keys table {name} has"
        if f"sparse/{name}/table.json" not in files:
            return f"it lists no files of table {name}"
    return _problem_of_places(body)


def _problem_of_places(body: Mapping[str, Any]) -> str | None:
    base = body.get("base")
    if base is not None and not (
        isinstance(base, dict)
        and isinstance(base.get("checkpoint"), str)
        and step_of(base["checkpoint"]) is not None
        and isinstance(base.get("manifest_xxh3_128"), str)
        and _is_count(base.get("links"))
    ):
        return f"it does not say what it leads on from, but {base!r}"
    if not isinstance(body.get("data", ""), str):
        return "it does not say where its files are"
    return None


def is_inside(name: str) -> bool:
    """Whether a name, with `/` between its parts, is one of something below the folder that it is joined to."""
    return "\0" not in name and all(part not in {"", ".", ".."} for part in name.split("/"))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_cursor(path: Path) -> dict[str, Any]:
    """What rows the checkpoint's model has seen. Raises CheckpointError, or UnavailableError."""
    return parse_cursor(_read(path, CURSOR), str(path))


def parse_cursor(text: bytes, where: str) -> dict[str, Any]:
    """A cursor from its file's text; what its values mean is for `coordinator.lineage`. Raises CheckpointError."""
    try:
        cursor = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}/{CURSOR} cannot be read: {error}") from error
    if not isinstance(cursor, dict) or not isinstance(cursor.get("position", {}), dict):
        raise CheckpointError(f"{where}/{CURSOR} is not one that paddlewheel writes")
    return cursor


def _read(path: Path, name: str) -> bytes:
    """A small file of a checkpoint."""
    from paddlewheel.pserver.saved_tables import read_regular  # with NumPy, which agents do without

    try:
        return read_regular(path / name)
    except OSError as error:
        raise _unreadable(path, name, error) from error


def _unreadable(path: Path, name: str, error: OSError) -> CheckpointError | UnavailableError:
    if is_for_good(error):
        return CheckpointError(f"{path} is no complete checkpoint: its {name} cannot be read ({error})")
    return UnavailableError(f"{path / name} cannot be read just now: {error}")


def read(path: Path, *, verify: bool = True) -> Checkpoint:
    """Open a committed checkpoint and verify every byte of it, or (`verify=False`) only which files it has.

    Raises:
        CheckpointError: a file is missing, extra, or differs from the manifest in size or hash.
        UnavailableError: a file cannot be read just now.
    """
    manifest = check_complete(path)
    if verify:
        verify_files(path, manifest["files"])
        for base in chain(path, manifest)[:-1]:
            tables = {n: facts for n, facts in read_manifest(base)["files"].items() if n.startswith("sparse/")}
            verify_files(base, tables)
    return Checkpoint(path, manifest, read_cursor(path))


def check_files(path: Path, files: Mapping[str, Mapping[str, Any]], *, besides: str) -> None:
    """Raise CheckpointError unless the folder holds these files in their sizes, one named `besides`, and no other."""
    sizes = {name: file.stat().st_size for name, file in _files(path) if name != besides}
    compare_files(str(path), {"files": files}, sizes)


def verify_files(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Read every byte of files as `to_disk` described them; CheckpointError names the first that differs."""
    for name, expected in files.items():
        try:
            found = _hash(path / name)
        except OSError as error:
            raise _unreadable(path, name, error) from error
        if found != expected["xxh3_128"]:
            raise CheckpointError(f"{path / name} is damaged: its hash differs from the manifest's")


def to_disk(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file of a folder, by name, all of it on disk when this returns."""
    files = {name: {"bytes": path.stat().st_size, "xxh3_128": _hash(path)} for name, path in _files(folder)}
    for path in folder.rglob("*"):
        _to_disk(path)
    _to_disk(folder)
    return files


def manifest_text(body: Mapping[str, Any]) -> str:
    """The exact text of a manifest's file: the body and a hash of it."""
    digest = xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, _DIGEST: digest}, indent=1) + "\n"


def _write(path: Path, text: str) -> None:
    """By rename, and on disk when this returns."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    _to_disk(temporary)
    temporary.replace(path)
    _to_disk(path.parent)


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Files by name. Hidden ones are of no account: a load may stage copies beside a table, and be killed."""
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        if file.is_file() and not any(part.startswith(".") for part in relative.parts):
            yield relative.as_posix(), file


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
