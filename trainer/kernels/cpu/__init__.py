"""Operators for the dense part on CPUs: compiled once on each machine, used inside Paddle's static programs.

Paddle 2.6.2's own operators leave much of a processor unused: MKL 2019 takes slow paths on processors that it does not
know, each bias, activation and concatenation is a pass over memory of its own, and bfloat16 is out of reach. These
three do the same with oneDNN (which Paddle's wheel brings along) and fewer passes. Where they cannot be had (no
compiler, no oneDNN), Paddle's own operators do the work: same numbers, more time.

Legend: B batch rows, F features, U unique keys, W floats of a pulled row, E floats of an embedding, X inputs,
Y outputs.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from paddlewheel import compiled

Precision = Literal["float32", "bfloat16"]
Operators = Literal["auto", "native", "paddle"]
Variable = Any  # a symbolic tensor of a static program

_SOURCES = Path(__file__).parent
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",  # else GCC takes square roots one by one
    "-w",
    "-DPADDLE_WITH_CUSTOM_KERNEL",
    "-DPADDLE_NO_PYTHON",
)
_AVX512_BF16 = 0xE7  # dnnl_cpu_isa_avx512_core_bf16: each set of instructions has the bits of those that it includes
_current: ContextVar[Precision | None] = ContextVar("native_precision", default=None)
_loaded: list[Path] = []


class NativeError(ValueError):
    """The operators cannot be built or loaded, or a job asks for what they cannot do; the message says what helps."""


@dataclass(frozen=True)
class Support:
    """What this machine can do.

    Attributes:
        built: the compiled operators, None when they are not there yet.
        compiler: path of a C++ compiler, None when there is none.
        bfloat16: whether oneDNN finds bfloat16 products in this processor (AVX512-BF16 or AMX). Where the variable
            ONEDNN_MAX_CPU_ISA hides them from it, they are not there.
    """

    built: Path | None
    compiler: str | None
    bfloat16: bool


def support() -> Support:
    """Look at this machine; builds nothing, does not import Paddle."""
    library = next((place for place in _places() if place.is_file()), None)
    return Support(library, compiled.compiler(), _AVX512_BF16 & ~_instructions() == 0)


def build() -> Path:
    """Compile the operators (some seconds) unless they are there; many processes may call this at once.

    They go beside this file where that is writable, else below $XDG_CACHE_HOME (or ~/.cache).

    Raises:
        NativeError: no compiler, no oneDNN in Paddle's wheel, no place to write to, or the compiler's error.
    """
    found = support()
    if found.built is not None:
        return found.built
    _check_buildable(found)
    paddle = _paddle()
    arguments = [*_FLAGS, f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}"]
    arguments += [str(_SOURCES / "tower.cc"), f"-L{paddle / 'libs'}", f"-L{paddle / 'base'}"]
    arguments += ["-l:libpaddle.so", "-l:libdnnl.so.3"]
    return compiled.build(_places(), arguments, "the operators", NativeError)


def load() -> Path:
    """Build if need be, and register the operators with Paddle; the library in use.

    Raises:
        NativeError: as `build`, or the library does not load.
    """
    if not _loaded:
        library = build()
        from paddle.utils.cpp_extension.extension_utils import load_op_meta_info_and_register_op

        try:
            ctypes.CDLL(str(_onednn()))  # found by its name when our library asks for it
            load_op_meta_info_and_register_op(str(library))
        except (OSError, RuntimeError, ValueError) as error:
            raise NativeError(f"{library} does not load: {error}. Delete it to have it built anew.") from error
        _loaded.append(library)
    return _loaded[0]


@dataclass(frozen=True)
class Choice:
    """What computes the dense part.

    Attributes:
        precision: of our operators' products; None: Paddle's operators compute, in float32.
        warning: why ours are not used although they were wanted.
    """

    precision: Precision | None
    warning: str = ""


def check(operators: Operators, precision: Literal["auto", Precision]) -> None:
    """Refuse what `train.cpu_backend` and `train.precision` insist on and this machine has not; builds nothing.

    Raises:
        NativeError: Paddle's operators or this processor are to multiply bfloat16 and cannot, or our operators must be
            used, are not built, and cannot be.
    """
    found = support()
    if precision == "bfloat16" and operators == "paddle":
        raise NativeError(
            "train.precision: bfloat16 needs our operators, but train.cpu_backend is 'paddle'. Set one to 'auto'."
        )
    if precision == "bfloat16" and not found.bfloat16:
        raise NativeError(
            "train.precision: bfloat16, but the processor of this machine has no bfloat16 products (AVX512-BF16 or "
            "AMX). Set train.precision to auto, which takes the fastest that each machine has, or to float32."
        )
    if (operators == "native" or precision == "bfloat16") and found.built is None:
        try:
            _check_buildable(found)
        except NativeError as error:
            raise _insisted(operators, precision, error) from error


def cpu_precision(precision: str, *, predicts: bool) -> Literal["auto", Precision]:
    """What `train.precision` asks of a CPU: predictions are float32 whatever training multiplies in."""
    if predicts and precision == "bfloat16":
        return "float32"
    assert precision in {"auto", "float32", "bfloat16"}, "JobConfig refuses the others"
    return cast('Literal["auto", Precision]', precision)


def choose(operators: Operators, precision: Literal["auto", Precision]) -> Choice:
    """What `train.cpu_backend` and `train.precision` mean on this machine; loads the operators when they are chosen.

    Raises:
        NativeError: the job insists on what cannot be had.
    """
    check(operators, precision)
    if operators == "paddle":
        return Choice(None)
    try:
        load()
    except NativeError as error:
        if operators == "native" or precision == "bfloat16":
            raise _insisted(operators, precision, error) from error
        return Choice(None, f"the dense part runs on Paddle's own operators, which are slower: {error}")
    if precision == "auto":
        precision = "bfloat16" if support().bfloat16 else "float32"
    return Choice(precision)


def _insisted(operators: str, precision: str, error: NativeError) -> NativeError:
    return NativeError(f"train.cpu_backend: {operators} with train.precision: {precision}: {error}")


@contextmanager
def using(precision: Precision | None) -> Iterator[None]:
    """Layers built inside use the operators with products in this precision; None: Paddle's own operators."""
    token = _current.set(precision)
    try:
        yield
    finally:
        _current.reset(token)


