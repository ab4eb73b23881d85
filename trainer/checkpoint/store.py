"""What every place that keeps checkpoints can do: the interface of a folder and of an object store.

A location is a folder's path, or `s3://bucket/prefix` (also `gs://`, `hdfs://`). An address is a checkpoint in it:
`<location>/step-<n>`, or a draft that is not committed yet. Only the coordinator changes what is committed.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paddlewheel.pserver.client import Client
    from paddlewheel.pserver.saved_tables import SavedTable
    from paddlewheel.trainer.checkpoint.manifest import Base

KEY_FOUND = "holds a key or password"
KEY_REMEDY = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role, in the environment of every process."
)
_SECRET_OPTION = re.compile(r"[?&](access_key|secret_key|session_token|password|token)=", re.IGNORECASE)


def is_remote(location: str) -> bool:
    """Whether a location or address is in an object store."""
    return "://" in location


def absolute(location: str) -> str:
    """A location or address in full, as every process of the job writes it: an absolute path, or an address."""
    return location.rstrip("/") if is_remote(location) else str(Path(location).absolute())


def holds_secret(address: str) -> bool:
    """Whether an address names a key or password: `s3://KEY:SECRET@bucket/...`, or as an option after `?`.

    A user's name alone is none in `hdfs://user@host/`.
    """
    scheme, is_address, rest = address.partition("://")
    if not is_address:
        return False
    host, _, path = rest.partition("/")
    if "@" in host:
        return ":" in host.rpartition("@")[0] or scheme != "hdfs"
    port = host.partition(":")[2]
    cut_off = bool(port) and not port.isdecimal() and "@" in path  # a secret key may have a slash in it
    return cut_off or bool(_SECRET_OPTION.search(rest))


class DirectoryBusyError(RuntimeError):
    """Another coordinator uses the checkpoint folder."""


class SavedModel(Protocol):
    """A committed checkpoint, read."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Step, job, tables, files, and what else the trainers wrote down."""
        ...

    @property
    def cursor(self) -> Mapping[str, Any]:
        """What rows the model has seen."""
        ...

    @property
    def readable(self) -> bool:
        """Whether the parts of `tables` can be read on this machine."""
        ...

    def dense(self) -> dict[str, Any]:
        """Parameters and optimizer state by name."""
        ...

    def tables(self) -> dict[str, SavedTable]:
        """By name, with those that they lead on from."""
        ...


class DraftModel(Protocol):
    """A checkpoint under construction: `save`, then `finish`; then it can be committed."""

    @property
    def address(self) -> str:
        """Where it is made."""
        ...

    @property
    def readable(self) -> bool:
        """Whether the parts of saved tables can be read on this machine."""
        ...

    def save(
        self,
        client: Client,
        *,
        advance_day: Collection[str] = (),
        mark: str | None = None,
        base: Base | None = None,
    ) -> dict[str, SavedTable]:
        """Have the servers save their tables: as they are (advance_day: see `Client.save`), or as at a mark.

        base: at a mark, save only what changed since that checkpoint.

        Raises CheckpointError, ServerError, OSError: it is not complete, and never will be.
        """
        ...

    def finish(
        self, *, dense: Mapping[str, Any], cursor: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the dense part, the cursor and, last, the manifest, which it returns."""
        ...


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

    # -- models, for trainers

    @abstractmethod
    def read_model(self, address: str, *, verify: bool) -> SavedModel:
        """A checkpoint but for the rows of its tables. verify: read all files through, too, where they are files here.

        Raises CheckpointError.
        """

    @abstractmethod
    def load_tables(self, client: Client, saved: SavedModel) -> str | None:
        """Have the servers load the tables of a model that this store has read; returns as `Client.load`.

        Raises CheckpointError, ServerError.
        """

    @abstractmethod
    def new_draft(self, name: str, step: int) -> DraftModel:
        """Begin a checkpoint of a step under a name that no other attempt has; it starts with `.`."""

    @abstractmethod
    def folder_seen_by_servers(self, run_dir: Path) -> Path:
        """Where files may lie that servers are to read: beside the checkpoints, or in the run's folder."""

    # -- changing

    @abstractmethod
    def sole_use(self) -> AbstractContextManager[None]:
        """Two coordinators must not commit to one location: raises DirectoryBusyError, or makes the other one fail."""

    @abstractmethod
    def beside_owner(self) -> AbstractContextManager[None]:
        """For who only removes old checkpoints: takes the right to commit from nobody. Raises DirectoryBusyError."""

    @abstractmethod
    def clear(self) -> None:
        """Make the location if it is not there; remove what a coordinator or trainer that was killed left half-done."""

    @abstractmethod
    def commit(self, draft: str, step: int, keep: int) -> str:
        """Give a finished draft (its name) its place, remove all but the newest `keep` and it; returns its address.

        Raises:
            CheckpointError: the draft is not complete, or another coordinator has taken over. Nothing has changed then.
            OSError: from the disk or the network. If the checkpoint is there afterwards, it is whole.
        """

    @abstractmethod
    def discard(self, pattern: str) -> None:
        """Remove drafts whose names match."""

    @abstractmethod
    def prune(self, keep: int, *, spare: str | None = None) -> list[str]:
        """Remove all but the newest `keep`, the best and `spare`; returns what was removed."""

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
        """Copy the journal to the location, unless the location is as safe as the journal's own place.

        Raises OSError: also when another coordinator has taken the location over, whose journal lies there.
        """

    @abstractmethod
    def fetch_journal(self, path: Path) -> None:
        """Bring the journal back, unless the one at the path begins with all of it: then that is the newer one."""


ASIDE = "set-aside-"


def aside_name() -> str:
    """Where checkpoints are put that a run does not go on from."""
    return time.strftime(f"{ASIDE}%Y%m%d-%H%M%S", time.gmtime())
