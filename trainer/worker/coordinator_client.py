"""The coordinator as a trainer sees it: requests and their replies (coordinator/README.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeVar

from paddlewheel.data_pipeline.dataset import Dataset, Slice
from paddlewheel.data_pipeline.errors import DataError
from paddlewheel.trainer.coordinator.row_ledger import runs_of
from paddlewheel.trainer.loop.span_log import Trained
from paddlewheel.trainer.protocol.messages import (
    CommitRequest,
    Committed,
    CursorReply,
    CursorRequest,
    Document,
    EpochReply,
    EpochRequest,
    HostAnswer,
    HostOrder,
    HostsReply,
    HostsRequest,
    LeaseReply,
    LeaseRequest,
    NotCommitted,
    Refusal,
    SaveFailed,
    TrainerReply,
    TrainerRequest,
)
from paddlewheel.trainer.telemetry import DurationHistogram
from paddlewheel.trainer.worker.agent_channel import AgentChannel

_Reply = TypeVar("_Reply", bound=TrainerReply)


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
        asked = EpochRequest(
            epoch=epoch,
            fingerprint=data.fingerprint,
            order=data.order_id,
            seed=seed,
            slices=tuple(piece.index for piece in plan),
            sizes=runs_of({piece.index: piece.num_rows for piece in plan}),
        )
        return dict(self._ask(asked, EpochReply).done)

    def leased(self, epoch: int, by_index: Mapping[int, Slice]) -> Iterator[Slice]:
        """Slices as the coordinator gives them; it is asked when the loader needs more."""
        while indices := self._lease(epoch):
            for index in indices:
                yield by_index[index]

    def cursor(self, step: int, epoch: int, trained: Trained) -> tuple[Document, str]:
        """What rows the model of this step has seen, and the name for a draft; waits for all trainers.

        trained: as `TrainedSpans.take` gives it.
        """
        asked = CursorRequest(step=step, epoch=epoch, spans=trained.spans, skipped=trained.skipped)
        reply = self._ask(asked, CursorReply)
        return reply.cursor, reply.draft

    def ask_hosts(self, order: HostOrder) -> Sequence[HostAnswer]:
        """Has the agents of all servers do something; their answers, by rank."""
        return self._ask(HostsRequest(order=order), HostsReply).answers

    def commit(self, step: int, draft: str, seconds: float) -> Committed | NotCommitted:
        """Has a draft committed. seconds: what the save has taken."""
        return self._settled(CommitRequest(step=step, draft=draft, seconds=seconds))

    def save_failed(self, step: int, error: str, kind: Literal["job", "runtime"]) -> NotCommitted:
        """Says why there is no draft to commit. kind: see `SaveFailed`."""
        reply = self._settled(SaveFailed(step=step, error=error, kind=kind))
        assert isinstance(reply, NotCommitted), reply
        return reply

    def _lease(self, epoch: int) -> tuple[int, ...]:
        started = time.perf_counter()
        slices = self._ask(LeaseRequest(epoch=epoch), LeaseReply).slices
        self.lease_waits.observe(time.perf_counter() - started)
        return slices

    def _settled(self, asked: CommitRequest | SaveFailed) -> Committed | NotCommitted:
        reply = self._granted(asked)
        assert isinstance(reply, (Committed, NotCommitted)), reply
        return reply

    def _ask(self, asked: TrainerRequest, kind: type[_Reply]) -> _Reply:
        reply = self._granted(asked)
        assert isinstance(reply, kind), reply
        return reply

    def _granted(self, asked: TrainerRequest) -> TrainerReply:
        reply = self._link.request(asked)
        if isinstance(reply, Refusal):
            message = f"the coordinator refused {asked.what!r}: {reply.error}"
            raise (DataError if reply.kind == "data" else RefusedError)(message)
        return reply
