"""The GPU side without a GPU: programs become kernel calls, and the calls, computed by NumPy, are the model."""

from __future__ import annotations

import ast
import ctypes
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from paddlewheel.data_pipeline.batch import Batch, TableKeys
from paddlewheel.trainer.dense.gpu_program import GpuProgram, chosen_precision
from paddlewheel.trainer.dense.inputs import TableLayout
from paddlewheel.trainer.dense.program import DenseProgram, padded_count
from paddlewheel.trainer.distributed.process_group import SingleGroup
from paddlewheel.trainer.job.config import JobConfig
from paddlewheel.trainer.job.errors import ConfigError
from paddlewheel.trainer.job.train import DenseOptimizerConfig
from paddlewheel.trainer.kernels.gpu import cuda_library, self_check
from paddlewheel.trainer.kernels.gpu.arena import plan_arena
from paddlewheel.trainer.kernels.gpu.cuda_library import GpuError
from paddlewheel.trainer.kernels.gpu.deferred import Values
from paddlewheel.trainer.kernels.gpu.emitter import Emitter
from paddlewheel.trainer.kernels.gpu.kernel_calls import (
    FUNCTIONS,
    KERNELS,
    Elementwise,
    FieldsGrad,
    Reduce,
    ScatterAdd,
    Zero,
)
from paddlewheel.trainer.kernels.gpu.layout import Constants, DeviceBuffers
from paddlewheel.trainer.kernels.gpu.lowering import UnsupportedError, lower
from paddlewheel.trainer.kernels.gpu.operators import RULES
from paddlewheel.trainer.kernels.gpu.tidy import first_order_with_fields, sums_of_three
from paddlewheel.trainer.kernels.gpu.views import Buffer, View, row_major
from paddlewheel.trainer.models import parse_model
from tests.support.emulated_gpu import EmulatedDevice
from tests.unit.trainer.models.test_models import CASES, MULTI_TASK, D, U, W, batch_of, layouts, name_of

pytestmark = pytest.mark.zoo

OPTIMIZER = DenseOptimizerConfig(learning_rate=0.01, weight_decay=0.01, l2=0.001, clip_norm=0.5)


def program_of(case, precision="float32", **changes):
    options = {
        "num_dense": D,
        "num_labels": 2 if case["kind"] in MULTI_TASK else 1,
        "model": parse_model(case),
        "optimizer": OPTIMIZER,
        "seed": 1,
        "rank": 0,
        **changes,
    }
    if precision == "cpu":
        return DenseProgram(layouts(case["kind"]), **options)
    return GpuProgram(layouts(case["kind"]), device=EmulatedDevice(), precision=precision, **options)


def values_of(case, seed=3):
    rng = np.random.default_rng(seed)
    batch = batch_of(2 if case["kind"] in MULTI_TASK else 1)
    return batch, {t.name: rng.normal(0, 0.5, (U, W + 1)).astype(np.float32) for t in layouts(case["kind"])}


def error(found, expected):
    return np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-12)


LOW = {"deepfm-[5,4]", "dlrm-[5]-[4]", "dcn-[4]-3-stacked-2", "mmoe-3-[4]-[3]"}  # others have the same layers


