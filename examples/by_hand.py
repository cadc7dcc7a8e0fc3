"""A plan written by hand: every layer by its name, patterns allowed. torchrun --nproc-per-node 2 examples/by_hand.py"""

import os

import torch
from torch import nn

import fourfold as ff
from fourfold.graph.capture import capture
from fourfold.plans import Mesh, Plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(8 * 16 * 16, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, loss = Net().double(), nn.functional.cross_entropy
    x, y = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.randint(0, 10, (4,))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    value = loss(model(x), y)  # one process, for comparison
    value.backward()
    alone = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}

    graph = capture(model, (x,), (y,), loss)
    plan = Plan(
        graph=graph.hash,
        batch=4,
        mesh=Mesh.of(x=ranks),  # one axis; Mesh.of(data=2, model=4) has two
        inputs={"x": "domain:0"},  # rows of the images
        splits=(("features.*", {"x": "domain:0"}), ("head.0", {"x": "channel"}), ("head.2", {"x": "filter"})),
    )
    run = ff.parallelize(model, plan, loss=loss, graph=graph)
    mine = run.forward_backward(x, y)
    assert torch.isclose(mine, value, rtol=1e-12)
    if ranks == 1:
        return
    share = dict(run.module.named_parameters())["head.2.weight"]
    if os.environ["RANK"] == "0":
        print(f"loss {float(mine):.12f}, in one process {float(value.detach()):.12f}")
        print(f"head.2.weight: {tuple(share.shape)} of {tuple(alone['head.2.weight'].shape)} on this rank")


if __name__ == "__main__":
    main()
