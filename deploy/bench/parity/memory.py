"""The servers' tables within one process: the same rules, initial values and admission, in NumPy.

What a run on servers is held against; also fast trials on small data. Not for production: one thread, no checkpoint.

Legend: U unique keys of a call, R rows of a table, W floats of a pulled row, E floats of an embedding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlewheel.pserver.client import Pulled
from paddlewheel.pserver.config import TableConfig, Tables
from paddlewheel.pserver.initializer import Initializer

Floats = NDArray[np.float32]
Keys = NDArray[np.uint64]
Classes = NDArray[np.uint8]


class MemoryClient:
    """`pull`, `push` and `flush` of `pserver.client.Client`, on tables of its own."""

    def __init__(self, tables: Tables, seed: int) -> None:
        self._tables = {name: _Table(name, config, seed) for name, config in tables.items()}

    def pull(self, table: str, keys_U: Keys, *, class_U: Classes | None = None) -> Floats:
        """Effective values [U, W], as `pserver.client.Client.pull` gives them."""
        return self._tables[table].pull(keys_U, class_U).values_UW

    def pull_with_counts(self, table: str, keys_U: Keys, *, class_U: Classes | None = None) -> Pulled:
        """As `pserver.client.Client.pull_with_counts`."""
        return self._tables[table].pull(keys_U, class_U)

    def push(
        self,
        table: str,
        keys_U: Keys,
        grads_UW: Floats,
        shows_U: Floats,
        clicks_U: Floats,
        *,
        class_U: Classes | None = None,
    ) -> None:
        """One update of the table's rule for each key, as `pserver.client.Client.push` makes it."""
        self._tables[table].push(keys_U, grads_UW, shows_U, clicks_U, class_U)

    def flush(self) -> None:
        """Nothing is ever on its way."""

    def num_keys(self) -> dict[str, int]:
        """Keys of each table."""
        return {name: table.num_rows for name, table in self._tables.items()}


class _Table:
    def __init__(self, name: str, config: TableConfig, seed: int) -> None:
        self._config = config
        self._initializer = Initializer(name, config, seed)
        self._sorted_keys, self._row_of_sorted = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self.num_rows = 0
        self._first = _Block(config.optimizer, 1)
        self._embedding = _Block(config.optimizer, config.width)
        self._counts_R2 = np.zeros((0, 2), np.float32)  # shows, clicks
        self._has_embedding_R = np.zeros(0, np.bool_)

    def pull(self, keys_U: Keys, class_U: Classes | None) -> Pulled:
        row_U = self._rows(keys_U)
        known_U = row_U >= 0
        first = int(self._config.first_order)
        change_UW = np.zeros((len(keys_U), self._config.pull_width), np.float32)
        counts_U2 = np.zeros((len(keys_U), 2), np.float32)
        found = row_U[known_U]
        counts_U2[known_U] = self._counts_R2[found]
        if first:
            change_UW[known_U, :1] = self._first.w[found]
        change_UW[known_U, first:] = self._embedding.w[found]
        shows_U, clicks_U = counts_U2.T
        admitted_U = self._initializer.admitted(shows_U, clicks_U, class_U)
        values_UW = self._initializer.effective(change_UW, keys_U, admitted_U)
        return Pulled(values_UW, shows_U, clicks_U, admitted_U)

    def push(self, keys_U: Keys, grads_UW: Floats, shows_U: Floats, clicks_U: Floats, class_U: Classes | None) -> None:
        row_U = self._rows(keys_U)
        if (row_U < 0).any():
            self._create(keys_U[row_U < 0])
            row_U = self._rows(keys_U)
        self._counts_R2[row_U] += np.stack([shows_U, clicks_U], axis=1)
        if self._config.optimizer.gradient_reduction == "mean":
            grads_UW = grads_UW / shows_U[:, None]
        first = int(self._config.first_order)
        if first:
            self._first.update(row_U, grads_UW[:, :1])
        trained_U = self._has_embedding_R[row_U]  # the push that creates an embedding does not train it
        self._embedding.update(row_U[trained_U], grads_UW[trained_U, first:])
        counts = self._counts_R2[row_U]
        self._has_embedding_R[row_U] |= self._initializer.admitted(counts[:, 0], counts[:, 1], class_U)

    def _rows(self, keys_U: Keys) -> NDArray[np.int64]:
        """Row of each key, -1 for unknown ones."""
        if not len(self._sorted_keys):
            return np.full(len(keys_U), -1, np.int64)
        at_U = np.minimum(np.searchsorted(self._sorted_keys, keys_U), len(self._sorted_keys) - 1)
        return np.where(self._sorted_keys[at_U] == keys_U, self._row_of_sorted[at_U], -1)

    def _create(self, keys: Keys) -> None:
        new_rows = np.arange(self.num_rows, self.num_rows + len(keys))
        self.num_rows += len(keys)
        joined, rows = np.concatenate([self._sorted_keys, keys]), np.concatenate([self._row_of_sorted, new_rows])
        order = np.argsort(joined, kind="stable")
        self._sorted_keys, self._row_of_sorted = joined[order], rows[order]
        if self.num_rows > len(self._counts_R2):
            size = max(1024, 2 * self.num_rows)
            self._counts_R2 = _grown(self._counts_R2, size)
            self._has_embedding_R = _grown(self._has_embedding_R, size)
            self._first.grow(size)
            self._embedding.grow(size)


class _Block:
    """Weights that share accumulators within a row, and the rule that changes them (formulas: pserver/config.py)."""

    def __init__(self, optimizer: Any, width: int) -> None:
        self._o = optimizer
        self.w = np.zeros((0, width), np.float32)
        wide = width if optimizer.rule in {"adagrad_elementwise", "adam"} else 1
        self._a, self._m, self._v = (np.zeros((0, wide), np.float32) for _ in range(3))
        self._t = np.zeros((0, 1), np.int64)

    def grow(self, size: int) -> None:
        self.w, self._t = _grown(self.w, size), _grown(self._t, size)
        if self._o.rule.startswith("adagrad"):
            self._a = _grown(self._a, size)
        elif self._o.rule.startswith("adam"):
            self._m, self._v = _grown(self._m, size), _grown(self._v, size)

    def update(self, rows: NDArray[np.int64], g: Floats) -> None:
        o = self._o
        if o.rule == "sgd":
            step = o.learning_rate * g
        elif o.rule.startswith("adagrad"):
            a = self._a[rows]
            step = o.learning_rate * g * np.sqrt(o.initial_accumulator / (o.initial_accumulator + a))
            square = g * g
            self._a[rows] = a + (square if o.rule == "adagrad_elementwise" else square.mean(axis=1, keepdims=True))
        else:
            self._t[rows] += 1
            t = self._t[rows]
            m, v = o.beta1 * self._m[rows] + (1 - o.beta1) * g, o.beta2 * self._v[rows] + (1 - o.beta2) * g * g
            rate = o.learning_rate * np.sqrt(1 - o.beta2**t) / (1 - o.beta1**t)
            step = (rate * m / (np.sqrt(v) + o.epsilon)).astype(np.float32)
            shared = o.rule == "adam_shared"
            self._m[rows] = m.mean(axis=1, keepdims=True) if shared else m
            self._v[rows] = v.mean(axis=1, keepdims=True) if shared else v
        self.w[rows] = np.clip(self.w[rows] - step, *o.weight_bounds)


def _grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    result = np.zeros((size, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result