@pytest.mark.parametrize(
    ("case", "precision", "tolerance"),
    [
        pytest.param(case, precision, tolerance, id=f"{name_of(case)}-{precision}")
        for case in CASES
        for precision, tolerance in (("float32", 1e-5), ("bfloat16", 3e-2), ("float16", 5e-3))
        if precision == "float32" or name_of(case) in LOW
    ],
)
def test_every_model_is_the_same_on_cpu_and_gpu(case, precision, tolerance):
    cpu, gpu = program_of(case, "cpu"), program_of(case, precision)
    batch, rows = values_of(case)
    assert error(gpu.predict(batch, rows), cpu.predict(batch, rows)) < tolerance
    expected, found = cpu.gradients(batch, rows), gpu.gradients(batch, rows)
    assert found.finite
    assert error(found.logit_BY, expected.logit_BY) < tolerance
    assert error(found.flat_N, expected.flat_N) < tolerance
    for name, grads_UW in expected.tables.items():
        assert found.tables[name].shape == grads_UW.shape
        assert error(found.tables[name], grads_UW) < tolerance


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] in {"deepfm", "dlrm", "dcn", "mmoe"}], ids=name_of)
def test_steps_of_the_optimizer_agree_and_a_state_goes_from_one_to_the_other(case):
    cpu, gpu = program_of(case, "cpu"), program_of(case)
    batch, rows = values_of(case)
    sync, buffer = SingleGroup(), gpu.buffer(7)
    for step in range(4):
        flat_N = cpu.gradients(batch, rows).flat_N
        cpu.apply(flat_N[:-2], 3.0, rate_factor=0.5)
        buffer.clear()
        buffer.take(gpu.gradients(batch, rows))
        np.testing.assert_allclose(buffer.tail[:2], flat_N[-2:], rtol=1e-5)
        buffer.sum(sync)
        buffer.apply(3.0, rate_factor=0.5)
        if step == 1:
            gpu.load_state(cpu.state())
    assert set(gpu.state()) == set(cpu.state())
    for name, value in cpu.state().items():
        np.testing.assert_allclose(gpu.state()[name], value, rtol=2e-4, atol=2e-6, err_msg=name)
    gpu.apply(flat_N[:-2], 2.0)
    cpu.apply(flat_N[:-2], 2.0)
    for name, value in cpu.parameters().items():
        np.testing.assert_allclose(gpu.parameters()[name], value, rtol=2e-4, atol=2e-6, err_msg=name)


def test_a_state_of_another_model_is_refused():
    with pytest.raises(ValueError, match="of another model"):
        program_of({"kind": "lr"}).load_state(program_of({"kind": "fwfm"}, "cpu").state())


def test_batches_of_other_sizes_in_any_order():
    case = {"kind": "din", "tower": [5], "attention": [4]}
    cpu, gpu = program_of(case, "cpu"), program_of(case)
    batch, rows = values_of(case)
    smaller = _rows_of(batch, slice(2, 5), length=3)
    for each in (batch, smaller, batch, _rows_of(batch, slice(0, 1), length=4), smaller):
        expected, found = cpu.gradients(each, rows), gpu.gradients(each, rows)
        assert error(found.flat_N, expected.flat_N) < 1e-5
        assert error(found.tables["item"], expected.tables["item"]) < 1e-5
        assert error(gpu.predict(each, rows), cpu.predict(each, rows)) < 1e-5


def _rows_of(batch, rows, length):
    tables = {
        name: replace(
            keys,
            index={
                n: (i[rows] if i.ndim == 1 else np.ascontiguousarray(i[rows, :length])) for n, i in keys.index.items()
            },
            single_BF=np.ascontiguousarray(keys.single_BF[rows]),
        )
        for name, keys in batch.tables.items()
    }
    return replace(
        batch,
        num_rows=len(batch.labels_BL[rows]),
        dense_BD=batch.dense_BD[rows],
        labels_BL=batch.labels_BL[rows],
        sample_weight_B=batch.sample_weight_B[rows],
        tables=tables,
    )


def test_a_bad_batch_is_told_and_changes_nothing():
    case = {"kind": "deepfm", "tower": [5]}
    for precision in ("float32", "float16"):
        gpu = program_of(case, precision)
        batch, rows = values_of(case)
        before = gpu.state()
        rows["user"][0] = np.inf
        with np.errstate(all="ignore"):
            assert not gpu.gradients(batch, rows).finite
        for name, value in gpu.state().items():
            np.testing.assert_array_equal(value, before[name])


