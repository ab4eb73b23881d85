"""The coordinator as a trainer sees it: requests and their replies (coordinator/README.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paddlewheel.data_pipeline.dataset import Dataset, Slice
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.trainer.coordinator.row_ledger import runs_of
from paddlewheel.trainer.telemetry import DurationHistogram
from paddlewheel.trainer.worker.agent_channel import AgentChannel


class RefusedError(ValueError):
    """The coordinator refused a request; asking again, or starting again, cannot help."""


class CoordinatorClient:
    """Asks and waits for the reply.

    Raises (all methods):
        DataError: the coordinator refused, because of the data.
        RefusedError: it refused for another reason.
    """

    def __init__(self, link: AgentChannel) -> None:
        self._link = link
        self.lease_waits = DurationHistogram()
        """How long the loader has waited for leases."""

    def open_epoch(self, epoch: int, data: Dataset, seed: int, plan: Sequence[Slice]) -> dict[int, int]:
        """Says what this trainer is about to read; returns the rows that are trained already, by slice."""
        reply = self._ask(
            "epoch",
            epoch=epoch,
            fingerprint=data.fingerprint,
            order=data.order_id,
            seed=seed,
            slices=[piece.index for piece in plan],
            sizes=runs_of({piece.index: piece.num_rows for piece in plan}),
        )
        return {int(index): int(rows) for index, rows in reply["done"]}

    def leased(self, epoch: int, by_index: Mapping[int, Slice]) -> Iterator[Slice]:
        """Slices as the coordinator gives them; it is asked when the loader needs more."""
        while indices := self._lease(epoch):
            for index in indices:
                yield by_index[int(index)]

    def cursor(self, step: int, epoch: int, trained: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """What rows the model of this step has seen, and the name for a draft; waits for all trainers.

        trained: as `TrainedSpans.take` gives it.
        """
        reply = self._ask("cursor", step=step, epoch=epoch, **trained)
        return reply["cursor"], reply["draft"]

    def ask_hosts(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Has the agents of all servers do something; their answers, by rank."""
        answers: list[dict[str, Any]] = self._ask("hosts", order=order)["answers"]
        return answers

    def commit(self, step: int, **fields: Any) -> dict[str, Any]:
        """Has a draft committed, or says why there is none; a commit that failed is an answer."""
        return self._ask("commit", step=step, **fields)

    def _lease(self, epoch: int) -> list[int]:
        started = time.perf_counter()
        slices: list[int] = self._ask("lease", epoch=epoch)["slices"]
        self.lease_waits.observe(time.perf_counter() - started)
        return slices

    def _ask(self, what: str, **fields: Any) -> dict[str, Any]:
        reply = self._link.request(what, **fields)
        if "error" in reply and "committed" not in reply:
            message = f"the coordinator refused {what!r}: {reply['error']}"
            raise (DataError if reply.get("kind") == "data" else RefusedError)(message)
        return reply
