"""Runs a whole job on this machine: coordinator, servers and trainers as processes, watched, and ended in order.

The coordinator decides what happens; the launcher only starts its processes, shows what it says, brings back agents
that died while the job goes on, starts a lost coordinator again (which goes on from the last checkpoint), and sees to
it that nothing is left at the end. If the launcher itself is killed, the
kernel ends everything it started (trainer.distributed.subprocesses.start).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import os
import shlex
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import grpc.aio
import psutil

from paddlewheel.deploy.launch.display import Display, choose_display
from paddlewheel.deploy.launch.hosts import HostsConfig
from paddlewheel.deploy.launch.outcome import RunOutcome
from paddlewheel.deploy.launch.plan import metrics_address, plan_of, targets_folder
from paddlewheel.trainer.agent.options import AgentOptions
from paddlewheel.trainer.agent.paddle_environment import COMPUTE_THREADS
from paddlewheel.trainer.agent.silence import Silence
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import coordinator_pb2_grpc as pb_grpc
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.records import JobOver
from paddlewheel.trainer.coordinator.resume import read_journal
from paddlewheel.trainer.coordinator.security import Security
from paddlewheel.trainer.coordinator.specs import Mode, Resume
from paddlewheel.trainer.distributed.subprocesses import kill_leftovers, kill_session, reserve_port, start
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL, EX_USAGE, EXIT_DONE, describe_exit
from paddlewheel.trainer.protocol.messages import Result
from paddlewheel.trainer.worker import warm_start

_OPEN_SECONDS = 30.0
"""The coordinator opens its port within this time, or something is wrong."""
_FAREWELL_SECONDS = 4.0
"""When the job is over, its processes have this long to leave before they are killed."""
_STOP_SECONDS = 10.0
"""After Ctrl-C everything is gone within this time, whatever happens."""
_RESPAWN_SECONDS = 1.0
"""Pause before a role, or the coordinator, is started again."""
_TAIL_LINES = 15


class LaunchError(RuntimeError):
    """The job could not be started on this machine; trying again may help."""


class RefusedError(ValueError):
    """The coordinator refuses the job as it is."""


class RunFolderBusyError(RuntimeError):
    """Another run uses the same run folder; when it has ended, trying again helps."""


def run_local(
    job: JobConfig,
    mode: Mode = "train",
    *,
    restore: str | None = None,
    resume: Resume = "auto",
    display: Display | None = None,
    hosts: HostsConfig | None = None,
    worker_commands: Mapping[str, Sequence[str]] | None = None,
) -> RunOutcome:
    """Runs the job with its servers and trainers on this machine, or on others. Call it from the main thread: signals.

    Args:
        job: what to run.
        mode: train (and evaluate at the end, if the job has evaluation data), or evaluate a checkpoint.
        restore: checkpoint to begin with; by default what `resume` finds.
        resume: auto goes on from the newest checkpoint of the same job, always also if the job was changed, never
            begins again and puts old checkpoints aside. A job that is trained already is not trained again.
        display: shows progress; a bar or log lines on standard error by default.
        hosts: where servers and trainers run; the coordinator always runs here. None: all of them here.
        worker_commands: programs that replace the Paddle workers, by role (for tests).

    Raises:
        ResumeError: the checkpoints in the job's folder are of a job with other values, or there are none to resume.
        RunFolderBusyError: another run uses job.run_dir.
        LaunchError: the coordinator could not be started.
        RefusedError: it refused the job.
        PortTakenError: a port that the job names is in use.
        ConfigError, CheckpointError: the job would begin with another model, which is not there or does not fit.
    """
    run_dir = Path(job.run_dir).absolute()
    log_dir = run_dir / "logs" if mode == "train" else run_dir / "logs" / mode
    log_dir.mkdir(parents=True, exist_ok=True)
    with _sole_use(run_dir):
        planned = plan_of(job, mode, restore=restore, resume=resume)
        plan = planned.plan
        if (result := planned.finished_result) is not None:
            return _nothing_to_do(plan, result, log_dir)
        if mode == "train" and job.warm_start is not None and planned.start.path is None:
            warm_start.plan(job)
        if hosts is not None and plan.http_address is not None and job.metrics.address is None:
            port = plan.http_address.rpartition(":")[2]
            plan = plan.model_copy(update={"http_address": f"{hosts.coordinator}:{port}"})
        _check_ports(job, hosts)
        launcher = _Launcher(job, plan, log_dir, display or choose_display(), hosts, worker_commands or {})
        outcome = asyncio.run(launcher.run())
        if outcome.result:
            name = "result.json" if mode == "train" else f"{mode}.json"
            try:
                (run_dir / name).write_text(json.dumps(outcome.to_json(), indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(f"{run_dir / name} cannot be written: {error}\n")
    return outcome


def _nothing_to_do(plan: JobPlan, result: dict[str, Any], log_dir: Path) -> RunOutcome:
    return RunOutcome(
        exit_code=EXIT_DONE,
        cause="",
        failed_role="",
        detail=f"{plan.job.name} is trained already; --from-scratch trains it again, more train.epochs or later --days "
        "go on.",
        result=result,
        run_dir=Path(plan.run_dir),
        log_dir=log_dir,
        seconds=0.0,
        num_restarts=0,
        server_memory_bytes={},
    )


@contextlib.contextmanager
def _sole_use(run_dir: Path) -> Iterator[None]:
    """Locks the folder itself, so no lock file is left."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderBusyError(
                f"run_dir: another run uses {run_dir}; wait for it, or give this one another folder (--set run_dir=...)"
            ) from error
        yield
    finally:
        os.close(fd)


