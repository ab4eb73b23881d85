"""``paddlewheel role``: one role of a job, as a container or another machine runs it."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from deploy.cli.arguments import JobFile, Overrides

app = App(name="role", help="Run one role of a job: what a container or another machine starts.")

CoordinatorAddress = Annotated[str, Parameter(name="--coordinator", help="HOST:PORT of the coordinator.")]
Rank = Annotated[int | None, Parameter(help="Rank of this role, from 0; by default the lowest free one.")]
Host = Annotated[str, Parameter(help="Address under which the other roles reach this machine.")]
Port = Annotated[int | None, Parameter(help="Port of the role's own service; by default a free one.")]
JoinSeconds = Annotated[float, Parameter(help="How long the coordinator may be away at the start.")]


@app.command
def coordinator(
    job: JobFile,
    *,
    listen: Annotated[str, Parameter(help="HOST:PORT to listen on.")] = "127.0.0.1:7070",
    mode: Literal["train", "evaluate"] = "train",
    restore: Annotated[Path | None, Parameter(help="Checkpoint (its step-<n> folder) to begin with.")] = None,
    overrides: Overrides = (),
) -> int:
    """Run the coordinator of a job: it waits for all servers and trainers, starts them, and decides until the end."""
    from deploy.launcher import plan_of
    from trainer.config import JobConfig
    from trainer.coordinator.service import serve
    from trainer.logs import configure_logs

    plan = plan_of(JobConfig.load(job, overrides), mode, restore=restore)
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    configure_logs()
    return asyncio.run(serve(plan, listen))


@app.command
def pserver(
    *,
    coordinator: CoordinatorAddress,
    rank: Rank = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    join_seconds: JoinSeconds = 300.0,
) -> int:
    """Run one parameter server of a job."""
    return _agent("pserver", coordinator, rank, host, port, join_seconds)


@app.command
def trainer(
    *,
    coordinator: CoordinatorAddress,
    rank: Rank = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    join_seconds: JoinSeconds = 300.0,
) -> int:
    """Run one trainer of a job. Its data must be reachable under the paths of the coordinator's job file."""
    return _agent("trainer", coordinator, rank, host, port, join_seconds)


def _agent(role: str, coordinator: str, rank: int | None, host: str, port: int | None, join_seconds: float) -> int:
    from trainer.agent import main

    arguments = ["--role", role, "--coordinator", coordinator, "--host", host, "--join-seconds", str(join_seconds)]
    for name, value in (("--rank", rank), ("--port", port)):
        if value is not None:
            arguments += [name, str(value)]
    return main(arguments)
