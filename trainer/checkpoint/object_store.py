"""Checkpoints in an object store, through pyarrow.fs: S3 and what speaks like it; gs:// and hdfs:// by the same code.

    <location>/step-<n>/MANIFEST.json       the commit: one object, written last, there as a whole or not at all
    <location>/data/<owner>/<draft>/...     what the manifest speaks of: sparse, dense, cursor, and the manifest itself
    <location>/OWNER                        the coordinator that may commit; the newest one takes it over
    <location>/LATEST, BEST, journal.jsonl

A manifest may name a `base`, as in a folder (`manifest.py`): `step-<m>` of the same location.

An object store cannot rename, so files never lie under the name of a step: they go to a folder that no other attempt of
any coordinator has, and committing is to write one small object that names them. Whatever dies before that leaves
files that nobody refers to; the next coordinator removes them.

Every file is read back and compared after its upload, and hashed again whenever it is fetched. Credentials, region and
endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL, an instance's role, ...).
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from paddlewheel.pserver.errors import is_for_good
from paddlewheel.trainer.checkpoint.manifest import (
    BROKEN_REMEDY,
    CURSOR,
    DENSE,
    FORMAT,
    MANIFEST,
    CheckpointError,
    check_base,
    compare_files,
    manifest_text,
    parse_cursor,
    parse_manifest,
    step_of,
)
from paddlewheel.trainer.checkpoint.store import ASIDE, Checkpoints, SavedModel, aside_name

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

    from paddlewheel.pserver.client import Client
    from paddlewheel.pserver.saved_tables import SavedTable
    from paddlewheel.trainer.checkpoint.object_draft import Hosts, RemoteDraft

Facts = dict[str, Any]
"""What a manifest says of a file: bytes, xxh3_128."""

_CHUNK_BYTES = 4 << 20
_NUM_THREADS = 4
_CONNECT_SECONDS, _REQUEST_SECONDS, _NUM_ATTEMPTS = 5, 15, 3
_OWNER, _LATEST, _BEST, _JOURNAL = "OWNER", "LATEST", "BEST", "journal.jsonl"
_REMEDY = (
    "credentials, region and endpoint come from the environment (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or "
    "AWS_PROFILE, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL)"
)


class StoreError(OSError):
    """The object store could not be asked, or refused; asking again may help."""


class CancelledError(RuntimeError):
    """A transfer was told to end."""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A committed checkpoint but for its sparse parts, verified.

    Attributes:
        descriptions: texts of the tables' descriptions, by table.
        chain: addresses of all checkpoints that a restore reads, the full one first and this one last.
        earlier: as `descriptions`, of those before this one.
    """

    address: str
    manifest: Mapping[str, Any]
    cursor: Mapping[str, Any]
    dense_bytes: bytes
    descriptions: Mapping[str, str]
    chain: Sequence[str] = ()
    earlier: Sequence[Mapping[str, str]] = ()

    readable = False

    def dense(self) -> dict[str, Any]:
        """Parameters and optimizer state by name."""
        from safetensors.numpy import load

        loaded: dict[str, Any] = load(self.dense_bytes)
        return loaded

    def tables(self) -> dict[str, SavedTable]:
        """By name, with those that they lead on from; their parts are in the store.

        Raises CheckpointError of the servers: a description is damaged, or a chain is broken.
        """
        from paddlewheel.pserver.saved_tables import parse_description, with_earlier

        return {
            name: with_earlier(
                [
                    *(parse_description(texts[name], Path("earlier", name)) for texts in self.earlier),
                    parse_description(text, Path("sparse", name)),
                ]
            )
            for name, text in self.descriptions.items()
        }


