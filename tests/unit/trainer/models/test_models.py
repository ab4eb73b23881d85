"""Every dense model against float64 NumPy: logits, loss, and the gradient of every table and parameter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from paddlewheel.data_pipeline.batch import Batch, TableKeys
from paddlewheel.trainer.dense.inputs import ListFeature, TableLayout
from paddlewheel.trainer.dense.program import DenseProgram
from paddlewheel.trainer.job.train import DenseOptimizerConfig
from paddlewheel.trainer.kernels.cpu import Precision
from paddlewheel.trainer.models import KINDS, ModelError, parse_model
from paddlewheel.trainer.models.base import FeatureSpec, Model, ModelInputs, Tower, Variable
from paddlewheel.trainer.serving.exported_program import ExportedProgram
from paddlewheel.trainer.worker.first_biases import Sample, fit
from tests.support import reference_models
from tests.support.reference_models import Row

pytestmark = pytest.mark.zoo

OPERATORS = [
    pytest.param(None, id="paddle"),
    pytest.param("float32", id="native", marks=pytest.mark.needs("native operators")),
]

B, D, W, U = 7, 3, 3, 9

TAGS = np.array([[1, 2, 2], [0, 0, 0], [3, 0, 0], [9, 9, 1], [0, 0, 0], [4, 5, 6], [2, 0, 0]], np.int32)
PAST = np.array(
    [[1, 2, 3, 9], [0, 0, 0, 0], [5, 5, 0, 0], [7, 0, 0, 0], [4, 2, 6, 0], [0, 0, 0, 0], [8, 1, 0, 0]], np.int32
)
VIEWS = np.array([[2, 1], [6, 7], [0, 0], [7, 0], [9, 0], [5, 5], [0, 0]], np.int32)
USER = np.array([[1, 2], [3, 3], [0, 4], [5, 0], [6, 7], [8, 9], [1, 9]], np.int32)
ITEM = np.array([[1], [2], [1], [0], [3], [2], [4]], np.int32)
LABELS = np.array([[1, 1], [0, 0], [1, 0], [1, 0], [0, 0], [1, 1], [0, 0]], np.float32)

CASES = [
    {"kind": "lr"},
    {"kind": "fm"},
    {"kind": "fwfm"},
    {"kind": "wide_deep", "tower": [5, 4]},
    {"kind": "deepfm", "tower": [5, 4]},
    {"kind": "deepfm", "tower": [5, 4], "norm": "layer"},
    {"kind": "deepfm", "tower": []},
    {"kind": "dcn", "tower": [4], "cross_layers": 2, "structure": "parallel"},
    {"kind": "dcn", "tower": [4], "cross_layers": 3, "structure": "stacked", "rank": 2},
    {"kind": "dlrm", "tower": [5], "bottom": [4]},
    {"kind": "xdeepfm", "tower": [4], "cin": [3, 2]},
    {"kind": "autoint", "attention_layers": 2, "heads": 2, "head_width": 2},
    {"kind": "autoint", "attention_layers": 1, "heads": 1, "head_width": 3, "tower": [4]},
    {"kind": "finalmlp", "tower": [5, 4], "second_tower": [6], "heads": 2},
    {"kind": "finalmlp", "tower": [4], "second_tower": [3], "gate": [3], "gate_context": ["u1", "tags"]},
    {"kind": "finalmlp", "tower": [4], "second_tower": [3], "gate": [], "second_gate_context": ["i1"]},
    {"kind": "din", "tower": [5], "attention": [4]},
    {"kind": "din", "tower": [5], "attention": [4], "softmax": True, "targets": {"views": "u2"}},
    {"kind": "dien", "tower": [5], "attention": [4]},
    {"kind": "dien", "tower": [5], "attention": [4], "auxiliary_weight": 0.7},
    {"kind": "two_tower", "item": ["i1", "tags"], "tower": [5], "width": 4, "temperature": 0.5},
    {"kind": "two_tower", "item": ["i1"], "tower": [5], "width": 4, "loss": "pointwise"},
    {"kind": "shared_bottom", "bottom": [5], "tower": [4], "label_weights": [1.0, 0.5]},
    {"kind": "mmoe", "experts": 3, "expert": [4], "tower": [3]},
    {"kind": "ple", "levels": 2, "shared_experts": 1, "label_experts": 2, "expert": [4], "tower": [3]},
    {"kind": "ple", "levels": 1, "shared_experts": 2, "label_experts": 1, "expert": [3], "tower": []},
    {"kind": "esmm", "tower": [4]},
]
MULTI_TASK = {"shared_bottom", "mmoe", "ple", "esmm"}
SEQUENCES = {"din", "dien"}


def name_of(case: dict) -> str:
    return "-".join(str(v) for v in case.values()).replace(" ", "")


def layouts(kind: str) -> list[TableLayout]:
    past = [ListFeature("past", "none"), ListFeature("views", "none")] if kind in SEQUENCES else []
    return [
        TableLayout("user", W + 1, True, ("u1", "u2")),
        TableLayout("item", W + 1, True, ("i1",), (ListFeature("tags", "mean"), *past)),
    ]


def batch_of(num_labels: int) -> Batch:
    keys = np.arange(1, U + 1, dtype=np.uint64)
    rng = np.random.default_rng(2)
    return Batch(
        num_rows=B,
        dense_BD=rng.standard_normal((B, D)).astype(np.float32),
        labels_BL=np.ascontiguousarray(LABELS[:, :num_labels]),
        tables={
            "user": TableKeys(keys, {"u1": USER[:, 0], "u2": USER[:, 1]}, USER, ("u1", "u2")),
            "item": TableKeys(keys, {"i1": ITEM[:, 0], "tags": TAGS, "past": PAST, "views": VIEWS}, ITEM, ("i1",)),
        },
        spans=(),
        sample_weight_B=rng.random(B).astype(np.float32),
    )


def rows_of(kind: str, batch: Batch, values: dict[str, np.ndarray]) -> list[Row]:
    result = []
    for b in range(B):
        user = np.vstack([np.zeros(W + 1), values["user"]])
        item = np.vstack([np.zeros(W + 1), values["item"]])
        tags = [item[t] for t in TAGS[b] if t]
        pooled = {
            "u1": user[USER[b, 0]],
            "u2": user[USER[b, 1]],
            "i1": item[ITEM[b, 0]],
            "tags": np.mean(tags, axis=0) if tags else np.zeros(W + 1),
        }
        past = {}
        if kind in SEQUENCES:
            past = {n: np.array([item[t, 1:] for t in ids[b] if t]) for n, ids in (("past", PAST), ("views", VIEWS))}
        result.append(
            Row(
                fields={n: v[1:] for n, v in pooled.items()},
                first_order=sum(v[0] for v in pooled.values()),
                dense=batch.dense_BD[b].astype(np.float64),
                past=past,
                ids={"i1": int(ITEM[b, 0])},
            )
        )
    return result


def expected(
    config, batch: Batch, values: dict[str, np.ndarray], dense: dict[str, np.ndarray]
) -> tuple[float, np.ndarray]:
    """Summed weighted loss, and logits [B, Y]."""
    rows = rows_of(config.kind, batch, values)
    forward = getattr(reference_models, config.kind)
    logits = np.array([np.atleast_1d(forward(row, dense, config)) for row in rows])
    loss = reference_models.LOSSES.get(config.kind, reference_models.logistic)
    row_losses = loss(rows, logits, batch.labels_BL.astype(np.float64), dense, config)
    return float((row_losses * batch.sample_weight_B).sum()), logits


def program_of(
    config, num_labels: int = 1, tables: list[TableLayout] | None = None, operators: Precision | None = None
) -> DenseProgram:
    return DenseProgram(
        layouts(config.kind) if tables is None else tables,
        num_dense=D,
        num_labels=num_labels,
        model=config,
        optimizer=DenseOptimizerConfig(),
        seed=11,
        rank=0,
        operators=operators,
    )


def test_every_kind_is_tested() -> None:
    assert {case["kind"] for case in CASES} == set(KINDS)


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_forward_loss_and_gradients(case: dict, operators: Precision | None) -> None:
    rng = np.random.default_rng(5)
    config = parse_model(case)
    num_labels = 2 if config.kind in MULTI_TASK else 1
    batch, program = batch_of(num_labels), program_of(config, num_labels, operators=operators)
    state = program.state()
    for name in program.sizes:  # where every parameter is away from its start, no term can hide
        state[name] = (0.6 * rng.standard_normal(state[name].shape)).astype(np.float32)
    program.load_state(state)
    values = {name: (0.8 * rng.standard_normal((U, W + 1))).astype(np.float32) for name in ("user", "item")}
    wide = {n: v.astype(np.float64) for n, v in values.items()}
    dense = {n: v.astype(np.float64) for n, v in program.parameters().items()}
    result = program.gradients(batch, values)
    loss, logits = expected(config, batch, wide, dense)
    np.testing.assert_allclose(result.logit_BY, logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(program.predict(batch, values), logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.flat_N[-2], loss, rtol=1e-4)

    def agrees(name: str, gradient: np.ndarray, loss_at) -> None:
        """The slope along random directions; a wrong entry changes every one of them."""
        for _ in range(2):
            direction = rng.standard_normal(gradient.shape)
            slope = (loss_at(1e-6 * direction) - loss_at(-1e-6 * direction)) / 2e-6
            scale = np.abs(gradient).max() * np.sqrt(gradient.size) + 1e-2
            assert abs(float((gradient * direction).sum()) - slope) < 2e-4 * scale, name

    for name in values:
        agrees(
            name,
            result.tables[name],
            lambda step, n=name: expected(config, batch, {**wide, n: wide[n] + step}, dense)[0],
        )
    offset = 0
    for name, size in program.sizes.items():
        agrees(
            name,
            result.flat_N[offset : offset + size].reshape(dense[name].shape),
            lambda step, n=name: expected(config, batch, wide, {**dense, n: dense[n] + step})[0],
        )
        offset += size


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_an_export_computes_is_the_same(case: dict, tmp_path: Path) -> None:
    num_labels = 2 if case["kind"] in MULTI_TASK else 1
    program, batch = program_of(parse_model(case), num_labels), batch_of(num_labels)
    rng = np.random.default_rng(4)
    rows = {name: rng.standard_normal((U, W + 1)).astype(np.float32) for name in ("user", "item")}
    program.save_inference(tmp_path / "model")
    exported = ExportedProgram(tmp_path / "model", layouts(case["kind"]))
    found = exported.predict(batch, rows)
    np.testing.assert_array_equal(found, program.predict(batch, rows))
    assert found.shape == (B, num_labels)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_any_number_of_rows_and_no_ids_at_all(kind: str) -> None:
    case = {"kind": kind, **({"item": ["i1"]} if kind == "two_tower" else {})}
    layers = {"tower", "bottom", "expert", "attention", "second_tower"} & set(KINDS[kind].model_fields)
    case |= {key: [4] for key in layers}
    num_labels = 2 if kind in MULTI_TASK else 1
    program = program_of(parse_model(case), num_labels)
    for rows in (1, 3):
        empty = {
            "u1": np.zeros(rows, np.int32),
            "i1": np.zeros(rows, np.int32),
            **{name: np.zeros((rows, 1), np.int32) for name in ("tags", "past", "views")},
        }
        no_keys = np.zeros(0, np.uint64)
        batch = Batch(
            num_rows=rows,
            dense_BD=np.ones((rows, D), np.float32),
            labels_BL=np.ones((rows, num_labels), np.float32),
            tables={
                "user": TableKeys(no_keys, empty, np.zeros((rows, 2), np.int32), ("u1", "u2")),
                "item": TableKeys(no_keys, empty, np.zeros((rows, 1), np.int32), ("i1",)),
            },
            spans=(),
        )
        result = program.gradients(batch, {n: np.zeros((0, W + 1), np.float32) for n in ("user", "item")})
        assert np.isfinite(result.flat_N).all()
        assert result.logit_BY.shape == (rows, num_labels)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"kind": "deepfm", "tower": [4]}, "reads no sequences, but past, views"),
        ({"kind": "finalmlp", "tower": [4], "second_tower": [3], "heads": 2}, "heads = 2 does not divide"),
        ({"kind": "finalmlp", "gate": [], "gate_context": ["u9"]}, "model.gate_context: 'u9' is no pooled feature"),
        ({"kind": "din", "targets": {"pasts": "i1"}}, "model.targets: 'pasts' is no sequence; there are past, views"),
        ({"kind": "din", "targets": {"past": "past"}}, "model.targets: 'past' is no pooled feature"),
        ({"kind": "two_tower", "item": ["tags"]}, "'tags' comes first"),
        ({"kind": "two_tower", "item": ["u1", "u2", "i1", "tags"]}, None),
        ({"kind": "esmm"}, "esmm needs data.labels"),
        ({"kind": "mmoe", "label_weights": [1, 2]}, "label_weights has 2 numbers for 1 labels"),
        ({"kind": "nowhere.at_all:M"}, "No module named 'nowhere'"),
        ({"kind": "paddlewheel.trainer.models.base:Nothing"}, "has no attribute 'Nothing'"),
        ({"kind": "paddlewheel.trainer.models.base:FeatureSpec"}, "not a subclass of"),
        ({"kind": f"{__name__}:Plain", "options": {"a": 1}}, "takes none, got a"),
        ({"kind": f"{__name__}:Idle"}, "the loss does not depend on spare"),
    ],
)
def test_what_does_not_fit_is_refused(case: dict, message: str | None) -> None:
    tables = (
        layouts("din") if message is not None and ("sequence" in message or case["kind"] == "din") else layouts("lr")
    )
    if message is None:  # the dense columns are the user's
        program_of(parse_model(case), tables=tables)
        return
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        program_of(parse_model(case), tables=tables)


def test_a_sequence_needs_one_candidate_of_its_table() -> None:
    tables = [
        TableLayout("user", W + 1, True, ("u1", "u2"), (ListFeature("friends", "none"),)),
        TableLayout("item", W + 1, True, ("i1",)),
    ]
    with pytest.raises(ValueError, match=r"targets: \{friends: FEATURE\}`.*2 single-valued features: u1, u2"):
        program_of(parse_model({"kind": "din"}), tables=tables)


def test_mixed_widths_are_refused_by_models_that_multiply_and_taken_by_others() -> None:
    tables = [TableLayout("user", 5, True, ("u1", "u2")), TableLayout("item", 6, False, ("i1",))]
    with pytest.raises(ValueError, match=r"got widths \[4, 6\]"):
        program_of(parse_model({"kind": "deepfm"}), tables=tables)
    program_of(parse_model({"kind": "dcn", "tower": [4]}), tables=tables)


class Mixed(Model):
    """A user's model: two towers, the second's logit scaled."""

    class Options(BaseModel):
        class Deep(BaseModel):
            rate: float = 0.0

        class Open(BaseModel):
            model_config = ConfigDict(extra="allow")

        units: tuple[int, ...]
        scale: float = 1.0
        deep: Deep | None = None
        many: list[Deep] = []
        named: dict[str, Deep] = {}
        open: Open = Open()

    def __init__(self, spec: FeatureSpec, options: Options) -> None:
        super().__init__()
        self.scale = options.scale
        self.one = Tower(spec.flat_width, options.units, spec.num_labels)
        self.two = Tower(spec.num_dense, options.units, spec.num_labels)

    def forward(self, inputs: ModelInputs) -> Variable:
        return self.one(inputs.flat_BX) + self.scale * self.two(inputs.dense_BD)


class Plain(Model):
    """A user's model without options."""


