"""Element-wise operators, their gradients, casts and dropout."""

from __future__ import annotations

from paddlewheel.trainer.kernels.gpu.context import Context, lowers
from paddlewheel.trainer.kernels.gpu.graph import Op
from paddlewheel.trainer.kernels.gpu.kernel_calls import Dropout
from paddlewheel.trainer.kernels.gpu.views import F32, I32, View, temporary

_FUNCTIONS = {
    "relu": ("relu", ("X",), "Out"),
    "sigmoid": ("sigmoid", ("X",), "Out"),
    "log": ("log", ("X",), "Out"),
    "softplus": ("softplus", ("X",), "Out"),
    "elementwise_add": ("add", ("X", "Y"), "Out"),
    "elementwise_sub": ("sub", ("X", "Y"), "Out"),
    "elementwise_mul": ("mul", ("X", "Y"), "Out"),
    "elementwise_div": ("div", ("X", "Y"), "Out"),
    "elementwise_max": ("max", ("X", "Y"), "Out"),
    "greater_than": ("greater", ("X", "Y"), "Out"),
    "equal": ("equal", ("X", "Y"), "Out"),
    "where": ("where", ("Condition", "X", "Y"), "Out"),
    "sigmoid_cross_entropy_with_logits": ("bce", ("X", "Label"), "Out"),
    "relu_grad": ("relu_grad", ("Out@GRAD", "Out"), "X@GRAD"),
    "sigmoid_grad": ("sigmoid_grad", ("Out@GRAD", "Out"), "X@GRAD"),
    "softplus_grad": ("softplus_grad", ("Out@GRAD", "X"), "X@GRAD"),
    "log_grad": ("div", ("Out@GRAD", "X"), "X@GRAD"),
    "sigmoid_cross_entropy_with_logits_grad": ("bce_grad", ("Out@GRAD", "X", "Label"), "X@GRAD"),
    "dropout_grad": ("mul", ("Out@GRAD", "Mask"), "X@GRAD"),
}
"""Operator -> element-wise function, its operands, the output."""

_BINARY_GRADIENTS = {
    "elementwise_add_grad": (("copy", ("Out@GRAD",)), ("copy", ("Out@GRAD",))),
    "elementwise_sub_grad": (("copy", ("Out@GRAD",)), ("negative", ("Out@GRAD",))),
    "elementwise_mul_grad": (("mul", ("Out@GRAD", "Y")), ("mul", ("Out@GRAD", "X"))),
    "elementwise_div_grad": (("div", ("Out@GRAD", "Y")), ("div_grad", ("Out@GRAD", "Out", "Y"))),
    "elementwise_max_grad": (
        ("max_grad_first", ("Out@GRAD", "X", "Y")),
        ("max_grad_second", ("Out@GRAD", "X", "Y")),
    ),
}
"""Gradient -> for each input, the function of which it is the sum over repeated axes."""


@lowers(*_FUNCTIONS)
def _function(c: Context, op: Op) -> None:
    assert op.attrs.get("axis", -1) == -1, "elementwise with an axis"
    function, operands, out = _FUNCTIONS[op.type]
    c.write(op, out, c.emit.map(function, *(c.read(op, slot) for slot in operands)))


@lowers(*_BINARY_GRADIENTS)
def _binary_gradient(c: Context, op: Op) -> None:
    rules = _BINARY_GRADIENTS[op.type]
    views = {slot: c.read(op, slot) for slot in dict.fromkeys(slot for _, slots in rules for slot in slots)}
    for slot, (function, slots) in zip(("X", "Y"), rules, strict=True):
        if op.out(f"{slot}@GRAD") is not None:
            shape = c.read(op, slot).shape
            c.write(op, f"{slot}@GRAD", c.emit.reduced_to(shape, function, *(views[name] for name in slots)))


@lowers("sum")
def _sum(c: Context, op: Op) -> None:
    views = [c.values.read(name) for name in op.ins["X"]]
    while len(views) > 1:
        views = [c.emit.map("add3" if len(views) > 2 else "add", *views[:3]), *views[3:]]
    c.write(op, "Out", views[0])


@lowers("scale")
def _scale(c: Context, op: Op) -> None:
    x, scale, bias = c.read(op, "X"), op.attrs["scale"], op.attrs["bias"]
    if not op.attrs.get("bias_after_scale", True):
        bias *= scale
    c.write(op, "Out", x if (scale, bias) == (1.0, 0.0) else c.emit.map("affine", x, p=scale, q=bias))


@lowers("cast")
def _cast(c: Context, op: Op) -> None:
    x = c.read(op, "X")
    kind = I32 if op.attrs["out_dtype"] in {2, 3} else F32
    c.write(op, "Out", x if x.type == kind else c.emit.map("copy", x, kind=kind))


@lowers("dropout")
def _dropout(c: Context, op: Op) -> None:
    x = c.read(op, "X")
    if op.attrs.get("is_test"):
        c.write(op, "Out", x)
        return
    assert op.attrs["dropout_implementation"] == "upscale_in_train"
    c.num_dropouts += 1
    mask, step = temporary(x.shape), View(c.buffers.step, 0, (1,), (1,), I32)
    seed = (c.seed * 1_000_003 + c.num_dropouts * 7919) % 2**32
    c.emit.add(Dropout(mask, step, seed, op.attrs["dropout_prob"]))
    c.write(op, "Mask", mask)
    c.write(op, "Out", c.emit.map("mul", x, mask))
