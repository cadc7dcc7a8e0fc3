"""The built-in networks are the published ones: parameters, work, meaning, export, and refusals that help."""

import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fourfold.models import MODELS, Example, describe

# The smallest forms worth running; also a record of what makes each network quick.
TINY: dict[str, dict[str, Any]] = {
    "alexnet": {"image": 95, "classes": 5, "width": 16, "channels": 4, "dropout": 0.0},
    "vgg16": {"image": 32, "classes": 5, "width": 16, "channels": 4, "dropout": 0.0},
    "vgg16-cifar": {"width": 16, "channels": 4},
    "resnet50": {"image": 64, "classes": 5, "width": 4, "blocks": "1-2-1-1"},
    "resnet152": {"image": 33, "classes": 5, "width": 4, "blocks": "1-1-2-1"},
    "cosmoflow": {"size": 16, "width": 4},
    "gnmt": {"layers": 6, "width": 8, "vocabulary": 17, "length": 5},
    "unet3d": {"size": 8, "width": 2, "depth": 3},
    "gpt2": {"layers": 2, "width": 12, "heads": 3, "vocabulary": 17, "length": 5},
}

# Arguments, parameters, source.
PUBLISHED: list[tuple[str, dict[str, Any], int, str]] = [
    ("alexnet", {}, 61_100_840, "torchvision AlexNet_Weights num_params"),
    ("vgg16", {}, 138_357_544, "torchvision VGG16_Weights num_params"),
    ("vgg16", {"norm": True}, 138_365_992, "torchvision VGG16_BN_Weights num_params"),
    (
        "vgg16-cifar",
        {},
        33_638_218,
        "Keras summary of VGG16(include_top, 32x32, 10 classes), widely reprinted",
    ),
    ("vgg16-cifar", {"norm": True}, 33_646_666, "the same with 2 x 4224 batch norm parameters"),
    ("resnet50", {}, 25_557_032, "torchvision ResNet50_Weights num_params"),
    ("resnet152", {}, 60_192_808, "torchvision ResNet152_Weights num_params"),
    ("cosmoflow", {}, 8_907_556, "MLPerf HPC v1.0 reference (mlcommons/hpc): 128^3 x 4, 32 to 512 filters"),
    (
        "gnmt",
        {"vocabulary": 32320},
        160_671_297,
        "MLPerf GNMT: its parameter shapes as listed in a submission's optimizer test",
    ),
    ("gpt2", {}, 124_439_808, "Hugging Face openai-community/gpt2, tied"),
]

# Multiply-adds of one 224-pixel image / 1e9: torchvision's `_ops`, which counts convolutions and linears.
PUBLISHED_WORK = {"alexnet": 0.714, "vgg16": 15.470, "resnet50": 4.089, "resnet152": 11.514}


