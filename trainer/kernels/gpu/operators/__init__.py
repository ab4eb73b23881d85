"""How each type of operator becomes kernel calls: one rule a type, by family."""

from paddlewheel.trainer.kernels.gpu.context import RULES
from paddlewheel.trainer.kernels.gpu.operators import (
    elementwise,
    joins,
    linear,
    lookups,
    products,
    recurrent,
    reductions,
    shapes,
)

__all__ = ["RULES", "elementwise", "joins", "linear", "lookups", "products", "recurrent", "reductions", "shapes"]
