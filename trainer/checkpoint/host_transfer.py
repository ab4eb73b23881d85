"""Checkpoints in an object store, as the hosts of servers and trainer 0 make and restore them.

Paddle's servers save to and load from disks of their own host only. So a save goes through a folder of each host:

    trainer 0   asks the hosts to prepare: room for this many bytes, an empty folder       (`Host.obey`, by the agents)
    trainer 0   asks the servers to save there, then the hosts to upload what they find
    trainer 0   uploads table descriptions, dense part, cursor and the draft's manifest    (`RemoteDraft`)

and a restore begins with each server's agent, which fetches what its server needs while that starts. A host never needs
to see another one's folder. The agents are asked through the coordinator (request `hosts`).
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from paddlewheel.pserver import host_parts
from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import Tables, table_id
from paddlewheel.pserver.errors import SaveError
from paddlewheel.pserver.saved_tables import Part, SavedTable, parse_description, with_earlier
from paddlewheel.trainer.checkpoint.manifest import CURSOR, DENSE, Base, CheckpointError
from paddlewheel.trainer.checkpoint.object_store import Facts, ObjectStore, RemoteCheckpoint

_LOADED = "loaded"

AskHosts = Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]]
"""Sends an order to the agents of all servers; their answers in rank order."""


@dataclass(frozen=True)
class StagingPlan:
    """What the coordinator tells of the way to the store. folders: of the servers' hosts, in rank order."""

    folders: tuple[str, ...]
    owner: str

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StagingPlan:
        return cls(tuple(raw["folders"]), raw["owner"])


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
        fetched, loaded = self._folder / "fetched", self._folder / _LOADED
        remote = store.read(address)
        saved = tables_of(remote)
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
            if sent[f"sparse/{name}"] != _facts(part):
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


class RemoteDraft:
    """A checkpoint under construction in an object store: `save`, then `finish`. Trainer 0's side."""

    def __init__(self, location: str, plan: StagingPlan, name: str, step: int, ask: AskHosts) -> None:
        self._store = ObjectStore(location, plan.owner)
        self._plan, self._name, self._step, self._ask = plan, name, step, ask
        self.address = self._store.draft(name)
        self._files: dict[str, Facts] = {}

    def save(
        self,
        client: Client,
        *,
        advance_day: Collection[str] = (),
        mark: str | None = None,
        base: Base | None = None,
    ) -> dict[str, SavedTable]:
        """Have the servers save and their hosts upload; advance_day: see `Client.save`. mark: save the state there.

        base: at a mark, save only what changed since that checkpoint.

        Raises:
            CheckpointError, ServerError, StoreError: it is not complete, and never will be.
        """
        since = None if base is None else base.since()
        self._answers({"order": "prepare", "draft": self._name, "bytes": list(client.save_bytes(since))})

        def collect() -> list[dict[str, list[Part]]]:
            answers = self._answers({"order": "upload", "draft": self._name})
            return [{n: [Part(*p) for p in parts] for n, parts in answer["tables"].items()} for answer in answers]

        saved = client.save_per_host(
            [Path(folder, self._name) for folder in self._plan.folders],
            collect,
            advance_day=advance_day,
            mark=mark,
            since=since,
        )
        for name, table in saved.items():
            folder = f"sparse/{name}/{table_id(name):03d}"
            self._files |= {f"{folder}/{part.name}": _facts(part) for part in table.parts}
            self._files |= self._store.put(self.address, {f"sparse/{name}/table.json": table.description.encode()})
        return saved

    def finish(
        self, *, dense: Mapping[str, Any], cursor: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """As `checkpoint.Draft.finish`."""
        import numpy as np
        from safetensors.numpy import save

        content = {
            DENSE: save({name: np.ascontiguousarray(value) for name, value in dense.items()}),
            CURSOR: json.dumps(cursor).encode(),
        }
        files = self._files | self._store.put(self.address, content)
        return self._store.finish(self.address, self._step, facts, files)

    def _answers(self, order: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        answers = self._ask(order)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise CheckpointError(f"the host of pserver {rank}: {answer['error']}")
        return answers


def load_remote(client: Client, saved: RemoteCheckpoint, plan: StagingPlan, ask: AskHosts) -> str | None:
    """Have the servers load what their hosts have fetched; returns as `Client.load`.

    Raises:
        CheckpointError: the tables do not fit.
    """
    mark = client.load_per_host([Path(folder, _LOADED) for folder in plan.folders], tables_of(saved))
    ask({"order": "forget"})
    return mark


def tables_of(saved: RemoteCheckpoint) -> dict[str, SavedTable]:
    """The checkpoint's tables by name, with those that they lead on from. Raises CheckpointError for a broken chain."""
    return {
        name: with_earlier(
            [
                *(parse_description(texts[name], Path("earlier", name)) for texts in saved.earlier),
                parse_description(text, Path("sparse", name)),
            ]
        )
        for name, text in saved.tables.items()
    }


def _facts(part: Part) -> Facts:
    return {"bytes": part.num_bytes, "xxh3_128": part.xxh3_128}