def test_float16_lowers_the_scale_of_the_loss_until_gradients_fit():
    case = {"kind": "deepfm", "tower": [8]}
    gpu, cpu = program_of(case, "float16"), program_of(case, "cpu")
    batch, rows = values_of(case)
    gpu._scale_loss(2.0**20)
    with np.errstate(all="ignore"):
        found = gpu.gradients(batch, rows)
    assert found.finite
    assert gpu._loss_scale < 2.0**20
    assert error(found.flat_N, cpu.gradients(batch, rows).flat_N) < 5e-3


def test_dropout_differs_from_step_to_step_and_is_off_in_predictions():
    case = {"kind": "deepfm", "tower": [32], "dropout": 0.5}
    gpu, cpu = program_of(case), program_of(case, "cpu")
    batch, rows = values_of(case)
    logits = [gpu.gradients(batch, rows).logit_BY for _ in range(3)]
    assert not np.array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[1], logits[2])
    assert error(gpu.predict(batch, rows), cpu.predict(batch, rows)) < 1e-5


def test_graphs_are_made_once_for_each_size():
    case = {"kind": "deepfm", "tower": [5]}
    gpu = program_of(case)
    batch, rows = values_of(case)
    gpu.gradients(batch, rows)
    made = gpu.device.captured
    fewer = {name: values[:-1] for name, values in rows.items()}
    keys = {name: np.minimum(t.single_BF, U - 1) for name, t in batch.tables.items()}
    for name, t in batch.tables.items():
        t.single_BF[:] = keys[name]
    gpu.gradients(batch, fewer)
    assert gpu.device.captured == made


# ------------------------------------------------------------------------------------------------- one table alone


def one_table(precision, width=8, first_order=True):
    """DeepFM on single-valued features of one table: lookup and FM pairs are one kernel, their gradients another."""
    table = TableLayout("t", width + first_order, first_order, ("a", "b", "c", "d", "e"))
    options = {"num_dense": 2, "num_labels": 1, "model": parse_model({"kind": "deepfm", "tower": [8, 8]})}
    options |= {"optimizer": OPTIMIZER, "seed": 1, "rank": 0}
    if precision == "cpu":
        return DenseProgram([table], **options)
    return GpuProgram([table], device=EmulatedDevice(), precision=precision, **options)


def one_table_batch(width=8, first_order=True):
    rng = np.random.default_rng(8)
    index_BF = rng.integers(0, 12, (9, 5)).astype(np.int32)
    names = ("a", "b", "c", "d", "e")
    keys = TableKeys(
        np.arange(1, 12, dtype=np.uint64), {n: index_BF[:, i] for i, n in enumerate(names)}, index_BF, names
    )
    dense_BD, labels_BL = rng.random((9, 2), np.float32), (rng.random((9, 1)) < 0.5).astype(np.float32)
    batch = Batch(num_rows=9, dense_BD=dense_BD, labels_BL=labels_BL, tables={"t": keys}, spans=())
    return batch, {"t": rng.normal(0, 0.5, (11, width + first_order)).astype(np.float32)}


@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize(("width", "fused"), [(4, True), (8, True), (16, True), (6, False)])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_lookup_and_pairs_in_one_kernel(width, fused, first_order, precision, tolerance):
    cpu, gpu = one_table("cpu", width, first_order), one_table(precision, width, first_order)
    batch, rows = one_table_batch(width, first_order)
    expected, found = cpu.gradients(batch, rows), gpu.gradients(batch, rows)
    assert error(found.logit_BY, expected.logit_BY) < tolerance
    assert error(found.flat_N, expected.flat_N) < tolerance
    assert error(found.tables["t"], expected.tables["t"]) < tolerance
    assert ("fields_lookup" in gpu._runner.kernels, "fields_grad" in gpu._runner.kernels) == (fused, fused)
    if fused:
        assert not {"gather", "scatter_add", "fm_pairs", "fm_pairs_grad"} & gpu._runner.kernels


