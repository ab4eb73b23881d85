"""Where the processes of a job serve their metrics; JobConfig embeds this as `metrics`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class MetricsConfig(BaseModel):
    """The HTTP ports of a job: /metrics of every process, and the coordinator's status page."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    enabled: bool = True
    """Whether they are opened at all."""

    address: str | None = None
    """Address they listen on. None: `cluster.bind_address`. A password and TLS are set by the environment, never
    here."""

    first_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the coordinator; servers and then trainers follow by rank. None: free ones. A taken one warns."""

    prometheus_sd_directory: str | None = None
    """Folder where the processes leave files for Prometheus's file_sd_configs. None: `targets` inside `run_dir`."""

    visualdl: bool = False
    """Whether loss, AUC and speed are also written to `visualdl` inside `run_dir` (needs the extra `visualdl`)."""

    def port(self, role: str, rank: int, num_servers: int) -> int:
        """The port of one process of a job with so many servers; 0 for any free one."""
        if self.first_port is None:
            return 0
        return self.first_port + {"coordinator": 0, "pserver": 1 + rank, "trainer": 1 + num_servers + rank}[role]
