"""What is known of optimizers by name: how much they read, write and keep, and which of them may update shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """One optimizer, in units of the parameter it updates."""

    passes: int  # tensors read or written by an update: parameter in and out, gradient in, each state tensor in and out
    state: int  # tensors kept from step to step
    scratch: int  # tensors made while one parameter is updated


OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "sgd": OptimizerFacts(passes=3, state=0, scratch=0),
    "momentum": OptimizerFacts(passes=5, state=1, scratch=0),
    "adamw": OptimizerFacts(passes=7, state=2, scratch=2),
}

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "ASGD",
    "Rprop",
)
"""torch's optimizers whose update of an element depends on that element alone: exact on any shard."""
