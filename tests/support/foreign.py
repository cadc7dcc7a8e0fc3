"""Models nobody here wrote, as factories: `fourfold verify tests/support/foreign.py:bert --strategy filter --ranks 2`.

Built from `monai` and `transformers` config classes with random weights, so nothing is downloaded. The default sizes
suit tests; the arguments reach the published ones. Each module takes tensors and returns logits.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fourfold.models.example import Example, class_loss, integers, normal, token_loss

DEVIATION = 0.1  # of the initial weights: large enough that a small model's gradients are not all but zero


class Logits(nn.Module):
    """A `transformers` model as a function of tensors: keyword names for the inputs, logits for the answer."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *tensors: Tensor) -> Tensor:
        """The logits for these inputs."""
        logits: Tensor = self.model(**dict(zip(self.names, tensors, strict=True))).logits
        return logits


def _wrapped(kind: str, config: Any, *names: str, **settings: Any) -> Logits:
    import transformers

    config.initializer_range = DEVIATION
    auto = getattr(transformers, kind)
    return Logits(auto.from_config(config, **settings), names)


def _picture_classes(kind: str, config: Any, batch: int, image: int) -> Example:
    module = _wrapped(kind, config, "pixel_values")
    pictures, labels = normal(batch, 3, image, image, seed=0), integers(batch, below=config.num_labels, seed=1)
    return Example(module, (pictures,), (labels,), class_loss)


def _volume(module: nn.Module, batch: int, size: int, classes: int) -> Example:
    volume, labels = normal(batch, 1, size, size, size, seed=0), integers(batch, size, size, size, below=classes, seed=1)
    return Example(module, (volume,), (labels,), class_loss)


def monai_unet(*, batch: int = 2, size: int = 16, width: int = 4, units: int = 2, dropout: float = 0.0) -> Example:
    """MONAI's 3-D U-Net: strided convolutions, residual units, instance norm, PReLU, transposed convolutions."""
    from monai.networks.nets import UNet

    channels = (width, 2 * width, 4 * width)
    module = UNet(3, 1, 3, channels=channels, strides=(2, 2), num_res_units=units, dropout=dropout)
    return _volume(module, batch, size, 3)


def monai_basic_unet(*, batch: int = 2, size: int = 32, width: int = 4, dropout: float = 0.0) -> Example:
    """MONAI's BasicUNet in 3-D: two convolutions per level, affine instance norm, four poolings."""
    from monai.networks.nets import BasicUNet

    features = (width, width, 2 * width, 4 * width, 8 * width, width)
    return _volume(BasicUNet(3, 1, 3, features=features, dropout=dropout), batch, size, 3)


def monai_segresnet(*, batch: int = 2, size: int = 16, width: int = 8, dropout: float = 0.0) -> Example:
    """MONAI's SegResNet in 3-D: group norm, residual blocks, trilinear upsampling."""
    from monai.networks.nets import SegResNet

    module = SegResNet(3, init_filters=width, in_channels=1, out_channels=3, dropout_prob=dropout or None)
    return _volume(module, batch, size, 3)


def resnet(*, batch: int = 4, image: int = 64, width: int = 8, depths: int = 1, classes: int = 10) -> Example:
    """transformers' ResNet of bottleneck blocks; `depths=50` is ResNet-50."""
    from transformers import ResNetConfig

    blocks = [3, 4, 6, 3] if depths == 50 else [depths] * 4
    sizes = [4 * width * 2**i for i in range(4)]
    config = ResNetConfig(embedding_size=width, hidden_sizes=sizes, depths=blocks, num_labels=classes)
    return _picture_classes("AutoModelForImageClassification", config, batch, image)


def convnext(
    *, batch: int = 4, image: int = 64, width: int = 8, depth: int = 1, classes: int = 10, drop_path: float = 0.0
) -> Example:
    """ConvNeXt: depthwise convolutions, layer norm over channels, layer scale, drop path."""
    from transformers import ConvNextConfig

    depths = [depth, depth, 3 * depth, depth]
    sizes = [width * 2**i for i in range(4)]
    config = ConvNextConfig(
        hidden_sizes=sizes, depths=depths, num_labels=classes, drop_path_rate=drop_path, image_size=image,
        layer_scale_init_value=0.5,
    )  # fmt: skip
    return _picture_classes("AutoModelForImageClassification", config, batch, image)


