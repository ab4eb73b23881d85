"""What `paddlewheel status` says of tables and memory."""

from __future__ import annotations

from paddlewheel.deploy.cli.status import _lines
from paddlewheel.trainer.coordinator import coordinator_pb2 as pb
from paddlewheel.trainer.coordinator import wire
from paddlewheel.trainer.protocol.messages import TableFigures
from tests.support.plans import progress


def test_tables_growth_and_the_time_that_memory_lasts_are_told() -> None:
    table = TableFigures(keys=(600, 200), bytes=3 << 20, new=50, admitted=300, evicted=7, shard_skew=1.5)
    told = pb.Progress()
    tables = {"item": table, "user": table.model_copy(update={"keys": ()})}
    features = {"a": 5, "b": 45, "c": 0}
    wire.fill(told, progress(rows=10, total_rows=40, tables=tables, new_keys_of_features=features))
    members = [
        pb.MemberStatus(
            role=pb.ROLE_PSERVER,
            rank=0,
            host="h",
            port=1,
            state="ready",
            worker_memory_bytes=800 << 20,
            memory_limit_bytes=1 << 30,
            seconds_to_limit=3725.0,
        ),
        pb.MemberStatus(role=pb.ROLE_PSERVER, rank=1, state="ready", worker_memory_bytes=1 << 20),
    ]
    lines = list(_lines(pb.JobStatus(name="j", mode="train", progress=told, members=members)))
    assert lines[2:] == [
        (
            "table item: 800 keys, 3 MiB of rows, 300 admitted, 50 new, 7 evicted, fullest server 1.50 times the mean, "
            "fullest shard 1.50 times"
        ),
        "new keys come from b 45, a 5",
        "pserver 0: ready on h:1, 800 MiB of 1,024, full in 1:02:05 at this growth",
        "pserver 1: ready on no machine yet, 1 MiB",
    ]
