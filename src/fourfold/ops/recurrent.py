"""LSTM: samples are independent, everything else stays whole (a hidden split would cost a collective per time step)."""

from __future__ import annotations

import math

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Dim, Loop, Nest, rule, whole_dims


@rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def recurrent(op: Op, graph: Graph) -> Nest | None:
    x = graph.values[op.operands[0]].shape
    if len(x) != 3:
        return None
    is_lstm = op.target.startswith("aten.lstm")
    if not is_lstm and op.args[5] and op.args[6]:
        return None  # dropout between layers: only the LSTM kernel draws it alike on every rank
    batch_first = bool(op.args[8])
    states = 2 if is_lstm else 1
    at = 0 if batch_first else 1
    loops = (Loop(name="n", size=x[at], labels=("batch",)),)

    def sequence(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        return tuple(("n",) if d == at else (size,) for d, size in enumerate(shape))

    def state(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        return ((shape[0],), ("n",), (shape[2],))

    shapes = [graph.values[name].shape for name in op.operands]
    weights = shapes[1 + states :]
    results = [graph.values[name].shape for name in op.results]
    steps = x[0] * x[1]
    return Nest(
        loops=loops,
        operands=(sequence(x), *(state(s) for s in shapes[1 : 1 + states]), *(whole_dims(s) for s in weights)),
        results=(sequence(results[0]), *(state(s) for s in results[1:])),
        kernel="lstm" if is_lstm else "plain",
        anchor=True,
        flops=2 * steps * sum(math.prod(s) for s in weights if len(s) == 2),
        saved=(0, *range(1 + states, len(shapes)), -1),
    )
