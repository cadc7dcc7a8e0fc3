"""The worked example of docs/op-rules.md, run as it stands: what it prints is what the page says, and it equals eager."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
from fourfold.graph.capture import capture
from fourfold.ops import nest
from fourfold.plans import Mesh, Plan
from fourfold.runtime.kernels import base
from ranks import Job, pool

PAGE = Path(__file__).parents[2] / "docs" / "op-rules.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run_page(code: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in code:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names


@contextlib.contextmanager
def page_rules(code: list[str]) -> Iterator[dict[str, Any]]:
    """The page's rule and kernel are known inside, and forgotten again."""
    try:
        yield run_page(code)
    finally:
        nest._RULES.pop("aten.bilinear", None)
        base._BUILDERS.pop("bilinear", None)


def test_the_page_prints_what_it_says() -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), page_rules(blocks("python")):
        pass
    assert [said.getvalue()] == blocks("text")


def job_on_rank(code: list[str], job: Job) -> ranks.Share:
    with page_rules(code):
        return ranks.run_job(job)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("split", ["batch", "filter", "channel"])
def test_the_rule_on_the_page_equals_one_device(split: str, count: int) -> None:
    code = blocks("python")[:2]
    torch.manual_seed(0)
    module = nn.Bilinear(5, 4, 7).double()
    x1, x2 = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    outputs: Tensor = module(x1, x2)
    outputs.square().mean().backward()
    with page_rules(code):
        graph = capture(module, (x1, x2))
    plan = Plan(graph=graph.hash, batch=4, mesh=Mesh.of(model=count), splits=(("*bilinear*", {"model": split}),))
    state = {k: v.detach().clone() for k, v in module.state_dict().items()}
    job = Job(name=split, graph=graph, plan=plan, state=state, inputs=[x1, x2])
    outcome = ranks.joined(plan.mesh, pool(count)(job_on_rank, code, job))
    (got,) = outcome.outputs.values()
    torch.testing.assert_close(got, outputs.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(outcome.gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)