def _check_ports(job: JobConfig, hosts: HostsConfig | None) -> None:
    """Refuses taken ports of this machine before anything starts."""
    cluster = job.cluster
    address = cluster.bind_address if hosts is None else hosts.coordinator
    ports = [*((cluster.server_ports or ()) if hosts is None else ())]
    for port in [*ports, *([cluster.coordinator_port] if cluster.coordinator_port else [])]:
        reserve_port(address, port).close()


@dataclass
class _Role:
    """One agent's member and, at times, its process."""

    name: str
    rank: int
    command: list[str]
    log: Path
    process: Process | None = None
    respawn_at: float = 0.0
    num_spawns: int = 0


@dataclass
class _Seen:
    """What the coordinator's status has told so far."""

    status: pb.JobStatus | None = None
    heard: bool = False
    """Since it was last looked."""
    entry: int = 0
    result: dict[str, Any] = field(default_factory=dict)
    server_memory_bytes: dict[int, int] = field(default_factory=dict)


class _Launcher:
    def __init__(
        self,
        job: JobConfig,
        plan: JobPlan,
        log_dir: Path,
        display: Display,
        hosts: HostsConfig | None,
        worker_commands: Mapping[str, Sequence[str]],
    ) -> None:
        self._job, self._plan, self._log_dir, self._display = job, plan, log_dir, display
        self._hosts, self._worker_commands = hosts, worker_commands
        self._own_address = job.cluster.bind_address if hosts is None else hosts.coordinator
        self._security = Security.from_environment()
        self._coordinator: Process | None = None
        self._address = ""
        self._lost = ""  # how the coordinator was lost
        self._num_records_before = 0  # the journal had, when the coordinator was started
        self._num_revivals = self._num_fruitless_revivals = 0
        self._roles: list[_Role] = []
        self._seen = _Seen()
        self._signal: int | None = None
        self._signal_at = 0.0
        self._signalled = asyncio.Event()
        self._stub: Any = None
        self._wake = asyncio.Event()
        self._fatal: tuple[int, str, str, str] | None = None  # exit code, cause, failed_role, detail
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self) -> RunOutcome:
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            if await self._open():
                while await self._attend():
                    if not await self._revive():
                        break
                await self._wait_for_all(_FAREWELL_SECONDS)
        finally:
            await self._kill_all()
            self._display.close()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
        return self._outcome(time.monotonic() - started)

    async def _attend(self) -> bool:
        """From the coordinator's start until the job is over or cannot go on; True when a new coordinator may help."""
        self._lost = ""
        async with self._security.channel(self._address) as channel:
            self._stub = pb_grpc.CoordinatorStub(channel)
            if self._signal is not None:  # it came while the coordinator was started
                self._begin_to_ask(self._signal)
            watching = asyncio.create_task(self._watch())
            try:
                for role in self._roles:
                    if role.process is None:
                        await self._spawn(role)
                await self._supervise(watching)
            finally:
                watching.cancel()
                for task in self._asking:
                    task.cancel()
        if not self._lost:
            return False
        committed = self._seen.status.checkpoint.num_committed if self._seen.status is not None else 0
        self._num_fruitless_revivals = 0 if committed else self._num_fruitless_revivals
        if self._signal is None and self._num_fruitless_revivals < self._job.control.max_restarts:
            return True
        cause = f"the coordinator {self._lost}"
        if self._num_revivals:
            cause += f" (after {self._num_revivals} new starts of it)"
        self._fatal = (EX_TEMPFAIL, cause, "coordinator", _tail(self._log_dir / "coordinator.log"))
        return False

    async def _revive(self) -> bool:
        """Another coordinator at the same address. The agents end by themselves, and are started again. As `_open`."""
        assert self._coordinator is not None
        self._num_revivals += 1
        self._num_fruitless_revivals += 1
        self._display.note("error", f"the coordinator {self._lost}; starting another one")
        (kill_session if self._coordinator.returncode is None else kill_leftovers)(self._coordinator.pid)
        await self._coordinator.wait()
        await asyncio.sleep(_RESPAWN_SECONDS)
        update: dict[str, Any] = {"restore_once": True}
        if self._plan.resume == "never":
            update["resume"] = "auto"
        if self._seen.status is not None and self._seen.status.checkpoint.num_committed:
            update = {"restore": None, "resume": "always"}  # what this run has committed is of this job
        self._plan = self._plan.model_copy(update=update)
        before = self._seen
        self._seen = _Seen(server_memory_bytes=before.server_memory_bytes)
        return await self._open()

    # -- processes

    async def _open(self) -> bool:
        """Starts the coordinator and learns its address; False when a signal came first, and there is nothing to stop.

        Raises:
            LaunchError, RefusedError: it ended instead.
        """
        cluster = self._job.cluster
        listen = self._address or f"{self._own_address}:{cluster.coordinator_port or 0}"
        self._num_records_before = max((record.record for record in read_journal(self._plan.journal)), default=0)
        read_end, write_end = os.pipe()
        log = self._log_dir / "coordinator.log"
        command = [
            sys.executable,
            "-m",
            "paddlewheel.trainer.coordinator",
            "--plan",
            "-",
            "--listen",
            listen,
            "--announce",
            str(write_end),
        ]
        try:
            with log.open("ab" if self._num_revivals else "wb") as output:
                self._coordinator = await start(command, output=output, stdin=True, pass_fds=[write_end])
        finally:
            os.close(write_end)
        assert self._coordinator.stdin is not None
        self._coordinator.stdin.write(self._plan.model_dump_json().encode() + b"\n")
        self._coordinator.stdin.close()
        reading = max(
            _OPEN_SECONDS, self._job.control.checkpoint_timeout_seconds
        )  # it reads the newest checkpoint through first
        line = await self._unless_signalled(_read_line(read_end, reading))
        if line is None:
            return False
        if not line:
            await self._refuse(log)
        said = json.loads(line)
        self._address = f"{self._own_address}:{said['port']}"
        self._display.note("info", f"coordinator at {self._address}; logs in {self._log_dir}")
        if "page_port" in said:
            host = self._job.metrics.address or self._own_address
            self._display.note("info", f"status page at {said['page_scheme']}://{host}:{said['page_port']}/")
        for name, number in (("pserver", cluster.servers), ("trainer", cluster.trainers)):
            for rank in range(number if not self._num_revivals else 0):
                self._roles.append(
                    _Role(name, rank, self._agent_command(name, rank), self._log_dir / f"{name}-{rank}.log")
                )
        return True

    async def _unless_signalled(self, reading: Coroutine[Any, Any, bytes]) -> bytes | None:
        """What is read; None as soon as a signal has come: it need not wait for a large checkpoint to be read."""
        tasks = [asyncio.ensure_future(reading), asyncio.ensure_future(self._signalled.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return None if self._signalled.is_set() else tasks[0].result()  # type: ignore[return-value]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _refuse(self, log: Path) -> NoReturn:
        """The coordinator has ended, or not come to its port in time: says why, in its own words."""
        assert self._coordinator is not None
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._coordinator.wait(), 2.0)
        code = self._coordinator.returncode
        said = _last_message(log)
        if code in {EX_USAGE, EX_TEMPFAIL} and said:
            raise (RefusedError if code == EX_USAGE else LaunchError)(said)
        raise LaunchError(f"the coordinator did not open its port; {log} says:\n{_tail(log)}")

    def _agent_command(self, name: str, rank: int) -> list[str]:
        if self._hosts is not None:
            place = next(place for place in self._hosts.places(name) if place.rank == rank)
            return place.connected(place.shell_command(self._job, self._address, targets_folder(self._job)))
        cluster = self._job.cluster
        metrics = metrics_address(self._job, name, rank)
        ports = cluster.server_ports if name == "pserver" else None
        options = AgentOptions(
            role=name,
            rank=rank,
            coordinator=self._address,
            host=cluster.bind_address,
            port=ports[rank] if ports is not None else None,
            job_name=self._job.name if metrics is not None else "",
            metrics=metrics,
            targets=targets_folder(self._job) if metrics is not None else None,
            worker=shlex.join(self._worker_commands.get(name, ())),
        )
        return [sys.executable, "-m", "paddlewheel.trainer.agent.agent", *options.to_arguments()]

    async def _spawn(self, role: _Role) -> None:
        with role.log.open("ab" if role.num_spawns else "wb") as output:
            role.process = await start(role.command, environment=self._environment(role), output=output)
        role.num_spawns += 1

    def _environment(self, role: _Role) -> dict[str, str]:
        """Threads of the trainer's libraries: the machine's cores divided, unless the user says otherwise."""
        if role.name != "trainer" or self._hosts is not None:
            return {}
        cores = len(os.sched_getaffinity(0))
        threads = self._job.cluster.trainer_threads or max(1, cores // self._job.cluster.trainers)
        return {name: os.environ.get(name, str(threads)) for name in COMPUTE_THREADS}

    # -- watching

    async def _watch(self) -> None:
        """Follows the coordinator's status; ends when the job is over or the coordinator is gone."""
        request = pb.StatusRequest(min_interval_seconds=0.25)
        try:
            async for status in self._stub.WatchStatus(request, metadata=self._security.metadata, wait_for_ready=True):
                self._take(status)
                self._wake.set()
        except grpc.aio.AioRpcError:
            pass
        self._wake.set()

    def _take(self, status: pb.JobStatus) -> None:
        seen = self._seen
        seen.status, seen.heard = status, True
        for entry in status.entries:
            if entry.number > seen.entry:
                seen.entry = entry.number
                if entry.level != "debug":
                    self._display.note(entry.level, entry.text)
        if status.HasField("result"):
            seen.result = wire.read(status.result, Result).figures
        for member in status.members:
            if member.role == pb.ROLE_PSERVER:
                before = seen.server_memory_bytes.get(member.rank, 0)
                seen.server_memory_bytes[member.rank] = max(before, member.worker_memory_bytes)
        self._display.update(status)

    async def _supervise(self, watching: asyncio.Task[None]) -> None:
        """Until the job is over or cannot go on."""
        assert self._coordinator is not None
        silence = Silence(self._job.control.heartbeat_timeout_seconds * 2, time.monotonic())
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), 0.2)
            self._wake.clear()
            now = time.monotonic()
            # Stopped by Ctrl-Z: nobody else was, and nobody was heard.
            self._signal_at = min(now, self._signal_at + silence.slept(now))
            if self._seen.heard:
                silence.heard(now)
                self._seen.heard = False
            if self._is_over():
                return
            if self._signal is not None and now - self._signal_at > _STOP_SECONDS - 1 + self._saving_seconds:
                self._display.note("warning", "the job did not stop in time: killing it")
                return
            if self._coordinator.returncode is not None or watching.done():
                if self._coordinator.returncode is None:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._coordinator.wait(), 2.0)
                await asyncio.wait({watching}, timeout=2.0)  # its last word may be read after its exit was noticed
                if self._is_over() or self._learn_the_end():
                    return
                self._lost = describe_exit(self._coordinator.returncode or 0)
                return
            if silence.is_too_long(now):
                self._lost = f"said nothing for {silence.limit_seconds:g} s"
                return
            for role in self._roles:
                await self._look_after(role, now)
            if self._fatal is not None:
                return

    @property
    def _saving_seconds(self) -> float:
        """How much longer an ordered stop may take because a checkpoint is being saved."""
        status = self._seen.status
        saving = status is not None and status.checkpoint.state in {"saving", "committing"}
        return self._job.control.final_checkpoint_timeout_seconds if saving else 0.0

    def _is_over(self) -> bool:
        return self._seen.status is not None and self._seen.status.over

    def _learn_the_end(self) -> bool:
        """Whether a coordinator that is gone had come to the job's end, which this process was not there to hear."""
        assert self._coordinator is not None
        code = self._coordinator.returncode
        last = next(iter(reversed(read_journal(self._plan.journal))), None)
        is_its_end = isinstance(last, JobOver) and last.record > self._num_records_before and last.exit_code == code
        if not is_its_end and code != EXIT_DONE:  # with that it ends only when all is done
            return False
        status = self._seen.status or pb.JobStatus()
        status.over = True
        status.outcome.CopyFrom(pb.Outcome(exit_code=code))
        if isinstance(last, JobOver) and is_its_end:
            status.outcome.cause, status.outcome.failed_role = last.cause, last.failed_role
            self._seen.result = last.result or self._seen.result
        self._seen.status = status
        return True

    async def _look_after(self, role: _Role, now: float) -> None:
        """Brings an agent back that died; kills one that the coordinator has given up."""
        assert role.process is not None
        code = role.process.returncode
        if code is None:
            if self._given_up(role):
                self._display.note(
                    "warning", f"{role.name} {role.rank} does not react: killing its process {role.process.pid}"
                )
                kill_session(role.process.pid)
                role.process.kill()
            return
        if role.respawn_at == 0.0:
            role.respawn_at = now + _RESPAWN_SECONDS
        elif now >= role.respawn_at and code == EX_USAGE:  # and the coordinator has not said by now that it is over
            cause = f"{role.name} {role.rank} {describe_exit(code)}"
            self._fatal = (EX_USAGE, cause, f"{role.name} {role.rank}", _tail(role.log))
        elif now >= role.respawn_at and self._signal is None:
            role.respawn_at = 0.0
            await self._spawn(role)

    def _given_up(self, role: _Role) -> bool:
        if self._seen.status is None or role.process is None:
            return False
        number = pb.ROLE_PSERVER if role.name == "pserver" else pb.ROLE_TRAINER
        return any(
            member.role == number
            and member.rank == role.rank
            and member.state == "lost"
            and member.pid == role.process.pid
            for member in self._seen.status.members
        )

    # -- ending

    def _on_signal(self, number: int) -> None:
        if self._signal is not None:
            self._display.note("warning", "second signal: killing the job")
            self._signal_at = -math.inf
        else:
            self._signal, self._signal_at = number, time.monotonic()
            self._signalled.set()
            self._display.note("warning", f"received {signal.Signals(number).name}: stopping in order (again: at once)")
            self._begin_to_ask(number)
        self._wake.set()

    def _begin_to_ask(self, number: int) -> None:
        self._asking.add(asyncio.get_running_loop().create_task(self._ask_to_stop(number)))

    async def _ask_to_stop(self, number: int) -> None:
        if self._stub is None:
            return
        reason = (
            "interrupted by the user"
            if number == signal.SIGINT
            else f"the launcher was sent {signal.Signals(number).name}"
        )
        request = pb.StopRequest(reason=reason, exit_code=128 + number)
        with contextlib.suppress(
            grpc.aio.AioRpcError, grpc.aio.UsageError
        ):  # the latter: of a coordinator that is gone
            await self._stub.StopJob(request, metadata=self._security.metadata, timeout=5.0)

    def _processes(self) -> list[Process]:
        every = [self._coordinator, *(role.process for role in self._roles)]
        return [process for process in every if process is not None]

    async def _wait_for_all(self, seconds: float) -> None:
        if self._signal is not None:
            seconds = max(1.0, min(seconds, self._signal_at + _STOP_SECONDS - 1 - time.monotonic()))
        waits = [asyncio.create_task(process.wait()) for process in self._processes()]
        if waits:
            await asyncio.wait(waits, timeout=seconds)
        for task in waits:
            task.cancel()

    async def _kill_all(self) -> None:
        """Kills what is left; the workers go with their agents, by the kernel."""
        for process in self._processes():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                kill_session(process.pid)
            else:
                kill_leftovers(process.pid)
        for process in self._processes():
            await process.wait()
        await self._wait_for_children()

    async def _wait_for_children(self) -> None:
        """Children of killed agents are not ours to wait for; they vanish within moments."""
        deadline = time.monotonic() + 2.0
        pids = [
            member.worker_pid
            for member in (self._seen.status.members if self._seen.status else ())
            if member.worker_pid
        ]
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:  # noqa: ASYNC110 -- not ours
            await asyncio.sleep(0.02)

    def _outcome(self, seconds: float) -> RunOutcome:
        status = self._seen.status
        if self._is_over() and status is not None:
            told = status.outcome
            code, cause, failed_role, detail = told.exit_code, told.cause, told.failed_role, told.detail
        elif self._fatal is not None:
            code, cause, failed_role, detail = self._fatal
        elif self._signal is not None:
            how = "not in order" if self._stub is not None else "before the coordinator was ready"
            code, cause, failed_role, detail = 128 + self._signal, f"stopped by a signal, {how}", "", ""
        else:
            raise LaunchError("the launcher ended without an outcome")
        if failed_role and not detail:
            detail = _tail(self._log_dir / f"{failed_role.replace(' ', '-')}.log")
        return RunOutcome(
            exit_code=code,
            cause=cause,
            failed_role=failed_role,
            detail=detail,
            result=self._seen.result,
            run_dir=Path(self._plan.run_dir),
            log_dir=self._log_dir,
            seconds=seconds,
            num_restarts=(status.num_restarts if status is not None else 0) + self._num_revivals,
            server_memory_bytes=dict(self._seen.server_memory_bytes),
            checkpoint=status.checkpoint.path if status is not None and self._plan.mode == "train" else "",
        )


async def _read_line(fd: int, seconds: float) -> bytes:
    """One line from a pipe, which is then closed; empty at its end or when the time is up."""
    reader = asyncio.StreamReader()
    pipe: IO[bytes] = os.fdopen(fd, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        return await asyncio.wait_for(reader.readline(), seconds)
    except asyncio.TimeoutError:
        return b""
    finally:
        transport.close()


def _last_message(log: Path) -> str:
    """What a process without Paddle has logged last as an error."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict) and said.get("level") == "error":
                return str(said.get("message", ""))
    return ""


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    spoken = [
        line for line in lines if not line.startswith('{"')
    ]  # the worker's own words, without the agent's log lines
    return "\n".join((spoken or lines)[-_TAIL_LINES:])