@pytest.mark.parametrize("copied", [False, True])
def test_embeddings_go_straight_into_the_layer_s_input_where_they_can(copied, monkeypatch):
    """Behind two dense columns they would begin at no multiple of four elements: then they are copied."""
    if copied:
        concat = RULES["concat"]

        def turned(c, op):
            concat(c, replace(op, ins={"X": op.ins["X"][::-1]}) if len(op.ins["X"]) == 2 else op)

        monkeypatch.setitem(RULES, "concat", turned)
    graph = one_table("float32").graphs["train"]
    shapes = {"dense": (9, 2), "label": (9, 1), "row_weight": (9, 1), "t/rows": (11, 9), "t/single": (9, 5)}
    calls = lower(graph, DeviceBuffers.of(graph, "bf16"), shapes).calls
    (lookup,) = [c for c in calls if c.kernel == "fields_lookup"]
    (layer,) = [c for c in calls if c.kernel == "matmul" and c.relu][:1]
    assert (lookup.e.buffer is layer.a.buffer) != copied
    assert lookup.e.type == ("f32" if copied else "bf16")


# ----------------------------------------------------------------------------------------- the list of what is needed


def zoo_calls(batch=37, keys=23):
    for case in [
        *CASES,
        {"kind": "deepfm", "tower": [5], "dropout": 0.2},
        {"kind": "deepfm", "tower": [5], "norm": "layer"},
    ]:
        program = program_of(case)
        yield from program._runner.optimizer_calls
        widths = {"dense": D, "label": 2 if case["kind"] in MULTI_TASK else 1, "row_weight": 1}
        for table in layouts(case["kind"]):
            widths |= {f"{table.name}/rows": W + 1, f"{table.name}/single": len(table.single)}
        for each in program.graphs.values():
            for low in ("f32", "bf16"):
                yield from self_check.calls_of(each, self_check.small_shapes(each, widths, batch, keys), low, tf32=True)
    widths = {"dense": 2, "label": 1, "row_weight": 1, "t/rows": 9, "t/single": 5}
    for each in one_table("float32").graphs.values():
        for low in ("f32", "bf16", "f16"):
            yield from self_check.calls_of(each, self_check.small_shapes(each, widths, batch, keys), low, tf32=True)


def test_the_kernels_and_the_lowered_operators_are_those_that_the_models_need(monkeypatch):
    """None is missing (lowering would refuse the program), none is there for nothing."""
    operators, build = {"scale", "shape"}, program_of

    def watched(case):
        program = build(case)
        operators.update(op.type for op in program.programs.train.global_block().ops)
        return program

    monkeypatch.setitem(globals(), "program_of", watched)
    calls = list(zoo_calls())
    helpers = {"low_copies"}  # parameters set from outside
    assert {call.kernel for call in calls} | helpers == set(KERNELS)
    assert {call.function for call in calls if hasattr(call, "function")} | {"max_grad_second"} == set(FUNCTIONS)

    assert operators <= set(RULES)
    assert {name for name in RULES if not name.startswith("pw_")} == operators | {"log_grad"}


def test_an_operator_without_a_kernel_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.delitem(RULES, "gather")
    with pytest.raises(
        UnsupportedError,
        match=r"'gather', which has no GPU kernel here: train it with `--set train\.device=cpu`",
    ):
        program_of({"kind": "lr"})


def test_a_sum_is_checked_with_terms_that_do_not_cancel():
    """A float32 sum near zero has a relative error that says nothing about the kernel."""
    rng = np.random.default_rng(0)
    view, out = (View(Buffer(4 * n), 0, (n,), (1,)) for n in (37, 1))
    for op in ("copy", "mul"):
        ins = (view,) if op == "copy" else (view, view)
        call = Reduce(out, None, ins, op, (0,))
        draws = [[self_check._random(call, i, v, rng) for i, v in enumerate(ins)] for _ in range(3000)]
        terms = np.prod(draws, axis=1)
        assert (abs(terms.sum(1)) > 0.02 * abs(terms).sum(1)).all()
        assert terms.min() < -0.1


