"""``paddlewheel role``: one role of a job, as a container or another machine runs it."""

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from cyclopts import App, Parameter, validators

from paddlewheel.deploy.cli.arguments import JobFile, Overrides, check_host_and_port
from paddlewheel.trainer.agent.options import AgentOptions, Option

app = App(name="role", help="Run one role of a job: what a container or another machine starts.")

_NOT_FOR_PEOPLE = ("role", "worker")
_HINTS = get_type_hints(AgentOptions, include_extras=True)


def _parameter(name: str) -> Parameter:
    """The command's argument for one of an agent's options."""
    option: Option = _HINTS[name].__metadata__[0]
    checks: list[Any] = [check_host_and_port] if option.is_address else []
    if option.limits is not None:
        checks.append(validators.Number(gte=option.limits[0], lte=option.limits[1]))
    flag = f"--{name.replace('_', '-')}"
    return Parameter(name=flag, help=option.help, env_var=option.variables, validator=checks)


def _arguments_of_an_agent() -> type:
    """A class of the command's arguments: the options of an agent without those that no person gives."""
    given: list[Any] = []
    for field in dataclasses.fields(AgentOptions):
        if field.name in _NOT_FOR_PEOPLE:
            continue
        plain: Any = _HINTS[field.name].__origin__
        kind = Annotated[plain, _parameter(field.name)]
        required = field.default is dataclasses.MISSING
        given.append((field.name, kind) if required else (field.name, kind, field.default))
    made = dataclasses.make_dataclass("AgentArguments", given, frozen=True, kw_only=True)
    made.__doc__, made.__module__ = AgentOptions.__doc__, __name__
    return Parameter(name="*")(made)


if TYPE_CHECKING:
    AgentArguments = AgentOptions
    Metrics = str | None
    Targets = Path | None
else:
    AgentArguments = _arguments_of_an_agent()
    Metrics = Annotated[str | None, _parameter("metrics")]
    Targets = Annotated[Path | None, _parameter("targets")]


def _run_agent(role: str, arguments: AgentArguments) -> int:
    """Runs the agent until the job is over; its exit code."""
    from paddlewheel.trainer.agent.agent import run_agent

    return run_agent(AgentOptions(**{**vars(arguments), "role": role}))


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

    plan = plan_of(JobConfig.load(job, overrides), mode, restore=restore).plan
    told = {"http_address": metrics, "targets": str(targets) if targets else None, "restore_once": True}
    plan = plan.model_copy(update=told)
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    configure_logs()
    return asyncio.run(serve(plan, listen))


@app.command
def pserver(arguments: AgentArguments) -> int:
    """Run one parameter server of a job."""
    return _run_agent("pserver", arguments)


@app.command
def trainer(arguments: AgentArguments) -> int:
    """Run one trainer of a job. Its data must be reachable under the paths of the coordinator's job file."""
    return _run_agent("trainer", arguments)