def vit(
    *, batch: int = 4, image: int = 32, patch: int = 8, width: int = 32, layers: int = 2, heads: int = 4, classes: int = 10,
    dropout: float = 0.0,
) -> Example:  # fmt: skip
    """ViT: a class token before the patches, whose answer is read at the end."""
    from transformers import ViTConfig

    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width, image_size=image,
        patch_size=patch, num_labels=classes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return _picture_classes("AutoModelForImageClassification", config, batch, image)


def swin(
    *, batch: int = 4, image: int = 32, patch: int = 2, width: int = 16, window: int = 4, depth: int = 2, classes: int = 10,
    drop_path: float = 0.0,
) -> Example:  # fmt: skip
    """Swin: attention in windows, shifted by rolls, and patches merged between stages; `depth=6` is Swin-T."""
    from transformers import SwinConfig

    depths, heads = ([2, 2, 6, 2], [3, 6, 12, 24]) if depth == 6 else ([depth, depth], [2, 4])
    config = SwinConfig(
        image_size=image, patch_size=patch, embed_dim=width, depths=depths, num_heads=heads, window_size=window,
        num_labels=classes, drop_path_rate=drop_path,
    )  # fmt: skip
    return _picture_classes("AutoModelForImageClassification", config, batch, image)


def segformer(*, batch: int = 2, image: int = 64, width: int = 8, depth: int = 1, classes: int = 5) -> Example:
    """SegFormer: attention with reduced keys, depthwise convolutions between, an all-MLP head; logits at a quarter."""
    from transformers import SegformerConfig

    config = SegformerConfig(
        hidden_sizes=[width, 2 * width, 4 * width, 4 * width], depths=[depth] * 4, num_attention_heads=[1, 2, 4, 4],
        decoder_hidden_size=2 * width, num_labels=classes, drop_path_rate=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    module = _wrapped("AutoModelForSemanticSegmentation", config, "pixel_values")
    labels = integers(batch, image // 4, image // 4, below=classes, seed=1)
    return Example(module, (normal(batch, 3, image, image, seed=0),), (labels,), class_loss)


def bert(
    *, batch: int = 4, length: int = 16, width: int = 32, layers: int = 2, heads: int = 4, vocabulary: int = 120,
    dropout: float = 0.0, padded: int = 0, eager: int = 0,
) -> Example:  # fmt: skip
    """BERT for masked tokens, with an attention mask: all ones, or with `padded` every sample a little shorter."""
    from transformers import BertConfig

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=max(length, 32), hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    module = _wrapped("AutoModelForMaskedLM", config, "input_ids", "attention_mask", attn_implementation=_attention(eager))
    ids = integers(batch, length, below=vocabulary, seed=0)
    labels = integers(batch, length, below=vocabulary, seed=1)
    lengths = length - (torch.arange(batch) % length if padded else torch.zeros(batch, dtype=torch.int64))
    mask = (torch.arange(length) < lengths[:, None]).to(torch.int64)
    return Example(module, (ids, mask), (labels,), token_loss)


def gpt2(
    *, batch: int = 4, length: int = 16, width: int = 32, layers: int = 2, heads: int = 4, vocabulary: int = 120,
    dropout: float = 0.0, eager: int = 0,
) -> Example:  # fmt: skip
    """GPT-2: fused projections as transposed `addmm`, tied embeddings."""
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, n_positions=length, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    return _causal(config, batch, length, eager)


def llama(
    *, batch: int = 4, length: int = 16, width: int = 32, layers: int = 2, heads: int = 4, shared: int = 2,
    vocabulary: int = 120, inner: int = 88, eager: int = 0,
) -> Example:  # fmt: skip
    """Llama: rotary positions, `shared` key-value heads, RMS norm written out, gated MLP."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=shared, intermediate_size=inner, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    return _causal(config, batch, length, eager)


def _causal(config: Any, batch: int, length: int, eager: int) -> Example:
    module = _wrapped("AutoModelForCausalLM", config, "input_ids", attn_implementation=_attention(eager))
    ids = integers(batch, length + 1, below=config.vocab_size, seed=0)
    return Example(module, (ids[:, :-1].contiguous(),), (ids[:, 1:].contiguous(),), token_loss)


def _attention(eager: int) -> str:
    return "eager" if eager else "sdpa"
