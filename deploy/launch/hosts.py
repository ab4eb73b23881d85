"""A job on a list of machines: who runs what, and the command that starts it there.

The launching machine runs the coordinator. Servers and trainers are started through a command such as ssh, or by hand
from the printed commands. If the launcher or a connection is lost, the roles notice that the coordinator is gone, and
end.

    coordinator: 10.0.0.1            # address of the launching machine, as the others see it
    hosts:
      - {name: node1, address: 10.0.0.11, servers: 1, trainers: 1}
      - {name: node2, address: 10.0.0.12, servers: 1, trainers: 1, first_port: 7100}

Every machine has paddlewheel, and sees the job's data and its checkpoint folder under the same paths; checkpoints may
be in an object store instead.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paddlewheel.trainer.agent.paddle_environment import COMPUTE_THREADS
from paddlewheel.trainer.job.config import JobConfig

_PORTS_PER_ROLE = 3  # its own service, health, metrics
_SSH = (
    "ssh",
    "-oBatchMode=yes",
    "-oConnectTimeout=10",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
    "{name}",
    "--",
)


class HostsError(ValueError):
    """The host file cannot be used, or does not fit the job."""


class HostConfig(BaseModel):
    """One machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(min_length=1)
    """What `connect` is given: a name or user@name for ssh."""
    address: str = Field(min_length=1)
    """Address (or a name that every machine resolves) on which its roles listen. Paddle's server has no authentication:
    take one of a private network."""
    servers: int = Field(default=0, ge=0)
    """Parameter servers on it."""
    trainers: int = Field(default=0, ge=0)
    """Trainers on it."""
    first_port: int | None = Field(default=None, ge=1, le=65_000)
    """Its roles take three ports each from here on: their own, health, metrics. None: free ones, and no metrics from
    other machines' Prometheus unless it reads the `targets` folder."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each trainer's dense part. None: what its libraries choose."""


class HostsConfig(BaseModel):
    """The host file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    coordinator: str = Field(min_length=1)
    """Address of the launching machine, as the hosts see it."""
    hosts: tuple[HostConfig, ...] = Field(min_length=1)
    """The machines, in rank order: the first servers and trainers are on the first one."""
    connect: tuple[str, ...] = _SSH
    """Command that runs a shell command (its last argument) on a host; `{name}` and `{address}` are filled in."""
    command: str = "paddlewheel"
    """How paddlewheel is called on the hosts, for example /opt/paddlewheel/bin/paddlewheel."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of every role there. Secrets do not belong here: name files (PADDLEWHEEL_TOKEN_FILE) instead."""

    @model_validator(mode="after")
    def _no_twins(self) -> HostsConfig:
        taken: dict[tuple[str, int], str] = {}
        for host in self.hosts:
            number = (host.servers + host.trainers) * _PORTS_PER_ROLE
            for port in range(host.first_port, host.first_port + number) if host.first_port else ():
                if (host.address, port) in taken:
                    raise ValueError(
                        f"port {port} of {host.address} would be used twice: move first_port of {host.name}"
                    )
                taken[host.address, port] = host.name
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str], job: JobConfig) -> HostsConfig:
        """Reads a host file and holds it against the job.

        Raises:
            HostsError: it cannot be read or used, or places another number of roles than the job has.
        """
        try:
            raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise HostsError(f"{path}: cannot be read: {error}") from error
        try:
            found = cls.model_validate(raw)
        except ValidationError as error:
            raise HostsError(f"{path}: " + "; ".join(_explain(item) for item in error.errors())) from None
        for what, wanted in (("servers", job.cluster.servers), ("trainers", job.cluster.trainers)):
            placed = sum(getattr(host, what) for host in found.hosts)
            if placed != wanted:
                raise HostsError(
                    f"{path}: its hosts have {placed} {what}, but cluster.{what} of the job is {wanted}; change one of "
                    f"them (--set cluster.{what}={placed})"
                )
        return found

    def places(self, role: str) -> Iterator[Place]:
        """Where the servers or trainers run, by rank."""
        rank = 0
        for host in self.hosts:
            for i in range(host.servers if role == "pserver" else host.trainers):
                slot = i + (host.servers if role == "trainer" else 0)
                first = None if host.first_port is None else host.first_port + _PORTS_PER_ROLE * slot
                yield Place(self, host, role, rank, first)
                rank += 1


@dataclass(frozen=True)
class Place:
    """One role on one host."""

    config: HostsConfig
    host: HostConfig
    role: str
    rank: int
    first_port: int | None

    def shell_command(self, job: JobConfig, coordinator: str, targets: Path | None) -> str:
        """The line that starts the role on its host.

        Args:
            job: the job.
            coordinator: 'host:port' that the role joins.
            targets: folder for Prometheus's files, if the hosts share one.
        """
        own, address = self.first_port, self.host.address
        command = [*shlex.split(self.config.command), "role", self.role, "--coordinator", coordinator]
        command += ["--rank", str(self.rank), "--host", address, "--job-name", job.name]
        if own is not None:
            command += ["--port", str(own), "--health", f"{address}:{own + 1}"]
        if job.metrics.enabled:
            command += ["--metrics", f"{address}:{0 if own is None else own + 2}"]
            if targets is not None:
                command += ["--targets", str(targets)]
        variables = dict(self.config.environment)
        if self.role == "trainer" and self.host.threads is not None:
            variables |= dict.fromkeys(COMPUTE_THREADS, str(self.host.threads))
        prefix = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
        return shlex.join([*prefix, *command])

    def connected(self, shell_command: str) -> list[str]:
        """The local command that runs a shell command there."""
        words = [word.format(name=self.host.name, address=self.host.address) for word in self.config.connect]
        return [*words, shell_command]


def print_commands(job: JobConfig, job_file: Path, hosts: HostsConfig, overrides: tuple[str, ...]) -> str:
    """What to type on each machine, for those who start roles by hand."""
    port = job.cluster.coordinator_port
    if port is None:
        raise HostsError("commands to type need a fixed port of the coordinator: --set cluster.coordinator_port=7070")
    coordinator = f"{hosts.coordinator}:{port}"
    start = [*shlex.split(hosts.command), "role", "coordinator", str(job_file), "--listen", coordinator]
    if job.metrics.enabled and job.metrics.first_port is not None:
        start += ["--metrics", f"{hosts.coordinator}:{job.metrics.first_port}"]
    for override in overrides:
        start += ["--set", override]
    lines = ["# here", shlex.join(start)]
    for role in ("pserver", "trainer"):
        for place in hosts.places(role):
            lines += [f"# on {place.host.name}", place.shell_command(job, coordinator, None)]
    return "\n".join(lines)


def _explain(item: Any) -> str:
    where = ".".join(str(step) for step in item["loc"])
    if item["type"] == "extra_forbidden":
        key = str(item["loc"][-1])
        known = list(HostConfig.model_fields if "hosts" in item["loc"] else HostsConfig.model_fields)
        near = difflib.get_close_matches(key, known, n=1)
        return f"{where}: unknown key{f'; did you mean {near[0]}?' if near else ''} (allowed: {', '.join(known)})"
    return f"{where}: {item['msg']}" if where else str(item["msg"])
