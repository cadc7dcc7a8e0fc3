"""Kernels by op family, with the names of `ops`; importing the room registers them all."""

from fourfold.runtime.kernels import (
    attention,
    conv,
    embedding,
    linear,
    loss,
    norm,
    pool,
    random,
    recurrent,
    reduce,
    resample,
    rows,
    shape,
)
from fourfold.runtime.kernels.base import Randomness, RankContext, build

__all__ = [
    "Randomness",
    "RankContext",
    "attention",
    "build",
    "conv",
    "embedding",
    "linear",
    "loss",
    "norm",
    "pool",
    "random",
    "recurrent",
    "reduce",
    "resample",
    "rows",
    "shape",
]
