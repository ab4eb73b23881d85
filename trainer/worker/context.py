"""What everything in a trainer's worker shares, opened once."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from paddlewheel.pserver.client import Client
from paddlewheel.pserver.config import Tables
from paddlewheel.pserver.messages import Remark
from paddlewheel.trainer.checkpoint.folder_store import open_address, open_checkpoints
from paddlewheel.trainer.checkpoint.object_draft import Hosts
from paddlewheel.trainer.checkpoint.store import Checkpoints
from paddlewheel.trainer.coordinator.specs import TrainerSpec
from paddlewheel.trainer.dense.backend import dense_program
from paddlewheel.trainer.dense.inputs import layouts
from paddlewheel.trainer.dense.protocols import DenseBackend
from paddlewheel.trainer.distributed.process_group import ProcessGroup, join_group
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.loop.train import Signals
from paddlewheel.trainer.worker.agent_channel import AgentChannel
from paddlewheel.trainer.worker.coordinator_client import CoordinatorClient


@dataclass(frozen=True)
class WorkerContext:
    """One trainer's place in an attempt, and its ways to all others.

    Attributes:
        spec: what the coordinator has told it.
        group: all trainers.
        client: the servers.
        program: the dense part.
        coordinator: asked before it reads, and when a checkpoint is made.
        link: events for the agent.
        signals: set from other threads.
        store: the job's checkpoints.
    """

    spec: TrainerSpec
    group: ProcessGroup
    client: Client
    program: DenseBackend
    coordinator: CoordinatorClient
    link: AgentChannel
    signals: Signals
    store: Checkpoints

    @classmethod
    def open(cls, spec: TrainerSpec, link: AgentChannel, signals: Signals, resources: ExitStack) -> WorkerContext:
        """Meet the other trainers, connect with the servers, build the dense part.

        Raises:
            ValueError (ConfigError): the job cannot be trained here.
            PeerLostError, OSError: the other trainers, or the servers, cannot be reached.
        """
        job, used = spec.job, tables_of(spec.job)
        group = join_group(spec.rank, spec.num_trainers, spec.store, interface=spec.interface)
        client = resources.enter_context(
            Client(
                used,
                spec.servers,
                seed=job.seed,
                server_uids=spec.server_uids,
                rank=spec.rank,
                num_trainers=spec.num_trainers,
                pull_timeout_seconds=job.control.pull_timeout_seconds,
            )
        )
        program = dense_program(
            job,
            layouts(job.data, used),
            spec.rank,
            predicts=spec.mode != "train",
            warn=lambda message: link.send(Remark(level="warning", message=message)),
        )
        coordinator = CoordinatorClient(link)
        store = open_checkpoints(job.checkpoint_location, hosts_of(spec, coordinator))
        return cls(spec, group, client, program, coordinator, link, signals, store)

    @property
    def is_first(self) -> bool:
        """Whether this is trainer 0, which alone speaks with the servers about whole tables."""
        return self.spec.rank == 0

    def store_of(self, address: str) -> tuple[Checkpoints, str]:
        """The store that a checkpoint lies in, which need not be the job's, and its full address."""
        return open_address(address, hosts_of(self.spec, self.coordinator))


def tables_of(job: JobConfig) -> Tables:
    """The tables that the job's features use."""
    return {name: job.tables[name] for name in job.data.tables}


def hosts_of(spec: TrainerSpec, coordinator: CoordinatorClient) -> Hosts | None:
    """The servers' hosts, where checkpoints go through them."""
    return Hosts(spec.staging, coordinator.ask_hosts) if spec.staging is not None else None