class Idle(Model):
    """A user's model with a parameter that does nothing."""

    def __init__(self, spec: FeatureSpec, options: None) -> None:
        super().__init__()
        self.spare = self.create_parameter([3])
        self.tower = Tower(spec.flat_width, (4,), 1)

    def forward(self, inputs: ModelInputs) -> Variable:
        return self.tower(inputs.flat_BX)


def test_a_users_own_model() -> None:
    config = parse_model({"kind": f"{__name__}:Mixed", "options": {"units": [4], "scale": 2.0}})
    program = program_of(config, tables=layouts("lr"))
    batch = batch_of(1)
    rng = np.random.default_rng(3)
    values = {name: rng.standard_normal((U, W + 1)).astype(np.float32) for name in ("user", "item")}
    dense = {n: v.astype(np.float64) for n, v in program.parameters().items()}
    rows = rows_of("mine", batch, {n: v.astype(np.float64) for n, v in values.items()})
    logits = [
        reference_models.tower(r.flat, dense, "one") + 2.0 * reference_models.tower(r.dense, dense, "two") for r in rows
    ]
    np.testing.assert_allclose(program.predict(batch, values), logits, rtol=1e-4, atol=1e-5)


def test_a_users_own_model_refuses_wrong_options() -> None:
    with pytest.raises(ModelError, match=r"model\.options\.units: Field required"):
        program_of(parse_model({"kind": f"{__name__}:Mixed"}), tables=layouts("lr"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"units": [4], "scal": 2.0}, r"model\.options\.scal: unknown key; did you mean scale\? Allowed in"),
        ({"unit": [4]}, r"model\.options\.unit: unknown key; did you mean units\?.*; model\.options\.units: Field req"),
        ({"units": [4], "deep": {"rat": 1}}, r"model\.options\.deep\.rat: unknown key; did you mean rate\?"),
        ({"units": [4], "many": [{"rate": 1}, {"x": 1}]}, r"model\.options\.many\.1\.x: unknown key"),
        ({"units": [4], "named": {"a": {"rate": 1}, "b": {"rte": 1}}}, r"model\.options\.named\.b\.rte: unknown key"),
    ],
)
def test_typos_in_the_options_of_a_users_own_model_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        program_of(parse_model({"kind": f"{__name__}:Mixed", "options": options}), tables=layouts("lr"))