class WithLoss(nn.Module):
    """Module and loss as one, the form that is captured."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.module = example.module
        self.loss = example.loss
        self.count = len(example.inputs)

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.loss(self.module(*tensors[: self.count]), *tensors[self.count :])


def build(name: str, *, batch: int = 3, device: str = "cpu", **arguments: Any) -> Example:
    torch.manual_seed(0)
    with torch.device(device):
        return MODELS[name](batch=batch, **arguments)


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "arguments", "count", "source"), PUBLISHED)
def test_parameter_count_is_the_published_one(name: str, arguments: dict[str, Any], count: int, source: str) -> None:
    assert parameters(build(name, device="meta", **arguments).module) == count, source


def test_unet3d_has_the_papers_parameters() -> None:
    """Cicek et al. 2016, section 2: 19069955, which leaves out the scales and shifts of the batch norms."""
    module = build("unet3d", device="meta", channels=3, bias=True).module
    norms = sum(parameters(layer) for layer in module.modules() if isinstance(layer, nn.BatchNorm3d))
    assert parameters(module) - norms == 19_069_955


@pytest.mark.parametrize("name", PUBLISHED_WORK)
def test_work_per_image_is_the_published_one(name: str) -> None:
    module, inputs, _, _ = build(name, batch=1, device="meta")
    with FlopCounterMode(display=False) as counter:
        module(*inputs)
    assert counter.get_total_flops() / 2e9 == pytest.approx(PUBLISHED_WORK[name], abs=0.001)


@pytest.mark.parametrize(("size", "blocks"), [(128, 5), (256, 6), (512, 7), (32, 3), (40, 4)])
def test_cosmoflow_pools_larger_volumes_more_often(size: int, blocks: int) -> None:
    module, inputs, _, _ = build("cosmoflow", batch=1, device="meta", size=size)
    assert sum(isinstance(layer, nn.Conv3d) for layer in module.modules()) == blocks
    assert module(*inputs).shape == (1, 4)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_tiny_form_and_a_description(name: str) -> None:
    assert name in TINY
    assert describe(name).endswith("parameters.")
    for parameter in inspect.signature(MODELS[name]).parameters.values():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.annotation is type(parameter.default)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_gives_a_finite_loss_and_a_gradient_for_every_parameter(name: str) -> None:
    module, inputs, targets, loss = build(name, **TINY[name])
    value = loss(module(*inputs), *targets)
    value.backward()
    assert value.shape == () and torch.isfinite(value)
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.count_nonzero(), key


@pytest.mark.parametrize("name", MODELS)
def test_the_batch_leads_every_tensor_and_the_data_repeats(name: str) -> None:
    one, two = build(name, **TINY[name]), build(name, **TINY[name])
    for tensor, again in zip(one.inputs + one.targets, two.inputs + two.targets, strict=True):
        assert tensor.shape[0] == 3 and torch.equal(tensor, again)
    assert pickle.loads(pickle.dumps(one.loss)) is one.loss


@pytest.mark.parametrize("name", MODELS)
def test_a_meta_build_has_the_same_shapes_and_no_data(name: str) -> None:
    real, meta = build(name, **TINY[name]), build(name, device="meta", **TINY[name])
    shapes = {key: (value.shape, value.dtype) for key, value in real.module.state_dict().items()}
    assert {key: (value.shape, value.dtype) for key, value in meta.module.state_dict().items()} == shapes
    tensors = [*meta.inputs, *meta.targets, *meta.module.state_dict().values()]
    assert all(tensor.is_meta for tensor in tensors)
    assert [x.shape for x in meta.inputs + meta.targets] == [x.shape for x in real.inputs + real.targets]


@pytest.mark.parametrize("name", MODELS)
def test_export_keeps_the_batch_dynamic(name: str) -> None:
    example = build(name, **TINY[name])
    tensors = example.inputs + example.targets
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(
            WithLoss(example), tensors, dynamic_shapes=(tuple({0: batch} for _ in tensors),), strict=False
        )
    for size in (1, 5):
        other = build(name, batch=size, **TINY[name])
        expected = other.loss(other.module(*other.inputs), *other.targets)
        actual = exported.module()(*other.inputs, *other.targets)
        torch.testing.assert_close(actual, expected)


def test_gpt2_looks_back_only() -> None:
    module, (ids,), _, _ = build("gpt2", **TINY["gpt2"])
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 17
    before, after = module(ids), module(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(2).all()


def test_gnmt_looks_back_in_the_target_and_everywhere_in_the_source() -> None:
    module, (source, target), _, _ = build("gnmt", **TINY["gnmt"])
    changed = target.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 17
    before, after = module(source, target), module(source, changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(2).all()
    changed = source.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 17
    assert (module(changed, target) != before).any(2).all()


def test_the_targets_of_a_language_model_are_its_next_tokens() -> None:
    _, (ids,), (following,), _ = build("gpt2", **TINY["gpt2"])
    assert torch.equal(ids[:, 1:], following[:, :-1])


def test_unet3d_gives_every_voxel_its_classes() -> None:
    module, (volumes,), _, _ = build("unet3d", **TINY["unet3d"])
    assert module(volumes).shape == (3, 3, 8, 8, 8)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "vgg16-cifar", "cosmoflow", "gnmt", "gpt2"])
def test_dropout_is_in_the_module_only_when_asked_for(name: str) -> None:
    for dropout in (0.0, 0.5):
        module, inputs, _, _ = build(name, **{**TINY[name], "dropout": dropout})
        assert torch.equal(module(*inputs), module(*inputs)) is (dropout == 0.0)
        assert any(isinstance(layer, nn.Dropout) for layer in module.modules()) is (dropout > 0.0)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("alexnet", {"image": 62}, "image is 62, the least is 63; use image=63 or more"),
        ("vgg16-cifar", {"image": 31}, "image is 31, the least is 32; use image=32 or more"),
        ("vgg16", {"dropout": 1.0}, "dropout is 1.0, outside 0 to 1 (excluded); use dropout=0 for none"),
        ("resnet50", {"batch": 0}, "batch is 0, the least is 1; use batch=1 or more"),
        ("resnet50", {"batch": 1, "image": 32}, "batch 1 of 32 pixels leaves 1 value per channel"),
        (
            "resnet50",
            {"blocks": "3-4-6"},
            "blocks is '3-4-6', not 4 positive numbers; use a form like 1-1-1-1",
        ),
        ("resnet152", {"blocks": "1-0-1-1"}, "blocks is '1-0-1-1', not 4 positive numbers"),
        ("cosmoflow", {"size": 4}, "size is 4, the least is 8; use size=8 or more"),
        ("gnmt", {"layers": 2}, "layers is 2, the least is 4; use layers=4 or more"),
        ("gnmt", {"layers": 7}, "layers is 7, not a multiple of 2 (half encode, half decode); use layers=8"),
        ("unet3d", {"size": 30}, "size is 30, not a multiple of 8 (3 poolings by 2); use size=32"),
        ("unet3d", {"size": 8, "batch": 1}, "batch 1 of size 8 leaves 1 value per channel"),
        ("gpt2", {"width": 100}, "width is 100, not a multiple of 12 (heads of equal width); use width=96"),
    ],
)
def test_bad_arguments_are_refused_with_the_remedy(name: str, arguments: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError) as refusal:
        MODELS[name](**arguments)
    assert message in str(refusal.value)
