"""What every place that keeps checkpoints can do: the interface of a folder and of an object store.

A location is a folder's path, or `s3://bucket/prefix` (also `gs://`, `hdfs://`). An address is a checkpoint in it:
`<location>/step-<n>`, or a draft that is not committed yet. Only the coordinator changes what is committed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


class DirectoryBusyError(RuntimeError):
    """Another coordinator uses the checkpoint folder."""


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


def aside_name() -> str:
    """Where `--fresh` puts what it finds."""
    return time.strftime("set-aside-%Y%m%d-%H%M%S", time.gmtime())