def test_a_kernel_that_computes_wrong_numbers_ends_the_start(monkeypatch):
    right = EmulatedDevice._run

    def wrong(self, bound):
        right(self, bound)
        call, starts = bound
        if call.kernel == "fm_pairs":
            memory = np.ctypeslib.as_array((ctypes.c_float * 1).from_address(starts[call.out.buffer]))
            memory[0] *= 1.5

    monkeypatch.setattr(EmulatedDevice, "_run", wrong)
    with pytest.raises(GpuError, match=r"wrong numbers in 1 of the kernels[\s\S]*fm_pairs[\s\S]*paddlewheel gpu build"):
        program_of({"kind": "deepfm", "tower": [5]})
    program_of({"kind": "lr"})  # which has no such kernel


# ------------------------------------------------------------------------------------------------- the passes alone


def test_the_compiler_and_its_runtime_need_nothing_else_of_ours():
    """So that it can be taken out, or away, as a whole."""
    room = "paddlewheel.trainer.kernels.gpu"
    imported = set()
    for path in Path(cuda_library.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {name.name for name in node.names}
    ours = {name for name in imported if name.split(".")[0] == "paddlewheel"}
    assert f"{room}.views" in ours
    assert {name for name in ours if name != room and not name.startswith(f"{room}.")} == set()
    assert not {name for name in imported if name.split(".")[0] == "paddle"}


def array(*shape, kind="temp"):
    return View(Buffer(4 * int(np.prod(shape)), kind), 0, shape, row_major(shape))


def test_a_program_lowered_twice_makes_the_same_calls():
    """Nothing of one lowering is left in what another reads: only the pool of constants is shared, and it is full."""
    graph = program_of({"kind": "dlrm", "tower": [5], "bottom": [4]}).graphs["train"]
    shapes = self_check.small_shapes(
        graph,
        dict.fromkeys(graph.feeds, D)
        | {"label": 1, "row_weight": 1, "user/single": 2, "item/single": 1, "user/rows": W + 1, "item/rows": W + 1},
    )
    buffers = DeviceBuffers.of(graph, "bf16")
    first, second = (lower(graph, buffers, shapes).calls for _ in range(2))
    offsets = [plan_arena(calls) for calls in (first, second)]
    assert offsets[0][1] == offsets[1][1]
    assert [_form(call, offsets[0][0]) for call in first] == [_form(call, offsets[1][0]) for call in second]


def _form(call, offsets):
    views = [
        None if v is None else (v.buffer.kind, offsets.get(v.buffer), v.offset, v.shape, v.strides, v.type)
        for v in (*call.outs, *call.ins)
    ]
    return call.kernel, call.variant, views


@pytest.mark.parametrize("others", ["nobody", "another call", "the host"])
def test_a_sum_of_three_is_one_call_unless_somebody_else_reads_the_inner_sum(others):
    a, b, c, out = (array(4) for _ in range(4))
    inner = array(4, kind="out" if others == "the host" else "temp")
    calls = [Elementwise(inner, (a, b), "add"), Elementwise(out, (inner, c), "add")]
    if others == "another call":
        calls.append(Elementwise(array(4), (inner,), "copy"))
    found = sums_of_three(calls)
    assert found == ([Elementwise(out, (a, b, c), "add3")] if others == "nobody" else calls)


def test_calls_that_only_look_like_a_sum_of_three_stay():
    a, b, c, inner, out = (array(4) for _ in range(5))
    product = [Elementwise(inner, (a, b), "mul"), Elementwise(out, (inner, c), "add")]
    second = [Elementwise(inner, (a, b), "add"), Elementwise(out, (c, inner), "add")]
    between = [Elementwise(inner, (a, b), "add"), Zero(c), Elementwise(out, (inner, c), "add")]
    for calls in (product, second, between):
        assert sums_of_three(calls) == calls


@pytest.mark.parametrize("change", ["none", "index", "table", "width", "values"])
def test_first_order_gradients_go_with_those_of_the_embeddings_by_the_same_index(change):
    rows, fields = 6, 2
    grads, index = array(9, 5), View(Buffer(4 * rows * fields), 0, (rows * fields,), (1,), "i32")
    dfirst = array(rows)
    values = View(dfirst.buffer, 0, (rows, fields), (1, 0))
    scatter = ScatterAdd(grads.slice(1, 0, 1), values, index, zero_is_none=True)
    change_of = {
        "none": {},
        "index": {"index": replace(index, buffer=Buffer(index.buffer.nbytes))},
        "table": {"table": array(9, 1)},
        "width": {"table": grads.slice(1, 0, 2)},
        "values": {"values": array(rows, fields)},
    }
    calls = [replace(scatter, **change_of[change]), Zero(array(3))]
    calls.append(
        FieldsGrad(grads.slice(1, 1, 5), None, None, None, None, array(rows, fields * 4), index, None, rows, 256)
    )
    found = first_order_with_fields(calls)
    if change == "none":
        assert [call.kernel for call in found] == ["zero", "fields_grad"]
        assert (found[-1].first, found[-1].dfirst) == (scatter.table, dfirst)
    else:
        assert found == calls


class _Work:
    def __init__(self):
        self.targets = []

    def write(self, emit, target):
        self.targets.append(target)


def test_a_deferred_array_is_computed_once_and_when_it_is_read():
    work, view = _Work(), array(2, 3)
    values = Values(Emitter(Constants(), tf32=False), {})
    values.set("x", view, work)
    values.set("reshaped", view.with_shape((6,)))
    assert values.peek("x") == view
    assert values.deferred(view) is work
    assert work.targets == []
    values.read("reshaped")
    values.read("x")
    assert work.targets == [view.with_shape((6,))]


def test_who_takes_deferred_work_is_the_only_one_to_do_it():
    work, view = _Work(), array(2, 3)
    values = Values(Emitter(Constants(), tf32=False), {})
    values.set("x", view, work)
    assert values.take(view) is work
    values.read("x")
    assert values.take(view) is None
    assert work.targets == []


def test_parameters_packed_and_unpacked_are_the_same_and_their_copies_lie_apart():
    graph = program_of({"kind": "deepfm", "tower": [5, 4]}).graphs["train"]
    buffers = DeviceBuffers.of(graph, "bf16")
    flat_N = np.arange(1, 1 + sum(p.size for p in graph.parameters), dtype=np.float32)
    packed = buffers.pack(flat_N)
    assert packed.size == buffers.size > flat_N.size
    np.testing.assert_array_equal(buffers.unpack(np.append(packed, [7.0, 8.0])), [*flat_N, 7.0, 8.0])
    places = buffers.low_at()[packed != 0]
    assert len(set(places)) == len(places)
    assert 0 <= places.min() <= places.max() < buffers.copies.nbytes // 2


# ----------------------------------------------------------------------------------------------- memory and views


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 900)), min_size=1, max_size=30))
def test_buffers_that_live_at_once_have_places_of_their_own(spans):
    buffers = [(first, first + length, Buffer(size)) for first, length, size in spans]
    result = View(Buffer(4, "out"), 0, (), ())
    calls = [
        Elementwise(result, tuple(View(b, 0, (1,), (1,)) for first, last, b in buffers if at in {first, last}), "add")
        for at in range(12)
    ]
    offsets, size = plan_arena(calls)
    used = [(first, last, offsets[b], b.nbytes) for first, last, b in buffers]
    assert all(start % 256 == 0 and start + nbytes <= size for _, _, start, nbytes in used)
    for i, (first, last, start, nbytes) in enumerate(used):
        for other_first, other_last, other_start, other_nbytes in used[:i]:
            if first <= other_last and other_first <= last and nbytes and other_nbytes:
                assert start + nbytes <= other_start or other_start + other_nbytes <= start


