"""What the coordinator has to run, and the lines it gives to the workers it has started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from paddlewheel.trainer.checkpoint.store import is_remote
from paddlewheel.trainer.job.control import ControlConfig


class JobPlan(BaseModel):
    """One run of a job: everything that the coordinator process reads at its start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    mode: Literal["train", "evaluate"] = "train"
    num_servers: int = Field(ge=1)
    num_trainers: int = Field(ge=1)
    run_dir: str
    """Folder of this run: logs, journal, results."""
    job: dict[str, Any]
    """The validated job file; the workers read it, the coordinator passes it on."""
    tables: dict[str, Any]
    """Descriptions of the tables that the job uses, for the servers."""
    control: ControlConfig = ControlConfig()
    interface: str | None = None
    """Network interface of the trainers' AllReduce; None: chosen from the host's address."""
    restore: str | None = None
    """Checkpoint to begin with; None: the newest of the job, if `resume` allows."""
    restore_once: bool = False
    """Whether a run that was asked for just this and has committed since goes on from what it has committed: roles are
    started again with the command that they were started with first."""
    days: tuple[str, ...] | None = None
    """The days of the job, as its epochs: those trained by earlier runs, then those of this run. None: not by days."""
    resume: Literal["auto", "always", "never"] = "auto"
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
        if self.days is not None:
            return len(self.days)
        return int(self.job.get("train", {}).get("epochs", 1))

    @property
    def by_days(self) -> bool:
        """Whether the job is trained day by day."""
        return self.job.get("train", {}).get("days") is not None

    @property
    def checkpoint(self) -> dict[str, Any]:
        """The job's `checkpoint` block."""
        block: dict[str, Any] = self.job.get("checkpoint", {})
        return block

    @property
    def checkpoint_location(self) -> str:
        """Where checkpoints are committed: a folder, or an address in an object store."""
        return str(self.checkpoint.get("directory") or Path(self.run_dir, "checkpoints"))

    @property
    def journal(self) -> Path:
        """Where the coordinator writes what it decides."""
        return Path(self.run_dir, "journal.jsonl" if self.mode == "train" else f"{self.mode}-journal.jsonl")

    def server_spec(self, endpoints: Sequence[str], rank: int, attempt: int, restore: str | None) -> dict[str, Any]:
        """The first line on a pserver worker's standard input; `staging` in it is for its agent."""
        spec = {
            "tables": self.tables,
            "endpoints": list(endpoints),
            "rank": rank,
            "num_trainers": self.num_trainers,
            "seed": int(self.job.get("seed", 0)),
            "attempt": attempt,
            "logs_removed": self.checkpoint.get("full_every") is not None,
        }
        if self._uses_store(restore):
            spec["staging"] = {
                "folder": self._staging_folder(rank),
                "owner": self.owner,
                "location": self.checkpoint_location,
                "restore": restore if restore is not None and is_remote(restore) else None,
            }
        return spec

    def _uses_store(self, restore: str | None) -> bool:
        return is_remote(self.checkpoint_location) or (restore is not None and is_remote(restore))

    def _staging_folder(self, rank: int) -> str:
        chosen = self.checkpoint.get("staging")
        return str(
            Path(chosen, f"{self.name}-pserver-{rank}") if chosen else Path(self.run_dir, f"staging-pserver-{rank}")
        )

    def trainer_spec(
        self, endpoints: Sequence[str], store: str, rank: int, attempt: int, restore: str | None
    ) -> dict[str, Any]:
        """The first line on a trainer worker's standard input."""
        return {
            "job": self.job,
            "mode": self.mode,
            "rank": rank,
            "num_trainers": self.num_trainers,
            "servers": list(endpoints),
            "store": store,
            "interface": self.interface,
            "run_dir": self.run_dir,
            "attempt": attempt,
            "restore": restore,
            "staging": {
                "folders": [self._staging_folder(server) for server in range(self.num_servers)],
                "owner": self.owner,
            }
            if self._uses_store(restore)
            else None,
            "days": self.days,
            "resume": self.resume,
        }
