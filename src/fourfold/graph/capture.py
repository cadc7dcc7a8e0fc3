"""From an `nn.Module` and its loss to a `Graph`, by torch.export: the only file of this room that knows torch.

Non-strict export in train mode with a dynamic batch dim; where a model fixes its batch size, a static capture instead. The
result is kept as high-level as torch.export leaves it. Changed here, and nothing else: in-place ops become functional,
symbolic sizes become `Size`, regions under `set_grad_enabled` and `autocast` are inlined, assertions are dropped.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fourfold.errors import CaptureFailed
from fourfold.graph.spec import Constant, Device, Dtype, Graph, Op, Parameter, Ref, Size, TensorSpec

Loss = Callable[..., Tensor]
Inputs = tuple[Tensor, ...] | Mapping[str, Tensor]

_EXAMPLE_BATCH = 4
_DROPPED = ("aten._assert", "aten.sym_constrain", "aten._assert_tensor_metadata")


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


def capture(
    model: nn.Module,
    inputs: Inputs,
    targets: tuple[Tensor, ...] = (),
    loss: Loss | None = None,
    *,
    train: bool = True,
    fixed: bool = False,
) -> Graph:
    """Capture model and loss; the batch stays open if the model allows it and `fixed` does not forbid it."""
    whole = WithLoss(model, loss)
    modes = [(module, module.training) for module in model.modules()]
    model.train(train)
    try:
        if fixed:
            return _graph(whole, _export(whole, inputs, targets, dynamic=False), inputs, targets, batch=batch_of(inputs))
        try:
            return _graph(whole, _export(whole, inputs, targets, dynamic=True), inputs, targets, batch=None)
        except CaptureFailed as reason:
            try:
                exported = _export(whole, inputs, targets, dynamic=False)
            except CaptureFailed:
                raise reason from None
            return _graph(whole, exported, inputs, targets, batch=batch_of(inputs))
    finally:
        for module, mode in modes:
            module.training = mode


def _export(whole: WithLoss, inputs: Inputs, targets: tuple[Tensor, ...], *, dynamic: bool) -> Any:
    batch = batch_of(inputs)
    device = next((p.device for p in whole.parameters()), torch.device("cpu"))

    def example(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise CaptureFailed(f"inputs must be tensors, got {type(tensor).__name__}; wrap other arguments in the factory")
        lead = (_EXAMPLE_BATCH,) if dynamic and _batched(tensor, batch) else tuple(tensor.shape[:1])
        return torch.zeros(lead + tuple(tensor.shape[1:]), dtype=tensor.dtype, device=device)

    dim = torch.export.Dim("batch", min=2, max=1 << 40)
    args = pytree.tree_map(example, (inputs, targets))
    shapes = pytree.tree_map(lambda t: {0: dim} if dynamic and _batched(t, batch) else None, (inputs, targets))
    try:
        with warnings.catch_warnings(), _without_logs(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return torch.export.export(whole, args, dynamic_shapes=shapes if dynamic else None, strict=False)
    except Exception as error:
        raise CaptureFailed(_explained(whole.model, error)) from error


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


def _explained(model: nn.Module, error: Exception) -> str:
    """One line: what failed, at which line of the user's code, and what to do about it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename and __file__ != f.filename]
    frames = [f for f in frames if "contextlib" not in f.filename and "fourfold" not in f.filename] or frames
    frames = [f for f in frames if f.line]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} `{frames[-1].line}`" if frames else ""
    reason = " ".join((str(error).strip() or type(error).__name__).split())[:200]
    hint = "avoid .item(), data-dependent control flow and Python side effects in forward"
    return f"{type(model).__name__} cannot be exported{where}: {reason}; {hint}"


