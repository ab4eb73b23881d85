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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from paddlewheel.pserver import host_parts
from paddlewheel.pserver.config import Tables, table_id
from paddlewheel.pserver.errors import SaveError
from paddlewheel.pserver.saved_tables import Part
from paddlewheel.trainer.checkpoint.manifest import CheckpointError
from paddlewheel.trainer.checkpoint.object_draft import LOADED, facts_of
from paddlewheel.trainer.checkpoint.object_store import ObjectStore


class Host:
    """What the agent of a server does for it. Every call may take long; `cancel` ends the one under way.

    Args:
        spec: the first line of the server's worker, with `staging`: folder, owner, location, restore.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        staging = spec["staging"]
        self._folder = Path(staging["folder"])
        self._tables = TypeAdapter(Tables).validate_python(spec["tables"])
        self._rank, self._num_servers = int(spec["rank"]), len(spec["endpoints"])
        self._location, self._owner, self._restore = staging["location"], staging["owner"], staging["restore"]
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
        saved = store.read(address).tables()
        for name, config in self._tables.items():
            if name not in saved:
                raise CheckpointError(f"{address} has no table {name!r}")
            table, number = saved[name], f"{table_id(name):03d}"
            parts = host_parts.needed(table, self._rank, self._num_servers, config)
            self._check_room(sum(part.num_bytes for part in parts))
            store.fetch(address, fetched, [f"sparse/{name}/{number}/{part.name}" for part in parts])
            host_parts.lay_out(table, fetched / "sparse" / name / number, loaded, self._rank, self._num_servers, config)
        shutil.rmtree(fetched, ignore_errors=True)

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carries out an order of trainer 0; an answer with `error` when it could not.

        prepare {draft, bytes}: makes an empty folder with room. upload {draft}: {tables: {name: parts}}, `Part` as
        lists. forget: removes everything.
        """
        with self._busy:
            try:
                match order["order"]:
                    case "prepare":
                        self.clear()
                        self._check_room(int(order["bytes"][self._rank]))
                        (self._folder / order["draft"]).mkdir(parents=True)
                    case "upload":
                        return {"tables": self._upload(order["draft"])}
                    case "forget":
                        self.clear()
                    case what:
                        return {"error": f"unknown order {what!r}"}
            except (OSError, ValueError, RuntimeError) as error:
                return {"error": f"{type(error).__name__}: {error}"}
            return {}

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
