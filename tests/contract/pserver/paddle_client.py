"""Run as a program: pull, push and pull again through Paddle's own client; prints both pulls as JSON.

python paddle_client.py ENDPOINTS WIDTH, tables as JSON on standard input; table "t", keys 1001 to 1004.
"""

import json
import sys

import numpy as np
import paddle
from paddle.base import core
from pydantic import TypeAdapter

from paddlewheel.pserver.config import Tables, table_id
from paddlewheel.pserver.descriptor import describe

endpoints, width = sys.argv[1].split(","), int(sys.argv[2])
tables = TypeAdapter(Tables).validate_json(sys.stdin.readline())
number = table_id("t")
hosts = [
    core.PSHost(e.rsplit(":", 1)[0], int(e.rsplit(":", 1)[1]), i).serialize_to_string() for i, e in enumerate(endpoints)
]
paddle.enable_static()
client = core.DistFleetWrapper()
client.init_worker(describe(tables, len(endpoints), worker=True), hosts, 0)
client.set_clients(client.get_client_info())
client.create_client2client_connection()


def program(build):
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        ids = paddle.static.data("ids", [-1, 1], "int64")
        block = main.global_block()
        table = block.create_var(name="table", shape=[1, width], dtype="float32", persistable=True, stop_gradient=True)
        return main, build(block, ids, table)


def pull(block, ids, table):
    out = block.create_var(name="out", shape=[-1, 1, width], dtype="float32")
    block.append_op(
        type="distributed_lookup_table",
        inputs={"Ids": [ids], "W": [table]},
        outputs={"Outputs": [out]},
        attrs={
            "table_id": number,
            "is_distributed": True,
            "padding_idx": 0,
            "lookup_table_version": "lookup_table_v2",
            "op_role": 0,
        },
    )
    return out


def push(block, ids, table):
    grads = paddle.static.data("grads", [-1, 1, width - 2], "float32")
    shows, clicks = paddle.static.data("shows", [-1, 1], "float32"), paddle.static.data("clicks", [-1, 1], "float32")
    block.append_op(
        type="distributed_push_sparse",
        inputs={"Ids": [ids], "W": [table], "Outputs": [grads], "Shows": [shows], "Clicks": [clicks]},
        outputs={"Outputs": [grads]},
        attrs={
            "table_id": number,
            "is_distributed": True,
            "padding_idx": 0,
            "size": width - 2,
            "use_cvm_op": False,
            "slots": [0],
            "op_role": 0,
        },
    )
    return grads


executor = paddle.static.Executor(paddle.CPUPlace())
scope = paddle.static.global_scope()
scope.var("table").get_tensor().set(np.zeros((1, width), np.float32), paddle.CPUPlace())
ids = np.arange(1001, 1005, dtype=np.int64).reshape(-1, 1)
pull_program, out = program(pull)
push_program, _ = program(push)
(first,) = executor.run(pull_program, feed={"ids": ids}, fetch_list=[out])
ones = np.ones((4, 1), np.float32)
grads = np.full((4, 1, width - 2), 0.5 / 4, np.float32)  # Paddle's op multiplies by the number of rows
executor.run(push_program, feed={"ids": ids, "grads": grads, "shows": ones, "clicks": ones}, fetch_list=[])
client.client_flush()
(second,) = executor.run(pull_program, feed={"ids": ids}, fetch_list=[out])
client.stop_worker()
sys.stdout.write(json.dumps([first.reshape(4, width).tolist(), second.reshape(4, width).tolist()]) + "\n")
