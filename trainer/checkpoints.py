"""Where checkpoints are kept: a folder that all roles see, or an object store, behind one interface.

A location is a folder's path, or `s3://bucket/prefix` (also `gs://`, `hdfs://`). An address is a checkpoint in it:
`<location>/step-<n>`, or a draft that is not committed yet. Only the coordinator changes what is committed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from trainer import checkpoint

_LEFTOVER = re.compile(r"\.(warm-start-.*|step-\d+-.*|step-\d+\.draft|removed-.*|LATEST\.new)")
_REPLACED = re.compile(r"\.replaced-(\d+)")


class DirectoryBusyError(RuntimeError):
    """Another coordinator uses the checkpoint folder."""


def is_remote(location: str) -> bool:
    """Whether a location or address is in an object store."""
    return "://" in location


def open_checkpoints(location: str) -> Checkpoints:
    """What is kept at a location. Looks at nothing yet.

    Raises:
        CheckpointError: no store is reached in this way.
    """
    if is_remote(location):
        from trainer.object_store import ObjectStore

        return ObjectStore(location)
    return Folder(Path(location))


def open_address(address: str) -> tuple[Checkpoints, str]:
    """What a person means by an address: the location that a checkpoint lies in, and its full address."""
    address = address.rstrip("/") if is_remote(address) else str(Path(address).absolute())
    return open_checkpoints(address.rpartition("/")[0]), address


class Checkpoints(ABC):
    """All checkpoints of one location."""

    location: str
    owner = ""
    """What the coordinator that commits here is called, where that matters."""

    def draft(self, name: str) -> str:
        """Address of the draft of this name."""
        return f"{self.location}/{name}"

    # -- reading

    @abstractmethod
    def committed(self) -> list[str]:
        """Addresses, oldest step first."""

    @abstractmethod
    def manifest(self, address: str) -> Mapping[str, Any]:
        """Of a checkpoint or draft. Raises CheckpointError when it is missing or was changed."""

    @abstractmethod
    def cursor(self, address: str) -> dict[str, Any]:
        """What rows its model has seen."""

    @abstractmethod
    def saved_at(self, address: str) -> float:
        """Unix time of its manifest."""

    @abstractmethod
    def check_complete(self, address: str) -> Mapping[str, Any]:
        """The manifest, if all files are there in the right size; contents are not read. Raises CheckpointError."""

    @abstractmethod
    def verify(self, address: str) -> None:
        """Reads every byte. Raises CheckpointError."""

    @abstractmethod
    def check_restorable(self, address: str) -> None:
        """As far as the coordinator can tell before a restore; the rest is verified by whoever loads it. Raises
        CheckpointError.
        """

    @abstractmethod
    def best(self) -> str | None:
        """The one that the job has marked as its best."""

    @abstractmethod
    def local_copy(self, address: str) -> AbstractContextManager[Path]:
        """Its folder on this machine, while the block lasts; what had to be fetched is verified."""

    # -- changing

    @abstractmethod
    def sole_use(self) -> AbstractContextManager[None]:
        """Two coordinators must not commit to one location: raises DirectoryBusyError, or makes the other one fail."""

    @abstractmethod
    def clear(self) -> None:
        """Make the location if it is not there; remove what a coordinator or trainer that was killed left half-done."""

    @abstractmethod
    def commit(self, draft: str, step: int, keep: int) -> str:
        """Give a finished draft (its name) its place, remove all but the newest `keep`; returns the new address.

        Raises:
            CheckpointError: the draft is not complete. Nothing has changed then.
            OSError: from the disk or the network. If the checkpoint is there afterwards, it is whole.
        """

    @abstractmethod
    def discard(self, pattern: str) -> None:
        """Remove drafts whose names match."""

    @abstractmethod
    def prune(self, keep: int) -> list[str]:
        """Remove all but the newest `keep` and the best; returns what was removed."""

    @abstractmethod
    def mark_best(self, address: str) -> None:
        """Have `prune` keep it."""

    @abstractmethod
    def set_aside(self, addresses: Sequence[str]) -> str:
        """Move checkpoints to where `committed` does not see them; returns that place."""

    @abstractmethod
    def set_damaged_aside(self, address: str) -> str:
        """The same for one that is damaged; returns its new name."""

    # -- the journal: kept beside checkpoints where the run folder of a coordinator may be lost with its machine

    @abstractmethod
    def keep_journal(self, path: Path) -> None:
        """Copy the journal to the location, unless the location is as safe as the journal's own place."""

    @abstractmethod
    def fetch_journal(self, path: Path) -> None:
        """Bring the journal back, unless there is one at the path."""


class Folder(Checkpoints):
    """Checkpoints in a folder that servers, trainers and coordinator see under the same path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.location = str(path)

    def committed(self) -> list[str]:
        return [str(path) for path in checkpoint.committed(self._path)]

    def manifest(self, address: str) -> Mapping[str, Any]:
        return checkpoint.read_manifest(Path(address))

    def cursor(self, address: str) -> dict[str, Any]:
        return checkpoint.read_cursor(Path(address))

    def saved_at(self, address: str) -> float:
        return Path(address, checkpoint.MANIFEST).stat().st_mtime

    def check_complete(self, address: str) -> Mapping[str, Any]:
        return checkpoint.check_complete(Path(address))

    def verify(self, address: str) -> None:
        checkpoint.read(Path(address))

    check_restorable = verify

    def best(self) -> str | None:
        found = checkpoint.best(self._path)
        return None if found is None else str(found)

    @contextlib.contextmanager
    def local_copy(self, address: str) -> Iterator[Path]:
        yield Path(address)

    @contextlib.contextmanager
    def sole_use(self) -> Iterator[None]:
        import fcntl

        self._path.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DirectoryBusyError(
                    f"another coordinator uses {self.location}, or is about to leave it"
                ) from error
            yield
        finally:
            os.close(fd)

    def clear(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        for staged in [hidden for path in checkpoint.committed(self._path) for hidden in path.rglob(".*")]:
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
        return str(checkpoint.commit(self._path / draft, step, keep))

    def discard(self, pattern: str) -> None:
        for path in list(self._path.glob(pattern)):
            shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep: int) -> list[str]:
        return [str(path) for path in checkpoint.prune(self._path, keep)]

    def mark_best(self, address: str) -> None:
        checkpoint.mark_best(Path(address))

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


def aside_name() -> str:
    """Where `--fresh` puts what it finds."""
    return time.strftime("set-aside-%Y%m%d-%H%M%S", time.gmtime())
