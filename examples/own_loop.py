"""Your own loop around a plan: gradients clipped by the norm of the whole model, a learning-rate schedule, evaluation, and the
weights at the end under the names your module has. torchrun --nproc-per-node 2 examples/own_loop.py"""

import os

import torch
from torch import nn

import fourfold as ff


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    x = torch.randn(128, 32)
    y = x.square().mean(1, keepdim=True)

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    loss = nn.functional.mse_loss
    plan = ff.plan(model, (x,), targets=(y,), loss=loss, strategy="filter", devices=ranks).best
    run = ff.parallelize(model, plan, loss=loss, optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1))
    assert run.optimizer is not None
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, T_max=30)

    for _ in range(30):
        run.forward_backward(x, y)  # gradients of the whole batch, divided as the weights are
        norm = run.clip_grad_norm(1.0)
        run.optimizer.step()
        schedule.step()
    value, (outputs,) = run.evaluate(x, y)  # dropout off; outputs whole on every rank

    weights = run.state_dict()  # whole tensors under the module's own keys
    model.load_state_dict(weights)
    with torch.no_grad():
        alone = loss(model.eval()(x), y)
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {float(value):.5f}, in one process {float(alone):.5f}; last gradient norm {float(norm):.3f}")
        print(f"outputs {tuple(outputs.shape)}, {len(weights)} tensors")
    assert torch.isclose(value, alone, rtol=1e-4)


if __name__ == "__main__":
    main()
