"""The towers of DeepFM and DLRM in PyTorch on a GPU: a peer that `paddlewheel bench dense --device gpu` runs.

`python torch_gpu_peer.py SPEC RESULT`, in an environment with PyTorch. Inputs are on the GPU already: unique rows,
their inverse, dense columns, labels. A step is forward, backward and fused Adam. `compile` is torch.compile, `graph`
the compiled step captured as one CUDA graph by hand. The result is written after each case.

Legend: B batch rows, F slots, P pairs, U unique keys, W floats of a row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def _layers(sizes: list[int], *, last: bool) -> nn.Sequential:
    """Linear layers with ReLU; without one behind the last layer unless `last`."""
    layers: list[nn.Module] = []
    for at in range(len(sizes) - 1):
        layers.append(nn.Linear(sizes[at], sizes[at + 1]))
        if last or at < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class DeepFM(nn.Module):  # type: ignore[misc]
    """First order, pairs, tower."""

    def __init__(self, work: dict[str, Any]) -> None:
        super().__init__()
        width = work["num_slots"] * work["width"] + work["num_dense"]
        self.tower = _layers([width, 400, 400, 400, 1], last=False)

    def forward(self, rows_UW: torch.Tensor, inverse_BF: torch.Tensor, dense_BD: torch.Tensor) -> torch.Tensor:
        emb = nn.functional.embedding(inverse_BF, rows_UW)
        vector = emb[:, :, 1:]
        total = vector.sum(1)
        pairs_B = 0.5 * ((total * total).sum(1) - (vector * vector).sum((1, 2)))
        tower_B = self.tower(torch.cat([vector.flatten(1), dense_BD], 1)).squeeze(1)
        return tower_B.float() + emb[:, :, 0].sum(1) + pairs_B.float()


class DLRM(nn.Module):  # type: ignore[misc]
    """Bottom tower, dot products of all pairs, top tower."""

    def __init__(self, work: dict[str, Any]) -> None:
        super().__init__()
        num_vectors, width = work["num_slots"] + 1, work["width"]
        self.bottom = _layers([work["num_dense"], 512, 256, width], last=True)
        self.top = _layers([num_vectors * (num_vectors - 1) // 2 + width, 512, 256, 1], last=False)
        first, second = torch.tril_indices(num_vectors, num_vectors, -1)
        self.register_buffer("pairs_P", first * num_vectors + second)

    def forward(self, rows_UW: torch.Tensor, inverse_BF: torch.Tensor, dense_BD: torch.Tensor) -> torch.Tensor:
        emb = nn.functional.embedding(inverse_BF, rows_UW)
        bottom = self.bottom(dense_BD)
        vectors = torch.cat([bottom.unsqueeze(1), emb[:, :, 1:].to(bottom.dtype)], 1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, self.pairs_P]
        return self.top(torch.cat([bottom, dots], 1)).squeeze(1).float() + emb[:, :, 0].sum(1)


def _step(work: dict[str, Any], spec: dict[str, Any], inputs: dict[str, np.ndarray[Any, Any]]) -> Any:
    mode = spec["mode"]
    torch.manual_seed(work["seed"])
    torch.backends.cuda.matmul.allow_tf32 = spec["precision"] == "tfloat32"
    torch.backends.cudnn.allow_tf32 = spec["precision"] == "tfloat32"
    kinds: dict[str, Any] = {"deepfm": DeepFM, "dlrm": DLRM}
    model = kinds[spec["model"]](work).cuda()
    adam = torch.optim.Adam(model.parameters(), lr=work["dense_learning_rate"], fused=True, capturable=mode == "graph")
    rows = torch.tensor(
        np.vstack([np.zeros_like(inputs["rows"][:1]), inputs["rows"]]), device="cuda", requires_grad=True
    )
    index = torch.tensor(inputs["index"].astype(np.int64), device="cuda")
    dense, label = torch.tensor(inputs["dense"], device="cuda"), torch.tensor(inputs["label"][:, 0], device="cuda")

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=spec["precision"] == "bfloat16"):
            logit = model(rows, index, dense)
        return nn.functional.binary_cross_entropy_with_logits(logit.float(), label, reduction="sum")

    forward = loss if mode == "eager" else torch.compile(loss, dynamic=False)

    def step() -> None:
        rows.grad = None
        adam.zero_grad(set_to_none=True)
        forward().backward()
        adam.step()

    if mode != "graph":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    rows.grad = None
    adam.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        forward().backward()
        adam.step()
    return graph.replay


def _measured(work: dict[str, Any], case: dict[str, Any]) -> list[float]:
    """Milliseconds of a step, of five rounds of 30."""
    torch._dynamo.reset()  # it gives up compiling a function that it has compiled often  # noqa: SLF001
    step = _step(work, case, dict(np.load(case["inputs"])))
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(30):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 30)
    return times


def main() -> None:
    """Every case of the spec, in order."""
    spec, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    answers: list[dict[str, Any]] = []
    for case in spec["cases"]:
        try:
            answers.append({"ms": _measured(spec["work"], case)})
        except Exception as error:  # noqa: BLE001  what went wrong is told, the other cases go on
            answers.append({"error": f"{type(error).__name__}: {error}"[:300]})
        result.write_text(json.dumps({"cases": answers, "versions": {"torch": torch.__version__}}))


if __name__ == "__main__":
    main()
