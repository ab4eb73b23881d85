"""Kernel calls as plain data: one class a kernel, with the arrays that it writes and reads, and its numbers.

`structs.encode` fills a kernel's struct from its call; `reference.run` computes the same call in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paddlewheel.trainer.kernels.gpu.views import View, temporary

FUNCTIONS = (
    "copy",
    "add",
    "sub",
    "mul",
    "div",
    "max",
    "affine",
    "relu",
    "relu_grad",
    "sigmoid",
    "sigmoid_grad",
    "bce",
    "bce_grad",
    "exp_diff",
    "log",
    "greater",
    "equal",
    "where",
    "softplus",
    "softplus_grad",
    "mul_add",
    "lerp",
    "square_diff",
    "rsqrt_affine",
    "div_grad",
    "max_grad_first",
    "max_grad_second",
    "add3",
    "sub_mul",
    "sqrt_affine",
    "tanh",
    "tanh_grad",
    "mul_exp_diff",
    "negative",
)
"""Element-wise functions by their number in kernels.cu."""

FIELDS_WIDTHS = frozenset({4, 8, 16, 32, 64, 128})
"""Widths of an embedding that the kernels over fields take."""

TILES = (256, 512)
"""Rows of a field that a block of `fields_grad` adds up: the larger when there are enough rows for all of the GPU."""


class Call:
    """One kernel launch. A subclass is one kernel; its fields are views (None: absent) and numbers.

    Class attributes, set where the subclass is declared:
        kernel: name of the function in kernels.cu, without `pw_`.
        writes, reads: the fields that are arrays, in order.
        workspaces: those written fields that hold nothing of use afterwards.
        updates: whether the kernel reads what it writes.
        variants: the numbers that choose another path through the kernel.
    """

    kernel: ClassVar[str]
    writes: ClassVar[tuple[str, ...]]
    reads: ClassVar[tuple[str, ...]]
    workspaces: ClassVar[frozenset[str]]
    updates: ClassVar[bool]
    variants: ClassVar[tuple[str, ...]]

    def __init_subclass__(
        cls,
        *,
        kernel: str,
        writes: tuple[str, ...],
        reads: tuple[str, ...] = (),
        workspaces: tuple[str, ...] = (),
        updates: bool = False,
        variants: tuple[str, ...] = (),
    ) -> None:
        cls.kernel, cls.writes, cls.reads = kernel, writes, reads
        cls.workspaces, cls.updates, cls.variants = frozenset(workspaces), updates, variants
        KERNELS[kernel] = cls

    @property
    def outs(self) -> tuple[View | None, ...]:
        """Arrays that it writes."""
        return tuple(getattr(self, name) for name in self.writes)

    @property
    def results(self) -> list[View]:
        """Arrays that it writes, without its workspaces."""
        found = (getattr(self, name) for name in self.writes if name not in self.workspaces)
        return [view for view in found if view is not None]

    @property
    def ins(self) -> tuple[View | None, ...]:
        """Arrays that it reads."""
        return tuple(getattr(self, name) for name in self.reads)

    @property
    def views(self) -> list[View]:
        """All arrays, those that it writes first."""
        return [view for view in (*self.outs, *self.ins) if view is not None]

    @property
    def variant(self) -> tuple[Any, ...]:
        """Values of `variants`."""
        return tuple(getattr(self, name) for name in self.variants)


KERNELS: dict[str, type[Call]] = {}
"""Every kernel of kernels.cu that takes part in a step."""


@dataclass(frozen=True)
class Elementwise(Call, kernel="elementwise", writes=("out",), variants=("function",)):
    """`out` = function(operands), which broadcast; `p` and `q` are numbers of the function."""

    out: View
    operands: tuple[View, ...]
    function: str
    p: float = 0.0
    q: float = 0.0

    @property
    def ins(self) -> tuple[View | None, ...]:
        return self.operands


@dataclass(frozen=True)
class Reduce(
    Call,
    kernel="reduce",
    writes=("out", "partial"),
    workspaces=("partial",),
    variants=("function", "largest", "by_warp"),
):
    """`out` [elements] = sum, or maximum, of function(operands) over axes of the operands, which have one shape.

    Attributes:
        by_warp: whether a warp, not a thread, makes an output.
        chunks: in how many parts the reduced elements are cut; more than one needs `partial`.
    """

    out: View
    partial: View | None
    operands: tuple[View, ...]
    function: str
    axes: tuple[int, ...]
    largest: bool = False
    by_warp: bool = False
    chunks: int = 1

    @property
    def ins(self) -> tuple[View | None, ...]:
        return self.operands


@dataclass(frozen=True)
class Squares(Call, kernel="squares", writes=("out", "partial"), reads=("source",), workspaces=("partial",)):
    """`out` = the sum of squares of all elements."""

    out: View
    partial: View
    source: View


@dataclass(frozen=True)
class Gather(Call, kernel="gather", writes=("out",), reads=("table", "index")):
    """`out` = rows of the table by index: [count, width], [groups, group, width], or of floats [groups, group]."""

    out: View
    table: View
    index: View


@dataclass(frozen=True)
class ScatterAdd(Call, kernel="scatter_add", writes=("table",), reads=("values", "index"), updates=True):
    """Values, in a shape that `Gather.out` may have, are added to rows of the table; to row 0 only if it counts."""

    table: View
    values: View
    index: View
    zero_is_none: bool = False


@dataclass(frozen=True)
class Copy2D(Call, kernel="copy2d", writes=("out",), reads=("source",)):
    """A matrix in another type or with other strides, and `fill` columns of zeros behind it."""

    out: View
    source: View
    fill: int = 0


@dataclass(frozen=True)
class BiasGrad(Call, kernel="bias_grad", writes=("dz", "partial", "db"), reads=("dy", "y"), workspaces=("partial",)):
    """`dz` = `dy` where `y` > 0 (everywhere without `y`), with `fill` columns of zeros; `db` = its columns' sums."""

    dz: View | None
    partial: View | None
    db: View | None
    dy: View
    y: View | None
    blocks: int
    fill: int


