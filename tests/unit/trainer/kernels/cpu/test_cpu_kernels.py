"""Our operators against NumPy in float64, forward and backward; where they come from; what happens without them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlewheel.trainer.kernels import cpu
from paddlewheel.trainer.kernels.cpu import NativeError, Precision
from tests.support.needs import require

Array = np.ndarray


PRECISIONS = ["float32", pytest.param("bfloat16", marks=pytest.mark.needs("bfloat16"))]


def run(
    build: Callable[..., list], given_arrays: dict[str, Array], wanted: Sequence[str], weight: Array
) -> list[Array]:
    """Values of what `build` returns, then the gradients of sum(first value * weight) for the named inputs."""
    require("native operators")
    cpu.load()
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        inputs = {}
        for name, array in given_arrays.items():
            shape = [-1, *array.shape[1:]] if array.ndim > 1 else list(array.shape)
            inputs[name] = paddle.static.data(name, shape, str(array.dtype))
            inputs[name].stop_gradient = name not in wanted
        values = build(**inputs)
        factor = paddle.static.data("factor", [-1, *weight.shape[1:]], "float32")
        grads = paddle.static.gradients(
            [paddle.sum(paddle.multiply(values[0], factor))], [inputs[name] for name in wanted]
        )
    executor = paddle.static.Executor(paddle.CPUPlace())
    return executor.run(main, feed={**given_arrays, "factor": weight}, fetch_list=[*values, *grads])


def to_bfloat16(array: Array) -> Array:
    """Rounded to the nearest bfloat16 with ties to even, as float64; by way of the spacing of 8-bit mantissas."""
    mantissa, exponent = np.frexp(array.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)


def tower_in_float64(
    inputs: list[Array], weights: list[Array], biases: list[Array], relu: list[bool], g: Array, rounded: bool
) -> tuple[Array, list[Array]]:
    """Output and gradients (inputs, weights, biases) of sum(output * g); products of bfloat16 factors if `rounded`."""
    cut = to_bfloat16 if rounded else (lambda a: a.astype(np.float64))
    outputs = [cut(np.concatenate(inputs, axis=1))]
    for place, (w, b, r) in enumerate(zip(weights, biases, relu, strict=True)):
        y = outputs[-1] @ cut(w) + b
        y = np.maximum(y, 0) if r else y
        outputs.append(cut(y) if place + 1 < len(weights) else y)
    g = g.astype(np.float64) * (outputs[-1] > 0 if relu[-1] else 1)
    g_weights, g_biases = [], []
    for place in range(len(weights) - 1, -1, -1):
        g_biases.insert(0, g.sum(axis=0))
        g = cut(g)
        g_weights.insert(0, outputs[place].T @ g)
        g = g @ cut(weights[place]).T
        if place:
            g = cut(g * (outputs[place] > 0 if relu[place - 1] else 1))
    g_inputs = np.split(g, np.cumsum([x.shape[1] for x in inputs])[:-1], axis=1)
    return outputs[-1], [*g_inputs, *g_weights, *g_biases]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("rows", "widths", "units", "relu"),
    [
        (5, [3], [4], [False]),
        (1, [1], [1], [True]),
        (33, [17, 13], [9, 7, 1], [True, True, False]),
        (64, [5, 1, 2], [31, 16], [True, True]),
        (7, [6], [5, 3], [False, False]),
        (300, [129, 13], [100, 101, 1], [True, True, False]),
    ],
)
def test_tower(rows: int, widths: list[int], units: list[int], relu: list[bool], precision: Precision) -> None:
    rng = np.random.default_rng([rows, *units])
    sizes = [sum(widths), *units]
    arrays = {f"x{i}": rng.standard_normal((rows, w)) for i, w in enumerate(widths)}
    arrays |= {
        f"w{i}": rng.standard_normal((a, b)) / a**0.5 for i, (a, b) in enumerate(zip(sizes, units, strict=False))
    }
    arrays |= {f"b{i}": rng.standard_normal(n) for i, n in enumerate(units)}
    arrays = {name: a.astype(np.float32) for name, a in arrays.items()}
    g = rng.standard_normal((rows, units[-1])).astype(np.float32)

    def build(**v: object) -> list:
        part = {k: [v[name] for name in arrays if name[0] == k] for k in "xwb"}
        with cpu.using(precision):
            return [cpu.tower(part["x"], part["w"], part["b"], relu=relu)]

    part = {k: [arrays[name] for name in arrays if name[0] == k] for k in "xwb"}
    expected, gradients = tower_in_float64(part["x"], part["w"], part["b"], relu, g, precision == "bfloat16")
    got, *got_gradients = run(build, arrays, list(arrays), g)
    # a sum near a tie may round the other way in float32: one step of bfloat16 in a few places
    tolerance = {"float32": 2e-5, "bfloat16": 3e-2}[precision]
    for name, want, have in zip(["out", *arrays], [expected, *gradients], [got, *got_gradients], strict=True):
        scale = np.abs(want).max() + 1e-6
        assert np.abs(have - want).max() <= tolerance * scale, name
        if precision == "bfloat16":  # and on average far closer than rounding itself is
            assert np.abs(have - want).mean() <= 2e-3 * scale, name


def test_tower_leaves_out_gradients_nobody_wants_and_biases_that_are_not_there() -> None:
    rng = np.random.default_rng(3)
    x, dense, w = (rng.standard_normal(s).astype(np.float32) for s in ((6, 4), (6, 2), (6, 3)))
    g = rng.standard_normal((6, 3)).astype(np.float32)

    def build(x: object, dense: object, w: object) -> list:
        with cpu.using("float32"):
            return [cpu.tower([x, dense], [w], [None], relu=[False])]

    out, g_x, g_w = run(build, {"x": x, "dense": dense, "w": w}, ["x", "w"], g)
    both = np.concatenate([x, dense], axis=1)
    np.testing.assert_allclose(out, both @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(g_x, (g @ w.T)[:, :4], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(g_w, both.T @ g, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_towers_of_several_threads_do_not_meet(precision: Precision) -> None:
    """Products of the same shape at once, as when an executor runs two towers side by side."""
    require("native operators")
    cpu.load()
    paddle.enable_static()
    main = paddle.static.Program()
    with paddle.static.program_guard(main), cpu.using(precision):
        x, w, v = (paddle.static.data(n, s, "float32") for n, s in (("x", [-1, 61]), ("w", [61, 37]), ("v", [37, 5])))
        w.stop_gradient = v.stop_gradient = False
        out = cpu.tower([x], [w, v], [None, None], relu=[True, False])
        fetched = [out, *paddle.static.gradients([paddle.sum(paddle.multiply(out, out))], [w, v])]

    def values(seed: int, times: int) -> list[list[Array]]:
        rng = np.random.default_rng(seed)
        feed = {
            n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (500, 61)), ("w", (61, 37)), ("v", (37, 5)))
        }
        executor, scope = paddle.static.Executor(paddle.CPUPlace()), paddle.static.Scope()
        return [executor.run(main, feed=feed, fetch_list=fetched, scope=scope) for _ in range(times)]

    alone = [values(seed, 1)[0] for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(values, range(4), [100] * 4))
    for expected, found in zip(alone, together, strict=True):
        for one in found:
            for want, have in zip(expected, one, strict=True):
                np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_on_what_is_not_finite_has_a_gradient_that_is_not_finite(precision: Precision, bad: float) -> None:
    x, w = np.ones((3, 2), np.float32), np.ones((2, 2), np.float32)
    x[1, 0] = bad

    def build(x: object, w: object) -> list:
        with cpu.using(precision):
            return [cpu.tower([x], [w, w], [None, None], relu=[True, False])]

    out, g_w = run(build, {"x": x, "w": w}, ["w"], np.ones((3, 2), np.float32))
    assert np.isfinite(out[[0, 2]]).all()
    # oneDNN's ReLU makes 0 of NaN, but its row of the inputs still meets the gradient of the weights
    assert not np.isfinite(g_w).all()


@settings(max_examples=25)
@given(
    rows=st.integers(1, 40),
    fields=st.integers(1, 9),
    keys=st.integers(1, 30),
    width=st.integers(1, 19),
    first=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_lookup(rows: int, fields: int, keys: int, width: int, first: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((keys, width + first)).astype(np.float32)
    index = rng.integers(0, keys + 1, (rows, fields)).astype(np.int32)
    g_vectors = rng.standard_normal((rows, fields * width)).astype(np.float32)
    g_first = rng.standard_normal((rows, 1)).astype(np.float32)

    def build(values: object, index: object) -> list:
        vectors, order = cpu.lookup(values, index, first_order=first)
        return [paddle.concat([paddle.reshape(vectors, [-1, fields * width]), order], axis=1)]

    weight = np.concatenate([g_vectors, g_first], axis=1)
    got, got_gradient = run(build, {"values": values, "index": index}, ["values"], weight)
    padded = np.vstack([np.zeros((1, width + first)), values])
    picked = padded[index]
    order = picked[:, :, 0].sum(axis=1, keepdims=True) if first else np.zeros((rows, 1))
    np.testing.assert_allclose(got[:, :-1], picked[:, :, int(first) :].reshape(rows, -1), rtol=1e-6)
    np.testing.assert_allclose(got[:, -1:], order, rtol=1e-5, atol=1e-5)
    expected = np.zeros(padded.shape)
    g = np.concatenate(
        [np.repeat(g_first[:, :, None], fields, axis=1)] * first + [g_vectors.reshape(rows, fields, width)], axis=2
    )
    np.add.at(expected, index, g)
    np.testing.assert_allclose(got_gradient, expected[1:], rtol=1e-4, atol=1e-4)


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 19), st.integers(0, 2**32 - 1))
def test_pairwise(rows: int, fields: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, g = rng.standard_normal((rows, fields, width)).astype(np.float32), rng.standard_normal((rows, 1))
    got, got_gradient = run(lambda fields: [cpu.pairwise(fields)], {"fields": values}, ["fields"], g.astype(np.float32))
    wide = values.astype(np.float64)
    expected, gradient = np.zeros((rows, 1)), np.zeros(wide.shape)
    for i in range(fields):
        for j in range(i):
            expected[:, 0] += (wide[:, i] * wide[:, j]).sum(axis=1)
            gradient[:, i] += g * wide[:, j]
            gradient[:, j] += g * wide[:, i]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(got_gradient, gradient, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        pytest.param(0x7, False, id="AVX2"),
        pytest.param(0x27, False, id="AVX512"),
        pytest.param(0x67, False, id="AVX512-VNNI"),
        pytest.param(0xE7, True, id="AVX512-BF16"),
        pytest.param(0xFEF, True, id="AMX"),
        pytest.param(0, False, id="no oneDNN"),
    ],
)
def test_processors(monkeypatch: pytest.MonkeyPatch, instructions: int, expected: bool) -> None:
    monkeypatch.setattr(cpu, "_instructions", lambda: instructions)
    assert cpu.support().bfloat16 is expected


def test_what_is_hidden_from_onednn_is_not_there() -> None:
    code = "from paddlewheel.trainer.kernels import cpu; print(cpu.support().bfloat16)"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.needs("native operators")
def test_a_job_may_insist_or_refuse() -> None:
    assert cpu.choose("paddle", "auto").precision is None
    assert cpu.choose("native", "float32").precision == "float32"
    assert cpu.choose("auto", "auto").precision == ("bfloat16" if cpu.support().bfloat16 else "float32")
    with pytest.raises(NativeError, match=r"bfloat16 needs our operators.*train\.cpu_backend is 'paddle'"):
        cpu.choose("paddle", "bfloat16")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As on a machine where the operators were never built; the folder in which they would be."""
    target = tmp_path / "cache" / "tower.so"
    monkeypatch.setattr(cpu, "_places", lambda: [target])
    monkeypatch.setattr(cpu, "_loaded", [])
    return target


