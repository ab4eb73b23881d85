"""Checkpoints in an object store, as the hosts of servers and trainer 0 make and restore them.

Paddle's servers save to and load from disks of their own host only. So a save goes through a folder of each host:

    trainer 0   asks the hosts to prepare: room for this many bytes, an empty folder       (`Host.obey`, by the agents)
    trainer 0   asks the servers to save there, then the hosts to upload what they find
    trainer 0   uploads table descriptions, dense part, cursor and the draft's manifest    (`RemoteDraft`)

and a restore begins with each server's agent, which fetches what its server needs while that starts. A host never needs
to see another one's folder. The agents are asked through the coordinator (request `hosts`).
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from paddlewheel.pserver import host_parts
from paddlewheel.pserver.config import table_id
from paddlewheel.pserver.errors import SaveError
from paddlewheel.pserver.messages import ServerSpec
from paddlewheel.pserver.saved_tables import Part
from paddlewheel.trainer.checkpoint.manifest import CheckpointError
from paddlewheel.trainer.checkpoint.object_draft import LOADED, facts_of
from paddlewheel.trainer.checkpoint.object_store import ObjectStore
from paddlewheel.trainer.protocol.messages import (
    ForgetFiles,
    HostAnswer,
    HostDone,
    HostFailed,
    HostOrder,
    HostStaging,
    HostUploaded,
    PrepareHost,
    UploadDraft,
    UploadedPart,
    UploadedTable,
)


class Host:
    """What the agent of a server does for it. Every call may take long; `cancel` ends the one under way.

    Args:
        spec: of the server's worker.
        staging: its folder, and the way to the store.
    """

    def __init__(self, spec: ServerSpec, staging: HostStaging) -> None:
        self._folder = Path(staging.folder)
        self._tables = spec.tables
        self._rank, self._num_servers = spec.rank, len(spec.endpoints)
        self._location, self._owner, self._restore = staging.location, staging.owner, staging.restore
        self._cancelled = threading.Event()
        self._busy = threading.RLock()

    def cancel(self) -> None:
        """End what is under way, soon."""
        self._cancelled.set()

    def begin(self) -> None:
        """Clear the folder; if a checkpoint is to be restored, fetch what the server will load.

        Raises:
            CheckpointError: the checkpoint is damaged, or its tables are others.
            OSError: disk or network.
        """
        with self._busy:
            self.clear()
            if self._restore is not None:
                self._fetch(self._restore)

    def _fetch(self, address: str) -> None:
        store = ObjectStore(address.rpartition("/")[0], self._owner, self._cancelled)
        fetched, loaded = self._folder / "fetched", self._folder / LOADED
        remote = store.read(address)
        saved = remote.tables()
        for name, config in self._tables.items():
            if name not in saved:
                raise CheckpointError(f"{address} has no table {name!r}")
            folder = f"sparse/{name}/{table_id(name):03d}"
            for at, (link, place) in enumerate(zip(saved[name].links, remote.chain, strict=True)):
                parts = host_parts.needed(link, self._rank, self._num_servers, config)
                self._check_room(sum(part.num_bytes for part in parts))
                store.fetch(place, fetched, [f"{folder}/{part.name}" for part in parts])
                to = host_parts.folder_of_link(loaded, at)
                host_parts.lay_out(link, fetched / folder, to, self._rank, self._num_servers, config)
                shutil.rmtree(fetched, ignore_errors=True)

    def obey(self, order: HostOrder) -> HostAnswer:
        """Carries out an order of trainer 0; `HostFailed` when it could not."""
        with self._busy:
            try:
                match order:
                    case PrepareHost():
                        self.clear()
                        self._check_room(order.num_bytes[self._rank])
                        (self._folder / order.draft).mkdir(parents=True)
                    case UploadDraft():
                        return HostUploaded(
                            tables={
                                name: UploadedTable(parts=tuple(UploadedPart(**part._asdict()) for part in parts))
                                for name, parts in self._upload(order.draft).items()
                            }
                        )
                    case ForgetFiles():
                        self.clear()
            except (OSError, ValueError, RuntimeError) as error:
                return HostFailed(error=f"{type(error).__name__}: {error}")
            return HostDone()

    def clear(self) -> None:
        """Remove the folder, as soon as nothing is under way in it."""
        with self._busy:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _upload(self, draft: str) -> dict[str, list[Part]]:
        folder = self._folder / draft
        found = host_parts.measure(folder, self._tables)
        store = ObjectStore(self._location, self._owner, self._cancelled)
        names = {f"{name}/{table_id(name):03d}/{part.name}": part for name, parts in found.items() for part in parts}
        sent = store.put(store.draft(draft), {f"sparse/{name}": folder / name for name in names})
        for name, part in names.items():
            if sent[f"sparse/{name}"] != facts_of(part):
                raise CheckpointError(f"{folder / name} changed while it was uploaded")
        self.clear()
        return found

    def _check_room(self, needed: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise SaveError(
                f"{self._folder} has {free / 1e6:.1f} MB left, {needed / 1e6:.1f} MB are needed: make room on that "
                "host, or set checkpoint.staging to another folder"
            )