@dataclass(frozen=True)
class Skinny(Call, kernel="skinny", writes=("y",), reads=("x", "w", "bias")):
    """A layer with few outputs: `y` = `x` `w` + `bias`."""

    y: View
    x: View
    w: View
    bias: View | None


@dataclass(frozen=True)
class SkinnyGrad(
    Call,
    kernel="skinny_grad",
    writes=("dx", "dw_partial", "dw", "db_partial", "db"),
    reads=("x", "w", "dy"),
    workspaces=("dw_partial", "db_partial"),
):
    """Gradients of a layer with few outputs. With `relu_x`, `dx` is 0 where `x` is, and `db` its columns' sums."""

    dx: View | None
    dw_partial: View
    dw: View
    db_partial: View | None
    db: View | None
    x: View
    w: View
    dy: View
    blocks: int
    relu_x: bool


@dataclass(frozen=True)
class FmPairs(Call, kernel="fm_pairs", writes=("out",), reads=("e",)):
    """The factorization machine's sum over pairs of `e` [rows, fields, width]."""

    out: View
    e: View


@dataclass(frozen=True)
class FmPairsGrad(Call, kernel="fm_pairs_grad", writes=("out",), reads=("e", "dout", "add")):
    """Its gradient, plus `add` [rows, fields * width]."""

    out: View
    e: View
    dout: View
    add: View | None


@dataclass(frozen=True)
class FieldsLookup(
    Call,
    kernel="fields_lookup",
    writes=("e", "pairs", "first", "sums"),
    reads=("table", "first_table", "index"),
):
    """Lookup of a row's embeddings, with their FM pairs, their sum, and the sum of first-order weights."""

    e: View | None
    pairs: View
    first: View | None
    sums: View | None
    table: View
    first_table: View | None
    index: View


@dataclass(frozen=True)
class FieldsGrad(
    Call,
    kernel="fields_grad",
    writes=("table", "first"),
    reads=("sums", "values", "dpairs", "add", "index", "dfirst"),
    updates=True,
):
    """Gradients of `FieldsLookup`, added to rows of the gradients' table: of pairs, of embeddings, of first order.

    Attributes:
        values: the embeddings' table.
        rows: of the batch.
        tile: rows of a field that a block adds up.
    """

    table: View
    first: View | None
    sums: View | None
    values: View | None
    dpairs: View | None
    add: View | None
    index: View
    dfirst: View | None
    rows: int
    tile: int


