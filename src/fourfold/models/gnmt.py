"""GNMT: the recurrent network of the pipeline papers, with one attention that every later layer reads.

Source: Wu et al., "Google's neural machine translation system" (2016), in the form of the MLPerf reference
(`gnmt_v2` attention): the first decoder layer's outputs query the encoder's by normalised Bahdanau attention,
at all target positions at once, and the context joins the input of each following decoder layer. Left out:
padding (all sentences have the full length), label smoothing and inference.

    source -> embedding -> bi-LSTM -> LSTM -> LSTM+ ... ----------.
    target -> embedding -> LSTM ------------------> attention <---'      + : residual, from the third layer on
                             |                          |
                             '-> cat <------------------+--> cat ...
                                  '-> LSTM -------------------'-> LSTM+ ... -> linear
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.models.arguments import dropout_layer, require_at_least, require_multiple, require_probability
from fourfold.models.example import Example, integers, token_loss

REFERENCE_RANGE, REFERENCE_WIDTH = 0.1, 1024  # the reference draws all weights from (-0.1, 0.1)


def weight_range(width: int) -> float:
    """The reference's range of initial weights, scaled so that narrow networks pass the signal on as well."""
    return float(REFERENCE_RANGE * (REFERENCE_WIDTH / width) ** 0.5)


class Attention(nn.Module):
    """Normalised Bahdanau attention: score = g v / |v| . tanh(Wq q + Wk k + b), softmax over keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.direction = nn.Parameter(torch.empty(width))
        self.gain = nn.Parameter(torch.full((1,), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Queries [N, T, W] and keys [N, S, W] to contexts [N, T, W]."""
        energy = torch.tanh(self.query(queries).unsqueeze(2) + self.key(keys).unsqueeze(1) + self.bias)
        weight = self.gain * self.direction / torch.linalg.vector_norm(self.direction)
        scores = F.linear(energy, weight.unsqueeze(0)).squeeze(3)
        return torch.bmm(torch.softmax(scores, dim=2), keys)


class Encoder(nn.Module):
    """A bidirectional LSTM, an LSTM that reads both directions, and LSTMs with residuals."""

    def __init__(self, *, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(2 * width, width, batch_first=True)
        self.rest = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers - 2))
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Embedded source [N, S, W] to what the attention reads [N, S, W]."""
        x, _ = self.first(self.dropout(x))
        x, _ = self.second(self.dropout(x))
        for layer in self.rest:
            y, _ = layer(self.dropout(x))
            x = x + y
        return x


class Decoder(nn.Module):
    """An LSTM whose outputs query the encoder's, then LSTMs that read the context beside their input."""

    def __init__(self, *, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.LSTM(width, width, batch_first=True)
        self.attention = Attention(width)
        self.second = nn.LSTM(2 * width, width, batch_first=True)
        self.rest = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 2))
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        """Embedded target [N, T, W] and encoded source [N, S, W] to features of the next tokens [N, T, W]."""
        x, _ = self.first(self.dropout(x))
        context = self.attention(x, encoded)
        x, _ = self.second(torch.cat((self.dropout(x), context), dim=2))
        for layer in self.rest:
            y, _ = layer(torch.cat((self.dropout(x), context), dim=2))
            x = x + y
        return x


class GNMT(nn.Module):
    """Encoder and decoder of equal depth behind one embedding shared by both languages."""

    def __init__(self, *, layers: int, width: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = Encoder(layers=layers // 2, width=width, dropout=dropout)
        self.decoder = Decoder(layers=layers // 2, width=width, dropout=dropout)
        self.classifier = nn.Linear(width, vocabulary)
        initialise(self, weight_range(width))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Source ids [N, S] and target ids [N, T] to logits of the next target tokens [N, T, V]."""
        encoded = self.encoder(self.embedding(source))
        logits: Tensor = self.classifier(self.decoder(self.embedding(target), encoded))
        return logits


def initialise(module: nn.Module, bound: float) -> None:
    """Uniform weights and biases, as in the reference, but for what normalises the attention."""
    for name, parameter in module.named_parameters():
        if not name.endswith(("attention.gain", "attention.bias")):
            nn.init.uniform_(parameter, -bound, bound)


def gnmt(
    *,
    batch: int = 16,
    layers: int = 8,
    width: int = 1024,
    vocabulary: int = 32000,
    length: int = 50,
    dropout: float = 0.0,
) -> Example:
    """GNMT translation: LSTM encoder and decoder with attention, 8 layers, 160 M parameters.

    layers: LSTM layers in all, half in the encoder: 8 is MLPerf's and the pipeline papers' GNMT-8 (4 + 4), 16
    the original's depth (8 + 8); length: tokens of the source and of the target; vocabulary: MLPerf pads it
    to 32320.
    """
    require_at_least(1, batch=batch, width=width, length=length)
    require_at_least(2, vocabulary=vocabulary)
    require_at_least(4, layers=layers)
    require_multiple(2, "half encode, half decode", layers=layers)
    require_probability(dropout=dropout)
    module = GNMT(layers=layers, width=width, vocabulary=vocabulary, dropout=dropout)
    source = integers(batch, length, below=vocabulary, seed=0)
    target = integers(batch, length + 1, below=vocabulary, seed=1)
    return Example(module, (source, target[:, :-1].contiguous()), (target[:, 1:].contiguous(),), token_loss)