def test_without_a_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    chosen = cpu.choose("auto", "auto")
    assert chosen.precision is None
    assert "no C++ compiler was found" in chosen.warning
    monkeypatch.setattr(cpu, "_instructions", lambda: 0xE7)
    for operators, precision in (("native", "auto"), ("auto", "bfloat16")):
        with pytest.raises(NativeError, match=rf"train\.cpu_backend: {operators}.*apt-get install g\+\+"):
            cpu.choose(operators, precision)


def test_bfloat16_on_a_processor_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_instructions", lambda: 0x7)
    for operators in ("auto", "native"):
        with pytest.raises(
            NativeError, match=r"train\.precision: bfloat16, but the processor.*Set train\.precision to"
        ):
            cpu.choose(operators, "bfloat16")


def test_the_compiler_may_fail(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NativeError, match="could not compile"):
        cpu.build()
    assert not bare.exists()
    assert [p.name for p in bare.parent.iterdir()] == [".lock"]


def test_a_broken_library_is_no_crash(bare: Path) -> None:
    bare.parent.mkdir()
    bare.write_bytes(b"not a library")
    with pytest.raises(NativeError, match=r"(?s)does not load.*Delete it"):
        cpu.load()


def test_processes_that_build_at_once_build_once(tmp_path: Path) -> None:
    compiler, log = tmp_path / "g++", tmp_path / "calls"
    compiler.write_text(
        f"#!/bin/sh\necho called >> {log}\nwhile [ $# -gt 0 ]; do [ $1 = -o ] && echo made > $2; shift; done\n"
    )
    compiler.chmod(0o755)
    code = textwrap.dedent(f"""
        from pathlib import Path
        from paddlewheel.trainer.kernels import cpu
        cpu._places = lambda: [Path({str(tmp_path / "lib" / "tower.so")!r})]
        print(cpu.build())
    """)
    command = [sys.executable, "-c", code]
    environment = {"CXX": str(compiler), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(cpu.__file__).parents[4])}
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert {line.strip() for line in said} == {str(tmp_path / "lib" / "tower.so")}
    assert log.read_text().splitlines() == ["called"]


