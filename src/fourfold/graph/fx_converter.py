"""From an exported torch.fx graph to ops of a `Graph`: in-place ops become functional ones, symbolic sizes `Size`s; nested
graphs are inlined, assertions dropped, and in-place writes to memory that another tensor shares are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fourfold.errors import CaptureFailed
from fourfold.graph.export_errors import users_line
from fourfold.graph.spec import Constant, Device, Dtype, Op, Ref, Size, TensorSpec

_DROPPED = ("aten._assert", "aten.sym_constrain", "aten._assert_tensor_metadata")


class FxConverter:
    """Collects values and ops while walking the exported graph."""

    def __init__(self) -> None:
        self.values: dict[str, TensorSpec] = {}
        self.ops: list[Op] = []
        self.constants: dict[str, Constant] = {}
        self.writes: dict[str, str] = {}
        self.buffers: set[str] = set()
        self.parameters: set[str] = set()
        self.keys: dict[str, str] = {}  # of parameters and buffers, as users know them
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
                try:
                    env[node] = self._call(owner, node, env, prefix)
                except CaptureFailed as error:
                    line = users_line(str(node.meta.get("stack_trace", "")))
                    raise error if line in str(error) else CaptureFailed(f"{error}{line}") from None
            elif node.op == "output":
                return self._literal(node.args[0], env)
        raise CaptureFailed("the exported graph has no output")

    def _attribute(self, owner: nn.Module, node: torch.fx.Node, prefix: str) -> Any:
        value = operator.attrgetter(str(node.target))(owner)
        return self.add_constant(prefix + node.name, value) if isinstance(value, Tensor) else value

    def add_constant(self, name: str, value: Tensor) -> Ref:
        if value.is_meta or type(value).__name__ == "FakeTensor":
            raise CaptureFailed(f"constant {name} has no data; build the model on a real device or register it as a buffer")
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise CaptureFailed(f"{name} is a tensor of a torch.func transform; use plain tensor ops there")
        if type(value) not in (Tensor, nn.Parameter):
            raise CaptureFailed(f"{name} is a {type(value).__name__}, which has no plain data; use a torch.Tensor there")
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
        if not isinstance(node.target, torch._ops.OpOverload):
            what = getattr(node.target, "__name__", target)
            raise CaptureFailed(f"{what} of a torch.func transform (vmap, grad) is not supported; use plain tensor ops there")
        return self._op(node, target, env, prefix)

    def _inline(self, owner: nn.Module, node: torch.fx.Node, env: dict[torch.fx.Node, Any], prefix: str) -> Any:
        name = str(node.target)
        body_at = next((i for i, a in enumerate(node.args) if isinstance(a, torch.fx.Node) and a.op == "get_attr"), None)
        if body_at is None or "wrap" not in name:
            raise CaptureFailed(f"the higher-order op {name} is not supported; write this part with plain tensor ops")
        if "autocast" in name and node.args[2]:
            dtype = str(node.args[1]).removeprefix("torch.")
            raise CaptureFailed(
                f"forward enters torch.autocast({node.args[0]!r}, dtype={dtype}), which capture cannot "
                "carry; leave it out and choose a --precision, or cast by .to(dtype)"
            )
        body = env[node.args[body_at]]  # type: ignore[index]
        inner: dict[torch.fx.Node, Any] = {}
        places = [n for n in body.graph.nodes if n.op == "placeholder"]
        for place, argument in zip(places, node.args[body_at + 1 :], strict=True):
            inner[place] = self._literal(argument, env)
        before = dict(inner)
        result = self.walk(body.graph, body, inner, f"{prefix}{node.name}_")
        for place, value in before.items():
            if isinstance(value, Ref) and inner[place] != value:  # written in place inside
                _rebind(env, value, inner[place])
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
        if overload._schema.is_mutable and isinstance(kwargs.get("out"), Ref):
            mutated = kwargs.pop("out").name
            overload, target = _without_out(overload, target)
        elif overload._schema.is_mutable:
            if not target.split(".")[1].endswith("_"):
                raise CaptureFailed(f"{target} writes into its arguments; use the functional op there")
            mutated = args[0].name
            overload, target = _functional(overload, target)
        args, kwargs = _without_formats(node, args, kwargs)
        if target.startswith("aten.new_"):  # only dtype and device come from the operand: a plain creation
            target, args, kwargs = self._creation(target, args, kwargs)
        if target.startswith("aten.type_as") or target == "aten.to.other":  # the other operand lends its dtype only
            target, args, kwargs = "aten.to.dtype", (args[0], Dtype(self.values[args[1].name].dtype)), {}
        if target == "aten.embedding.default":  # a dense gradient has the same numbers as a sparse one
            args, kwargs = (*args[:4], *(False for _ in args[4:])), {k: v for k, v in kwargs.items() if k != "sparse"}
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
            inplace=str(node.target) if mutated is not None and target.split(".")[1] + "_" in str(node.target) else "",
            random=torch.Tag.nondeterministic_seeded in overload.tags,
        )
        self._check_storage(op, overload, mutated)
        self.ops.append(op)
        if mutated is not None:
            _rebind(env, Ref(mutated), out[0])
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
                raise CaptureFailed(f"forward changes parameter '{self._key(base)}' in place; do that outside of the model")
            if base in self.buffers and base != mutated:
                raise CaptureFailed(f"forward writes into a part of buffer '{self._key(base)}'; write the whole buffer")
            if base in self.buffers:
                self.writes[base] = op.results[0]
                self.buffers.add(op.results[0])
                self.base[op.results[0]] = op.results[0]
            else:
                self.stale[base] = op.path
        elif op.operands and any(r.alias_info is not None for r in overload._schema.returns):
            for result in op.results:
                self.base[result] = self.base.get(op.operands[0], op.operands[0])

    def _key(self, name: str) -> str:
        """How users know a parameter or buffer, also after it was written."""
        while name not in self.keys and name in self.writes.values():
            name = next(base for base, value in self.writes.items() if value == name)
        return self.keys.get(name, name)

    def _literal(self, value: Any, env: dict[torch.fx.Node, Any]) -> Any:
        if isinstance(value, torch.fx.Node):
            if value not in env:
                raise CaptureFailed(f"forward uses {value.name}, which is no tensor (a torch.Generator?); pass tensors alone")
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


def _rebind(env: dict[torch.fx.Node, Any], old: Ref, new: Any) -> None:
    """Whoever read a tensor that was written in place reads the new value from then on."""
    for key, current in env.items():
        if current == old:
            env[key] = new


def _without_formats(node: torch.fx.Node, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments without memory formats, which change no number; split programs lay tensors out themselves."""
    last = len(args) - 1 if args and isinstance(node.args[-1], torch.memory_format) else len(args)
    return args[:last], {k: v for k, v in kwargs.items() if not isinstance(node.kwargs.get(k), torch.memory_format)}


def _without_out(overload: Any, target: str) -> tuple[Any, str]:
    """The overload that takes the same arguments and returns what this one writes into `out`."""
    library, name, _ = target.split(".")
    packet = getattr(getattr(torch.ops, library), name)
    wanted = [(a.name, str(a.type)) for a in overload._schema.arguments if a.name != "out"]
    for variant in packet.overloads():
        found = getattr(packet, variant)
        if not found._schema.is_mutable and [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return found, f"{library}.{name}.{variant}"
    raise CaptureFailed(f"{target} writes into its argument and has no functional form; write it without out=")


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