@given(st.data())
def test_a_reshaped_view_holds_the_same_elements_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    memory = np.arange(4096)
    strides = tuple(data.draw(st.sampled_from([0, s, s + 1, 2 * s])) for s in row_major(shape))
    view = View(Buffer(0), 3, shape, strides)
    target = data.draw(st.permutations(shape)) if data.draw(st.booleans()) else [*shape, 1]
    found = view.with_shape(tuple(target))
    array = as_strided(memory[3:], shape, [s * 8 for s in strides])
    if found is not None:
        again = as_strided(memory[3:], found.shape, [s * 8 for s in found.strides])
        np.testing.assert_array_equal(again.ravel(), array.ravel())
    else:
        assert not view.contiguous


@given(st.integers(0, 5_000_000))
def test_few_sizes_for_the_keys_of_a_batch(count):
    size = padded_count(count)
    assert size >= count
    assert size <= max(64, count * 1.13)
    assert padded_count(size) == size


# -------------------------------------------------------------------------------------------- what a user is told


def _job(**train):
    return {"name": "j", "data": {"train": "x", "labels": ["y"], "sparse": [{"name": "a"}]}, "train": train}


@pytest.mark.parametrize("precision", ["tfloat32", "float16"])
def test_precisions_of_gpus_are_refused_on_cpus(precision):
    with pytest.raises(ConfigError, match=rf"train\.precision: {precision} is for GPUs.*float32, bfloat16 or auto"):
        JobConfig.parse(_job(precision=precision))
    assert JobConfig.parse(_job(precision=precision, device="gpu")).train.precision == precision