@dataclass(frozen=True)
class DotPairs(Call, kernel="dot_pairs", writes=("out",), reads=("v",)):
    """Dot products of all pairs of `v` [rows, vectors, width]: the triangle below the diagonal."""

    out: View
    v: View


@dataclass(frozen=True)
class DotPairsGrad(Call, kernel="dot_pairs_grad", writes=("out",), reads=("v", "dout")):
    """Its gradient."""

    out: View
    v: View
    dout: View


@dataclass(frozen=True)
class Dropout(Call, kernel="dropout", writes=("mask",), reads=("step",)):
    """A mask of 0 and 1 / (1 - rate), drawn from the seed and the step's number."""

    mask: View
    step: View
    seed: int
    rate: float


@dataclass(frozen=True)
class AdamSettings:
    """AdamW's numbers; `clip_norm` 0 where the gradient is not clipped."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    l2: float
    clip_norm: float


_ADAM_WRITES = ("param", "moment1", "moment2", "low")
_ADAM_READS = ("grad", "decays", "low_at", "scalars", "squares")


@dataclass(frozen=True)
class Adam(Call, kernel="adam", writes=_ADAM_WRITES, reads=_ADAM_READS, updates=True):
    """AdamW over the flat parameters, with their copies in the low type.

    Attributes:
        decays: a byte a parameter: whether it decays.
        low_at: element of each parameter's copy in `low`; -1 where it has none.
        scalars: rate, factor of the gradient, powers of the betas.
        squares: the gradient's sum of squares, where it is clipped.
    """

    param: View
    moment1: View
    moment2: View
    low: View
    grad: View
    decays: View
    low_at: View
    scalars: View
    squares: View | None
    settings: AdamSettings


@dataclass(frozen=True)
class LowCopies(Adam, kernel="low_copies", writes=_ADAM_WRITES, reads=_ADAM_READS, updates=True):
    """The copies alone."""


@dataclass(frozen=True)
class Matmul(
    Call,
    kernel="matmul",
    writes=("out",),
    reads=("a", "b", "bias"),
    variants=("trans_a", "trans_b", "relu"),
):
    """`out` = `a` `b` + `bias`, of matrices or of as many in each; then ReLU."""

    out: View
    a: View
    b: View
    bias: View | None = None
    trans_a: bool = False
    trans_b: bool = False
    relu: bool = False
    tf32: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n, k: `out` is [m, n] and sums k products."""
        m, k = self.a.shape[-2:][::-1] if self.trans_a else self.a.shape[-2:]
        return m, self.b.shape[-2 if self.trans_b else -1], k


@dataclass(frozen=True)
class Zero(Call, kernel="zero", writes=("out",)):
    """Bytes of zero."""

    out: View


@dataclass(frozen=True)
class Count(Call, kernel="count", writes=("counter",), updates=True):
    """One more."""

    counter: View


def tile_of(rows: int) -> int:
    """The tile of `FieldsGrad` for so many rows."""
    return TILES[rows >= 16_384]


def reduction(
    function: str,
    operands: Sequence[View],
    axes: Sequence[int],
    out: View,
    *,
    largest: bool = False,
) -> Reduce:
    """A `Reduce` with its workspace: cut into chunks where there are fewer outputs than the GPU has threads.

    `axes` ascend; `out` may have any shape with as many elements as the axes leave.
    """
    first = operands[0]
    num_reduced = int(np.prod([first.shape[d] for d in axes], dtype=np.int64))
    num_out = first.size // max(num_reduced, 1)
    last = max((d for d in axes if first.shape[d] > 1), default=0)
    by_warp = num_reduced >= 16 and (first.strides[last] == 1 or num_out < 32)
    threads = max(1, num_out * (32 if by_warp else 1))
    chunks = max(1, min(131_072 // threads, num_reduced // (256 if by_warp else 64), 1024))
    partial = temporary((chunks, max(1, out.size))) if chunks > 1 else None
    flat = out.with_shape((out.size,))
    assert flat is not None
    return Reduce(flat, partial, tuple(operands), function, tuple(axes), largest, by_warp, chunks)
