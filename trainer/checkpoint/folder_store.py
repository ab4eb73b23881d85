"""Where checkpoints are kept: a folder that all roles see, or an object store. Which of them, an address tells."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlewheel.trainer.checkpoint import manifest
from paddlewheel.trainer.checkpoint.manifest import Checkpoint, Draft
from paddlewheel.trainer.checkpoint.object_store import ObjectStore
from paddlewheel.trainer.checkpoint.store import (
    Checkpoints,
    DirectoryBusyError,
    SavedModel,
    absolute,
    aside_name,
    is_remote,
)

if TYPE_CHECKING:
    from paddlewheel.pserver.client import Client
    from paddlewheel.trainer.checkpoint.object_draft import Hosts

_LEFTOVER = re.compile(r"\.(warm-start-.*|step-\d+-.*|step-\d+\.draft|removed-.*|LATEST\.new)")
_REPLACED = re.compile(r"\.replaced-(\d+)")
_OWNER = "OWNER"
"""Names the coordinator that may commit, and is locked by it."""


def open_checkpoints(location: str, hosts: Hosts | None = None) -> Checkpoints:
    """What is kept at a location. Looks at nothing yet.

    Args:
        location: a folder or an address of an object store.
        hosts: of the servers, for who saves or loads tables there; a folder needs none.

    Raises:
        CheckpointError: no store is reached in this way.
    """
    if is_remote(location):
        return ObjectStore(location, hosts.plan.owner if hosts is not None else None, hosts=hosts)
    return Folder(Path(location))


def open_address(address: str, hosts: Hosts | None = None) -> tuple[Checkpoints, str]:
    """What a person means by an address: the location that a checkpoint lies in, and its full address."""
    address = absolute(address)
    return open_checkpoints(address.rpartition("/")[0], hosts), address


class Folder(Checkpoints):
    """Checkpoints in a folder that servers, trainers and coordinator see under the same path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.location = str(path)
        self.owner = uuid.uuid4().hex[:12]
        self._owner_fd: int | None = None

    def committed(self) -> list[str]:
        return [str(path) for path in manifest.committed(self._path)]

    def manifest(self, address: str) -> Mapping[str, Any]:
        return manifest.read_manifest(Path(address))

    def cursor(self, address: str) -> dict[str, Any]:
        return manifest.read_cursor(Path(address))

    def saved_at(self, address: str) -> float:
        return Path(address, manifest.MANIFEST).stat().st_mtime

    def check_complete(self, address: str) -> Mapping[str, Any]:
        return manifest.check_complete(Path(address))

    def verify(self, address: str) -> None:
        manifest.read(Path(address))

    check_restorable = verify

    def read_model(self, address: str, *, verify: bool) -> Checkpoint:
        return manifest.read(Path(address), verify=verify)

    def load_tables(self, client: Client, saved: SavedModel) -> str | None:
        assert isinstance(saved, Checkpoint)
        return client.load(saved.sparse)

    def new_draft(self, name: str, step: int) -> Draft:
        return Draft(self._path, name, step)

    def folder_seen_by_servers(self, run_dir: Path) -> Path:
        return self._path

    def best(self) -> str | None:
        found = manifest.best(self._path)
        return None if found is None else str(found)

    @contextlib.contextmanager
    def local_copy(self, address: str) -> Iterator[Path]:
        yield Path(address)

    @contextlib.contextmanager
    def sole_use(self) -> Iterator[None]:
        with self._locked() as owner_fd:
            os.ftruncate(owner_fd, 0)
            os.pwrite(owner_fd, self.owner.encode(), 0)
            os.fsync(owner_fd)
            self._owner_fd = owner_fd
            try:
                yield
            finally:
                self._owner_fd = None

    @contextlib.contextmanager
    def beside_owner(self) -> Iterator[None]:
        with self._locked():
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Holds the folder against all others that ask for it, on this host and on others; the file of its owner.

        Two locks, because NFS passes on those of files opened for writing alone, and those hold between processes only.
        """
        import fcntl

        self._path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file = os.open(self._path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                stack.callback(os.close, file)
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                if isinstance(error, PermissionError) and error.errno != errno.EACCES:
                    raise
                raise DirectoryBusyError(
                    f"checkpoint.directory: another run uses {self.location}; wait for it, or give this one another "
                    "folder (--set checkpoint.directory=...)"
                ) from error
            yield file

    def _check_owner(self) -> None:
        """Where a mount keeps locks to itself, two coordinators may both hold them: then the later one is right."""
        if self._owner_fd is None:
            return
        # through the descriptor that holds the lock: to open and close the file anew would end it
        found = os.pread(self._owner_fd, 1024, 0)
        if found != self.owner.encode():
            raise manifest.CheckpointError(
                f"another coordinator has taken over {self.location}: this one commits no more"
            )

    def clear(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        for staged in [hidden for path in manifest.committed(self._path) for hidden in path.rglob(".*")]:
            shutil.rmtree(staged, ignore_errors=True)  # copies that a load was about to read
        for path in self._path.iterdir():
            replaced = _REPLACED.fullmatch(path.name)
            if replaced and not (self._path / f"step-{replaced[1]}").exists():
                path.rename(self._path / f"step-{replaced[1]}")  # a rename that was begun
            elif replaced or _LEFTOVER.fullmatch(path.name):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def commit(self, draft: str, step: int, keep: int) -> str:
        self._check_owner()
        return str(manifest.commit(self._path / draft, step, keep))

    def discard(self, pattern: str) -> None:
        for path in list(self._path.glob(pattern)):
            shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep: int, *, spare: str | None = None) -> list[str]:
        spared = Path(spare) if spare is not None else None
        return [str(path) for path in manifest.prune(self._path, keep, spare=spared)]

    def mark_best(self, address: str) -> None:
        manifest.mark_best(Path(address))

    def set_aside(self, addresses: Sequence[str]) -> str:
        aside = self._path / aside_name()
        aside.mkdir(exist_ok=True)
        for address in addresses:
            Path(address).rename(aside / Path(address).name)
        return str(aside)

    def set_damaged_aside(self, address: str) -> str:
        path = Path(address)
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        return aside.name

    def keep_journal(self, path: Path) -> None:
        pass  # it is on a disk like this one

    def fetch_journal(self, path: Path) -> None:
        pass
