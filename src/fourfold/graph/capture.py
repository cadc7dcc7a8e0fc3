"""From an `nn.Module` and its loss to a `Graph`, by torch.export.

Non-strict export with a dynamic batch dim; where a model fixes its batch size, a static capture instead. Every submodule is
captured in the mode (train, eval) the user left it in, and the module is left as it was. The result is as high-level as
torch.export leaves it but for what `fx_converter.py` changes. What export would drop, `export_watch.py` refuses.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fourfold.errors import CaptureFailed
from fourfold.graph.constant_ranges import ConstantRanges
from fourfold.graph.export_errors import explained
from fourfold.graph.export_watch import Observer
from fourfold.graph.fx_converter import FxConverter
from fourfold.graph.lstm_tracing import lstm_by_shapes
from fourfold.graph.module_attributes import preserve_attributes
from fourfold.graph.refusals import refuse_hooks, refuse_modules, refuse_overlaps
from fourfold.graph.spec import Graph, Op, Parameter, Ref

Loss = Callable[..., Tensor]
Inputs = tuple[Tensor, ...] | Mapping[str, Tensor]

_EXAMPLE_BATCH = 4
MOST_BATCH, MOST_ON_GPU = 1 << 40, 880801
"""Export proves shapes up to this batch. On GPUs batch norm takes another of its kernels beyond, which would fix the batch."""


def mean_square(outputs: Any) -> Tensor:
    """The stand-in loss: mean square of every floating-point output."""
    leaves = [o for o in pytree.tree_leaves(outputs) if isinstance(o, Tensor) and o.is_floating_point()]
    return torch.stack([leaf.square().mean() for leaf in leaves]).sum() if len(leaves) > 1 else leaves[0].square().mean()


class WithLoss(nn.Module):
    """Model and loss as one module: ``(inputs, targets) -> (loss, outputs)``."""

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: Any, targets: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
        outputs = self.model(**inputs) if isinstance(inputs, Mapping) else self.model(*inputs)
        return (self.loss(outputs, *targets) if self.loss else mean_square(outputs)), outputs


def batch_of(inputs: Inputs) -> int:
    """The global batch of the given inputs: dim 0 of the first that has one."""
    for tensor in pytree.tree_leaves(inputs):
        if tensor.dim():
            return int(tensor.shape[0])
    raise CaptureFailed("no input tensor has a batch dim; give inputs whose first dim is the batch")


class _Observed(WithLoss):
    """Model and loss, watched; where two batches are given, called twice, and the second result counts."""

    def __init__(self, whole: WithLoss, observer: Observer) -> None:
        super().__init__(whole.model, whole.loss)
        self._observer = observer

    def forward(self, inputs: Any, targets: tuple[Tensor, ...], *later: Any) -> tuple[Tensor, Any]:
        result = self._observer.call(self, partial(WithLoss.forward, self, inputs, targets))
        return self.forward(*later) if later else result


def capture(
    model: nn.Module,
    inputs: Inputs,
    targets: tuple[Tensor, ...] = (),
    loss: Loss | None = None,
    *,
    train: bool | None = None,
    fixed: bool = False,
) -> Graph:
    """Capture model and loss; the batch stays open if the model allows it and `fixed` does not forbid it.

    `train`: by default every submodule is captured in the mode it is in; True or False switches all of them, for this capture.
    """
    whole = WithLoss(model, loss)
    trains = train is not False
    if trains:
        refuse_hooks(whole)
    with preserve_attributes(whole):
        if train is not None:
            model.train(train)
        refuse_modules(whole)
        if fixed:
            return _captured(whole, inputs, targets, dynamic=False, trains=trains)
        try:
            return _captured(whole, inputs, targets, dynamic=True, trains=trains)
        except CaptureFailed as reason:
            try:
                return _captured(whole, inputs, targets, dynamic=False, trains=trains)
            except CaptureFailed:
                raise reason from None


def _captured(whole: WithLoss, inputs: Inputs, targets: tuple[Tensor, ...], *, dynamic: bool, trains: bool) -> Graph:
    seen = Observer(differentiated=trains)
    with preserve_attributes(whole):
        exported = _export(whole, inputs, targets, seen, dynamic=dynamic)
    name = type(whole.model).__name__
    seen.refuse(name)
    _refuse_state(whole, inputs, targets, seen, exported.constants.values(), dynamic=dynamic)
    batch = None if dynamic else batch_of(inputs)
    graph = _graph(whole, exported, inputs, targets, batch=batch, twice=seen.written_twice)
    trained = {p.name for p in graph.parameters if p.trainable}
    if trains and any(p.requires_grad for p in whole.parameters()) and not trained & graph.reached:
        raise CaptureFailed(
            f"the loss of {name} depends on no parameter that is trained, so that eager PyTorch's backward "
            "raises too; let it depend on one, or freeze them all"
        )
    keys = {p.name: p.key for p in graph.parameters}
    refuse_overlaps(whole, {f"model.{keys[name]}" for name, _ in graph.writes})
    return graph


def _refuse_state(
    whole: WithLoss, inputs: Inputs, targets: tuple[Tensor, ...], seen: Observer, constants: Any, *, dynamic: bool
) -> None:
    """Refuse attributes that carry something from one call of forward to the next: the captured program has none of them.

    Where one changed, two calls are traced, each with inputs of its own. A cache changes in the first call alone, what it
    holds does not depend on the first inputs, and both calls write the same buffers.
    """
    name, baked = type(whole.model).__name__, {id(tensor) for tensor in constants}
    remedy = "keep it in a registered buffer, or outside of forward"
    for key, tensor in seen.replaced.items():
        if id(tensor) in baked:
            raise CaptureFailed(f"{name} reads and replaces the tensor '{_shown(key)}' in forward; {remedy}")
    if not seen.changed:
        return
    again = Observer(differentiated=False)
    with preserve_attributes(whole):
        exported = _export(whole, inputs, targets, again, dynamic=dynamic, times=2)
    if again.written != seen.written:
        key = _shown(min(again.written ^ seen.written))
        raise CaptureFailed(f"{name} writes buffer '{key}' in its first call of forward alone; do that before training")
    if _reads_first_inputs(exported, len(pytree.tree_leaves((inputs, targets)))):
        changed = ", ".join(f"'{_shown(key)}'" for key in seen.changed[:3])
        raise CaptureFailed(f"{name} carries tensors from one call of forward to the next ({changed} changes); {remedy}")
    if again.changed:
        changed = _shown(again.changed[0])
        raise CaptureFailed(f"{name} changes '{changed}' in every call of forward, and capture would freeze it; {remedy}")


def _reads_first_inputs(exported: Any, count: int) -> bool:
    """Whether the result of the second of two calls depends on the inputs and targets of the first, so many tensors."""
    places = [n for n in exported.graph.nodes if n.op == "placeholder"]
    given = [n for n, s in zip(places, exported.graph_signature.input_specs, strict=True) if s.kind.name == "USER_INPUT"]
    left, seen = list(exported.graph.output_node().all_input_nodes), set()
    while left:
        node = left.pop()
        if node not in seen and not isinstance(node.meta.get("val"), (int, torch.SymInt)):  # all batches have the same size
            seen.add(node)
            left += node.all_input_nodes
    return bool(seen & set(given[:count]))


def _shown(key: str) -> str:
    return key.removeprefix("model.")


def _export(
    whole: WithLoss, inputs: Inputs, targets: tuple[Tensor, ...], observer: Observer, *, dynamic: bool, times: int = 1
) -> Any:
    batch = batch_of(inputs)
    device = next((p.device for p in whole.parameters()), torch.device("cpu"))

    def example(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise CaptureFailed(f"inputs must be tensors, got {type(tensor).__name__}; wrap other arguments in the factory")
        lead = (_EXAMPLE_BATCH,) if dynamic and _batched(tensor, batch) else tuple(tensor.shape[:1])
        return torch.zeros(lead + tuple(tensor.shape[1:]), dtype=tensor.dtype, device=device)

    dim = torch.export.Dim("batch", min=2, max=MOST_ON_GPU if device.type == "cuda" else MOST_BATCH)
    args = pytree.tree_map(example, (inputs, targets) * times)
    mine, theirs, *later = pytree.tree_map(
        lambda t: {0: dim} if dynamic and _batched(t, batch) else None, (inputs, targets) * times
    )
    shapes = (mine, theirs, tuple(later)) if later else (mine, theirs)
    observed = _Observed(whole, observer)
    try:
        with (
            warnings.catch_warnings(),
            _without_logs(),
            contextlib.redirect_stderr(io.StringIO()),
            lstm_by_shapes(),
            ConstantRanges(),
            observer.watching(),
        ):
            warnings.simplefilter("ignore")
            return torch.export.export(observed, args, dynamic_shapes=shapes if dynamic else None, strict=False)
    except CaptureFailed:
        raise
    except Exception as error:
        raise CaptureFailed(explained(whole.model, error)) from error


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Export logs and prints pages about a failure before it raises; the error we make of it says it in a line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _batched(tensor: Tensor, batch: int) -> bool:
    return tensor.dim() > 0 and int(tensor.shape[0]) == batch


def _graph(
    whole: WithLoss, exported: Any, inputs: Inputs, targets: tuple[Tensor, ...], *, batch: int | None, twice: set[str]
) -> Graph:
    builder, env = FxConverter(), {}
    state = {**dict(whole.named_parameters(remove_duplicate=False)), **dict(whole.named_buffers(remove_duplicate=False))}
    clash = {key.removeprefix("model.") for key in state if key.startswith("model.loss.")} & state.keys()
    if clash:
        raise CaptureFailed(f"model and loss both have a '{min(clash)}'; rename the model's submodule 'loss'")
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for key, tensor in state.items():
        kept = first.setdefault(id(tensor), key)
        if kept != key:
            aliases[key.removeprefix("model.")] = kept.removeprefix("model.")
    parameters: dict[str, Parameter] = {}
    by_key: dict[str, Ref] = {}
    user: list[str] = []
    persistent = set(whole.state_dict())
    places = [n for n in exported.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(places, exported.graph_signature.input_specs, strict=True):
        kind = spec.kind.name
        if kind in ("PARAMETER", "BUFFER"):
            tensor = state[spec.target]
            key = first[id(tensor)]
            if key not in by_key:
                by_key[key] = builder.add_value(node.name, node.meta["val"])
                parameters[node.name] = Parameter(
                    name=node.name,
                    key=key.removeprefix("model."),
                    trainable=kind == "PARAMETER" and tensor.requires_grad,
                    buffer=kind == "BUFFER",
                    persistent=key in persistent,
                )
                (builder.buffers if kind == "BUFFER" else builder.parameters).add(node.name)
            env[node] = by_key[key]
            builder.keys[by_key[key].name] = _shown(key)
        elif kind == "CONSTANT_TENSOR":
            env[node] = builder.add_constant(node.name, exported.constants[spec.target])
        elif isinstance(node.meta.get("val"), Tensor):
            env[node] = builder.add_value(node.name, node.meta["val"])
            user.append(node.name)
    loss, *outputs = builder.walk(exported.graph, exported.graph_module, env, "")
    if not isinstance(loss, Ref) or builder.values[loss.name].shape != ():
        raise CaptureFailed("the loss must be a scalar tensor; reduce it with mean() or sum()")
    _write_twice(builder, {by_key[key].name: _shown(key) for key in twice if key in by_key})
    count = len(pytree.tree_leaves(inputs))
    return Graph(
        values=builder.values,
        inputs=tuple(user[:count]),
        targets=tuple(user[count:]),
        parameters=tuple(parameters.values()),
        constants=tuple(builder.constants.values()),
        ops=_used(builder, loss.name, [o.name for o in outputs if isinstance(o, Ref)]),
        loss=loss.name,
        outputs=tuple(dict.fromkeys(o.name for o in outputs if isinstance(o, Ref))),
        writes=tuple(_last_writes(builder)),
        batch=batch,
        aliases=tuple(aliases.items()),
    )


def _write_twice(builder: FxConverter, buffers: Mapping[str, str]) -> None:
    """Buffers written inside torch.utils.checkpoint, which runs forward again for backward, are written twice, as eager does:
    running statistics move twice towards the same ones of the batch, a counter counts two."""
    left = dict(buffers)
    for k, op in enumerate(builder.ops):
        args = op.args
        if op.target.startswith(("aten.batch_norm", "aten.instance_norm")) and args[5] and set(op.operands) & set(buffers):
            if not set(op.operands) & set(left):
                raise CaptureFailed(
                    f"{op.path} updates statistics that torch.utils.checkpoint has updated already; leave the "
                    "checkpoint out and recompute by the plan"
                )
            builder.ops[k] = replace(op, args=(*args[:6], 1 - (1 - args[6]) ** 2, *args[7:]))
            for name in op.operands:
                left.pop(name, None)
        elif op.inplace == "aten.add_.Tensor" and op.operands == (op.operands[0],) and op.operands[0] in left:
            builder.ops[k] = replace(op, args=(args[0], 2 * args[1]))
            del left[op.operands[0]]
    for key in left.values():
        raise CaptureFailed(
            f"buffer '{key}' is written inside torch.utils.checkpoint, which runs that part of forward twice; "
            "leave the checkpoint out and recompute by the plan"
        )


def _last_writes(builder: FxConverter) -> list[tuple[str, str]]:
    """Each stored buffer and the value it holds after the step (chains of writes followed to their end)."""
    roots = [b for b in builder.writes if b not in set(builder.writes.values())]
    out = []
    for root in roots:
        value = root
        while value in builder.writes:
            value = builder.writes[value]
        out.append((root, value))
    return out


def _used(builder: FxConverter, loss: str, outputs: Sequence[str]) -> tuple[Op, ...]:
    """The ops whose results are used, in order."""
    wanted = {loss, *outputs, *builder.writes.values()}
    kept: list[Op] = []
    for op in reversed(builder.ops):
        if wanted & set(op.results):
            wanted.update(op.operands)
            kept.append(op)
    return tuple(reversed(kept))
