"""NumPy references of the dense models in float64, row by row, written from the papers' formulas.

A model's reference takes one row's inputs and the parameters by name, and gives that row's logits. Legend: F fields,
W width, D dense columns, L ids of the row's sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Row:
    """One row: embeddings by feature in order, first-order weights summed, dense columns, sequences, feature ids."""

    fields: dict[str, np.ndarray]
    first_order: float
    dense: np.ndarray
    past: dict[str, np.ndarray]
    ids: dict[str, int]

    @property
    def vectors(self):
        return np.array(list(self.fields.values()))

    @property
    def flat(self):
        return np.concatenate([*self.fields.values(), self.dense])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def normalised(x, p, name):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def affine(x, p, name):
    return x @ p[f"{name}.weight"] + p.get(f"{name}.bias", 0.0)


def tower(x, p, name):
    """Hidden layers, layer norms and output as far as `p` has them."""
    layer = 0
    while f"{name}.hidden.{layer}.weight" in p:
        x = affine(x, p, f"{name}.hidden.{layer}")
        if f"{name}.norms.{layer}.weight" in p:
            x = normalised(x, p, f"{name}.norms.{layer}")
        x = np.maximum(x, 0)
        layer += 1
    return affine(x, p, f"{name}.output") if f"{name}.output.weight" in p else x


def dots(vectors, weights=None):
    total = 0.0
    for i in range(len(vectors)):
        for j in range(i + 1, len(vectors)):
            total += vectors[i] @ vectors[j] * (1.0 if weights is None else weights[i, j])
    return total


def lr(row, p, c):
    return row.first_order + p["bias"] + row.dense @ p["dense.weight"]


def fm(row, p, c):
    return lr(row, p, c) + dots(row.vectors)


def fwfm(row, p, c):
    return lr(row, p, c) + dots(row.vectors, p["pairs"])


def wide_deep(row, p, c):
    return lr(row, p, c) + tower(row.flat, p, "tower")


def deepfm(row, p, c):
    return row.first_order + dots(row.vectors) + tower(row.flat, p, "tower")


def dcn(row, p, c):
    x0 = x = row.flat
    for layer in range(c.cross_layers):
        if c.rank is None:
            inner = p[f"cross.{layer}.weight"].T @ x + p[f"cross.{layer}.bias"]
        else:
            low = p[f"cross.{layer}.0.weight"].T @ x
            inner = p[f"cross.{layer}.1.weight"].T @ low + p[f"cross.{layer}.1.bias"]
        x = x0 * inner + x
    hidden = tower(x, p, "tower") if c.structure == "stacked" else np.concatenate([x, tower(x0, p, "tower")])
    return row.first_order + affine(hidden, p, "output")


def dlrm(row, p, c):
    bottom = tower(row.dense, p, "bottom")
    vectors = [bottom, *row.vectors]
    pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
    return row.first_order + tower(np.concatenate([bottom, pairs]), p, "top")


def xdeepfm(row, p, c):
    first = state = row.vectors
    pooled = []
    for layer, maps in enumerate(c.cin):
        weight = p[f"cin.{layer}.weight"].reshape(len(state), len(first), maps)
        new = np.zeros((maps, first.shape[1]))
        for h in range(maps):
            for i in range(len(state)):
                for j in range(len(first)):
                    new[h] += weight[i, j, h] * state[i] * first[j]
        state = new
        pooled.append(state.sum(axis=1))
    return row.first_order + affine(np.concatenate(pooled), p, "output") + tower(row.flat, p, "tower")


def autoint(row, p, c):
    state = np.vstack([row.vectors, row.dense[:, None] * p["dense_DW"]])
    for layer in range(c.attention_layers):
        name, size = f"attention.{layer}", c.head_width
        heads = []
        for head in range(c.heads):
            part = slice(head * size, (head + 1) * size)
            q, k, v = (state @ p[f"{name}.{n}.weight"][:, part] for n in ("query", "key", "value"))
            heads.append(np.array([softmax(q[m] @ k.T) @ v for m in range(len(state))]))
        state = np.maximum(np.hstack(heads) + state @ p[f"{name}.residual.weight"], 0)
    logit = row.first_order + affine(state.ravel(), p, "output")
    return logit + tower(row.flat, p, "tower") if c.tower else logit


def finalmlp(row, p, c):
    streams = [row.flat, row.flat]
    if c.gate is not None:
        for side, context in enumerate((c.gate_context, c.second_gate_context)):
            given = np.concatenate([row.fields[n] for n in context]) if context else p[f"gates.{side}.learnt"][0]
            streams[side] = 2 * sigmoid(tower(given, p, f"gates.{side}.tower")) * row.flat
    one, two = tower(streams[0], p, "first"), tower(streams[1], p, "second")
    logit = row.first_order + affine(one, p, "linear_first") + affine(two, p, "linear_second")
    size_one, size_two = len(one) // c.heads, len(two) // c.heads
    for head in range(c.heads):
        for label in range(len(logit)):
            weight = p["bilinear"][head][:, label * size_two : (label + 1) * size_two]
            left = one[head * size_one : (head + 1) * size_one]
            logit[label] += left @ weight @ two[head * size_two : (head + 1) * size_two]
    return logit


def din(row, p, c):
    interests = []
    for number, (name, past) in enumerate(row.past.items()):
        target = row.fields[c.targets.get(name, "i1")]
        scores = np.array([tower(_pair(target, e), p, f"units.{number}")[0] for e in past])
        if c.softmax and len(past):
            scores = softmax(scores)
        interests.append(sum((s * e for s, e in zip(scores, past, strict=True)), np.zeros(len(target))))
    return row.first_order + tower(np.concatenate([row.flat, *interests]), p, "tower")


def _pair(target, other):
    return np.concatenate([target, other, target - other, target * other])


def gru(inputs, p, name):
    """Cho et al., 2014, with the reset gate applied after the state's product (as cuDNN and Paddle do)."""
    width = p[f"{name}.weight_input"].shape[1]
    state, states = np.zeros(width), []
    for x in inputs:
        a = p[f"{name}.weight_input"] @ x + p[f"{name}.bias_input"]
        b = p[f"{name}.weight_state"] @ state + p[f"{name}.bias_state"]
        reset, update = sigmoid(a[:width] + b[:width]), sigmoid(a[width : 2 * width] + b[width : 2 * width])
        candidate = np.tanh(a[2 * width :] + reset * b[2 * width :])
        state = update * state + (1 - update) * candidate
        states.append(state)
    return states


