"""PyTorch with its tables in memory, fed from the same Parquet files: no server, no exchange between processes.

A script of its own, run by a Python that has torch, pyarrow and numpy: `python torch_peer.py SPEC RESULT`.
The spec is JSON: {"work": ..., "parquet": [files], "batch_rows", "threads", "passes", "bf16"}; to RESULT it writes
{"passes": [{"rows", "started", "ended"}], "loss", "versions"}; times are time.monotonic().

Written to be fast: one table for all slots, ids made unique, row-wise AdaGrad on the rows touched, fused Adam, a thread
that reads ahead. With `bf16` the tower runs under autocast.

Legend: B batch rows, F slots, D dense columns, U unique ids, W floats of a row.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn


def batches(spec: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(ids_BF disjoint between slots, dense_BD, label_B), read by another thread; rows of files are not mixed."""
    work = spec["work"]
    slots = [f"C{i + 1}" for i in range(work["num_slots"])]
    dense = [f"I{i + 1}" for i in range(work["num_dense"])]
    offset_F = np.arange(work["num_slots"]) * work["ids_per_slot"]
    ready: queue.Queue[Any] = queue.Queue(maxsize=8)

    def read() -> None:
        for file in spec["parquet"]:
            for rows in pq.ParquetFile(file).iter_batches(spec["batch_rows"], columns=["label", *dense, *slots]):
                ids_BF = np.empty((rows.num_rows, len(slots)), np.int64)
                dense_BD = np.empty((rows.num_rows, len(dense)), np.float32)
                for i, name in enumerate(slots):
                    ids_BF[:, i] = rows.column(name).to_numpy()
                for i, name in enumerate(dense):
                    dense_BD[:, i] = rows.column(name).to_numpy()
                label_B = rows.column("label").to_numpy().astype(np.float32)
                ready.put((torch.from_numpy(ids_BF + offset_F), torch.from_numpy(dense_BD), torch.from_numpy(label_B)))
        ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (item := ready.get()) is not None:
        yield item


class DeepFM:
    """Tables, tower, and one training step."""

    def __init__(self, work: dict[str, Any], *, bf16: bool) -> None:
        torch.manual_seed(work["seed"])
        self.width, self.bf16 = work["width"], bf16
        num_rows = work["num_slots"] * work["ids_per_slot"] + 1
        self.table_KW = torch.empty(num_rows, 1 + self.width).uniform_(-0.01, 0.01)
        self.table_KW[:, 0] = 0
        self.squares_K = torch.zeros(num_rows)
        self.learning_rate = work["embedding_learning_rate"]
        sizes = [work["num_slots"] * self.width + work["num_dense"], *work["tower"]]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.tower = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        self.adam = torch.optim.Adam(self.tower.parameters(), lr=work["dense_learning_rate"], fused=True)

    def step(self, ids_BF: torch.Tensor, dense_BD: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
        """Forward, backward, both updates; the mean loss."""
        unique_U, inverse_BF, shows_U = torch.unique(ids_BF, return_inverse=True, return_counts=True)
        rows_UW = self.table_KW[unique_U].requires_grad_()
        emb_BFW = nn.functional.embedding(inverse_BF, rows_UW)
        vector_BFW = emb_BFW[:, :, 1:]
        sum_BW = vector_BFW.sum(1)
        pairs_B = 0.5 * ((sum_BW * sum_BW).sum(1) - (vector_BFW * vector_BFW).sum((1, 2)))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            tower_B = self.tower(torch.cat([vector_BFW.flatten(1), dense_BD], 1)).squeeze(1)
        logit_B = tower_B.float() + emb_BFW[:, :, 0].sum(1) + pairs_B
        loss = nn.functional.binary_cross_entropy_with_logits(logit_B, label_B)
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        self.adam.step()
        with torch.no_grad():
            gradient_UW = rows_UW.grad
            assert gradient_UW is not None
            gradient_UW *= (len(label_B) / shows_U).unsqueeze(1)  # the mean per occurrence, as the servers' rule has it
            squares_U = self.squares_K[unique_U]
            rows_UW -= self.learning_rate * gradient_UW * torch.rsqrt(1 + squares_U / 3.0).unsqueeze(1)
            self.squares_K[unique_U] = squares_U + (gradient_UW * gradient_UW).mean(1)
            self.table_KW[unique_U] = rows_UW
        return loss.detach()


def main() -> None:
    """All passes."""
    spec, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(spec["threads"])
    model = DeepFM(spec["work"], bf16=spec["bf16"])
    passes, loss = [], torch.zeros(())
    for _ in range(spec["passes"]):
        started, rows = time.monotonic(), 0
        for ids_BF, dense_BD, label_B in batches(spec):
            loss = model.step(ids_BF, dense_BD, label_B)
            rows += len(label_B)
        passes.append({"rows": rows, "started": started, "ended": time.monotonic()})
    versions = {"torch": torch.__version__}
    result.write_text(json.dumps({"passes": passes, "loss": float(loss), "versions": versions}))


if __name__ == "__main__":
    main()
