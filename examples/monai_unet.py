"""MONAI's 3-D U-Net, each volume cut in slabs over the ranks: borders are exchanged, the numbers are those of one device.
pip install monai; torchrun --nproc-per-node 2 examples/monai_unet.py"""

import os

import torch
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from torch import Tensor

import fourfold as ff


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), norm="instance")
    volume = torch.randn(2, 1, 32, 16, 16)
    labels = (volume > 0.5).float()
    dice = DiceLoss(sigmoid=True)

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return dice(outputs[:, :1], target)

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    plan = ff.plan(model, (volume,), targets=(labels,), loss=loss, strategy="spatial", devices=ranks).best
    run = ff.parallelize(model, plan, loss=loss, optimizer=lambda named: torch.optim.Adam([p for _, p in named], 1e-2))
    for step in range(6):
        value = run.step(volume, labels)
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step + 1}: dice loss {float(value):.4f}")


if __name__ == "__main__":
    main()
