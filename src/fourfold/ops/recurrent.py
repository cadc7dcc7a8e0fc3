"""LSTM: samples are independent, everything else stays whole (a hidden split would cost a collective per time step)."""

from __future__ import annotations

import math

from fourfold.graph import Graph, Op
from fourfold.ops.nest import Dim, Loop, Nest, SavedExtra, rule, whole_dims


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
        saved=tuple(range(1, len(shapes))) if batch_first else tuple(range(len(shapes))),
        saved_extra=_saved_extra(op, x, shapes[1][2], batch_first),
    )


_PAGE = 4096  # bytes: oneDNN begins each part of its workspace at a page


def _row_length(count: int) -> int:
    """Elements (float32) of a row of oneDNN's workspace: rows are multiples of 64 bytes, but not of 1024."""
    count = -(-count // 16) * 16
    return count if count % 256 else count + 16


def _saved_extra(op: Op, x: tuple[int, ...], hidden: int, batch_first: bool) -> tuple[SavedExtra, ...]:
    """Of every layer and direction: results, last states, and gates and states of every step.

    The LSTM is oneDNN's (float32); the bytes agree with its workspace to a few pages. The other cells run step by step as
    single ops.
    """
    layers, bidirectional = op.args[4], op.args[7]
    time, width, sides = x[1] if batch_first else x[0], x[2], 2 if bidirectional else 1
    out: list[SavedExtra] = [SavedExtra(((time,), ("n",), (width,)))] if batch_first else []
    for layer in range(layers):
        reads = width if layer == 0 else sides * hidden
        for _ in range(sides):
            if not op.target.startswith("aten.lstm"):
                out += [SavedExtra(((time,), ("n",), (hidden,)))] * 7
                continue
            out += [SavedExtra((("n",), (hidden,)))] * 2 + [SavedExtra(((time,), ("n",), (_row_length(4 * hidden),)), 4, _PAGE)]
            out += [SavedExtra(((2 * (time + 1),), ("n",), (_row_length(max(hidden, reads)),)), 4, _PAGE)] * 3
            out += [SavedExtra(((2 * (time + 1),), ("n",), (_row_length(hidden),)), 4, _PAGE)] * 2 + [
                SavedExtra(((time,), ("n",), (hidden,)), 4, _PAGE)
            ]
        out.append(SavedExtra(((time,), ("n",), (sides * hidden,))))
        if bidirectional:  # both directions concatenated, and the reversed input of the second
            out += [
                SavedExtra(((time,), ("n",), (2 * hidden,))),
                SavedExtra(((time,), ("n",), (reads,))),
                SavedExtra((("n",), (8 * hidden,))),
            ]
    return tuple(out)