def test_native_operators_are_refused_on_gpus():
    with pytest.raises(ConfigError, match=r"train\.cpu_backend: native are operators for CPUs"):
        JobConfig.parse(_job(cpu_backend="native", device="gpu"))


def test_precision_by_compute_capability():
    assert chosen_precision("auto", 90) == chosen_precision("auto", 80) == "bfloat16"
    assert chosen_precision("auto", 75) == "float16"
    assert chosen_precision("float32", 70) == "float32"
    with pytest.raises(GpuError, match=r"needs a GPU of compute capability 8\.0 or later, this one has 7\.0"):
        chosen_precision("bfloat16", 70)


def test_kernels_that_were_not_built(monkeypatch, tmp_path):
    monkeypatch.setenv("PADDLEWHEEL_GPU_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(cuda_library, "_library", None)
    with pytest.raises(GpuError, match=re.escape("run `paddlewheel gpu build` on this machine")):
        cuda_library.load()


def test_a_library_that_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PADDLEWHEEL_GPU_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(cuda_library, "_library", None)
    cuda_library.kernels_path().write_text("no library")
    with pytest.raises(GpuError, match=r"cannot be loaded: .*`paddlewheel gpu build` again"):
        cuda_library.load()


def test_a_build_without_a_compiler_and_for_a_gpu_that_is_too_old(monkeypatch, tmp_path):
    monkeypatch.setenv("PADDLEWHEEL_GPU_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(cuda_library, "nvcc", lambda: None)
    with pytest.raises(GpuError, match="nvcc was not found: install the CUDA toolkit"):
        cuda_library.build([90])
    monkeypatch.setattr(cuda_library, "nvcc", lambda: tmp_path / "nvcc")
    monkeypatch.setattr(cuda_library, "gpus", list)
    with pytest.raises(GpuError, match=r"nvidia-smi shows no GPU.*--arch 90"):
        cuda_library.build()
    with pytest.raises(GpuError, match=r"compute capability 6\.1: the kernels need 7\.0"):
        cuda_library.build([61])