def test_options_may_say_that_they_take_other_keys() -> None:
    given = {"units": [4], "open": {"anything": 1}, "named": {"any": {"rate": 1}}}
    program_of(parse_model({"kind": f"{__name__}:Mixed", "options": given}), tables=layouts("lr"))


def test_the_how_to_in_the_readme_works(tmp_path: Path) -> None:
    text = (Path(__file__).parents[4] / "trainer" / "models" / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [job] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_models.py").write_text(code)
    model = parse_model({**yaml.safe_load(job)["model"], "folder": str(tmp_path)})
    program = program_of(model, tables=layouts("lr"))
    values = {name: np.ones((U, W + 1), np.float32) for name in ("user", "item")}
    assert np.isfinite(program.gradients(batch_of(1), values).flat_N).all()


def test_the_readme_lists_every_kind_and_its_keys() -> None:
    text = (Path(__file__).parents[4] / "trainer" / "models" / "README.md").read_text(encoding="utf-8")
    table = {row.split("|")[1].strip().strip("`"): row for row in text.splitlines() if row.startswith("| `")}
    assert set(table) - {"model.kind"} == set(KINDS)
    for kind, config in KINDS.items():
        fields = set(config.model_fields) - {"kind", "tower", "dropout", "norm"}
        listed = set(re.findall(r"`(\w+)`", table[kind].split("|")[4]))
        assert listed == fields, kind
        assert ("tower" in config.model_fields) == ("tower" in table[kind].split("|")[4].replace("second_tower", ""))


def test_experts_start_apart() -> None:
    """Experts with equal weights would get equal gradients and stay one expert forever."""
    values = program_of(parse_model({"kind": "mmoe", "experts": 2, "expert": [4], "tower": []}), 2).parameters()
    assert not np.allclose(values["experts.0.hidden.0.weight"], values["experts.1.hidden.0.weight"])


class Steady:
    """Servers that give the values of a test, whatever is asked for."""

    def __init__(self, values):
        self.values = values

    def pull(self, table, keys_U):
        return self.values[table]


def _first_program(case, **more):
    batch = batch_of(2 if case["kind"] in MULTI_TASK else 1)
    program = DenseProgram(
        layouts(case["kind"]),
        num_dense=D,
        num_labels=batch.labels_BL.shape[1],
        model=parse_model(case),
        optimizer=DenseOptimizerConfig(),
        seed=4,
        rank=0,
        **more,
    )
    return batch, program


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_first_predictions_have_the_labels_rates_as_their_means(case: dict) -> None:
    rng = np.random.default_rng(8)
    values = {name: rng.standard_normal((U, W + 1)).astype(np.float32) for name in ("user", "item")}
    batch, program = _first_program(case)
    if case["kind"] == "two_tower":
        assert program.output_biases == [], "a cosine has no bias"
        return
    before = program.parameters()
    rates = np.array([0.004, 0.0007])[: batch.labels_BL.shape[1]]
    biases = fit(program, Steady(values), Sample([batch, batch], rates, 14))
    assert program.read_output_biases() == pytest.approx(biases)
    probability = 1 / (1 + np.exp(-program.predict(batch, values).astype(np.float64)))
    mean = np.average(probability, axis=0, weights=batch.sample_weight_B)
    assert mean == pytest.approx(rates, rel=2e-3)
    touched = {name for name, _ in program.output_biases}
    for name, value in program.parameters().items():
        if name not in touched:
            np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("rate", [1e-6, 0.5, 1 - 1e-6])
def test_rates_of_any_size_are_met_with_a_shift_of_predictions_too(rate: float) -> None:
    """Negative sampling shifts predictions; the mean is that of what is predicted, not of what is trained on."""
    rng = np.random.default_rng(8)
    values = {name: rng.standard_normal((U, W + 1)).astype(np.float32) for name in ("user", "item")}
    batch, program = _first_program({"kind": "deepfm", "tower": [5]}, logit_shift=float(np.log(0.05)))
    fit(program, Steady(values), Sample([batch], np.array([rate]), 7))
    logit = program.predict(batch, values).astype(np.float64)[:, 0]
    mean = np.average(1 / (1 + np.exp(-logit)), weights=batch.sample_weight_B)
    assert mean == pytest.approx(rate, rel=2e-3)
    assert 1 - mean == pytest.approx(1 - rate, rel=2e-3)


@pytest.mark.parametrize("case", [case for case in CASES if not case.get("auxiliary_weight")], ids=name_of)
def test_rows_that_fill_up_a_batch_change_nothing(case: dict) -> None:
    """But for auxiliary losses: their negatives are those of the row before, which the first row has not always."""
    rng = np.random.default_rng(8)
    values = {name: rng.standard_normal((U, W + 1)).astype(np.float32) for name in ("user", "item")}
    batch, plain = _first_program(case)
    _, padded = _first_program(case, pad_rows=True)
    expected, found = plain.gradients(batch, values), padded.gradients(batch, values)
    assert found.logit_BY.shape == expected.logit_BY.shape
    np.testing.assert_allclose(found.logit_BY, expected.logit_BY, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.flat_N, expected.flat_N, rtol=1e-4, atol=1e-5)
    for name, gradient in expected.tables.items():
        np.testing.assert_allclose(found.tables[name], gradient, rtol=1e-4, atol=1e-5)