def dien(row, p, c):
    interests = []
    for number, (name, past) in enumerate(row.past.items()):
        target = row.fields[c.targets.get(name, "i1")]
        states = gru(past, p, f"extraction.{number}")
        if states:
            weight = softmax(np.array([tower(_pair(target, s), p, f"units.{number}")[0] for s in states]))
            interests.append(gru([w * s for w, s in zip(weight, states, strict=True)], p, f"evolution.{number}")[-1])
        else:
            interests.append(np.zeros(len(target)))
    return row.first_order + tower(np.concatenate([row.flat, *interests]), p, "tower")


def two_tower_vectors(row, p, c):
    user = np.concatenate([*(v for n, v in row.fields.items() if n not in c.item), row.dense])
    item = np.concatenate([row.fields[n] for n in c.item])
    user, item = tower(user, p, "user_tower"), tower(item, p, "item_tower")
    return user / np.linalg.norm(user), item / np.linalg.norm(item)


def two_tower(row, p, c):
    user, item = two_tower_vectors(row, p, c)
    return np.array([user @ item / c.temperature])


def shared_bottom(row, p, c):
    return _towers(lambda label: tower(row.flat, p, "bottom"), p)


def mmoe(row, p, c):
    experts = np.array([tower(row.flat, p, f"experts.{e}") for e in range(c.experts)])
    return _towers(lambda label: softmax(affine(row.flat, p, f"gates.{label}")) @ experts, p)


def ple(row, p, c):
    num_labels = 2
    states = [row.flat] * (num_labels + 1)
    for level in range(c.levels):
        name = f"levels.{level}"
        own = [
            [tower(states[k], p, f"{name}.label_experts.{k}.{e}") for e in range(c.label_experts)]
            for k in range(num_labels)
        ]
        shared = [tower(states[-1], p, f"{name}.shared_experts.{e}") for e in range(c.shared_experts)]
        new = [
            softmax(affine(states[k], p, f"{name}.gates.{k}")) @ np.array(own[k] + shared) for k in range(num_labels)
        ]
        if level < c.levels - 1:
            everything = np.array([e for mine in own for e in mine] + shared)
            new.append(softmax(affine(states[-1], p, f"{name}.shared_gate")) @ everything)
        states = new
    return _towers(lambda label: states[label], p)


def _towers(state_of, p):
    labels = range(len({n.split(".")[1] for n in p if n.startswith("towers.")}))
    return np.array([tower(state_of(k), p, f"towers.{k}")[0] for k in labels])


def esmm(row, p, c):
    click, conversion = tower(row.flat, p, "click")[0], tower(row.flat, p, "conversion")[0]
    both = sigmoid(click) * sigmoid(conversion)
    return np.array([click, np.log(both / (1 - both))])


# ---- losses of rows, [B] ---------------------------------------------------------------------------------------------


def logistic(rows, logits_BY, labels_BY, p, c):
    weights = np.array(getattr(c, "label_weights", ()) or (1.0,) * labels_BY.shape[1])
    return ((np.logaddexp(0, logits_BY) - labels_BY * logits_BY) * weights).sum(axis=1)


def in_batch_softmax(rows, logits_BY, labels_BY, p, c):
    """Each positive row's item among the distinct items of the batch; rows without an item count for nothing."""
    if c.loss == "pointwise":
        return logistic(rows, logits_BY, labels_BY, p, c)
    vectors = [two_tower_vectors(row, p, c) for row in rows]
    identity = [row.ids[c.item[0]] for row in rows]
    loss = np.zeros(len(rows))
    for b in range(len(rows)):
        if labels_BY[b, 0] and identity[b]:
            candidates = {}
            for other, (_, item) in enumerate(vectors):
                if identity[other]:
                    candidates.setdefault(identity[other], []).append(vectors[b][0] @ item / c.temperature)
            # the same item in rows whose other item features differ: the mean of its exponentials
            total = sum(np.mean(np.exp(scores)) for scores in candidates.values())
            loss[b] = (np.log(total) - logits_BY[b, 0]) * labels_BY[b, 0]
    return loss


def with_auxiliary(rows, logits_BY, labels_BY, p, c):
    loss = logistic(rows, logits_BY, labels_BY, p, c)
    for number, name in enumerate(rows[0].past):
        for b, row in enumerate(rows):
            past, other = row.past[name], rows[b - 1].past[name]  # row -1 is the last one
            states = gru(past, p, f"extraction.{number}")
            terms = []
            for t in range(len(past) - 1):
                term = np.logaddexp(0, -states[t] @ past[t + 1])
                if t + 1 < len(other):
                    term += np.logaddexp(0, states[t] @ other[t + 1])
                terms.append(term)
            if terms:
                loss[b] += c.auxiliary_weight * np.mean(terms)
    return loss


LOSSES = {"two_tower": in_batch_softmax, "dien": with_auxiliary}
