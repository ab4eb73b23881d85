"""What the coordinator has to run, and what it tells the workers that it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from paddlewheel.pserver.messages import ServerSpec
from paddlewheel.trainer.checkpoint.store import absolute, is_remote
from paddlewheel.trainer.coordinator.specs import Mode, Resume, TrainerSpec
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.protocol.messages import HostStaging, StagingPlan


class JobPlan(BaseModel):
    """One run of a job: everything that the coordinator process reads at its start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: JobConfig
    mode: Mode = "train"
    interface: str | None = None
    """Network interface of the trainers' AllReduce; None: chosen from the host's address."""
    restore: str | None = None
    """Checkpoint to begin with; None: the newest of the job, if `resume` allows."""
    restore_once: bool = False
    """Whether a run that was asked for just this and has committed since goes on from what it has committed: roles are
    started again with the command that they were started with first."""
    days: tuple[str, ...] | None = None
    """The days of the job, as its epochs: those trained by earlier runs, then those of this run. None: not by days."""
    resume: Resume = "auto"
    """Whether training goes on from the checkpoints it finds; see resume.py."""
    http_address: str | None = None
    """'host:port' of the coordinator's status page and metrics; None: there are none."""
    targets: str | None = None
    """Folder for the file that tells Prometheus of the coordinator."""
    owner: str = ""
    """Name of this coordinator in an object store; it chooses one."""

    @property
    def num_epochs(self) -> int:
        """Passes over the training data, or days."""
        return self.job.num_epochs(self.days)

    @property
    def run_dir(self) -> str:
        """Folder of this run: logs, journal, results."""
        return str(Path(self.job.run_dir).absolute())

    @property
    def checkpoint_location(self) -> str:
        """Where checkpoints are committed: a folder, or an address in an object store."""
        return absolute(self.job.checkpoint_location)

    @property
    def journal(self) -> Path:
        """Where the coordinator writes what it decides."""
        return Path(self.run_dir, "journal.jsonl" if self.mode == "train" else f"{self.mode}-journal.jsonl")

    def server_spec(self, endpoints: Sequence[str], rank: int, attempt: int) -> ServerSpec:
        """The first line on a pserver worker's standard input."""
        return ServerSpec(
            tables={name: self.job.tables[name] for name in self.job.data.tables},
            endpoints=tuple(endpoints),
            rank=rank,
            num_trainers=self.job.cluster.trainers,
            seed=self.job.seed,
            attempt=attempt,
            logs_removed=self.job.checkpoint.full_every is not None,
        )

    def host_staging(self, rank: int, restore: str | None) -> HostStaging | None:
        """What a server's agent is told of the object store; None: there is none."""
        if not self._uses_store(restore):
            return None
        return HostStaging(
            folder=self._staging_folder(rank),
            owner=self.owner,
            location=self.checkpoint_location,
            restore=restore if restore is not None and is_remote(restore) else None,
        )

    def trainer_spec(
        self,
        endpoints: Sequence[str],
        server_uids: Sequence[str],
        store: str,
        rank: int,
        attempt: int,
        restore: str | None,
    ) -> TrainerSpec:
        """The first line on a trainer worker's standard input. Arguments are as the fields of `TrainerSpec`."""
        folders = tuple(self._staging_folder(server) for server in range(self.job.cluster.servers))
        return TrainerSpec(
            job=self.job,
            mode=self.mode,
            rank=rank,
            num_trainers=self.job.cluster.trainers,
            servers=tuple(endpoints),
            server_uids=tuple(server_uids),
            store=store,
            interface=self.interface,
            attempt=attempt,
            restore=restore,
            staging=StagingPlan(folders=folders, owner=self.owner) if self._uses_store(restore) else None,
            days=self.days,
            resume=self.resume,
        )

    def _uses_store(self, restore: str | None) -> bool:
        return is_remote(self.checkpoint_location) or (restore is not None and is_remote(restore))

    def _staging_folder(self, rank: int) -> str:
        chosen, name = self.job.checkpoint.staging, f"pserver-{rank}"
        return str(Path(chosen, f"{self.job.name}-{name}") if chosen else Path(self.run_dir, f"staging-{name}"))