class _Builder:
    """Collects values and ops while walking the exported graph."""

    def __init__(self) -> None:
        self.values: dict[str, TensorSpec] = {}
        self.ops: list[Op] = []
        self.constants: dict[str, Constant] = {}
        self.writes: dict[str, str] = {}
        self.buffers: set[str] = set()
        self.parameters: set[str] = set()
        self.base: dict[str, str] = {}  # a view's storage owner
        self.stale: dict[str, str] = {}  # storage owner -> the in-place op that overwrote it

    def add_value(self, name: str, value: Tensor) -> Ref:
        self.values[name] = TensorSpec(tuple(_size(s) for s in value.shape), str(value.dtype).removeprefix("torch."))
        return Ref(name)

    def walk(self, graph: torch.fx.Graph, owner: nn.Module, env: dict[torch.fx.Node, Any], prefix: str) -> Any:
        """Visit a graph whose placeholders are bound in `env`; the result is its output literal."""
        for node in graph.nodes:
            if node.op == "get_attr":
                env[node] = self._attribute(owner, node, prefix)
            elif node.op == "call_function":
                env[node] = self._call(owner, node, env, prefix)
            elif node.op == "output":
                return self._literal(node.args[0], env)
        raise CaptureFailed("the exported graph has no output")

    def _attribute(self, owner: nn.Module, node: torch.fx.Node, prefix: str) -> Any:
        value = operator.attrgetter(str(node.target))(owner)
        return self.add_constant(prefix + node.name, value) if isinstance(value, Tensor) else value

    def add_constant(self, name: str, value: Tensor) -> Ref:
        if value.is_meta or type(value).__name__ == "FakeTensor":
            raise CaptureFailed(f"constant {name} has no data; build the model on a real device or register it as a buffer")
        flat = value.detach().cpu().contiguous().reshape(-1)
        self.constants[name] = Constant(name=name, data=bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
        return self.add_value(name, value)

    def _call(self, owner: nn.Module, node: torch.fx.Node, env: dict[torch.fx.Node, Any], prefix: str) -> Any:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            return _size(value)
        if isinstance(value, (torch.SymFloat, torch.SymBool, float, bool)) and node.target is not operator.getitem:
            raise CaptureFailed(f"{node.name} depends on the batch size in a way that is not affine; fix the batch size")
        if node.target is operator.getitem:
            return self._literal(node.args[0], env)[node.args[1]]
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._inline(owner, node, env, prefix)
        target = str(node.target)
        if target.startswith(_DROPPED):
            return None
        return self._op(node, target, env, prefix)

    def _inline(self, owner: nn.Module, node: torch.fx.Node, env: dict[torch.fx.Node, Any], prefix: str) -> Any:
        name = str(node.target)
        body_at = next((i for i, a in enumerate(node.args) if isinstance(a, torch.fx.Node) and a.op == "get_attr"), None)
        if body_at is None or "wrap" not in name:
            raise CaptureFailed(f"the higher-order op {name} is not supported; write this part with plain tensor ops")
        body = env[node.args[body_at]]  # type: ignore[index]
        inner: dict[torch.fx.Node, Any] = {}
        places = [n for n in body.graph.nodes if n.op == "placeholder"]
        for place, argument in zip(places, node.args[body_at + 1 :], strict=True):
            inner[place] = self._literal(argument, env)
        result = self.walk(body.graph, body, inner, f"{prefix}{node.name}_")
        if "grad" in name and node.args[0] is False:
            return tuple(self._detached(r) for r in result)
        return result

    def _detached(self, ref: Any) -> Any:
        if not isinstance(ref, Ref):
            return ref
        name = f"{ref.name}_detached"
        self.values[name] = self.values[ref.name]
        self.ops.append(
            Op(name=name, target="aten.detach.default", args=(ref,), kwargs={}, results=(name,), module="", pointwise=True)
        )
        return Ref(name)

    def _op(self, node: torch.fx.Node, target: str, env: dict[torch.fx.Node, Any], prefix: str) -> Any:
        overload: Any = node.target
        args, kwargs = self._literal(node.args, env), self._literal(node.kwargs, env)
        mutated: str | None = None
        if overload._schema.is_mutable:
            if not target.split(".")[1].endswith("_"):
                raise CaptureFailed(f"{target} writes into its arguments; use the functional op there")
            mutated = args[0].name
            overload, target = _functional(overload, target)
        if target.startswith("aten.new_"):  # only dtype and device come from the operand: a plain creation
            target, args, kwargs = self._creation(target, args, kwargs)
        if target.startswith("aten.type_as") or target == "aten.to.other":  # the other operand lends its dtype only
            target, args, kwargs = "aten.to.dtype", (args[0], Dtype(self.values[args[1].name].dtype)), {}
        name = prefix + node.name
        leaves = [v for v in pytree.tree_leaves(node.meta.get("val"))]
        many = isinstance(node.meta.get("val"), (tuple, list))
        results = tuple(f"{name}.{i}" if many else name for i in range(len(leaves)))
        out = tuple(self.add_value(r, v) for r, v in zip(results, leaves, strict=True))
        op = Op(
            name=name,
            target=target,
            args=args,
            kwargs=kwargs,
            results=results,
            module=_module_path(node),
            pointwise=torch.Tag.pointwise in overload.tags,
            inplace=str(node.target) if mutated is not None else "",
            random=torch.Tag.nondeterministic_seeded in overload.tags,
        )
        self._check_storage(op, overload, mutated)
        self.ops.append(op)
        if mutated is not None:
            for key, current in env.items():
                if isinstance(current, Ref) and current.name == mutated:
                    env[key] = out[0]
        return out if many else out[0]

    def _creation(self, target: str, args: Any, kwargs: Any) -> tuple[str, Any, Any]:
        source, size, *rest = args
        kind = target.split(".")[1].removeprefix("new_")
        fill = {"zeros": 0, "ones": 1, "empty": 0}.get(kind, rest[0] if rest else kwargs.get("fill_value", 0))
        dtype = kwargs.get("dtype") or Dtype(self.values[source.name].dtype)
        return "aten.full.default", (size, fill), {"dtype": dtype, "device": Device()}

    def _check_storage(self, op: Op, overload: Any, mutated: str | None) -> None:
        """Refuse a read of a tensor whose storage an in-place op has changed behind its back."""
        for operand in op.operands:
            writer = self.stale.get(self.base.get(operand, operand))
            if writer is not None and not (operand == mutated):
                raise CaptureFailed(f"{op.path} reads a view that {writer} changed in place; use the functional op there")
        if mutated is not None:
            base = self.base.get(mutated, mutated)
            if base in self.parameters:
                raise CaptureFailed(f"{op.path} changes parameter {base} in place in forward; do that outside the model")
            if base in self.buffers and base != mutated:
                raise CaptureFailed(f"{op.path} writes into a part of buffer {base}; write the whole buffer")
            if base in self.buffers:
                self.writes[base] = op.results[0]
                self.buffers.add(op.results[0])
                self.base[op.results[0]] = op.results[0]
            else:
                self.stale[base] = op.path
        elif op.operands and any(r.alias_info is not None for r in overload._schema.returns):
            for result in op.results:
                self.base[result] = self.base.get(op.operands[0], op.operands[0])

    def _literal(self, value: Any, env: dict[torch.fx.Node, Any]) -> Any:
        if isinstance(value, torch.fx.Node):
            return env[value]
        if isinstance(value, (tuple, list)):
            return tuple(self._literal(v, env) for v in value)
        if isinstance(value, Mapping):
            return {str(k): self._literal(v, env) for k, v in value.items()}
        if isinstance(value, torch.dtype):
            return Dtype(str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return Device()
        if isinstance(value, (torch.layout, torch.memory_format)):
            return None
        if isinstance(value, torch.SymInt):
            return _size(value)
        if value is None or isinstance(value, (int, float, bool, str, complex)):
            return value
        raise CaptureFailed(f"argument {value!r} of type {type(value).__name__} is not supported")


def _graph(whole: WithLoss, exported: Any, inputs: Inputs, targets: tuple[Tensor, ...], *, batch: int | None) -> Graph:
    builder, env = _Builder(), {}
    state = {**dict(whole.named_parameters(remove_duplicate=False)), **dict(whole.named_buffers(remove_duplicate=False))}
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
        elif kind == "CONSTANT_TENSOR":
            env[node] = builder.add_constant(node.name, exported.constants[spec.target])
        elif isinstance(node.meta.get("val"), Tensor):
            env[node] = builder.add_value(node.name, node.meta["val"])
            user.append(node.name)
    loss, *outputs = builder.walk(exported.graph, exported.graph_module, env, "")
    if not isinstance(loss, Ref) or builder.values[loss.name].shape != ():
        raise CaptureFailed("the loss must be a scalar tensor; reduce it with mean() or sum()")
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


def _last_writes(builder: _Builder) -> list[tuple[str, str]]:
    """Each stored buffer and the value it holds after the step (chains of writes followed to their end)."""
    roots = [b for b in builder.writes if b not in set(builder.writes.values())]
    out = []
    for root in roots:
        value = root
        while value in builder.writes:
            value = builder.writes[value]
        out.append((root, value))
    return out


def _used(builder: _Builder, loss: str, outputs: Sequence[str]) -> tuple[Op, ...]:
    """The ops whose results are used, in order."""
    wanted = {loss, *outputs, *builder.writes.values()}
    kept: list[Op] = []
    for op in reversed(builder.ops):
        if wanted & set(op.results):
            wanted.update(op.operands)
            kept.append(op)
    return tuple(reversed(kept))


def _functional(overload: Any, target: str) -> tuple[Any, str]:
    """The functional twin of an in-place overload."""
    _, name, variant = target.split(".")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    twin = getattr(packet, variant, None) if packet is not None else None
    if twin is None:
        raise CaptureFailed(f"the in-place op {target} has no functional form; write it without the in-place call")
    return twin, f"aten.{name.removesuffix('_')}.{variant}"


def _module_path(node: torch.fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = str(stack[-1][0]) if stack else ""
    if "hook" in path:
        path = ""
    return path.removeprefix("model").removeprefix(".").split("@")[0]


def _size(value: Any) -> Any:
    """An int, or the affine `Size` of a symbolic one."""
    if isinstance(value, int):
        return value
    expression = value.node.expr
    if expression.is_number:
        return int(expression)
    (symbol,) = expression.free_symbols
    const = expression.subs(symbol, 0)
    coef = expression.subs(symbol, 1) - const
    if (expression - (coef * symbol + const)).expand() != 0 or not (coef.is_integer and const.is_integer):
        raise CaptureFailed(f"size {expression} is not affine in the batch; the batch size has to be fixed")
    return Size(int(coef), int(const))
