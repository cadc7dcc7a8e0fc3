"""Op rules, one file per family; importing the room registers them all."""

from fourfold.ops import (
    attention,
    conv,
    embedding,
    linear,
    loss,
    norm,
    pointwise,
    pool,
    recurrent,
    reduce,
    resample,
    rows,
    shape,
)
from fourfold.ops.nest import Kept, Loop, Nest, Window, find_rule, nest_of

__all__ = [
    "Kept",
    "Loop",
    "Nest",
    "Window",
    "attention",
    "conv",
    "embedding",
    "find_rule",
    "linear",
    "loss",
    "nest_of",
    "norm",
    "pointwise",
    "pool",
    "recurrent",
    "reduce",
    "resample",
    "rows",
    "shape",
]