class ObjectStore(Checkpoints):
    """All checkpoints below `scheme://bucket/prefix`.

    Args:
        location: the address; without options, user or password.
        owner: the coordinator on whose behalf drafts are written; None: a new one.
        cancelled: ends transfers when it is set.
        hosts: of the servers, if tables are to be saved or loaded.
    """

    def __init__(
        self,
        location: str,
        owner: str | None = None,
        cancelled: threading.Event | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._hosts = hosts
        self.location = location.rstrip("/")
        self.owner = owner or uuid.uuid4().hex[:12]
        self._cancelled = cancelled or threading.Event()
        self._connected: tuple[FileSystem, str] | None = None

    # -- names

    def draft(self, name: str) -> str:
        return f"{self.location}/data/{self.owner}/{name}"

    def _path(self, address: str) -> str:
        """The path that the file system knows an address by."""
        assert address == self.location or address.startswith(self.location + "/"), (address, self.location)
        return posixpath.normpath(self._root + address[len(self.location) :])

    @property
    def _filesystem(self) -> FileSystem:
        return self._connect()[0]

    @property
    def _root(self) -> str:
        return self._connect()[1]

    @property
    def _has_folders(self) -> bool:
        """Whether a folder must be made before something is written into it."""
        return self._filesystem.type_name not in {"s3", "gcs"}

    def _connect(self) -> tuple[FileSystem, str]:
        if self._connected is None:
            import pyarrow as pa
            from pyarrow.fs import FileSystem

            scheme, _, rest = self.location.partition("://")
            if scheme in {"s3", "gs"} and not re.match(r"[A-Za-z0-9]", rest):
                raise CheckpointError(f"{self.location} names no bucket: write {scheme}://bucket/prefix")
            try:
                filesystem, root = FileSystem.from_uri(self.location)
                if filesystem.type_name == "s3":
                    filesystem = _patient_s3(filesystem.region)
            except OSError as error:
                if _is_refusal(error):
                    raise CheckpointError(f"{self.location} cannot be used for checkpoints: {error}") from error
                raise StoreError(f"{self.location}: {error}") from error
            except (pa.ArrowException, ValueError) as error:
                raise CheckpointError(f"{self.location} cannot be used for checkpoints: {error}") from error
            self._connected = filesystem, root
        return self._connected

    # -- reading

    def committed(self) -> list[str]:
        found = [step_of(info.base_name) for info in self._list(self.location)]
        steps = sorted(step for step in found if step is not None)
        addresses = [f"{self.location}/step-{step}" for step in steps]
        there = self._infos([f"{address}/{MANIFEST}" for address in addresses])
        return [address for address, info in zip(addresses, there, strict=True) if info.is_file]

    def manifest(self, address: str) -> Mapping[str, Any]:
        return parse_manifest(self._read_named(address, MANIFEST), address)

    def cursor(self, address: str) -> dict[str, Any]:
        manifest = self.manifest(address)
        return parse_cursor(self._fetch_bytes(address, manifest, CURSOR), address)

    def saved_at(self, address: str) -> float:
        info = self._infos([f"{address}/{MANIFEST}"])[0]
        return float(info.mtime_ns or 0) / 1e9

    def check_complete(self, address: str) -> Mapping[str, Any]:
        manifest = self._check_alone(address)
        for base in self._chain(address, manifest)[:-1]:
            try:
                self._check_alone(base)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{address} leads on from one that is not whole: {error}. {BROKEN_REMEDY}"
                ) from error
        return manifest

    def _chain(self, address: str, manifest: Mapping[str, Any]) -> list[str]:
        """Addresses as of `manifest.chain`. Raises CheckpointError."""
        found = [address]
        while (told := manifest.get("base")) is not None:
            base = self._place_of_base(found[0], told["checkpoint"])
            there = self._infos([f"{base}/{MANIFEST}"])[0].is_file
            manifest = check_base(found[0], base, told, self.manifest(base) if there else None)
            if base in found:
                raise CheckpointError(f"{address} leads on from itself")
            found.insert(0, base)
        return found

    def _place_of_base(self, address: str, name: str) -> str:
        """In the same folder of steps, or, for one that was put aside, in the location itself."""
        folder = address.rpartition("/")[0]
        if "/data/" in address[len(self.location) :] or not self._infos([f"{folder}/{name}/{MANIFEST}"])[0].is_file:
            return f"{self.location}/{name}"
        return f"{folder}/{name}"

    def _check_alone(self, address: str) -> Mapping[str, Any]:
        manifest = self.manifest(address)
        folder = self._data(address, manifest)
        sizes = {info.path[len(folder) + 1 :]: info.size for info in self._files(folder)}
        sizes.pop(MANIFEST, None)
        compare_files(address, manifest, sizes)
        return manifest

    def verify(self, address: str) -> None:
        for link in self._chain(address, self.check_complete(address)):
            self._verify_alone(link)

    def _verify_alone(self, address: str) -> None:
        manifest = self.manifest(address)
        folder = self._data(address, manifest)

        def look(name: str) -> None:
            self._copy(f"{folder}/{name}", None, manifest["files"][name])

        self._for_each(look, manifest["files"])

    def check_restorable(self, address: str) -> None:
        """Sizes, and all but the sparse parts: each server's host verifies those that it fetches."""
        self.read(address)

    def read(self, address: str) -> RemoteCheckpoint:
        """Everything but the sparse parts, which are fetched by the hosts of the servers."""
        manifest = self.check_complete(address)
        chain = self._chain(address, manifest)
        tables = []
        for link in chain:
            body = self.manifest(link)
            texts = {
                name: self._fetch_bytes(link, body, f"sparse/{name}/table.json") for name in manifest.get("tables", {})
            }
            tables.append({name: text.decode(errors="replace") for name, text in texts.items()})
        cursor = parse_cursor(self._fetch_bytes(address, manifest, CURSOR), address)
        dense = self._fetch_bytes(address, manifest, DENSE)
        return RemoteCheckpoint(address, manifest, cursor, dense, tables[-1], chain, tables[:-1])

    def read_model(self, address: str, *, verify: bool) -> RemoteCheckpoint:
        return self.read(address)  # what is small, and verified on its way

    def load_tables(self, client: Client, saved: SavedModel) -> str | None:
        from paddlewheel.trainer.checkpoint import object_draft

        assert isinstance(saved, RemoteCheckpoint)
        return object_draft.load_tables(client, saved, self._given_hosts())

    def new_draft(self, name: str, step: int) -> RemoteDraft:
        from paddlewheel.trainer.checkpoint.object_draft import RemoteDraft

        return RemoteDraft(self, self._given_hosts(), name, step)

    def folder_seen_by_servers(self, run_dir: Path) -> Path:
        return run_dir

    def _given_hosts(self) -> Hosts:
        if self._hosts is None:
            raise CheckpointError(f"{self.location}: to save or load tables there, the hosts of the servers are needed")
        return self._hosts

    def best(self) -> str | None:
        try:
            address = f"{self.location}/{self._read_named(self.location, _BEST).decode().strip()}"
        except FileNotFoundError:
            return None
        return address if address in self.committed() else None

    @contextlib.contextmanager
    def local_copy(self, address: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="paddlewheel-") as temporary:
            for link in self._chain(address, self.manifest(address)):
                self.fetch(link, Path(temporary, link.rpartition("/")[2]))
            yield Path(temporary, address.rpartition("/")[2])

    def fetch(self, address: str, folder: Path, names: Iterable[str] | None = None) -> None:
        """Copy files of a checkpoint (by default all, and its manifest) into a folder, and verify them.

        Raises:
            CheckpointError: a file is missing or is not what the manifest says.
        """
        manifest = self.manifest(address)
        data = self._data(address, manifest)

        def bring(name: str) -> None:
            if name not in manifest["files"]:
                raise CheckpointError(f"{address} is damaged: its manifest lacks {name}")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._copy(f"{data}/{name}", path, manifest["files"][name])

        self._for_each(bring, manifest["files"] if names is None else names)
        if names is None:
            (folder / MANIFEST).write_bytes(self._read_named(address, MANIFEST))

    # -- writing a draft

    def put(self, address: str, files: Mapping[str, Path | bytes]) -> dict[str, Facts]:
        """Upload files of a draft under their names, read them back, and say what they are.

        Raises:
            CheckpointError: what the store gives back is not what was sent.
            StoreError: the store refused or was not reached.
        """
        root = self._path(address)
        facts: dict[str, Facts] = {}

        def send(name: str) -> None:
            facts[name] = self._send(files[name], f"{root}/{name}")
            self._copy(f"{root}/{name}", None, facts[name])

        self._for_each(send, files)
        return facts

    def finish(self, address: str, step: int, facts: Mapping[str, Any], files: Mapping[str, Facts]) -> dict[str, Any]:
        """Write a draft's manifest, which names its place and all its files; returns it."""
        data = address[len(self.location) + 1 :]
        manifest = {"format": FORMAT, "step": step, "data": data, **facts, "files": dict(files)}
        self._write(f"{self._path(address)}/{MANIFEST}", manifest_text(manifest).encode())
        return manifest

    # -- what only the coordinator does

    @contextlib.contextmanager
    def sole_use(self) -> Iterator[None]:
        """Takes the location over. There are no locks in an object store: the coordinator before fails to commit."""
        owner = {"owner": self.owner, "time": time.time()}
        self._write(f"{self._path(self.location)}/{_OWNER}", json.dumps(owner).encode())
        yield

    @contextlib.contextmanager
    def beside_owner(self) -> Iterator[None]:
        yield  # whoever commits here goes on doing so

    def clear(self) -> None:
        """Nothing to make: a prefix is there when something is in it."""
        kept = self._data_in_use()
        for owner in self._list(f"{self.location}/data"):
            for draft in self._list(f"{self.location}/data/{owner.base_name}"):
                if draft.path not in kept:
                    self._delete_folder(draft.path)

    def commit(self, draft: str, step: int, keep: int) -> str:
        address = self.draft(draft)
        self.check_complete(address)
        self._check_owner()
        final = f"{self.location}/step-{step}"
        before = None
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            before = self._data(final, self.manifest(final))
        manifest = self._read_named(address, MANIFEST)
        self._write(f"{self._path(final)}/{MANIFEST}", manifest)
        try:
            self._check_owner()  # taken over between the look and the write: then nobody may go on from this one
        except CheckpointError:
            if self._read_named(final, MANIFEST) == manifest:
                with _errors(final):
                    self._filesystem.delete_file(f"{self._path(final)}/{MANIFEST}")
            raise
        self._write(f"{self._path(self.location)}/{_LATEST}", f"step-{step}\n".encode())
        # The same step again, after a restart from an older one. One that came from a folder lies where this one is.
        if before is not None and before not in (self._path(address), self._path(final)):
            self._delete_folder(before)
        self.prune(keep, spare=final)
        return final

    def replace(self, address: str, rewrite: Callable[[Path], Path]) -> str:
        """Put what `rewrite` makes of a checkpoint's copy in its place; returns its address.

        The location is taken over, so a coordinator that still runs commits no more. Whatever fails, the checkpoint is
        there as it was.

        Raises:
            CheckpointError: it is damaged, another one leads on from it, or another coordinator takes over meanwhile.
            StoreError: the store refused or was not reached.
        """
        step = self.manifest(address)["step"]
        name = f".step-{step}-{uuid.uuid4().hex[:8]}"
        with self.sole_use():
            self._check_leaf(address)
            try:
                with self.local_copy(address) as copy:
                    folder = rewrite(copy)
                body = parse_manifest((folder / MANIFEST).read_bytes(), str(folder))
                facts = {k: v for k, v in body.items() if k not in {"format", "step", "files", "data"}}
                sent = self.put(self.draft(name), {file: folder / file for file in body["files"]})
                compare_files(str(folder), body, {file: fact["bytes"] for file, fact in sent.items()})
                self.finish(self.draft(name), step, facts, body["files"])
                self._check_leaf(address)
                return self.commit(name, step, keep=1 << 30)
            finally:
                self.discard(name)

    def _check_leaf(self, address: str) -> None:
        """Raises CheckpointError if another checkpoint leads on from this one."""
        for other in [*self.committed(), *self._put_aside()]:
            with contextlib.suppress(CheckpointError):
                told = self.manifest(other).get("base")
                if told is None or self._place_of_base(other, told["checkpoint"]) != address:
                    continue
                break
        else:
            return
        raise CheckpointError(
            f"{address} has to stay as it is, because {other[len(self.location) + 1 :]} leads on from it: compact that "
            "one first, or name a folder to write to"
        )

    def _put_aside(self) -> Iterator[str]:
        for info in self._list(self.location):
            if info.base_name.startswith(ASIDE):
                aside = self._address(info.path)
                yield from (f"{aside}/{inner.base_name}" for inner in self._list(aside))

    def discard(self, pattern: str) -> None:
        kept = self._data_in_use()
        for info in self._list(f"{self.location}/data/{self.owner}"):
            if fnmatchcase(info.base_name, pattern) and info.path not in kept:
                self._delete_folder(info.path)

    def prune(self, keep: int, *, spare: str | None = None) -> list[str]:
        found = self.committed()
        kept = {address for address in (*found[-max(1, keep) :], self.best(), spare) if address is not None}
        kept |= set(self._put_aside())
        needed: set[str] = set()
        for address in kept:
            self._add_bases(address, needed)
        removed = [address for address in found if address not in kept | needed]
        for address in removed:
            data = None
            with contextlib.suppress(CheckpointError):
                data = self._data(address, self.manifest(address))
            self._delete_folder(self._path(address))  # first, so that no half-removed checkpoint is committed
            if data is not None:
                self._delete_folder(data)
        return removed

    def _add_bases(self, address: str, to: set[str]) -> None:
        """What a checkpoint leads on from, as far as that can be found out, up to what is there already."""
        with contextlib.suppress(CheckpointError):
            while (told := self.manifest(address).get("base")) is not None:
                address = self._place_of_base(address, told["checkpoint"])
                if address in to:
                    return
                to.add(address)

    def mark_best(self, address: str) -> None:
        self._write(f"{self._path(self.location)}/{_BEST}", (address.rpartition("/")[2] + "\n").encode())

    def set_aside(self, addresses: Sequence[str]) -> str:
        aside = f"{self.location}/{aside_name()}"
        for address in addresses:
            self._move_manifest(address, f"{aside}/{address.rpartition('/')[2]}", "../")
        return aside

    def set_damaged_aside(self, address: str) -> str:
        self._move_manifest(address, f"{address}.damaged", "")
        return address.rpartition("/")[2] + ".damaged"

    def keep_journal(self, path: Path) -> None:
        try:
            self._check_owner()
        except CheckpointError as error:
            raise StoreError(f"the journal is not kept: {error}") from error
        self._write(f"{self._path(self.location)}/{_JOURNAL}", path.read_bytes())

    def fetch_journal(self, path: Path) -> None:
        try:
            kept = self._read_named(self.location, _JOURNAL)
        except FileNotFoundError:
            return
        with contextlib.suppress(FileNotFoundError):
            here = path.read_bytes()
            if here.startswith(kept):
                return
            if here:  # another coordinator has gone on since, on another machine
                path.rename(path.with_name(f"{path.name}.replaced"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kept)

    def check_access(self) -> None:
        """Writes, reads and removes an object.

        Raises:
            CheckpointError: that is not allowed or not possible; says what to look at.
            StoreError: the store is not reached, or cannot do it now.
        """
        path = f"{self._path(self.location)}/access-{uuid.uuid4().hex[:12]}"
        try:
            self._write(path, b"paddlewheel\n")
            self._read(path)
            with _errors(path):
                self._filesystem.delete_file(path)
        except OSError as error:
            message = f"checkpoint.directory {self.location} cannot be written to: {error}."
            if _is_refusal(error):
                raise CheckpointError(f"{message} Does the bucket exist? {_REMEDY}") from error
            raise StoreError(f"{message} Try again, or look at the endpoint: {_REMEDY}") from error

    # -- inside

    def _check_owner(self) -> None:
        try:
            owner = json.loads(self._read_named(self.location, _OWNER))["owner"]
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise CheckpointError(f"{self.location}/{_OWNER} is gone or broken: nobody may commit") from error
        if owner != self.owner:
            raise CheckpointError(f"another coordinator has taken over {self.location}: this one commits no more")

    def _data_in_use(self) -> set[str]:
        """Folders of files that something refers to which is committed, put aside or damaged."""
        found = []
        for info in self._list(self.location):
            if info.base_name.startswith("step-"):
                found.append(info.path)
            elif info.base_name.startswith(ASIDE):
                found += [f"{info.path}/{inner.base_name}" for inner in self._list(self._address(info.path))]
        addresses = [self._address(path) for path in found]
        there = self._infos([f"{address}/{MANIFEST}" for address in addresses])
        in_use = set()
        for address, info in zip(addresses, there, strict=True):
            if info.is_file:
                with contextlib.suppress(CheckpointError):  # unreadable: its files cannot be found by anyone
                    in_use.add(self._data(address, self.manifest(address)))
        return in_use

    def _address(self, path: str) -> str:
        return self.location + path[len(self._root.rstrip("/")) :]

    def _data(self, address: str, manifest: Mapping[str, Any]) -> str:
        """Path of the folder that holds the files of a manifest.

        The manifest names it relative to the folder of steps that it lies in. One without it came from a folder, by a
        copy of that whole folder: its files lie beside it. What it names is fetched, and removed with the checkpoint:
        so it must be a draft of this location, or for a checkpoint that was put aside, of the one above; or, if it came
        from a folder, the place that it had there.
        """
        if "data" not in manifest:
            return self._path(address)
        base = self.location if "/data/" in address[len(self.location) :] else address.rpartition("/")[0]
        root = self._path(base)
        if root.rpartition("/")[2].startswith(ASIDE):
            root = root.rpartition("/")[0]
        found = posixpath.normpath(posixpath.join(self._path(base), manifest["data"]))
        below = found.removeprefix(f"{root}/")
        is_draft = below != found and below.startswith("data/") and below.count("/") == len(("owner", "draft"))
        if not is_draft and (below == found or step_of(below) != manifest["step"]):
            raise CheckpointError(
                f"{address} is not one that paddlewheel writes: its files would lie in {manifest['data']!r}, not in a "
                "draft of its location"
            )
        return found

    def _move_manifest(self, address: str, to: str, up: str) -> None:
        text = self._read_named(address, MANIFEST)
        with contextlib.suppress(CheckpointError):
            body = parse_manifest(text, address)
            data = self._data(address, body)[len(self._root.rstrip("/")) + 1 :]
            text = manifest_text({**body, "data": up + data}).encode()
        self._write(f"{self._path(to)}/{MANIFEST}", text)
        with _errors(address):
            self._filesystem.delete_file(f"{self._path(address)}/{MANIFEST}")

    def _fetch_bytes(self, address: str, manifest: Mapping[str, Any], name: str) -> bytes:
        expected = manifest["files"].get(name)
        if expected is None:
            raise CheckpointError(f"{address} is damaged: its manifest lacks {name}")
        path = f"{self._data(address, manifest)}/{name}"
        try:
            content = self._read(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{address} is damaged: {name} is missing") from error
        if xxhash.xxh3_128_hexdigest(content) != expected["xxh3_128"]:
            raise CheckpointError(f"{address} is damaged: the hash of {name} differs from the manifest's")
        return content

    def _read_named(self, address: str, name: str) -> bytes:
        try:
            return self._read(f"{self._path(address)}/{name}")
        except FileNotFoundError as error:
            if name != MANIFEST:
                raise
            raise CheckpointError(f"{address} is no complete checkpoint: it has no {MANIFEST}") from error

    def _read(self, path: str) -> bytes:
        with _errors(path), self._filesystem.open_input_stream(path) as stream:
            content: bytes = stream.read()
            return content

    def _write(self, path: str, content: bytes) -> None:
        """One small object, as a whole."""
        with _errors(path):
            if self._has_folders:
                self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
            with self._filesystem.open_output_stream(path) as stream:
                stream.write(content)

    def _send(self, source: Path | bytes, path: str) -> Facts:
        digest, size = xxhash.xxh3_128(), 0
        with _errors(path):
            if self._has_folders:
                self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
            with self._filesystem.open_output_stream(path) as stream:
                for chunk in _chunks(source):
                    self._go_on()
                    stream.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
        return {"bytes": size, "xxh3_128": digest.hexdigest()}

    def _copy(self, path: str, to: Path | None, expected: Mapping[str, Any]) -> None:
        """Reads an object through, into a file if one is named, and compares it with what is expected."""
        digest, size = xxhash.xxh3_128(), 0
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(to.open("wb")) if to is not None else None
            try:
                stack.enter_context(_errors(path))
                stream = stack.enter_context(self._filesystem.open_input_stream(path))
                while chunk := stream.read(_CHUNK_BYTES):
                    self._go_on()
                    digest.update(chunk)
                    size += len(chunk)
                    if out is not None:
                        out.write(chunk)
            except FileNotFoundError as error:
                raise CheckpointError(f"{path} is missing") from error
        if size != expected["bytes"] or digest.hexdigest() != expected["xxh3_128"]:
            raise CheckpointError(
                f"{path} is damaged: {size} bytes with hash {digest.hexdigest()}, instead of {expected['bytes']} with "
                f"{expected['xxh3_128']}"
            )

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError("told to end")

    def _for_each(self, action: Callable[[str], None], names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            tasks = [pool.submit(action, name) for name in names]
            try:
                for task in tasks:
                    task.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _list(self, address: str) -> list[FileInfo]:
        """What is directly below an address."""
        from pyarrow.fs import FileSelector

        with _errors(address):
            found: list[FileInfo] = self._filesystem.get_file_info(
                FileSelector(self._path(address), allow_not_found=True)
            )
        return found

    def _files(self, path: str) -> list[FileInfo]:
        from pyarrow.fs import FileSelector

        with _errors(path):
            found = self._filesystem.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
        return [info for info in found if info.is_file]

    def _infos(self, addresses: Sequence[str]) -> list[FileInfo]:
        with _errors(self.location):
            found: list[FileInfo] = self._filesystem.get_file_info([self._path(address) for address in addresses])
        return found

    def _delete_folder(self, path: str) -> None:
        with _errors(path), contextlib.suppress(FileNotFoundError):
            self._filesystem.delete_dir(path)


def _patient_s3(region: str) -> FileSystem:
    """Small objects in one request instead of three; a store that hangs is given up after about a minute."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    scheme, _, endpoint = url.rpartition("://")
    return S3FileSystem(
        region=region,
        scheme=scheme or None,
        endpoint_override=endpoint or None,
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=_NUM_ATTEMPTS),
        allow_delayed_open=True,
    )


def _chunks(source: Path | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    with source.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


# What a store says, in pyarrow's words, when it was reached and has refused for good.
_REFUSALS = re.compile(
    r"AWS Error (ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN_ID|SIGNATURE_DOES_NOT_MATCH|"
    r"UNRECOGNIZED_CLIENT|INVALID_SIGNATURE|MISSING_AUTHENTICATION_TOKEN|OPT_IN_REQUIRED|ACCOUNT_PROBLEM)"
    r"|HTTP status (400|401|403|404)|[Bb]ucket '[^']*' not found"
)


def _is_refusal(error: OSError) -> bool:
    """Whether asking again cannot help. A network that is down and a store that is busy are none."""
    caused = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return is_for_good(caused) or bool(_REFUSALS.search(str(error)))


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    """Pyarrow's own errors as StoreError; that something is not there stays FileNotFoundError."""
    import pyarrow as pa

    try:
        yield
    except (FileNotFoundError, StoreError):
        raise
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{what}: {error}") from error
