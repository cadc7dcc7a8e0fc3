"""Measured peaks against allocations counted by hand."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fourfold.runs.measured_memory import measured_peak
from ranks import pool

N = 10_000
BYTES = 4 * N


def nothing() -> list[torch.Tensor]:
    return []


def test_the_peak_of_a_chain_is_its_two_largest_neighbours() -> None:
    def chain() -> int:
        tensor = torch.empty(N)
        for factor in (3, 5, 2):
            tensor = torch.empty(factor * N)  # the one before is still alive
        return tensor.numel()

    assert measured_peak(chain, held=nothing, warm_up=0) == (2 * N, 8 * BYTES)


def test_what_the_caller_holds_is_counted_once() -> None:
    weight = torch.zeros(N, requires_grad=True)
    weight.grad = torch.zeros(N)
    views = [weight, weight[:5], weight.detach().view(2, -1), torch.empty(0)]
    assert measured_peak(lambda: None, held=lambda: views) == (None, 2 * BYTES)


def test_a_step_that_drops_the_gradients_of_the_step_before_is_credited_for_them() -> None:
    weight = torch.zeros(N, requires_grad=True)

    def step() -> None:
        weight.grad = None
        weight.neg().sum().backward()

    scalars = 2 * 4  # the sum and its gradient
    _, peak = measured_peak(step, held=lambda: [weight])
    assert peak == 2 * BYTES + scalars  # the weight and either its negative or its gradient


def test_gradients_that_stay_are_counted_with_those_that_come() -> None:
    weight = torch.zeros(N, requires_grad=True)
    _, peak = measured_peak(lambda: weight.neg().sum().backward(), held=lambda: [weight])
    assert peak == 3 * BYTES + 2 * 4


def test_a_free_of_what_was_never_counted_counts_nothing() -> None:
    kept = {"old": torch.empty(100 * N)}
    _, peak = measured_peak(lambda: kept.clear() or torch.empty(N).numel(), held=nothing, warm_up=0)
    assert peak == BYTES


def test_a_free_of_what_was_held_is_seen_where_its_allocation_was() -> None:
    kept: list[torch.Tensor] = []

    def swap() -> None:
        kept.clear()
        kept.append(torch.empty(N))

    assert measured_peak(swap, held=lambda: kept) == (None, BYTES)


def test_the_peak_of_a_backward_pass_counted_by_hand() -> None:
    x = torch.rand(N, requires_grad=True)

    def step() -> None:
        x.grad = None
        x.exp().sin().sum().backward()

    # sin's backward: exp's result (saved), the cosine and the product, beside x, the loss and its gradient.
    _, peak = measured_peak(step, held=lambda: [x])
    assert peak == BYTES + 3 * BYTES + 2 * 4


def test_saved_activations_of_a_convolutional_network_are_all_there_when_forward_ends() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.Sigmoid(), nn.Tanh())
    x = torch.rand(2, 3, 16, 16)
    activation = 4 * 2 * 8 * 16 * 16
    held = 4 * (x.numel() + 8 * 3 * 9 + 8)
    # Every activation function keeps its result, the convolution only what is held; its workspace is gone by then.
    _, peak = measured_peak(lambda: model(x), held=lambda: [x, *model.parameters()])
    assert peak == held + 5 * activation


def test_optimizer_state_made_in_the_first_step_is_held_in_the_second() -> None:
    weight = torch.zeros(N, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        weight.neg().sum().backward()
        optimizer.step()

    def held() -> list[torch.Tensor]:
        return [weight, *(t for state in optimizer.state.values() for t in state.values() if t is not None)]

    _, peak = measured_peak(step, held=held)
    assert peak == 3 * BYTES + 8 + 4  # the weight, its gradient and momentum; the factor 0.9 as float64 and as float32


def gather_while_rank_0_allocates() -> int:
    mine, parts, word = torch.ones(N), [torch.empty(N) for _ in range(2)], torch.zeros(1)

    def run() -> None:
        if dist.get_rank() == 0:
            work = dist.all_gather(parts, mine, async_op=True)
            time.sleep(0.5)  # its thread now holds the flat result, waiting for rank 1
            torch.empty(N)
            dist.send(word, 1)
            work.wait()
        else:
            dist.recv(word, 0)
            dist.all_gather(parts, mine)

    return measured_peak(run, held=lambda: [mine, *parts, word], warm_up=0)[1]


def test_buffers_of_the_communication_thread_are_seen() -> None:
    held, flat = 3 * BYTES + 4, 2 * BYTES
    assert pool(2)(gather_while_rank_0_allocates) == [held + flat + BYTES, held + flat]


@pytest.mark.gpu
def test_on_cuda_the_peak_is_the_allocator_s() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    before = torch.cuda.memory_allocated(device)
    _, peak = measured_peak(lambda: torch.empty(2**20, device=device).numel(), held=nothing, device=device)
    assert peak == before + 2**22