def fits(*inputs: Variable) -> bool:
    """Whether the operators are to be used (`using`), on these inputs: `tower` takes arrays [B, X] alone."""
    return _current.get() is not None and all(len(x.shape) == 2 for x in inputs)


def lookup(rows_UW: Variable, index_BF: Variable, *, first_order: bool) -> tuple[Variable, Variable]:
    """Embeddings by position among the pulled rows, and the sum of the first-order weights.

    Args:
        rows_UW: float32; with `first_order`, column 0 is a first-order weight and W = 1 + E.
        index_BF: int32, position + 1; 0 stands for no id: zeros, and no gradient.
        first_order: whether the table has first-order weights.

    Returns:
        float32 [B, F, E] and [B, 1] (zeros without `first_order`).
    """
    vectors_BFE, first_B1 = _outputs("paddlewheel_lookup", 2)
    _append(
        "paddlewheel_lookup",
        {"Rows": [rows_UW], "Index": [index_BF]},
        {"Vectors": [vectors_BFE], "First": [first_B1]},
        {"first_order": int(first_order)},
    )
    return vectors_BFE, first_B1


def pairwise(fields_BFE: Variable) -> Variable:
    """Sum over all pairs of fields of the dot product of their embeddings, [B, 1] (Rendle, 2010, eq. 5)."""
    out_B1, sum_BE = _outputs("paddlewheel_pairwise", 2)
    _append("paddlewheel_pairwise", {"Fields": [fields_BFE]}, {"Out": [out_B1], "Sum": [sum_BE]}, {})
    return out_B1


