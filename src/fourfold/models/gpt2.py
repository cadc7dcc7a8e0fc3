"""GPT-2: the transformer beside the papers' networks; heads and MLP split by filter, tokens by domain.

Source: Radford et al., "Language models are unsupervised multitask learners" (2019): learned positions, norms
before each part, a fused projection to queries, keys and values, tanh GELU, output weights tied to the token
embedding. The tied weight is one parameter with two uses, so that it stays tied when a meta-built module is
given storage.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.models.arguments import dropout_layer, require_at_least, require_multiple, require_probability
from fourfold.models.example import Example, integers, token_loss

DEVIATION = 0.02  # of the initial weights


class Attention(nn.Module):
    """Causal attention of several heads behind one projection of 3 x width."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.probability = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [N, T, W] to the same shape, each from itself and those before it."""
        shape = (x.shape[0], x.shape[1], self.heads, x.shape[2] // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        probability = self.probability if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to its input."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width=width, heads=heads, dropout=dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [N, T, W] to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class GPT2(nn.Module):
    """Embeddings, blocks, a last norm, and logits by the token embedding."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, length: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = dropout_layer(dropout)
        self.blocks = nn.Sequential(*(Block(width=width, heads=heads, dropout=dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self._initialise(layers)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [N, T] to logits of the token after each [N, T, vocabulary]."""
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(self.blocks(self.dropout(self.tokens(ids) + positions)))
        return F.linear(x, self.tokens.weight)

    def _initialise(self, layers: int) -> None:
        """Normal weights, zero biases; the 2 x layers summands of the residual stream are scaled down."""
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                summand = name.endswith(("attention.out", "mlp.2"))
                nn.init.normal_(layer.weight, std=DEVIATION * ((2 * layers) ** -0.5 if summand else 1.0))
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)


def gpt2(
    *,
    batch: int = 4,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    length: int = 1024,
    dropout: float = 0.0,
) -> Example:
    """GPT-2 small on tokens: causal transformer with tied embeddings, 124 M parameters.

    layers: blocks; width: of the residual stream; heads: of each attention; length: tokens of a sample.
    """
    require_at_least(1, batch=batch, layers=layers, width=width, heads=heads, length=length)
    require_at_least(2, vocabulary=vocabulary)
    require_multiple(heads, "heads of equal width", width=width)
    require_probability(dropout=dropout)
    module = GPT2(layers=layers, width=width, heads=heads, vocabulary=vocabulary, length=length, dropout=dropout)
    ids = integers(batch, length + 1, below=vocabulary, seed=0)
    return Example(module, (ids[:, :-1].contiguous(),), (ids[:, 1:].contiguous(),), token_loss)
