"""The best plan for this machine, and training under it. Start on every rank: torchrun --nproc-per-node 2 examples/train.py"""

import os

import torch
from torch import nn

import fourfold as ff


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)
    )
    images = torch.randn(64, 1, 8, 8)
    classes = (images.mean((1, 2, 3)) > 0).long()

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    plan = ff.plan(model, (images,), targets=(classes,), loss=nn.functional.cross_entropy, devices=ranks).best
    run = ff.parallelize(
        model, plan, loss=nn.functional.cross_entropy, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], 1e-3)
    )
    for step in range(20):
        loss = run.step(images, classes)  # the whole batch, or this rank's part: run.local(images, classes)
        if step % 5 == 4 and os.environ.get("RANK", "0") == "0":
            print(f"{plan.strategy} on {plan.mesh}, step {step + 1}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
