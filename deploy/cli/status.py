"""``paddlewheel status``: what a running job is doing, asked of its coordinator."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paddlewheel.deploy.cli.arguments import Json, LogFormat, answer, check_host_and_port

if TYPE_CHECKING:
    from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
    from paddlewheel.trainer.protocol.messages import Progress

_ANSWER_SECONDS = 5.0


class NoCoordinatorError(ConnectionError):
    """Nobody answers there as a coordinator."""


def status(
    address: Annotated[
        str,
        Parameter(
            validator=check_host_and_port,
            help="HOST:PORT of the coordinator; `train` prints it, and so does its log.",
        ),
    ],
    *,
    watch: Annotated[
        bool, Parameter(negative=(), help="Go on until the job is over; a bar on a terminal, else log lines.")
    ] = False,
    log_format: LogFormat = "auto",
    json: Json = False,
) -> int:
    """Show what a running job is doing: phase, progress, and every role's state.

    Exit code 0; with --watch that of the job; 75 when nobody answers.
    """
    return asyncio.run(_watch(address, log_format, json=json) if watch else _show(address, json=json))


async def _show(address: str, *, json: bool) -> int:
    import grpc

    from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
    from paddlewheel.trainer.coordinator import coordinator_pb2_grpc as pb_grpc
    from paddlewheel.trainer.coordinator.security import Security

    security = Security.from_environment()
    async with security.channel(address) as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        try:
            found = await stub.GetStatus(pb.StatusRequest(), metadata=security.metadata, timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _unreachable(address, error) from None
    _answer(found, json=json)
    return 0


def _answer(found: "pb.JobStatus", *, json: bool) -> None:
    from google.protobuf.json_format import MessageToDict

    from paddlewheel.trainer.coordinator import wire

    if not json:
        answer(None, json=False, text=lambda: "\n".join(_lines(found)))
        return
    data: dict[str, Any] = MessageToDict(found, preserving_proto_field_name=True)
    for member in data.get("members", ()):
        member.pop("progress", None)
    if found.HasField("progress"):
        data["progress"] = wire.plain(found.progress)
    if found.HasField("result"):
        data["result"] = wire.plain(found.result)["figures"]
    answer(data, json=True, text=str)


async def _watch(address: str, log_format: LogFormat, *, json: bool) -> int:
    import grpc

    from paddlewheel.deploy.launch.display import choose_display
    from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
    from paddlewheel.trainer.coordinator import coordinator_pb2_grpc as pb_grpc
    from paddlewheel.trainer.coordinator.security import Security

    security = Security.from_environment()
    display = None
    seen, last = 0, None
    try:
        async with security.channel(address) as channel:
            stub = pb_grpc.CoordinatorStub(channel)
            async for last in stub.WatchStatus(pb.StatusRequest(min_interval_seconds=0.5), metadata=security.metadata):
                display = display or choose_display(log_format=log_format, for_machines=json)
                for entry in last.entries:
                    if entry.number > seen:
                        seen = entry.number
                        if entry.level != "debug":
                            display.note(entry.level, entry.text, entry.time_seconds)
                display.update(last)
    except grpc.aio.AioRpcError as error:
        if last is None or not last.over:
            raise _unreachable(address, error) from None
    finally:
        if display is not None:
            display.close()
    if last is None or not last.over:
        raise NoCoordinatorError(f"the coordinator at {address} went away before the job was over")
    _answer(last, json=json)
    return int(last.outcome.exit_code)


def _unreachable(address: str, error: Any) -> NoCoordinatorError:
    return NoCoordinatorError(f"no coordinator answers at {address}: {error.code().name.lower()}, {error.details()}")


def _lines(found: "pb.JobStatus") -> Iterator[str]:
    from paddlewheel.deploy.launch.display import duration, progress_of
    from paddlewheel.trainer.coordinator import coordinator_pb2 as pb

    attempt = f", attempt {found.attempt}" if found.attempt > 1 else ""
    yield f"{found.name} ({found.mode}): {found.phase.replace('_', ' ')} for {duration(found.elapsed_seconds)}{attempt}"
    told = progress_of(found)
    if told is not None and told.total_rows:
        rate = f"{told.rows_per_second:,.0f} rows/s" if told.rows_per_second else "no rate yet"
        left = f", {duration(told.seconds_left)} left" if told.seconds_left is not None else ""
        named = {"loss": told.loss, "AUC": told.auc}
        scores = "".join(f", {name} {value:.4f}" for name, value in named.items() if value is not None)
        yield f"{told.rows:,} of {told.total_rows:,} rows, {rate}{scores}{left}"
    if told is not None:
        yield from _tables(told)
    for member in found.members:
        role = pb.Role.Name(member.role).removeprefix("ROLE_").lower()
        where = f"{member.host}:{member.port}" if member.port else member.host
        memory = f", {member.worker_memory_bytes / (1 << 20):,.0f} MiB" if member.worker_memory_bytes else ""
        if member.worker_memory_bytes and member.memory_limit_bytes:
            memory += f" of {member.memory_limit_bytes / (1 << 20):,.0f}"
        if member.HasField("seconds_to_limit"):
            memory += f", full in {duration(member.seconds_to_limit)} at this growth"
        yield f"{role} {member.rank}: {member.state} on {where or 'no machine yet'}{memory}"
    if found.checkpoint.path:
        yield f"checkpoint: {found.checkpoint.path}, {duration(found.checkpoint.age_seconds)} ago"
    if found.over:
        yield f"over with exit code {found.outcome.exit_code}" + (
            f": {found.outcome.cause}" if found.outcome.cause else ""
        )


def _tables(told: "Progress") -> Iterator[str]:
    """How large the tables are, and what makes them grow; as far as trainer 0 knows."""
    for name, found in told.tables.items():
        keys = found.keys
        if not keys:
            continue
        total = sum(keys)
        parts = [f"{total:,} keys", f"{found.bytes / (1 << 20):,.0f} MiB of rows"]
        counts = {"admitted": found.admitted, "new": found.new, "evicted": found.evicted}
        parts += [f"{count:,} {what}" for what, count in counts.items() if count is not None]
        if total and len(keys) > 1:
            parts.append(f"fullest server {max(keys) * len(keys) / total:.2f} times the mean")
        if found.shard_skew is not None:
            parts.append(f"fullest shard {found.shard_skew:.2f} times")
        yield f"table {name}: {', '.join(parts)}"
    features = told.new_keys_of_features
    if any(features.values()):
        most = sorted(features.items(), key=lambda item: -item[1])[:5]
        yield "new keys come from " + ", ".join(f"{name} {count:,}" for name, count in most if count)
