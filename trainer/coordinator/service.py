"""The coordinator process: carries events to the state machine and its actions to the agents, over gRPC.

python -m paddlewheel.trainer.coordinator --plan PLAN.json --listen HOST:PORT [--announce FD]
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paddlewheel.pserver.messages import ServerSpec
from paddlewheel.trainer.checkpoint.folder_store import open_checkpoints
from paddlewheel.trainer.checkpoint.manifest import CheckpointError
from paddlewheel.trainer.checkpoint.store import Checkpoints, DirectoryBusyError
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import coordinator_pb2_grpc as pb_grpc
from paddlewheel.trainer.coordinator import inbound, messages, resume, run_report, wire
from paddlewheel.trainer.coordinator.journal import Journal, put_damaged_aside
from paddlewheel.trainer.coordinator.page import StatusPage
from paddlewheel.trainer.coordinator.plan import JobPlan
from paddlewheel.trainer.coordinator.records import CommitBegan, CommitDone, JobOver, Record, RunBegan
from paddlewheel.trainer.coordinator.security import Security, SecurityError
from paddlewheel.trainer.coordinator.state_machine import JobStateMachine, Phase
from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL, EX_USAGE
from paddlewheel.trainer.protocol.messages import Evaluation, MessageError
from paddlewheel.trainer.telemetry import WebSecurityError, WebServer
from paddlewheel.trainer.telemetry.discovery import TargetFile
from paddlewheel.trainer.telemetry.logs import configure_logs
from paddlewheel.trainer.telemetry.scalars import Scalars

_ROLE_NUMBERS = {role: number for number, role in inbound.ROLES.items()}
_NUM_ENTRIES_KEPT = 200
_FAREWELL_SECONDS = 3.0
"""How long the coordinator, when the job is over, waits for its agents and observers to hang up."""
_PAGE_SECONDS = 5.0
"""How long a request for the status page waits for the event loop."""
_SECONDS_BETWEEN_CHECKS = 2.0
"""So often it is looked whether the journal is still there."""

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name


class CoordinatorService(pb_grpc.CoordinatorServicer):
    """One job's control plane. All of it runs in one event loop, so the state machine sees one event at a time."""

    def __init__(
        self, plan: JobPlan, journal: Journal, kept: Checkpoints, start: resume.StartPoint, attempt: int
    ) -> None:
        self.plan = plan
        self._kept = kept
        self.over = asyncio.Event()
        version = importlib.metadata.version("paddlewheel")
        self._control = JobStateMachine(plan, time.monotonic(), start, attempt, version)
        self._journal = journal
        # A disk may stall for seconds, the event loop must not: agents would take this process for lost. One thread
        # keeps the order of the records, those of commits included.
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "journal")
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: list[asyncio.Future[messages.CheckpointDone]] = []
        self._log = structlog.get_logger().bind(job=plan.job.name, role="coordinator")
        self._outboxes: dict[int, asyncio.Queue[pb.AgentCommand | None]] = {}
        self._num_sessions = 0
        self._entries: collections.deque[pb.LogEntry] = collections.deque(maxlen=_NUM_ENTRIES_KEPT)
        self._num_entries = 0
        self._changed = asyncio.Condition()
        self._version = 0
        self._started_at = time.monotonic()
        self._observers = 0
        minutes = plan.job.checkpoint.every_minutes
        tables = {name: plan.job.tables[name].model_dump(mode="json") for name in plan.job.data.tables}
        self.page = StatusPage(
            plan.job.name,
            self._status_from_a_thread,
            facts={"version": version, "tables": tables},
            checkpoint_interval_seconds=None if minutes is None else 60.0 * minutes,
        )
        self._loop = asyncio.get_running_loop()
        self.scalars = Scalars(Path(plan.run_dir, "visualdl")) if plan.job.metrics.visualdl else None
        for note in start.notes:
            self._note("warning", note)

    # -- the state machine

    def apply(self, event: messages.Event) -> None:
        """Gives the event to the state machine and carries out what it decides."""
        for action in self._control.handle(event, time.monotonic()):
            self._perform(action)
        if self.scalars is not None and isinstance(event, messages.WorkerEvent) and isinstance(event.event, Evaluation):
            self.scalars.evaluation(event.event.report, event.event.step)
        self._version += 1

    def _perform(self, action: messages.Action) -> None:
        match action:
            case messages.Commit():
                self._run(self._commit(action))
            case messages.Examine(path):
                self._run(self._examine(path))
            case messages.Discard(drafts):
                self._run(self._discard(drafts))
            case messages.CheckpointDone():
                asking, self._asking = self._asking, []
                for future in asking:
                    if not future.done():
                        future.set_result(action)
            case messages.Log(level, text, record):
                self._note(level, text)
                if record is not None:
                    self._record(record)
            case messages.JobFinished(outcome):
                progress, result = self._control.progress, self._control.result
                figures = result.figures if result is not None else None
                over = JobOver(
                    exit_code=outcome.exit_code,
                    cause=outcome.cause,
                    failed_role=outcome.failed_role,
                    rows=progress.rows if progress is not None else 0,
                    draft=self._control.committed_draft,
                    result=figures,
                )
                self._record(over)
                self._note("debug", f"the job is over: {outcome.cause or 'done'}")
                if self.scalars is not None and figures is not None:
                    self.scalars.evaluation(figures.get("eval") or {})
                self.over.set()
            case _:
                self._tell(action)

    def _tell(self, action: messages.Action) -> None:
        """Actions that are commands to agents."""
        limits = self.plan.job.control
        match action:
            case messages.Welcome(session, rank):
                welcome = pb.Welcome(
                    rank=rank,
                    heartbeat_seconds=limits.heartbeat_seconds,
                    heartbeat_timeout_seconds=limits.heartbeat_timeout_seconds,
                )
                self._send(session, pb.AgentCommand(welcome=welcome))
            case messages.Refuse(session, reason, exit_code):
                self._send(session, pb.AgentCommand(refused=pb.Refused(reason=reason, exit_code=exit_code)))
                self._send(session, None)
            case messages.StartWorker(session, attempt, spec, staging):
                start = pb.StartWorker(
                    attempt=attempt,
                    probe_seconds=0.25,
                    server_health_timeout_seconds=limits.server_health_timeout_seconds,
                )
                wire.fill(start.server if isinstance(spec, ServerSpec) else start.trainer, spec)
                if staging is not None:
                    wire.fill(start.staging, staging)
                self._send(session, pb.AgentCommand(start_worker=start))
            case messages.SendToWorker(session, attempt, command):
                worker_input = pb.WorkerInput(attempt=attempt)
                wire.put_union(worker_input, command)
                self._send(session, pb.AgentCommand(worker_input=worker_input))
            case messages.HostRequest(session, attempt, order):
                host_request = pb.HostRequest(attempt=attempt)
                wire.put_union(host_request, order)
                self._send(session, pb.AgentCommand(host_request=host_request))
            case messages.StopWorker(session, attempt, grace):
                self._send(session, pb.AgentCommand(stop_worker=pb.StopWorker(attempt=attempt, grace_seconds=grace)))
            case messages.Finish(session, exit_code, reason):
                self._send(session, pb.AgentCommand(finish=pb.Finish(exit_code=exit_code, reason=reason)))
            case messages.CloseSession(session):
                self._send(session, None)

    def _run(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _examine(self, path: str) -> None:
        try:
            start = await asyncio.to_thread(resume.fall_back, self.plan, self._kept, path)
        except ValueError as error:
            self.apply(messages.Examined(refusal=str(error)))
        except Exception as error:  # noqa: BLE001 -- whatever it is, the job must not wait for ever
            self.apply(messages.Examined(error=f"{type(error).__name__}: {error}"))
        else:
            self.apply(messages.Examined(start))

    async def _discard(self, drafts: str) -> None:
        try:
            await asyncio.to_thread(self._kept.discard, drafts)
        except Exception as error:  # noqa: BLE001 -- they take room, nothing else
            self._note("warning", f"drafts {drafts} could not be removed: {_words_of(error)}")

    async def _commit(self, commit: messages.Commit) -> None:
        try:
            path = await self._loop.run_in_executor(self._writer, self._commit_files, commit)
        except Exception as error:  # noqa: BLE001 -- whatever it is: trainers wait for this answer, and no other comes
            if not isinstance(error, (OSError, ValueError)):
                self._log.exception("a commit raised", draft=commit.cursor.draft)
            self.apply(messages.CommitFinished(commit, error=_words_of(error)))
        else:
            self.apply(messages.CommitFinished(commit, path=path))

    def _commit_files(self, commit: messages.Commit) -> str:
        """Verifies and commits a draft. The journal knows of it before it has its name, or there is no commit."""
        cursor, kept = commit.cursor, self._kept
        draft = kept.draft(cursor.draft)
        manifest = kept.check_complete(draft)
        written = kept.cursor(draft)
        if written != json.loads(json.dumps(cursor.body)) or manifest["step"] != cursor.step:
            raise CheckpointError(f"{draft} does not hold the cursor that it was given")
        num_bytes = sum(file["bytes"] for file in manifest["files"].values())
        started = time.monotonic()
        self._journal.write(_commit_record(written))
        try:
            path = kept.commit(cursor.draft, cursor.step, self.plan.job.checkpoint.keep)
        except OSError:
            path = f"{kept.location}/step-{cursor.step}"
            if path not in kept.committed() or kept.cursor(path) != written:
                raise  # else it has its name, and only the cleaning up has failed
        with contextlib.suppress(OSError):
            self._journal.write(
                CommitDone(
                    attempt=written["attempt"],
                    step=cursor.step,
                    draft=cursor.draft,
                    path=str(path),
                    bytes=num_bytes,
                    save_seconds=commit.seconds,
                    commit_seconds=time.monotonic() - started,
                )
            )
            kept.keep_journal(self.plan.journal)
        return path

    def _record(self, record: Record) -> None:
        def write(stamped: Record) -> None:
            self._check_journal()
            try:
                self._journal.write(stamped)
            except OSError as error:
                text = f"the journal cannot be written: {error}; the report will lack {stamped.what!r}"
                self._loop.call_soon_threadsafe(self._note, "error", text)

        self._writer.submit(write, record.model_copy(update={"time": round(time.time(), 3)}))

    def _check_journal(self) -> None:
        """Says when somebody has removed or cut it: what it proves is gone. In the writer's thread."""
        try:
            done = self._journal.check()
        except OSError as error:
            done = f"the journal cannot be written any more: {error}"
        if done:
            self._loop.call_soon_threadsafe(self._note, "error", done)

    def _note(self, level: str, text: str) -> None:
        self._num_entries += 1
        self._entries.append(pb.LogEntry(number=self._num_entries, time_seconds=time.time(), level=level, text=text))
        getattr(self._log, level if level in {"debug", "info", "warning", "error"} else "info")(
            text, attempt=self._control.attempt
        )

    def _send(self, session: int, command: pb.AgentCommand | None) -> None:
        outbox = self._outboxes.get(session)
        if outbox is not None:
            outbox.put_nowait(command)

    async def tick(self) -> None:
        """Lets time pass for the state machine, pulses to the agents and news to the watchers, until cancelled."""
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(self.plan.job.control.heartbeat_seconds / 2)
            self.apply(messages.Tick())
            if time.monotonic() - checked_at > _SECONDS_BETWEEN_CHECKS:
                checked_at = time.monotonic()
                self._writer.submit(self._check_journal)
            self.page.curves.add(time.monotonic() - self._started_at, self._control.progress)
            if self.scalars is not None:
                self.scalars.progress(self._control.progress)
            for session in list(self._outboxes):
                self._send(session, pb.AgentCommand(pulse=pb.Pulse()))
            async with self._changed:
                self._changed.notify_all()

    # -- agents

    async def Attend(
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.AgentCommand]:
        """One agent's membership."""
        self._num_sessions += 1
        session = self._num_sessions
        try:
            joined = inbound.joined(session, await anext(aiter(request_iterator), None))
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        outbox: asyncio.Queue[pb.AgentCommand | None] = asyncio.Queue()
        self._outboxes[session] = outbox
        self.apply(joined)
        reader = asyncio.create_task(self._read(session, request_iterator))
        reader.add_done_callback(lambda _task: outbox.put_nowait(None))
        try:
            while (command := await outbox.get()) is not None:
                yield command
        finally:
            reader.cancel()
            del self._outboxes[session]
            self.apply(messages.Left(session))

    async def _read(self, session: int, stream: AsyncIterator[pb.AgentMessage]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for message in stream:
                try:
                    event = inbound.event_of(session, message)
                except MessageError as error:
                    self._note("error", f"an agent is dropped, for it says what cannot be: {error}")
                    return
                if event is not None:
                    self.apply(event)

    # -- observers

    async def GetStatus(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.JobStatus:
        """The job now."""
        del request, context
        return self.status()

    async def WatchStatus(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.JobStatus]:
        """The job, again and again, until it is over."""
        try:
            interval = inbound.watch_interval_seconds(request)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._observers += 1
        try:
            while True:
                version, over = self._version, self.over.is_set()
                yield self.status()
                if over:
                    return
                await asyncio.sleep(interval)
                async with self._changed:
                    await self._changed.wait_for(lambda version=version: self._version != version)  # type: ignore[misc]
        finally:
            self._observers -= 1

    async def CheckpointNow(
        self, request: pb.CheckpointRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.CheckpointReply:
        """A checkpoint at the next step; waits until it is committed."""
        try:
            timeout = inbound.checkpoint_timeout_seconds(request)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        future: asyncio.Future[messages.CheckpointDone] = self._loop.create_future()
        self._asking.append(future)
        self.apply(messages.CheckpointAsked())
        try:
            done = await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError:
            return pb.CheckpointReply(error=f"not committed within {request.timeout_seconds:g} s; it may be later")
        return pb.CheckpointReply(committed=not done.error, step=done.step, path=done.path, error=done.error)

    async def StopJob(self, request: pb.StopRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.StopReply:
        """An ordered stop."""
        try:
            stop = inbound.stop_of(request)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self.apply(stop)
        return pb.StopReply()

    def status(self) -> pb.JobStatus:
        """Everything an observer may want to know, as of now."""
        now, control = time.monotonic(), self._control
        reply = pb.JobStatus(
            name=self.plan.job.name,
            mode=self.plan.mode,
            phase=control.phase.value,
            attempt=control.attempt,
            num_restarts=control.num_restarts,
            elapsed_seconds=now - self._started_at,
            progress_age_seconds=self._progress_age(now),
            entries=self._entries,
            run_dir=self.plan.run_dir,
            over=self.over.is_set(),
            checkpoint=self._checkpoint_status(now),
        )
        if control.progress is not None:
            wire.fill(reply.progress, control.progress)
        if control.result is not None:
            wire.fill(reply.result, control.result)
        for role_rank, member in control.members.items():
            shown = reply.members.add(
                role=_ROLE_NUMBERS[role_rank.role],
                rank=role_rank.rank,
                host=member.host,
                port=member.port,
                state=member.state,
                pid=member.pid,
                worker_pid=member.worker_pid,
                heartbeat_age_seconds=max(0.0, now - member.heard_at),
                worker_memory_bytes=member.worker_memory_bytes,
                memory_limit_bytes=member.memory_limit_bytes,
                seconds_to_limit=member.seconds_to_limit,
            )
            if member.progress is not None:
                wire.fill(shown.progress, member.progress)
        if control.outcome is not None:
            outcome = control.outcome
            reply.outcome.CopyFrom(
                pb.Outcome(
                    exit_code=outcome.exit_code,
                    cause=outcome.cause,
                    failed_role=outcome.failed_role,
                    detail=outcome.detail,
                )
            )
        return reply

    def _progress_age(self, now: float) -> float:
        """Seconds since the slowest trainer last moved; 0 unless the trainers are at work."""
        if self._control.phase is not Phase.RUNNING:
            return 0.0
        return max(0.0, *(now - member.moved_at for member in self._control.members.of(messages.Role.TRAINER)))

    def _checkpoint_status(self, now: float) -> pb.CheckpointStatus:
        known = self._control.checkpoint
        return pb.CheckpointStatus(
            step=known.step,
            path=known.path,
            age_seconds=now - known.committed_at if known.path else 0.0,
            last_seconds=known.seconds,
            num_committed=known.num_committed,
            num_failed=known.num_failed,
            state=known.state,
        )

    def _status_from_a_thread(self) -> pb.JobStatus:
        """For the HTTP server: the state machine belongs to the event loop."""

        async def ask() -> pb.JobStatus:
            return self.status()

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(_PAGE_SECONDS)

    async def close(self) -> None:
        """Waits until everything is written down."""
        await asyncio.to_thread(self._writer.shutdown)

    async def farewell(self) -> None:
        """Waits, for a short while, until every agent and observer has heard the end and hung up."""
        async with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while (self._outboxes or self._observers) and time.monotonic() < deadline:  # noqa: ASYNC110 -- short and rare
            await asyncio.sleep(0.02)


def _commit_record(cursor: Mapping[str, Any]) -> CommitBegan:
    return CommitBegan(attempt=cursor["attempt"], cursor=run_report.told_of(cursor))


def _words_of(error: Exception) -> str:
    return str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"


def _serve_page(plan: JobPlan, page: StatusPage, target: TargetFile | None) -> WebServer | None:
    """Start the metrics server. If the port is taken, log a warning and continue without it."""
    if plan.http_address is None:
        return None
    log = structlog.get_logger().bind(job=plan.job.name, role="coordinator")
    host = plan.http_address.rpartition(":")[0]
    try:
        web = WebServer(plan.http_address, page.routes())
        log.info("serving the status page and metrics", address=host, port=web.port)
        if target is not None:
            target.write(host.strip("[]"), web.port, web.scheme)
    except OSError as error:
        reason = str(error.strerror or error)
        log.warning("no status page: cannot listen; going on without", address=plan.http_address, reason=reason)
        return None
    return web


def _begin_journal(journal: Journal, plan: JobPlan, start: resume.StartPoint, records: Sequence[Record]) -> None:
    """Says that a run begins; and what the coordinator before this one committed without living to write it down."""
    journal.write(
        RunBegan(
            mode=plan.mode,
            resume=plan.resume,
            restore=start.path,
            asked=resume.asked_for(plan),
            checkpoints=plan.checkpoint_location,
        )
    )
    if start.cursor is None or start.path is None:
        return
    known = {record.draft for record in records if isinstance(record, CommitDone)}
    if start.cursor["draft"] not in known:
        journal.write(_commit_record(start.cursor))
        found = {name: start.cursor[name] for name in ("attempt", "step", "draft")}
        journal.write(CommitDone(**found, path=start.path))


def _last_attempt(records: Sequence[Record], start: resume.StartPoint) -> int:
    """No number of an attempt is used twice, drafts are named after it; and the journal may have lost records."""
    told = [getattr(record, "attempt", 0) for record in records]
    return max([*told, start.cursor["attempt"] if start.cursor is not None else 0])


async def serve(plan: JobPlan, listen: str, announce: TextIO | None = None, security: Security | None = None) -> int:
    """Runs the coordinator until the job is over; returns the job's exit code.

    Args:
        plan: the job.
        listen: 'host:port'; port 0 takes any free one.
        announce: gets one line of JSON with the port, as soon as it is open.
        security: TLS and token; from the environment by default.
    """
    security = security or Security.from_environment()
    kept = open_checkpoints(plan.checkpoint_location)
    plan = plan.model_copy(update={"owner": kept.owner})
    with kept.sole_use() if plan.mode == "train" else contextlib.nullcontext():
        start = resume.prepare_start(plan, kept)
        return await _serve(plan, listen, announce, security, kept, start)


async def _serve(
    plan: JobPlan, listen: str, announce: TextIO | None, security: Security, kept: Checkpoints, start: resume.StartPoint
) -> int:
    if (damage := put_damaged_aside(plan.journal)) is not None:
        start = dataclasses.replace(start, notes=(*start.notes, damage))
    records = resume.read_journal(plan.journal)
    journal = Journal(plan.journal)
    _begin_journal(journal, plan, start, records)
    attempt = _last_attempt(records, start)
    service = CoordinatorService(plan, journal, kept, start, attempt)
    server = security.server()
    pb_grpc.add_CoordinatorServicer_to_server(service, server)
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = security.listen(server, listen)
    await server.start()
    for name in ("", SERVICE_NAME):
        await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
    target = TargetFile(Path(plan.targets), plan.job.name, "coordinator", 0) if plan.targets else None
    web = _serve_page(plan, service.page, target)
    if announce is not None:
        page = {"page_port": web.port, "page_scheme": web.scheme} if web is not None else {}
        announce.write(json.dumps({"port": port, **page}) + "\n")
        announce.close()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        request = messages.StopRequested(f"the coordinator was sent {number.name}", 128 + number)
        loop.add_signal_handler(number, service.apply, request)
    structlog.get_logger().info(
        "coordinator is listening", job=plan.job.name, address=listen.rsplit(":", 1)[0], port=port
    )
    ticking = asyncio.create_task(service.tick())
    over = asyncio.create_task(service.over.wait())
    try:
        await asyncio.wait({ticking, over}, return_when=asyncio.FIRST_COMPLETED)
        if ticking.done():
            ticking.result()  # raises what went wrong
        await service.farewell()
        status = service.status()
        return status.outcome.exit_code
    finally:
        ticking.cancel()
        over.cancel()
        if target is not None:
            target.remove()
        if service.scalars is not None:
            service.scalars.close()
        if web is not None:
            await asyncio.to_thread(web.close)
        await server.stop(0.2)
        await service.close()
        journal.close()
        if plan.mode == "train":
            with contextlib.suppress(OSError, ValueError):
                await asyncio.to_thread(kept.keep_journal, plan.journal)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the coordinator process."""
    parser = argparse.ArgumentParser(prog="python -m paddlewheel.trainer.coordinator", description=__doc__)
    parser.add_argument("--plan", required=True, help="JSON file with a JobPlan; - reads it from standard input")
    parser.add_argument("--listen", default="127.0.0.1:0", help="address of the gRPC port")
    parser.add_argument("--announce", type=int, help="descriptor to write the port to")
    options = parser.parse_args(arguments)
    configure_logs()
    try:
        text = sys.stdin.read() if options.plan == "-" else Path(options.plan).read_text(encoding="utf-8")
        plan = JobPlan.model_validate_json(text)
        announce = open(options.announce, "w", encoding="utf-8") if options.announce is not None else None  # noqa: SIM115, PTH123
        return asyncio.run(serve(plan, options.listen, announce))
    except (SecurityError, WebSecurityError, ValueError) as error:
        structlog.get_logger().error(str(error), role="coordinator")
        return EX_USAGE
    except (OSError, DirectoryBusyError) as error:
        structlog.get_logger().error(str(error), role="coordinator")
        return EX_TEMPFAIL


if __name__ == "__main__":
    sys.exit(main())
