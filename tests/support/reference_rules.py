"""NumPy references of the servers' update rules, written from the formulas (in float64), not from the servers' code.

State of a key: its change from the initial vector, and the rule's accumulators, for the first-order weight (a block of
width 1) and for the embedding (a block of the table's width) separately.
"""

from __future__ import annotations

import numpy as np


class Block:
    """One key's weights that share accumulators: the first-order weight, or the embedding."""

    def __init__(self, optimizer, width):
        self.o, self.width = optimizer, width
        self.w = np.zeros(width)
        self.a = np.zeros(width if optimizer.rule == "adagrad_elementwise" else 1)
        shape = width if optimizer.rule == "adam" else 1
        self.m, self.v, self.t = np.zeros(shape), np.zeros(shape), 0

    def update(self, g):
        """g: the gradient that the rule sees (already divided by occurrences where the table asks for it)."""
        o, g = self.o, np.asarray(g, np.float64)
        if o.rule == "sgd":
            self.w = self.w - o.learning_rate * g
        elif o.rule.startswith("adagrad"):
            a0 = o.initial_accumulator
            self.w = self.w - o.learning_rate * g * np.sqrt(a0 / (a0 + self.a))
            self.a = self.a + (g**2 if o.rule == "adagrad_elementwise" else np.mean(g**2))
        else:
            self.t += 1
            m = o.beta1 * self.m + (1 - o.beta1) * g
            v = o.beta2 * self.v + (1 - o.beta2) * g**2
            rate = o.learning_rate * np.sqrt(1 - o.beta2**self.t) / (1 - o.beta1**self.t)
            self.w = self.w - rate * m / (np.sqrt(v) + o.epsilon)
            self.m, self.v = (m, v) if o.rule == "adam" else (m.mean(keepdims=True), v.mean(keepdims=True))
        self.w = np.clip(self.w, *o.weight_bounds)


class ReferenceTable:
    """What a server's table must hold after the same pushes."""

    def __init__(self, config):
        self.config, self.rows = config, {}
        self.thresholds = {}  # of keys whose feature has one of its own

    def threshold(self, key):
        return self.thresholds.get(int(key), self.config.admission_threshold)

    def push(self, key, grad_W, shows, clicks):
        c = self.config
        row = self.rows.setdefault(
            int(key), {"show": 0.0, "click": 0.0, "first": Block(c.optimizer, 1), "embedding": None}
        )
        row["show"] += shows
        row["click"] += clicks
        grad_W = np.asarray(grad_W, np.float64) / (shows if c.optimizer.gradient_reduction == "mean" else 1.0)
        if c.first_order:
            row["first"].update(grad_W[:1])
        if row["embedding"] is not None:
            row["embedding"].update(grad_W[int(c.first_order) :])
        elif self.score(row) >= (self.threshold(key) or 0):
            row["embedding"] = Block(c.optimizer, c.width)  # the push that creates an embedding does not train it

    def score(self, row):
        return (row["show"] - row["click"]) * self.config.unclicked_weight + row["click"] * self.config.clicked_weight

    def change(self, key):
        """float64 [pull width]: first-order weight and the embedding's change; zeros for what does not exist."""
        row = self.rows.get(int(key))
        embedding = np.zeros(self.config.width)
        if row and row["embedding"] is not None:
            embedding = row["embedding"].w
        first = [row["first"].w[0] if row else 0.0] if self.config.first_order else []
        return np.concatenate([first, embedding])
