"""``paddlewheel role``: one role of a job, as a container or another machine runs it."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators

from paddlewheel.deploy.cli.arguments import JobFile, Overrides, check_host_and_port

app = App(name="role", help="Run one role of a job: what a container or another machine starts.")

Metrics = Annotated[
    str | None,
    Parameter(
        name="--metrics",
        env_var="PADDLEWHEEL_METRICS",
        validator=check_host_and_port,
        help="HOST:PORT to serve /metrics on (default: off). If the port is in use, a warning is logged.",
    ),
]
Targets = Annotated[
    Path | None,
    Parameter(
        name="--targets",
        env_var="PADDLEWHEEL_TARGETS",
        help="Folder for the file that tells Prometheus about this role.",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AgentArguments:
    """What servers and trainers are told. Each may also come from the environment, as it does in a container."""

    coordinator: Annotated[str, Parameter(validator=check_host_and_port, env_var="PADDLEWHEEL_COORDINATOR")]
    """HOST:PORT of the coordinator. It need not run yet, and its name need not resolve yet."""
    rank: Annotated[
        int | None,
        Parameter(validator=validators.Number(gte=0, lte=10_000), env_var=("PADDLEWHEEL_RANK", "JOB_COMPLETION_INDEX")),
    ] = None
    """Rank of this role, from 0; by default the lowest free one."""
    host: Annotated[str, Parameter(env_var="PADDLEWHEEL_HOST")] = "127.0.0.1"
    """Address of this machine under which the other roles reach it, and on which it listens."""
    port: Annotated[
        int | None, Parameter(validator=validators.Number(gte=1, lte=65535), env_var="PADDLEWHEEL_PORT")
    ] = None
    """Port of the role's own service; by default a free one."""
    health: Annotated[str, Parameter(validator=check_host_and_port, env_var="PADDLEWHEEL_HEALTH")] = "127.0.0.1:0"
    """HOST:PORT of the gRPC health service. Service `""`: the role is alive; `ready`: it has joined as a member."""
    job_name: Annotated[str, Parameter(env_var="PADDLEWHEEL_JOB_NAME")] = ""
    """Name of the job in the metrics."""
    metrics: Metrics = None
    targets: Targets = None
    join_seconds: Annotated[float, Parameter(validator=validators.Number(gte=0, lte=1e8))] = 300.0
    """Seconds to wait for the coordinator at the start."""

    def run(self, role: str) -> int:
        """Runs the agent until the job is over; its exit code."""
        from paddlewheel.trainer.agent.agent import main

        arguments = ["--role", role]
        for name, value in vars(self).items():
            if value is not None:
                arguments += [f"--{name.replace('_', '-')}", str(value)]
        return main(arguments)


@app.command
def coordinator(
    job: JobFile,
    *,
    listen: Annotated[str, Parameter(validator=check_host_and_port, help="HOST:PORT to listen on.")] = "127.0.0.1:7070",
    mode: Literal["train", "evaluate"] = "train",
    restore: Annotated[
        str | None,
        Parameter(
            help="Checkpoint (its `step-<n>` folder, or s3://...) to begin with; those after it are put aside. Started "
            "again with it, the job goes on from what it has committed since."
        ),
    ] = None,
    metrics: Metrics = None,
    targets: Targets = None,
    overrides: Overrides = (),
) -> int:
    """Run the coordinator of a job: it waits for all servers and trainers, starts them, and decides until the end.

    With --metrics it also serves the status page there.
    """
    from paddlewheel.deploy.launch.plan import plan_of
    from paddlewheel.trainer.coordinator.service import serve
    from paddlewheel.trainer.job.config import JobConfig
    from paddlewheel.trainer.telemetry.logs import configure_logs

    plan = plan_of(JobConfig.load(job, overrides), mode, restore=restore)
    told = {"http_address": metrics, "targets": str(targets) if targets else None, "restore_once": True}
    plan = plan.model_copy(update=told)
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    configure_logs()
    return asyncio.run(serve(plan, listen))


@app.command
def pserver(arguments: AgentArguments) -> int:
    """Run one parameter server of a job."""
    return arguments.run("pserver")


@app.command
def trainer(arguments: AgentArguments) -> int:
    """Run one trainer of a job. Its data must be reachable under the paths of the coordinator's job file."""
    return arguments.run("trainer")
