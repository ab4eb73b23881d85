"""LR, DeepFM, DCN-v2 and DIN in plain PyTorch, on rows that `trainer.parity.peers` has encoded.

Runs in an environment of its own (torch and numpy; nothing of ours is imported): `python torch_models.py SPEC.json`
prints one JSON line. Everything is as in a textbook: embedding tables, one Adam with L2 for all parameters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


class Peer(nn.Module):  # type: ignore[misc]
    """All four models; `kind` decides which parts take part in the logit."""

    def __init__(self, spec: dict[str, Any], layout: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.layout = spec["kind"], layout
        width, sizes = spec["width"], layout["sizes"]
        self.embedding = nn.ModuleDict({t: nn.Embedding(n + 1, width, padding_idx=0) for t, n in sizes.items()})
        self.first_order = nn.ModuleDict({t: nn.Embedding(n + 1, 1, padding_idx=0) for t, n in sizes.items()})
        for table in self.embedding.values():
            nn.init.uniform_(table.weight, -spec["initial_range"], spec["initial_range"])
            with torch.no_grad():
                table.weight[0] = 0
        for table in self.first_order.values():
            nn.init.zeros_(table.weight)
        pooled = [*layout["singles"], *(n for n, how in layout["lists"].items() if how != "none")]
        self.sequences = [n for n, how in layout["lists"].items() if how == "none"]
        flat = width * (len(pooled) + len(self.sequences)) + layout["dense"]
        self.linear = nn.Linear(layout["dense"], 1) if layout["dense"] else None
        self.bias = nn.Parameter(torch.zeros(1))
        if self.kind != "lr":
            self.tower = _tower(flat, spec["tower"], spec["dropout"])
            self.output = nn.Linear(spec["tower"][-1] + (flat if self.kind == "dcn" else 0), 1)
        if self.kind == "dcn":
            self.cross = nn.ModuleList([nn.Linear(flat, flat) for _ in range(spec["cross_layers"])])
        units = spec["attention"]
        last = [4 * width, *units][-1]
        self.attention = nn.ModuleList(
            [nn.Sequential(_tower(4 * width, units, 0.0), nn.Linear(last, 1)) for _ in self.sequences]
        )

    def forward(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        pooled, logit = {}, self.bias.expand(len(rows["label"]))
        for name, table in self.layout["singles"].items():
            pooled[name] = self.embedding[table](rows[name])
            logit = logit + self.first_order[table](rows[name])[:, 0]
        for name, how in self.layout["lists"].items():
            table = self.layout["list_tables"][name]
            if how == "none":
                continue
            count = (rows[name] > 0).sum(1, keepdim=True).clamp(min=1) if how == "mean" else 1
            pooled[name] = self.embedding[table](rows[name]).sum(1) / count
            logit = logit + (self.first_order[table](rows[name]).sum(1) / count)[:, 0]
        if self.kind == "lr":
            return logit if self.linear is None else logit + self.linear(rows["dense"])[:, 0]
        vectors = list(pooled.values())
        if self.kind == "deepfm":
            stacked = torch.stack(vectors, 1)
            logit = logit + 0.5 * (stacked.sum(1) ** 2 - (stacked**2).sum(1)).sum(1)
        for unit, name in zip(self.attention, self.sequences, strict=True):
            past = self.embedding[self.layout["list_tables"][name]](rows[name])
            target = pooled[self.layout["targets"][name]].unsqueeze(1).expand_as(past)
            score = unit(torch.cat([target, past, target - past, target * past], -1))
            vectors.append((score * (rows[name] > 0).unsqueeze(-1) * past).sum(1))
        flat = torch.cat([*vectors, rows["dense"]], 1)
        hidden = self.tower(flat)
        if self.kind == "dcn":
            crossed = flat
            for layer in self.cross:
                crossed = flat * layer(crossed) + crossed
            hidden = torch.cat([crossed, hidden], 1)
        return logit + self.output(hidden)[:, 0]


def _tower(inputs: int, units: list[int], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in units:
        layers += [nn.Linear(inputs, size), nn.ReLU(), nn.Dropout(dropout)]
        inputs = size
    return nn.Sequential(*layers)


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Trains; AUC and logloss on the evaluation rows after every epoch."""
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(spec["seed"])
    data = np.load(spec["rows"])
    layout = json.loads(str(data["layout"]))
    names = ["label", "dense", *layout["singles"], *layout["lists"]]
    parts = {part: {n: torch.from_numpy(data[f"{part}/{n}"]) for n in names} for part in ("train", "eval")}
    model = Peer(spec, layout)
    adam = torch.optim.Adam(model.parameters(), lr=spec["learning_rate"], weight_decay=spec["l2"])
    loss_of = nn.BCEWithLogitsLoss()
    count, batch = len(parts["train"]["label"]), spec["batch_rows"]
    epochs = []
    for _ in range(spec["epochs"]):
        model.train()
        order = torch.randperm(count)
        for start in range(0, count, batch):
            rows = {n: v[order[start : start + batch]] for n, v in parts["train"].items()}
            adam.zero_grad()
            loss_of(model(rows), rows["label"]).backward()
            adam.step()
        model.eval()
        with torch.no_grad():
            held = parts["eval"]
            logits = [
                model({n: v[at : at + 4096] for n, v in held.items()}) for at in range(0, len(held["label"]), 4096)
            ]
            logit = torch.cat(logits).double()
            label = held["label"].double()
            loss = nn.functional.binary_cross_entropy_with_logits(logit, label).item()
        epochs.append({"auc": _auc(logit.numpy(), label.numpy()), "logloss": loss})
    return {"epochs": epochs}


def _auc(score: np.ndarray, label: np.ndarray) -> float:
    """Mann-Whitney, ties one half."""
    _, where, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[where]
    positives = label.sum()
    return float((rank[label == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(label) - positives)))


if __name__ == "__main__":
    print(json.dumps(train(json.loads(Path(sys.argv[1]).read_text()))))  # noqa: T201