def test_the_operators_need_no_python_headers_and_import_no_paddle_to_be_found() -> None:
    code = "import sys; from paddlewheel.trainer.kernels import cpu; cpu.support(); assert 'paddle' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.needs("native operators")
def test_the_products_kept_for_row_counts_that_differ_are_bounded() -> None:
    """Each takes some hundred kilobytes; with a new one for each batch a trainer would grow for as long as it runs."""
    program = """
        import numpy as np, psutil
        from paddlewheel.trainer.models import parse_model
        from paddlewheel.trainer.dense.inputs import TableLayout
        from paddlewheel.trainer.dense.program import DenseProgram
        from paddlewheel.trainer.job.train import DenseOptimizerConfig
        from types import SimpleNamespace

        names = ["a", "b"]
        program = DenseProgram([TableLayout("t", 5, True, names)], num_dense=3, num_labels=1,
            model=parse_model({"kind": "deepfm", "tower": [64, 64, 64]}), optimizer=DenseOptimizerConfig(), seed=1,
            rank=0, operators="float32")
        rng = np.random.default_rng(0)

        def step(rows):
            index = rng.integers(0, 9, (rows, 2)).astype(np.int32)
            batch = SimpleNamespace(num_rows=rows, dense_BD=np.zeros((rows, 3), np.float32), sample_weight_B=None,
                labels_BL=np.zeros((rows, 1), np.float32),
                tables={"t": SimpleNamespace(single_BF=index, index={}, weights={})})
            program.gradients(batch, {"t": np.zeros((8, 5), np.float32)})

        for rows in range(100, 190):
            step(rows)
        before = psutil.Process().memory_info().rss
        for rows in range(190, 290):
            step(rows)
        print("grown", (psutil.Process().memory_info().rss - before) >> 20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grown = int(done.stdout.rsplit("grown", 1)[1])
    assert grown < 20, grown