def tower(
    inputs: Sequence[Variable],
    weights: Sequence[Variable],
    biases: Sequence[Variable | None],
    *,
    relu: Sequence[bool],
) -> Variable:
    """Fully connected layers one after the other: relu(x W + b), without the ReLU where `relu` says so.

    In the precision of `using`. With bfloat16, inputs, weights, activations and gradients are rounded to it before each
    product; sums, biases, parameters and their gradients stay float32.

    Args:
        inputs: float32 [B, X_i], taken side by side; [B, F, E] counts as [B, F * E].
        weights: float32 [X, Y] of each layer.
        biases: float32 [Y] of each layer; None for a layer without.
        relu: for each layer.

    Returns:
        float32 [B, Y] of the last layer.
    """
    import paddle

    present = [
        paddle.zeros([weight.shape[1]], "float32") if bias is None else bias
        for weight, bias in zip(weights, biases, strict=True)
    ]
    everything = [_with_gradient(each) for each in [*inputs, *weights, *present]]
    out_BY, saved = _outputs("paddlewheel_tower", 2)
    _append(
        "paddlewheel_tower",
        {"All@VECTOR": everything},
        {"Out": [out_BY], "Saved": [saved]},
        {
            "relu": [int(r) for r in relu],
            "wanted": [int(not each.stop_gradient) for each in inputs],
            "bfloat16": int(_current.get() == "bfloat16"),
        },
    )
    return out_BY


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) on parameters in Paddle's memory, one pass over each.

    Attributes:
        beta1, beta2, epsilon: as in Kingma and Ba, 2015.
    """

    beta1: float
    beta2: float
    epsilon: float

    def step(
        self,
        tensors: Sequence[Any],
        gradient: NDArray[np.float32],
        *,
        scale: float,
        rate: float,
        decay: float,
        l2: float,
    ) -> None:
        """Change one parameter: decay it, then Adam with the gradient `scale * gradient + l2 * parameter`.

        Args:
            tensors: float32 on the CPU: parameter, first moment, second moment, beta1^t, beta2^t.
            gradient: as many floats as the parameter, one after the other.
            scale: factor of the gradient.
            rate: learning rate of this step.
            decay: decoupled weight decay, relative to the rate.
            l2: factor of the parameter in the gradient.
        """
        settings = (ctypes.c_float * 7)(scale, l2, rate, self.beta1, self.beta2, self.epsilon, decay)
        pointers = [ctypes.c_void_p(tensor._ptr()) for tensor in tensors]  # noqa: SLF001  the only way to the memory
        _function("paddlewheel_adamw")(
            ctypes.byref(settings), ctypes.c_int64(gradient.size), ctypes.c_void_p(gradient.ctypes.data), *pointers
        )


@cache
def _function(name: str) -> Any:
    function = getattr(ctypes.CDLL(str(load())), name)
    function.restype = None
    return function


def in_float32(program: Any) -> Any:
    """The program itself, its towers with float32 products: what predicts must not depend on the machine."""
    for operator in program.global_block().ops:
        if operator.type == "paddlewheel_tower":
            operator._set_attr("bfloat16", 0)  # noqa: SLF001  Paddle's way to change an operator
    return program


def _with_gradient(value: Variable) -> Variable:
    """The same value as a variable that may have a gradient: an operator's list of gradients must be whole."""
    import paddle

    if not value.stop_gradient:
        return value
    copy = paddle.assign(value)
    copy.stop_gradient = False
    return copy


def _outputs(operator: str, count: int) -> list[Variable]:
    from paddle.base.layer_helper import LayerHelper

    helper = LayerHelper(operator)
    return [helper.create_variable_for_type_inference("float32") for _ in range(count)]


def _append(operator: str, inputs: dict[str, Any], outputs: dict[str, Any], attributes: dict[str, Any]) -> None:
    from paddle.base.layer_helper import LayerHelper

    LayerHelper(operator).append_op(type=operator, inputs=inputs, outputs=outputs, attrs=attributes)


@cache
def _instructions() -> int:
    """The instructions that oneDNN uses on this processor (dnnl_cpu_isa_t); 0 where Paddle or oneDNN is missing.

    /proc/cpuinfo tells what the processor has; oneDNN also minds what the kernel lets a process use, and
    ONEDNN_MAX_CPU_ISA.
    """
    try:
        return int(ctypes.CDLL(str(_onednn())).dnnl_get_effective_cpu_isa())
    except (NativeError, OSError):
        return 0


def _onednn() -> Path:
    library = _paddle() / "libs" / "libdnnl.so.3"
    if not library.is_file():
        raise NativeError(f"this Paddle for {platform.machine()} comes without oneDNN (libdnnl.so.3).")
    return library


def _check_buildable(found: Support) -> None:
    """Told apart from the rest of `build`, because it can be asked beforehand."""
    if found.compiler is None:
        raise NativeError(compiled.NO_COMPILER)
    _onednn()


def _paddle() -> Path:
    found = find_spec("paddle")
    if found is None or found.origin is None:
        raise NativeError("Paddle is not installed: pip install 'paddlewheel[cpu]' or 'paddlewheel[gpu]'.")
    return Path(found.origin).parent


def _places() -> list[Path]:
    wheels = []
    for package in ("paddlepaddle", "paddlepaddle-gpu"):
        with suppress(PackageNotFoundError):
            wheels.append(f"{package} {version(package)}")
    return compiled.places("tower", _SOURCES, _SOURCES.glob("*.[ch]*"), _FLAGS, *wheels)
