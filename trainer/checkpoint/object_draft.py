"""Trainer 0's side of checkpoints in an object store; the servers' hosts do the other one (host_transfer.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlewheel.pserver.config import table_id
from paddlewheel.pserver.saved_tables import Part, SavedTable
from paddlewheel.trainer.checkpoint.manifest import CURSOR, DENSE, Base, CheckpointError
from paddlewheel.trainer.protocol.messages import (
    ForgetFiles,
    HostAnswer,
    HostFailed,
    HostOrder,
    HostUploaded,
    PrepareHost,
    StagingPlan,
    UploadDraft,
)

if TYPE_CHECKING:
    from paddlewheel.pserver.client import Client
    from paddlewheel.trainer.checkpoint.object_store import Facts, ObjectStore, RemoteCheckpoint

LOADED = "loaded"
"""Where in its folder a host puts what it has fetched."""

AskHosts = Callable[[HostOrder], Sequence[HostAnswer]]
"""Sends an order to the agents of all servers; their answers in rank order."""


@dataclass(frozen=True)
class Hosts:
    """The agents of the servers, as a trainer reaches them. ask: sends an order to all, and waits."""

    plan: StagingPlan
    ask: AskHosts


class RemoteDraft:
    """A checkpoint under construction in an object store: `save`, then `finish`. Trainer 0's side."""

    readable = False

    def __init__(self, store: ObjectStore, hosts: Hosts, name: str, step: int) -> None:
        self._store, self._hosts, self._name, self._step = store, hosts, name, step
        self.address = store.draft(name)
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
        self._answers(PrepareHost(draft=self._name, num_bytes=tuple(client.save_bytes(since))))

        def collect() -> list[dict[str, list[Part]]]:
            answers = self._answers(UploadDraft(draft=self._name))
            uploaded = [answer.tables for answer in answers if isinstance(answer, HostUploaded)]
            return [{n: [Part(**dict(p)) for p in table.parts] for n, table in tables.items()} for tables in uploaded]

        saved = client.save_per_host(
            [Path(folder, self._name) for folder in self._hosts.plan.folders],
            collect,
            advance_day=advance_day,
            mark=mark,
            since=since,
        )
        for name, table in saved.items():
            folder = f"sparse/{name}/{table_id(name):03d}"
            self._files |= {f"{folder}/{part.name}": facts_of(part) for part in table.parts}
            self._files |= self._store.put(self.address, {f"sparse/{name}/table.json": table.description.encode()})
        return saved

    def finish(
        self, *, dense: Mapping[str, Any], cursor: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """As `manifest.Draft.finish`."""
        import numpy as np
        from safetensors.numpy import save

        content = {
            DENSE: save({name: np.ascontiguousarray(value) for name, value in dense.items()}),
            CURSOR: json.dumps(cursor).encode(),
        }
        files = self._files | self._store.put(self.address, content)
        return self._store.finish(self.address, self._step, facts, files)

    def _answers(self, order: HostOrder) -> Sequence[HostAnswer]:
        answers = self._hosts.ask(order)
        for rank, answer in enumerate(answers):
            if isinstance(answer, HostFailed):
                raise CheckpointError(f"the host of pserver {rank}: {answer.error}")
        return answers


def load_tables(client: Client, saved: RemoteCheckpoint, hosts: Hosts) -> str | None:
    """Have the servers load what their hosts have fetched; returns as `Client.load`.

    Raises:
        CheckpointError: the tables do not fit.
    """
    mark = client.load_per_host([Path(folder, LOADED) for folder in hosts.plan.folders], saved.tables())
    hosts.ask(ForgetFiles())
    return mark


def facts_of(part: Part) -> Facts:
    """Size and hash of a part, as a manifest has them."""
    return {"bytes": part.num_bytes, "xxh3_128": part.xxh3_128}
