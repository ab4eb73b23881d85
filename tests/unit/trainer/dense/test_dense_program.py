"""The dense programs against float64 NumPy: forward, gradients of every input, the optimizer step, state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paddlewheel.data_pipeline.batch import Batch, TableKeys
from paddlewheel.trainer.dense.inputs import ListFeature, TableLayout
from paddlewheel.trainer.dense.program import DenseProgram, clipped_scale
from paddlewheel.trainer.job.train import DenseOptimizerConfig
from paddlewheel.trainer.kernels.cpu import Precision
from paddlewheel.trainer.models import parse_model

OPERATORS = [
    pytest.param(None, id="paddle"),
    pytest.param("float32", id="native", marks=pytest.mark.needs("native operators")),
]

B, D, W, U = 6, 3, 4, 9
LAYOUTS = [
    TableLayout("user", W + 1, True, ("u1", "u2")),
    TableLayout(
        "item", W + 1, True, ("i1",), (ListFeature("tags", "mean"), ListFeature("words", "sum", weighted=True))
    ),
]


def _batch(rng: np.random.Generator) -> Batch:
    tags = np.array([[1, 2, 2], [0, 0, 0], [3, 0, 0], [9, 9, 1], [0, 0, 0], [4, 5, 6]], np.int32)
    words = np.array([[1, 0], [2, 3], [0, 0], [4, 4], [7, 8], [9, 0]], np.int32)
    weights = (rng.random((B, 2)) * (words > 0)).astype(np.float32)
    single_user = rng.integers(0, U + 1, (B, 2)).astype(np.int32)
    single_item = rng.integers(0, U + 1, (B, 1)).astype(np.int32)
    keys = np.arange(1, U + 1, dtype=np.uint64)
    return Batch(
        num_rows=B,
        dense_BD=rng.standard_normal((B, D)).astype(np.float32),
        labels_BL=rng.integers(0, 2, (B, 1)).astype(np.float32),
        tables={
            "user": TableKeys(keys, {"u1": single_user[:, 0], "u2": single_user[:, 1]}, single_user, ("u1", "u2")),
            "item": TableKeys(
                keys,
                {"i1": single_item[:, 0], "tags": tags, "words": words},
                single_item,
                ("i1",),
                {"words": weights},
            ),
        },
        spans=(),
        sample_weight_B=rng.random(B).astype(np.float32),
    )


def _pooled(batch: Batch, rows: dict[str, np.ndarray]) -> np.ndarray:
    """Row by row in float64: [B, 5, W + 1] in the order u1, u2, i1, tags, words."""
    out = np.zeros((B, 5, W + 1))
    value = {name: np.vstack([np.zeros(W + 1), rows[name].astype(np.float64)]) for name in rows}
    for b in range(B):
        user, item = batch.tables["user"], batch.tables["item"]
        out[b, 0], out[b, 1] = (value["user"][user.index[n][b]] for n in ("u1", "u2"))
        out[b, 2] = value["item"][item.index["i1"][b]]
        tags = [t for t in item.index["tags"][b] if t]
        if tags:
            out[b, 3] = sum(value["item"][t] for t in tags) / len(tags)
        for position, word in enumerate(item.index["words"][b]):
            if word:
                out[b, 4] += item.weights["words"][b, position] * value["item"][word]
    return out


def _loss(
    kind: str, batch: Batch, rows: dict[str, np.ndarray], dense: dict[str, np.ndarray]
) -> tuple[float, np.ndarray]:
    """Summed weighted loss and logits, in float64 and with loops over pairs."""
    pooled = _pooled(batch, rows)
    dense = {k: v.astype(np.float64) for k, v in dense.items()}
    logit = pooled[:, :, 0].sum(axis=1)
    vectors = pooled[:, :, 1:]
    if kind in ("lr", "fm"):
        logit = logit + dense["bias"][0] + batch.dense_BD.astype(np.float64) @ dense["dense.weight"][:, 0]
    if kind in ("fm", "deepfm"):
        for i in range(5):
            for j in range(i):
                logit = logit + (vectors[:, i] * vectors[:, j]).sum(axis=1)
    if kind == "deepfm":
        x = np.concatenate([vectors.reshape(B, -1), batch.dense_BD.astype(np.float64)], axis=1)
        for layer in range(2):
            x = np.maximum(x @ dense[f"tower.hidden.{layer}.weight"] + dense[f"tower.hidden.{layer}.bias"], 0)
        logit = logit + (x @ dense["tower.output.weight"] + dense["tower.output.bias"])[:, 0]
    label = batch.labels_BL[:, 0]
    row_loss = np.logaddexp(0, logit) - label * logit
    return float((row_loss * batch.sample_weight_B).sum()), logit


def _numeric_gradient(function, array: np.ndarray) -> np.ndarray:
    gradient, step = np.zeros(array.shape), 1e-5
    wide = array.astype(np.float64)
    for place in np.ndindex(array.shape):
        up, down = wide.copy(), wide.copy()
        up[place] += step
        down[place] -= step
        gradient[place] = (function(up) - function(down)) / (2 * step)
    return gradient


def _program(kind: str, operators: Precision | None = None, **optimizer: float) -> DenseProgram:
    return DenseProgram(
        LAYOUTS,
        num_dense=D,
        num_labels=1,
        model=parse_model({"kind": kind} | ({"tower": [5, 4]} if kind == "deepfm" else {})),
        optimizer=DenseOptimizerConfig(**optimizer),
        seed=11,
        rank=0,
        operators=operators,
    )


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("kind", ["lr", "fm", "deepfm"])
def test_forward_and_all_gradients(kind: str, operators: Precision | None) -> None:
    rng = np.random.default_rng(5)
    batch, program = _batch(rng), _program(kind, operators)
    rows = {name: rng.standard_normal((U, W + 1)).astype(np.float32) for name in ("user", "item")}
    dense = program.parameters()
    result = program.gradients(batch, rows)
    loss, logit = _loss(kind, batch, rows, dense)
    np.testing.assert_allclose(result.logit_BY[:, 0], logit, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(program.predict(batch, rows)[:, 0], logit, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(result.flat_N[-2:], [loss, batch.sample_weight_B.sum()], rtol=2e-5)
    for name, values in rows.items():
        expected = _numeric_gradient(lambda v, n=name: _loss(kind, batch, {**rows, n: v}, dense)[0], values)
        np.testing.assert_allclose(result.tables[name], expected, rtol=1e-3, atol=2e-4)
    offset = 0
    for name, size in program.sizes.items():
        expected = _numeric_gradient(lambda v, n=name: _loss(kind, batch, rows, {**dense, n: v})[0], dense[name])
        got = result.flat_N[offset : offset + size].reshape(expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=2e-4, err_msg=name)
        offset += size
    assert offset == program.num_floats == len(result.flat_N) - 2


@pytest.mark.parametrize("operators", OPERATORS)
def test_apply_is_adam_with_decoupled_decay_l2_clipping_and_schedule(operators: Precision | None) -> None:
    rng = np.random.default_rng(6)
    settings = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6}
    program = _program("deepfm", operators, **settings, weight_decay=0.1, l2=0.05, clip_norm=2.0)
    weights = {k: v.astype(np.float64) for k, v in program.parameters().items()}
    first = {k: np.zeros(v.shape) for k, v in weights.items()}
    second = {k: np.zeros(v.shape) for k, v in weights.items()}
    clipped = []
    for step, (size_of_gradient, factor) in enumerate([(1.0, 0.5), (3.0, 1.0), (0.1, 0.7), (2.0, 0.1)], start=1):
        flat = (size_of_gradient * rng.standard_normal(program.num_floats)).astype(np.float32)
        program.apply(flat, 7.0, rate_factor=factor)
        mean = flat.astype(np.float64) / 7.0
        norm = np.linalg.norm(mean)
        clipped.append(norm > 2.0)
        mean *= min(1.0, 2.0 / norm)
        offset = 0
        for name, size in program.sizes.items():
            gradient = mean[offset : offset + size].reshape(weights[name].shape)
            offset += size
            if weights[name].ndim > 1:
                gradient = gradient + 0.05 * weights[name]
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient**2
            if weights[name].ndim > 1:
                weights[name] *= 1 - 0.01 * factor * 0.1
            rate = 0.01 * factor * np.sqrt(1 - 0.9**step) / (1 - 0.8**step)
            weights[name] -= rate * first[name] / (np.sqrt(second[name]) + 1e-6 * np.sqrt(1 - 0.9**step))
    assert set(clipped) == {True, False}
    for name, value in program.parameters().items():
        np.testing.assert_allclose(value, weights[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.needs("native operators")
def test_a_state_may_go_from_one_kind_of_operators_to_the_other() -> None:
    rng = np.random.default_rng(6)
    first, second = _program("deepfm", "float32", weight_decay=0.1), _program("deepfm", None, weight_decay=0.1)
    for step in range(4):
        flat = rng.standard_normal(first.num_floats).astype(np.float32)
        first.apply(flat, 3.0)
        second.apply(flat, 3.0)
        if step == 1:
            second.load_state(first.state())
        for name, value in first.state().items():
            np.testing.assert_allclose(second.state()[name], value, rtol=2e-5, atol=1e-7, err_msg=name)


def test_the_shift_is_for_predictions_of_the_first_label_alone() -> None:
    batch = replace(_batch(np.random.default_rng(8)), labels_BL=np.zeros((B, 2), np.float32))
    rows = {name: np.ones((U, W + 1), np.float32) for name in ("user", "item")}
    plain, shifted = (
        DenseProgram(
            LAYOUTS,
            num_dense=D,
            num_labels=2,
            model=parse_model({"kind": "fm"}),
            optimizer=DenseOptimizerConfig(),
            seed=11,
            rank=0,
            logit_shift=shift,
        )
        for shift in (0.0, -2.5)
    )
    np.testing.assert_array_equal(plain.gradients(batch, rows).flat_N, shifted.gradients(batch, rows).flat_N)
    np.testing.assert_allclose(
        shifted.predict(batch, rows) - plain.predict(batch, rows), np.tile([-2.5, 0.0], (B, 1)), atol=1e-6
    )


def test_clipping_leaves_a_zero_gradient_alone() -> None:
    assert clipped_scale(np.zeros(3, np.float32), 4.0, 1.0) == 0.25
    assert clipped_scale(np.full(4, 6.0, np.float32), 4.0, None) == 0.25
    assert clipped_scale(np.full(4, 6.0, np.float32), 4.0, 1.5) == 0.125  # norm 12 / 4 = 3


def test_state_moves_to_another_program_exactly() -> None:
    rng = np.random.default_rng(7)
    one, two = _program("deepfm"), _program("deepfm")
    for value in one.parameters():
        np.testing.assert_array_equal(one.parameters()[value], two.parameters()[value])  # the seed decides
    flats = [rng.standard_normal(one.num_floats).astype(np.float32) for _ in range(4)]
    for flat in flats[:2]:
        one.apply(flat, 3.0)
    two.load_state(one.state())
    for flat in flats[2:]:
        one.apply(flat, 3.0)
        two.apply(flat, 3.0)
    for name, value in one.state().items():
        np.testing.assert_array_equal(value, two.state()[name], err_msg=name)


def test_state_of_another_model_is_refused() -> None:
    program = _program("deepfm")
    with pytest.raises(ValueError, match="another model"):
        program.load_state(_program("lr").state())
    state = program.state()
    state["tower.output.weight"] = np.zeros((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"tower\.output\.weight is \[2, 2\]"):
        program.load_state(state)


def test_every_parameter_starts_with_its_own_numbers() -> None:
    values = [v.ravel()[:4] for k, v in _program("deepfm").parameters().items() if v.ndim > 1]
    ratios = np.array([v / values[0] for v in values[1:]])
    assert (np.ptp(ratios, axis=1) > 0.01).all()


def test_dropout_differs_by_step_and_trainer_and_repeats_with_the_seed() -> None:
    rng = np.random.default_rng(9)
    batch = _batch(rng)
    rows = {name: rng.standard_normal((U, W + 1)).astype(np.float32) for name in ("user", "item")}

    def logits(rank: int) -> list[np.ndarray]:
        program = DenseProgram(
            LAYOUTS,
            num_dense=D,
            num_labels=1,
            model=parse_model({"kind": "deepfm", "tower": [50, 40], "dropout": 0.5}),
            optimizer=DenseOptimizerConfig(),
            seed=11,
            rank=rank,
        )
        return [program.gradients(batch, rows).logit_BY for _ in range(2)]

    first, second = logits(0)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, logits(1)[0])
    np.testing.assert_array_equal([first, second], logits(0))


def test_a_batch_without_any_id_trains_and_scores() -> None:
    program = _program("deepfm")
    full = _batch(np.random.default_rng(8))
    none = TableKeys(np.zeros(0, np.uint64), {}, np.zeros((B, 2), np.int32), ("u1", "u2"))
    item = TableKeys(
        np.zeros(0, np.uint64),
        {"tags": np.zeros((B, 1), np.int32), "words": np.zeros((B, 1), np.int32)},
        np.zeros((B, 1), np.int32),
        ("i1",),
        {"words": np.zeros((B, 1), np.float32)},
    )
    batch = replace(full, tables={"user": none, "item": item})
    rows = {name: np.zeros((0, W + 1), np.float32) for name in ("user", "item")}
    result = program.gradients(batch, rows)
    assert np.isfinite(result.flat_N).all()
    assert result.tables["user"].shape == (0, W + 1)


@pytest.mark.parametrize(
    "operators",
    [
        None,
        pytest.param("float32", marks=pytest.mark.needs("native operators")),
        pytest.param("bfloat16", marks=pytest.mark.needs("native operators", "bfloat16")),
    ],
)
def test_predictions_are_float32_whatever_training_computes_in(operators):
    rng = np.random.default_rng(5)
    batch = _batch(rng)
    rows = {name: rng.standard_normal((U, W + 1)).astype(np.float32) for name in ("user", "item")}

    def program(operators):
        return DenseProgram(
            LAYOUTS,
            num_dense=D,
            num_labels=1,
            model=parse_model({"kind": "deepfm", "tower": [32, 16]}),
            optimizer=DenseOptimizerConfig(),
            seed=3,
            rank=0,
            operators=operators,
        )

    ours = program(operators)
    predicted = ours.predict(batch, rows)
    same = np.abs(ours.gradients(batch, rows).logit_BY - predicted).max()
    assert (same > 1e-4) == (operators == "bfloat16")
    np.testing.assert_allclose(predicted, program(None).predict(batch, rows), rtol=1e-5, atol=1e-5)
