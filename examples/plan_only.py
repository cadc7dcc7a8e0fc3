"""What every way to split a model would cost on a cluster, before anything is run: no weights, no devices needed."""

import torch
from torch import nn

import fourfold as ff


def network(classes: int = 100) -> nn.Module:
    """Some convolutions and a wide classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 16 * 16, 2048),
        nn.ReLU(),
        nn.Linear(2048, classes),
    )


def main() -> None:
    with torch.device("meta"):  # shapes alone
        model = network()
        inputs, targets = (torch.zeros(256, 3, 64, 64),), (torch.zeros(256, dtype=torch.int64),)
    loss = nn.functional.cross_entropy
    for cluster in ("ethernet-10g-gpu", "dgx-h100"):
        found = ff.plan(model, inputs, targets=targets, loss=loss, cluster=cluster, devices=8, optimizer="adamw")
        print(found)  # the table
        best = found.best
        print(f"on {cluster}: {best.strategy} on {best.mesh}")
        for path, split in best.splits:
            print(f"    {path:12} {split}")


if __name__ == "__main__":
    main()
