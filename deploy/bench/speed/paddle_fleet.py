"""Paddle's own path, as its documentation shows it: fleet's asynchronous parameter server fed by QueueDataset.

`python -m paddlewheel.deploy.bench.speed.paddle_fleet SPEC RESULT` runs one role; fleet learns which from the
environment, as it does in production. The spec is JSON: {"work": ..., "text": [files], "batch_rows", "threads",
"passes", "directory"}. A trainer writes {"passes": [{"rows", "started", "ended"}]} to RESULT; times are
time.monotonic().

Nothing here is ours but the model: text goes from the file through Paddle's C++ reader and executor threads to its
client, which sends gradients in the background.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def table_config(name: str, width: int, learning_rate: float) -> dict[str, Any]:
    """AdaGrad on the table; without this fleet would quietly use Adam at the dense learning rate."""
    prefix = f"table_parameters.{name}"
    config: dict[str, Any] = {f"{prefix}.table_class": "MemorySparseTable", f"{prefix}.shard_num": 64}
    for part in ("embed_sgd_param", "embedx_sgd_param"):
        rule = f"{prefix}.accessor.{part}"
        config |= {
            f"{rule}.name": "SparseAdaGradSGDRule",
            f"{rule}.adagrad.learning_rate": learning_rate,
            f"{rule}.adagrad.initial_g2sum": 3.0,
            f"{rule}.adagrad.initial_range": 0.01,
            f"{rule}.adagrad.weight_bounds": [-10.0, 10.0],
        }
    config |= {
        f"{prefix}.accessor.accessor_class": "SparseAccessor",
        f"{prefix}.accessor.fea_dim": width + 3,
        f"{prefix}.accessor.embedx_dim": width,
        f"{prefix}.accessor.embedx_threshold": 0,
    }
    return {name: config}


def build(work: dict[str, Any]) -> tuple[list[Any], Any]:
    """The DeepFM in the current program: its inputs in the order of the text, and its loss."""
    import paddle

    static, num_slots, width = paddle.static, work["num_slots"], work["width"]
    table = {
        "size": [num_slots * work["ids_per_slot"] + 1, width + 1],
        "param_attr": paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01)),
    }
    slots = [static.data(f"C{i + 1}", [-1, 1], "int64") for i in range(num_slots)]
    embedded = [paddle.reshape(static.nn.sparse_embedding(slot, **table), [-1, 1, width + 1]) for slot in slots]
    emb_BFW = paddle.concat(embedded, axis=1)
    dense_BD = static.data("dense", [-1, work["num_dense"]], "float32")
    label_B1 = static.data("label", [-1, 1], "float32")
    first_order_B1 = paddle.sum(emb_BFW[:, :, 0], axis=1, keepdim=True)
    vector_BFW = emb_BFW[:, :, 1:]
    sum_BW = paddle.sum(vector_BFW, axis=1)
    squares_B1 = paddle.reshape(paddle.sum(vector_BFW * vector_BFW, axis=[1, 2]), [-1, 1])
    pairs_B1 = 0.5 * (paddle.sum(sum_BW * sum_BW, axis=1, keepdim=True) - squares_B1)
    x = paddle.concat([paddle.reshape(vector_BFW, [-1, num_slots * width]), dense_BD], axis=1)
    for units in work["tower"]:
        x = paddle.nn.functional.relu(paddle.nn.Linear(x.shape[-1], units)(x))
    logit_B1 = paddle.nn.Linear(x.shape[-1], 1)(x) + first_order_B1 + pairs_B1
    loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(logit_B1, label_B1))
    return [*slots, dense_BD, label_B1], loss


def main() -> None:
    """One role of the job."""
    spec = json.loads(sys.argv[1])
    work = spec["work"]
    import paddle
    from paddle.distributed import fleet

    os.chdir(spec["directory"])  # Paddle leaves a file in the working directory
    paddle.enable_static()
    paddle.seed(work["seed"])
    fleet.init(fleet.PaddleCloudRoleMaker())
    inputs, loss = build(work)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    strategy.sparse_table_configs = table_config("emb", work["width"], work["embedding_learning_rate"])
    fleet.distributed_optimizer(paddle.optimizer.Adam(work["dense_learning_rate"]), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    passes = []
    for _ in range(spec["passes"]):
        started = time.monotonic()
        dataset = paddle.distributed.QueueDataset()
        dataset.init(batch_size=spec["batch_rows"], thread_num=spec["threads"], use_var=inputs, pipe_command="cat")
        dataset.set_filelist(spec["text"])
        executor.train_from_dataset(paddle.static.default_main_program(), dataset)
        passes.append({"rows": work["rows"], "started": started, "ended": time.monotonic()})
    Path(sys.argv[2]).write_text(json.dumps({"passes": passes}))
    fleet.stop_worker()
    sys.stdout.flush()
    os._exit(0)  # as its documentation has it ends here; some of Paddle's threads abort in an ordinary exit


if __name__ == "__main__":
    main()
