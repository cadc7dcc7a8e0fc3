"""A graph under autocast has the dtypes that autocast really uses, and its casts as ops."""

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fourfold.api.settings import priced_graph, setting_of
from fourfold.graph import Device, Dtype, Ref
from fourfold.graph.autocast import under_autocast
from fourfold.graph.capture import capture
from fourfold.graph.spec import map_leaves
from fourfold.models import MODELS
from fourfold.plans import lower_plan, named
from fourfold.runtime.kernels.base import overload

SMALL = {
    "alexnet": {"image": 64, "width": 32, "channels": 4},
    "resnet50": {"image": 33, "width": 4, "blocks": "1-1-1-1"},
    "unet3d": {"size": 8, "width": 2},
    "cosmoflow": {"size": 8, "width": 2},
    "gpt2": {"layers": 1, "width": 16, "heads": 2, "length": 8, "vocabulary": 30},
}


@cache
def captured(name: str):
    with torch.device("meta"):
        return capture(*MODELS[name](**SMALL.get(name, {}), batch=2))


def observed(graph, device: str) -> dict[str, str]:
    """The dtype of every value when the plain graph runs op by op under real autocast."""
    concrete = graph.at(2)
    found = {n: torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device=device) for n, s in concrete.values.items()}
    with torch.autocast(device, torch.bfloat16):
        for op in concrete.ops:
            if op.target.startswith("aten.arange"):
                continue
            it = iter(found[name] for name in op.operands)
            result = overload(op.target)(*filled(op.args, it, device), **filled(dict(op.kwargs), it, device))
            found.update(zip(op.results, result if isinstance(result, (tuple, list)) else (result,), strict=True))
    return {name: str(t.dtype).removeprefix("torch.") for name, t in found.items()}


def filled(value, tensors, device: str):
    def leaf(item):
        if isinstance(item, Ref):
            return next(tensors)
        return (
            getattr(torch, item.name) if isinstance(item, Dtype) else torch.device(device) if isinstance(item, Device) else item
        )

    return map_leaves(value, leaf)


@pytest.mark.parametrize("name", SMALL)
def test_every_value_has_the_dtype_autocast_gives_it(name: str) -> None:
    graph = captured(name)
    cast = under_autocast(graph, device="cpu")
    assert {n: cast.values[n].dtype for n in graph.values} == observed(graph, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, "gnmt"])
def test_every_value_has_the_dtype_autocast_gives_it_on_a_gpu(name: str) -> None:
    graph = captured(name)
    cast = under_autocast(graph, device="cuda")
    assert {n: cast.values[n].dtype for n in graph.values} == observed(graph, "cuda")


def test_on_a_gpu_that_is_not_there_norms_of_rows_and_losses_are_in_float32() -> None:
    cast = under_autocast(captured("gpt2"), device="cuda")
    taken = {op.target.split(".")[1]: [cast.values[n].dtype for n in op.operands] for op in cast.ops}
    assert taken["layer_norm"] == ["float32"] * 3
    assert taken["linear"] == ["bfloat16"] * len(taken["linear"])
    assert taken["scaled_dot_product_attention"] == ["bfloat16"] * 3
    assert taken["cross_entropy_loss"][0] == "bfloat16"  # it casts its own logarithms inside
    assert cast.values[cast.loss].dtype == "float32"


def test_batch_norm_takes_half_precision_with_float32_weights() -> None:
    cast = under_autocast(captured("resnet50"), device="cuda")
    norm = next(op for op in cast.ops if "batch_norm" in op.target)
    assert [cast.values[n].dtype for n in norm.operands] == ["bfloat16"] + ["float32"] * 4
    assert cast.values[norm.results[0]].dtype == "bfloat16"


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + F.linear(x, self.weight)


def test_a_weight_is_cast_once_and_an_activation_at_each_use() -> None:
    cast = under_autocast(capture(Twice(), (torch.zeros(2, 4),)), device="cuda")
    casts = Counter(op.operands[0] for op in cast.ops if op.target == "aten._to_copy.default")
    weight = next(p.name for p in cast.parameters)
    assert (casts[weight], casts[cast.inputs[0]]) == (1, 2)


def test_casts_change_neither_the_other_ops_nor_shapes() -> None:
    graph = captured("resnet50")
    cast = under_autocast(graph)
    assert [op.name for op in cast.ops if op.target != "aten._to_copy.default"] == [op.name for op in graph.ops]
    assert all(cast.values[name].shape == spec.shape for name, spec in graph.values.items())
    assert lower_plan(cast, named("data", cast, ranks=2, batch=4)).parts


def test_predictions_in_bf16_are_of_the_graph_with_its_casts() -> None:
    graph = captured("gpt2")
    told = priced_graph(graph, setting_of("dgx-h200", 1, precision="bf16"))
    assert any(op.target == "aten._to_copy.default" for op in told.ops)
    assert priced_graph(graph, setting_of("dgx-h200", 1, precision="tf32")) is graph
    assert priced_graph(graph, setting_of("dgx-h200", 1, precision="bf16", cost_model="paradl")) is graph


def test_autocast_is_off_again_afterwards() -> None:
    under_autocast(captured("cosmoflow"), device="cpu")
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
