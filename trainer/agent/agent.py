"""The light half of a server or trainer: joins the coordinator, starts the Paddle worker, watches it, answers for it.

python -m paddlewheel.trainer.agent.agent --role pserver|trainer --coordinator HOST:PORT ...       (see options.py)

It never imports Paddle, whose calls hold the GIL for minutes: heartbeats, health checks and signals must go on. The
worker's standard input carries its specification, commands and replies; its events come back on a pipe of their own
(subprocesses.EVENT_FD); its output passes through this process to the log. The worker cannot outlive it
(subprocesses.start).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paddlewheel.pserver.admin import is_healthy, server_uid
from paddlewheel.pserver.errors import ServerError
from paddlewheel.pserver.messages import ServerSpec, WorkerError
from paddlewheel.trainer.agent.options import AgentOptions
from paddlewheel.trainer.agent.paddle_environment import math_environment
from paddlewheel.trainer.agent.worker_process import WorkerProcess
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import coordinator_pb2_grpc as pb_grpc
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.coordinator.security import Security, SecurityError
from paddlewheel.trainer.distributed.subprocesses import PortTakenError, interface_of, port_of, reserve_port
from paddlewheel.trainer.job.exit_codes import EX_TEMPFAIL, EX_USAGE, EXIT_DONE, describe_exit
from paddlewheel.trainer.protocol.messages import (
    HostAnswer,
    HostFailed,
    HostStaging,
    PhaseChanged,
    WorkerEvent,
    to_line,
)
from paddlewheel.trainer.telemetry import Telemetry, WebSecurityError, WebServer, metrics_app
from paddlewheel.trainer.telemetry.discovery import TargetFile
from paddlewheel.trainer.telemetry.logs import configure_logs
from paddlewheel.trainer.telemetry.probes import ServerProbe, gpu_probe

if TYPE_CHECKING:
    from paddlewheel.trainer.checkpoint.host_transfer import Host

_ROLES = {"pserver": pb.ROLE_PSERVER, "trainer": pb.ROLE_TRAINER}
_JOIN_RETRY_SECONDS = 1.0
_PORT_SECONDS = 60.0
"""A server that was killed keeps its port until its memory is freed: 0.12 s for each GiB, as measured."""
_PORT_RETRY_SECONDS = 0.5


class Agent:
    """One agent process. `run` returns its exit code."""

    def __init__(self, options: AgentOptions, security: Security) -> None:
        self._options = options
        self._security = security
        self._log = structlog.get_logger().bind(job=options.job_name, role=options.role)
        self._outbox: asyncio.Queue[pb.AgentMessage] = asyncio.Queue()
        self._holder: socket.socket | None = None
        self._worker: WorkerProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._host: Host | None = None
        self._host_end: asyncio.Task[None] | None = None
        self._orders: set[asyncio.Task[None]] = set()
        self._finish: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._heard_at = 0.0
        self._rank = options.rank
        self._health = health.aio.HealthServicer()
        self._telemetry = Telemetry(
            options.role,
            options.job_name,
            rank=options.rank,
            version=importlib.metadata.version("paddlewheel"),
            probe=gpu_probe() if options.role == "trainer" else None,
        )
        self._web: WebServer | None = None
        self._target: TargetFile | None = None

    async def run(self) -> int:
        """Attends the coordinator until the job is over or one of the two is lost."""
        self._holder = await self._reserve()
        server = await self._serve_health()
        self._serve_metrics()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with self._security.channel(self._options.coordinator) as channel:
                return await self._attend(pb_grpc.CoordinatorStub(channel))
        finally:
            await self._end_worker(0.0)
            if self._host_end is not None:
                await asyncio.wait([self._host_end])
            await server.stop(0)
            if self._target is not None:
                self._target.remove()
            if self._web is not None:
                await asyncio.to_thread(self._web.close)
            if self._holder is not None:
                self._holder.close()

    async def _reserve(self) -> socket.socket:
        """The worker's port, when whoever had it before is gone. Raises PortTakenError when that takes too long."""
        deadline = time.monotonic() + _PORT_SECONDS
        while True:
            try:
                return reserve_port(self._options.host, self._options.port)
            except PortTakenError as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                if left > _PORT_SECONDS - _PORT_RETRY_SECONDS:
                    self._log.warning(
                        f"{error}; it is tried for {_PORT_SECONDS:g} s: a server that was killed may linger"
                    )
            await asyncio.sleep(_PORT_RETRY_SECONDS)

    # -- the coordinator

    async def _attend(self, stub: Any) -> int:
        deadline = time.monotonic() + self._options.join_seconds
        while not self._finish.done():
            call = stub.Attend(metadata=self._security.metadata, wait_for_ready=True)
            try:
                welcome = await self._join(call, max(0.0, deadline - time.monotonic()))
                return await self._serve(call, welcome)
            except asyncio.TimeoutError:
                self._log.error(
                    f"the coordinator at {self._options.coordinator} did not answer within"
                    f" {self._options.join_seconds:g} s: is it running, does its name resolve, is its port open?"
                )
                return EX_TEMPFAIL
            except _RefusedError as refusal:
                self._log.warning(f"the coordinator refuses this agent: {refusal}")
                if refusal.exit_code != EX_TEMPFAIL or time.monotonic() > deadline:
                    return refusal.exit_code
            finally:
                call.cancel()
            await self._wait_for([], _JOIN_RETRY_SECONDS)
        return self._finish.result()

    async def _serve(self, call: Any, welcome: pb.Welcome) -> int:
        """From the welcome until the job is over or the coordinator is lost."""
        self._rank = welcome.rank
        self._log = self._log.bind(rank=self._rank)
        self._log.info("joined the coordinator", coordinator=self._options.coordinator)
        self._telemetry.joined(welcome.rank)
        self._announce_metrics(welcome.rank)
        self._say_available()
        await self._set_health(serving=True)
        jobs = [
            self._read(call),
            self._write(call),
            self._beat(welcome.heartbeat_seconds),
            self._listen_for_silence(welcome.heartbeat_timeout_seconds),
        ]
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            await self._wait_for(tasks)
            if not self._finish.done():
                for task in tasks:
                    if task.done():
                        task.result()  # none of them ends without a decision, except by an error
            return self._finish.result()
        finally:
            for task in tasks:
                task.cancel()
            await self._end_worker(0.0)
            self._telemetry.left()

    async def _join(self, call: Any, seconds: float) -> pb.Welcome:
        role = _ROLES[self._options.role]
        version = importlib.metadata.version("paddlewheel")
        join = pb.Join(role=role, rank=self._options.rank, host=self._options.host, pid=os.getpid(), version=version)

        async def exchange() -> Any:
            await call.write(pb.AgentMessage(join=join))
            while True:
                command = await call.read()
                if command is grpc.aio.EOF:
                    raise _RefusedError("it closed the connection", EX_TEMPFAIL)
                if command.WhichOneof("command") != "pulse":
                    return command

        asking = asyncio.ensure_future(exchange())
        await self._wait_for([asking], seconds)
        if not asking.done():
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await asking
            if self._finish.done():
                raise _RefusedError("this agent was told to go", self._finish.result())
            raise asyncio.TimeoutError
        try:
            command: pb.AgentCommand = asking.result()
        except grpc.aio.AioRpcError as error:
            code = EX_USAGE if error.code() is grpc.StatusCode.UNAUTHENTICATED else EX_TEMPFAIL
            raise _RefusedError(str(error.details() or error.code()), code) from error
        except asyncio.InvalidStateError as error:  # grpc.aio's word for a stream that broke while it was written
            raise _RefusedError("the connection broke", EX_TEMPFAIL) from error
        self._heard_at = time.monotonic()
        match command.WhichOneof("command"):
            case "welcome":
                return command.welcome
            case "finish":
                raise _RefusedError(f"the job is over: {command.finish.reason or 'done'}", command.finish.exit_code)
            case _:
                raise _RefusedError(command.refused.reason, command.refused.exit_code)

    async def _read(self, call: Any) -> None:
        try:
            while (command := await call.read()) is not grpc.aio.EOF:
                self._heard_at = time.monotonic()
                await self._obey(command)
            reason = "it closed the connection"
        except grpc.aio.AioRpcError as error:
            reason = str(error.details() or error.code())
        self._lose_coordinator(reason)

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._outbox.get())
        await asyncio.sleep(3600)  # the reader says why

    async def _beat(self, seconds: float) -> None:
        while True:
            beat = self._worker.measure() if self._worker is not None else pb.Heartbeat()
            if self._worker is not None:
                left = self._telemetry.worker_measured(beat.worker_memory_bytes, beat.worker_cpu_seconds)
                if left is not None:
                    beat.seconds_to_limit = left
            beat.memory_limit_bytes = self._telemetry.memory_limit_bytes
            self._outbox.put_nowait(pb.AgentMessage(heartbeat=beat))
            await asyncio.sleep(seconds)

    async def _listen_for_silence(self, limit: float) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(limit / 8)
            if (
                time.monotonic() - before > limit / 2
            ):  # it was this process that slept: read first what has come meanwhile
                self._heard_at = max(self._heard_at, time.monotonic() - limit / 2)
            if time.monotonic() - self._heard_at > limit:
                self._lose_coordinator(f"not a word for {limit:g} s")

    def _lose_coordinator(self, reason: str) -> None:
        if not self._finish.done():
            self._log.error(f"lost the coordinator ({reason}); ending the worker")
            self._finish.set_result(EX_TEMPFAIL)

    def _on_signal(self, number: int) -> None:
        self._log.warning(f"received {signal.Signals(number).name}")
        if self._rank is None or self._heard_at == 0.0:
            if not self._finish.done():
                self._finish.set_result(128 + number)
        else:
            self._outbox.put_nowait(pb.AgentMessage(leaving=pb.Leaving(signal=number)))

    async def _obey(self, command: pb.AgentCommand) -> None:
        match command.WhichOneof("command"):
            case "start_worker":
                await self._start_worker(command.start_worker)
            case "worker_input":
                if self._worker is not None and self._worker.attempt == command.worker_input.attempt:
                    self._worker.tell(to_line(wire.read_union(command.worker_input, "command")))
            case "stop_worker":
                if self._worker is not None and self._worker.attempt == command.stop_worker.attempt:
                    self._telemetry.worker_stopping()
                    self._worker.stop(command.stop_worker.grace_seconds)
            case "host_request":
                task = asyncio.create_task(self._carry_out(command.host_request))
                self._orders.add(task)
                task.add_done_callback(self._orders.discard)
            case "finish":
                self._log.info("the job is over", exit_code=command.finish.exit_code, cause=command.finish.reason)
                if not self._finish.done():
                    self._finish.set_result(command.finish.exit_code)

    # -- the worker

    async def _start_worker(self, order: pb.StartWorker) -> None:
        await self._end_worker(0.0)
        variables = {"PYTHONUNBUFFERED": "1", **math_environment(os.environ)}
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(self._options.host)) is not None:
            variables["GLOO_SOCKET_IFNAME"] = interface  # else gloo takes what this machine's own name resolves to
        worker = await WorkerProcess.start(
            self._options.command, order.attempt, self._outbox, self._telemetry.observe, variables
        )
        if order.HasField("staging"):
            from paddlewheel.trainer.checkpoint.host_transfer import Host  # with NumPy, which no other agent needs

            self._host = Host(wire.read(order.server, ServerSpec), wire.read(order.staging, HostStaging))
        self._worker = worker
        self._telemetry.worker_started(order.attempt)
        worker.tell(json.dumps(wire.plain(order.server if order.HasField("server") else order.trainer)))
        self._outbox.put_nowait(pb.AgentMessage(worker_started=pb.WorkerStarted(attempt=order.attempt, pid=worker.pid)))
        self._log.info("started the worker", worker_pid=worker.pid, attempt=order.attempt)
        self._watcher = asyncio.create_task(self._watch_worker(worker, order))

    async def _watch_worker(self, worker: WorkerProcess, order: pb.StartWorker) -> None:
        probing: asyncio.Task[None] | None = None
        if self._options.role == "pserver":
            probing = asyncio.create_task(self._probe(worker, order))
        try:
            code = await worker.wait()
        finally:
            if probing is not None:
                probing.cancel()
            if self._host is not None:
                self._host_end = asyncio.create_task(self._end_host(self._host))
                self._host = None
        self._worker = None
        self._telemetry.worker_exited(code, expected=worker.ended_as_asked(code))
        self._log.info(f"the worker {describe_exit(code)}", attempt=order.attempt)
        exited = pb.WorkerExited(
            attempt=order.attempt,
            exit_code=code,
            expected=worker.ended_as_asked(code),
            reason=worker.deaf_reason,
            log_tail="" if code == EXIT_DONE else worker.tail,
        )
        self._outbox.put_nowait(pb.AgentMessage(worker_exited=exited))
        self._say_available()

    async def _probe(self, worker: WorkerProcess, order: pb.StartWorker) -> None:
        """Tells the coordinator when the server answers for the first time; ends a server that has become deaf."""
        assert self._holder is not None
        if self._host is not None and not await self._fetch(self._host, worker):
            return
        port, ready, heard_at = port_of(self._holder), False, time.monotonic()
        while True:
            if await asyncio.to_thread(is_healthy, self._options.host, port):
                heard_at = time.monotonic()
                if not ready:
                    with contextlib.suppress(ServerError):  # not there after all: it is asked again
                        uid = await asyncio.to_thread(server_uid, self._options.host, port)
                        self._telemetry.worker_ready(ServerProbe.of_worker(wire.read(order.server, ServerSpec)))
                        there = pb.WorkerReady(attempt=order.attempt, server_uid=uid)
                        self._outbox.put_nowait(pb.AgentMessage(worker_ready=there))
                        ready = True
            elif ready and time.monotonic() - heard_at > order.server_health_timeout_seconds and not worker.stopping:
                worker.deaf_reason = f"did not answer on its port for {order.server_health_timeout_seconds:g} s"
                worker.kill()
            await asyncio.sleep(order.probe_seconds if not ready else max(order.probe_seconds, 1.0))

    # -- checkpoints in an object store

    async def _fetch(self, host: Host, worker: WorkerProcess) -> bool:
        """Before the server counts as ready: what it is to load must be on this host."""
        self._say(worker, PhaseChanged(phase="loading"))
        if self._host_end is not None:
            await asyncio.wait([self._host_end])
        try:
            await asyncio.to_thread(host.begin)
        except Exception as error:  # noqa: BLE001 -- the trainers wait for this server, or for its error
            kind: Literal["checkpoint", "runtime"] = "checkpoint" if isinstance(error, ValueError) else "runtime"
            self._say(worker, WorkerError(kind=kind, message=f"restoring: {error}"))
            return False
        self._say(worker, PhaseChanged(phase=""))
        return True

    async def _carry_out(self, order: pb.HostRequest) -> None:
        """Whatever comes of it, there is an answer: trainer 0 waits for that of every host."""
        try:
            host, worker = self._host, self._worker
            if host is None or worker is None or worker.attempt != order.attempt:
                answer: HostAnswer = HostFailed(error="its server is gone, or has no folder for checkpoints of a store")
            else:
                answer = await asyncio.to_thread(host.obey, wire.read_union(order, "order"))
        except Exception as error:  # noqa: BLE001 -- see above
            self._log.exception("an order could not be carried out", order=order.WhichOneof("order"))
            answer = HostFailed(error=f"{type(error).__name__}: {error}")
        message = pb.HostResponse(attempt=order.attempt)
        wire.put_union(message, answer)
        self._outbox.put_nowait(pb.AgentMessage(host_response=message))

    async def _end_host(self, host: Host) -> None:
        """Nothing of a worker's checkpoints outlives it on this host."""
        host.cancel()
        await asyncio.to_thread(host.clear)

    def _say(self, worker: WorkerProcess, event: WorkerEvent) -> None:
        """As if the worker had said it: a server's worker says nothing while it serves."""
        message = pb.WorkerEvent(attempt=worker.attempt)
        wire.put_union(message, event)
        self._outbox.put_nowait(pb.AgentMessage(worker_event=message))

    async def _end_worker(self, grace_seconds: float) -> None:
        if self._worker is not None and self._watcher is not None:
            self._worker.stop(grace_seconds)
            await self._watcher

    def _say_available(self) -> None:
        """The next worker gets another port, unless the user has chosen one: the old one may linger."""
        if self._options.port is None and self._holder is not None:
            self._holder.close()
            self._holder = reserve_port(self._options.host)
        assert self._holder is not None
        self._outbox.put_nowait(pb.AgentMessage(available=pb.Available(port=port_of(self._holder))))

    # -- health

    async def _serve_health(self) -> grpc.aio.Server:
        server = self._security.server()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        self._security.listen(server, self._options.health)
        await self._set_health(serving=False)
        await server.start()
        return server

    # -- metrics

    def _serve_metrics(self) -> None:
        """Start the metrics server. If the port is taken, log a warning and continue without it."""
        address = self._options.metrics
        if address is None:
            return
        try:
            self._web = WebServer(address, {"/metrics": metrics_app(self._telemetry.registry)}, name=self._options.host)
            self._log.info("serving metrics", address=address.rpartition(":")[0], port=self._web.port)
        except OSError as error:
            reason = error.strerror or error
            self._log.warning(f"no metrics: {address} cannot be listened on ({reason}); going on without")

    def _announce_metrics(self, rank: int) -> None:
        if self._web is None or self._options.targets is None:
            return
        self._target = TargetFile(self._options.targets, self._options.job_name, self._options.role, rank)
        try:
            self._target.write(self._options.host, self._web.port, self._web.scheme)
        except OSError as error:
            self._log.warning(f"Prometheus is not told of this agent: {error}")

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("ready", status)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def _wait_for(self, futures: Sequence[asyncio.Future[Any]], seconds: float | None = None) -> None:
        """Until one of the futures is done, the agent is to end, or the time is up."""
        waited: list[asyncio.Future[Any]] = [*futures, self._finish]
        await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


class _RefusedError(Exception):
    def __init__(self, reason: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(reason)


async def attend(options: AgentOptions, security: Security) -> int:
    """Runs one agent; returns its exit code."""
    return await Agent(options, security).run()


def run_agent(options: AgentOptions) -> int:
    """The agent until the job is over; the exit code of its process."""
    configure_logs()
    try:
        return asyncio.run(attend(options, Security.from_environment()))
    except (SecurityError, WebSecurityError) as error:
        structlog.get_logger().error(str(error), role=options.role, rank=options.rank)
        return EX_USAGE
    except PortTakenError as error:
        structlog.get_logger().error(str(error), role=options.role, rank=options.rank)
        return EX_TEMPFAIL


if __name__ == "__main__":
    sys.exit(run_agent(AgentOptions.from_arguments(sys.argv[1:])))
