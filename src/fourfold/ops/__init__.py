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
from fourfold.ops.nest import Loop, Nest, SavedExtra, Window, find_rule, nest_of

__all__ = [
    "Loop",
    "Nest",
    "SavedExtra",
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
