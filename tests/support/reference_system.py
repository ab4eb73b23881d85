"""A whole training job in float64 NumPy, written from the formulas: tables, pooling, DeepFM forward and backward, Adam.

It takes the batches of every trainer (their order is tested elsewhere) and does step by step what the job must do.
"""

from __future__ import annotations

import numpy as np

from paddlewheel.pserver.initializer import codebook
from tests.support.reference_rules import ReferenceTable


class ReferenceJob:
    """`job` is a JobConfig with a deepfm model; `dense` are the initial dense parameters by name."""

    def __init__(self, job, dense):
        self.job = job
        self.tables = {name: ReferenceTable(job.tables[name]) for name in job.data.tables}
        self.codebooks = {
            name: codebook(name, job.tables[name].width, job.tables[name].initial_range, job.seed)
            for name in job.data.tables
        }
        self.dense = {k: v.astype(np.float64) for k, v in dense.items()}
        self.m = {k: np.zeros(v.shape) for k, v in self.dense.items()}
        self.v = {k: np.zeros(v.shape) for k, v in self.dense.items()}
        self.t = 0

    def value(self, table, key):
        """What a pull of this key returns: its change, plus the initial vector where it has an embedding."""
        config = self.job.tables[table]
        row = self.tables[table].rows.get(int(key))
        threshold = self.tables[table].threshold(key)
        admitted = threshold is None or (row is not None and self.tables[table].score(row) >= threshold)
        value = self.tables[table].change(key)
        if admitted:
            value[int(config.first_order) :] += self.codebooks[table][int(key) & 0xFFFF]
        return value

    def step(self, batches):
        """One synchronous step over one batch of each trainer that still has one."""
        self.t += 1
        total = sum(b.num_rows if b.sample_weight_B is None else float(b.sample_weight_B.sum()) for b in batches)
        gradients = {k: np.zeros(v.shape) for k, v in self.dense.items()}
        pushes = []
        for batch in batches:
            self._learn_thresholds(batch)
            rows, counts = {}, {}
            for b in range(batch.num_rows):
                self._row(batch, b, gradients, rows, counts)
            for (table, key), (shows, _) in counts.items():
                rows[table, key] = rows[table, key] + self.job.train.embedding_l2 * shows * self.value(table, key)
            pushes.append((rows, counts))
        for rows, counts in pushes:
            for (table, key), gradient in rows.items():
                self.tables[table].push(key, gradient, *counts[table, key])
        self._adam({k: g / total for k, g in gradients.items()})

    def _learn_thresholds(self, batch):
        for table, keys in batch.tables.items():
            for feature, threshold in self.job.tables[table].admission_by_feature.items():
                for place in keys.index[feature].ravel():
                    if place:
                        self.tables[table].thresholds[int(keys.keys_U[place - 1])] = threshold

    def _row(self, batch, b, gradients, rows, counts):
        data = self.job.data
        fields = []  # (table, [(key, weight)]), in the order of the model's input: per table singles, then lists
        for table in data.tables:
            keys = batch.tables[table]
            features = [f for f in data.sparse if f.table == table]
            for f in [f for f in features if not f.multi_valued] + [f for f in features if f.multi_valued]:
                places = [int(p) for p in np.atleast_1d(keys.index[f.name][b]) if p]
                scale = 1 / len(places) if f.pooling == "mean" and places else 1.0
                fields.append((table, [(int(keys.keys_U[p - 1]), scale) for p in places]))
        label = float(batch.labels_BL[b, 0])
        for table, ids in fields:
            for key, _ in ids:
                shows, clicks = counts.get((table, key), (0.0, 0.0))
                counts[table, key] = (shows + 1, clicks + label)
        width = self.job.tables[data.tables[0]].width
        first = np.array([int(self.job.tables[table].first_order) for table, _ in fields])
        pooled = [sum((s * self.value(t, k) for k, s in ids), np.zeros(width + f))
                  for (t, ids), f in zip(fields, first, strict=True)]  # fmt: skip
        vectors = np.array([p[f:] for p, f in zip(pooled, first, strict=True)])
        logit = sum(p[0] for p, f in zip(pooled, first, strict=True) if f)
        summed = vectors.sum(axis=0)
        logit += 0.5 * ((summed**2).sum() - (vectors**2).sum())
        activations = [np.concatenate([vectors.ravel(), batch.dense_BD[b].astype(np.float64)])]
        for layer in range(len(self.job.model.tower)):
            w, bias = (self.dense[f"tower.hidden.{layer}.{n}"] for n in ("weight", "bias"))
            activations.append(np.maximum(activations[-1] @ w + bias, 0))
        logit += (activations[-1] @ self.dense["tower.output.weight"] + self.dense["tower.output.bias"])[0]
        slope = 1 / (1 + np.exp(-logit)) - label
        # backward
        gradients["tower.output.weight"] += slope * activations[-1][:, None]
        gradients["tower.output.bias"] += slope
        back = slope * self.dense["tower.output.weight"][:, 0]
        for layer in reversed(range(len(self.job.model.tower))):
            back = back * (activations[layer + 1] > 0)
            gradients[f"tower.hidden.{layer}.weight"] += np.outer(activations[layer], back)
            gradients[f"tower.hidden.{layer}.bias"] += back
            back = self.dense[f"tower.hidden.{layer}.weight"] @ back
        by_field = back[: vectors.size].reshape(vectors.shape) + slope * (summed - vectors)
        for (table, ids), f, gradient in zip(fields, first, by_field, strict=True):
            for key, scale in ids:
                whole = scale * np.concatenate([[slope]] * int(f) + [gradient])
                rows[table, key] = rows.get((table, key), 0.0) + whole

    def _adam(self, gradients):
        o = self.job.train.dense_optimizer
        for name, g in gradients.items():
            self.m[name] = o.beta1 * self.m[name] + (1 - o.beta1) * g
            self.v[name] = o.beta2 * self.v[name] + (1 - o.beta2) * g**2
            if g.ndim > 1:
                self.dense[name] = self.dense[name] * (1 - o.learning_rate * o.weight_decay)
            correction = np.sqrt(1 - o.beta2**self.t)
            rate = o.learning_rate * correction / (1 - o.beta1**self.t)
            self.dense[name] = self.dense[name] - rate * self.m[name] / (np.sqrt(self.v[name]) + o.epsilon * correction)
