"""A GPT-2 of Hugging Face, built from its config: by filter, and as a pipeline of two stages with the tied embedding in both.
pip install transformers; torchrun --nproc-per-node 2 examples/transformer.py"""

import os

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import fourfold as ff
from fourfold.plans import Options


class Logits(nn.Module):
    """The model as a function of tensors alone."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=200, n_positions=32, n_embd=64, n_layer=2, n_head=4, use_cache=False)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    ids = torch.randint(0, 200, (8, 32))
    targets = ids.roll(-1, 1)
    for strategy, options in (("filter", Options()), ("pipeline", Options(microbatches=4))):
        torch.manual_seed(1)
        model = Logits()
        plan = ff.plan(model, (ids,), targets=(targets,), loss=loss, strategy=strategy, devices=ranks, options=options).best
        run = ff.parallelize(model, plan, loss=loss, optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1))
        losses = [float(run.step(ids, targets)) for _ in range(4)]
        if os.environ.get("RANK", "0") == "0":
            print(f"{strategy}: " + ", ".join(f"{value:.6f}" for value in losses))


if __name__ == "__main__":
    main()
