"""Models nobody here wrote, from monai and transformers, split on two ranks with the numbers of one device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import foreign
from foreign_table import HEAD, PAGE, PLAIN, RANDOM, RANKS, STRATEGIES, found, reference
from foreign_table import foreign as case
from fourfold.graph.capture import capture
from fourfold.models.example import Example
from fourfold.plans import lower, named
from fourfold.runs.comparison_run import ComparisonRun, run_steps
from fourfold.runs.eager_run import eager_trial
from fourfold.runs.reference import EAGER, PROGRAM, Reference
from fourfold.runs.verify import verify
from ranks import close_pools, pool

MISSING = [name for name in ("monai", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.foreign,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install monai transformers"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

FULL: dict[str, tuple[str, dict[str, int]]] = {
    "ResNet-50": ("resnet", {"width": 64, "depths": 50, "image": 224, "classes": 1000, "batch": 32}),
    "BERT-base": ("bert", {"width": 768, "layers": 12, "heads": 12, "length": 512, "vocabulary": 30522, "batch": 32}),
    "GPT-2 small": ("gpt2", {"width": 768, "layers": 12, "heads": 12, "length": 1024, "vocabulary": 50257, "batch": 32}),
    "Llama, 8 layers": ("llama", {"width": 4096, "layers": 8, "heads": 32, "shared": 32, "inner": 11008, "length": 2048,
                                  "vocabulary": 32000, "batch": 8}),
    "ViT-base": ("vit", {"image": 224, "patch": 16, "width": 768, "layers": 12, "heads": 12, "classes": 1000, "batch": 32}),
    "SegResNet, 96^3": ("monai_segresnet", {"size": 96, "width": 32, "batch": 2}),
    "Swin-T": ("swin", {"image": 224, "patch": 4, "width": 96, "window": 7, "depth": 6, "classes": 1000, "batch": 32}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    close_pools()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("text", [*PLAIN, *RANDOM])
def test_a_foreign_model_split_on_two_ranks_equals_one_device(text: str, strategy: str) -> None:
    cell = found(text, strategy)
    assert cell.verdict is not None, cell.refusal
    assert cell.verdict.equal, cell.verdict.worst
    assert cell.verdict.program.split_flops_fraction >= 0.95
    assert not cell.verdict.program.replicated


@pytest.mark.parametrize("text", [*PLAIN, *RANDOM])
def test_the_page_tells_what_was_found(text: str) -> None:
    page = PAGE.read_text().splitlines()
    assert HEAD in page
    assert [row for row in (found(text, s).row for s in STRATEGIES) if row not in page] == []


@pytest.mark.parametrize("text", PLAIN)
def test_the_program_on_one_rank_is_the_module_in_float32(text: str) -> None:
    subject, start = case(text), reference(text).start
    eager = eager_trial(subject, start, subject.example.tensors, precision="fp32", optimizer="sgd", steps=1)
    plan = named("data", subject.graph, ranks=1, batch=subject.batch)
    task = ComparisonRun(graph=subject.graph, plan=plan, data="", precision="fp32", steps=1)
    ours = run_steps(task, start, subject.example.tensors)
    assert ours.losses == pytest.approx(eager.losses, rel=1e-6)
    for name, output in eager.outputs.items():
        torch.testing.assert_close(ours.outputs[name], output)
    for key, gradient in eager.gradients.items():
        torch.testing.assert_close(ours.gradients[key], gradient)


MASKED = ("gpt2,dropout=0.1", "vit,dropout=0.1")
"""While they are exported they give attention a mask that eager does without, so that its dropout cannot be replayed."""


@pytest.mark.parametrize("text", RANDOM)
def test_random_models_do_draw_and_are_compared_with_eager(text: str) -> None:
    plain = text.partition(",")[0]
    assert reference(text).kind == (PROGRAM if text in MASKED else EAGER)
    assert reference(text).exact.losses[0] != reference(plain).exact.losses[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_weight_moved_by_a_millionth_is_seen(strategy: str) -> None:
    """The control: were equality won by looking away, this would pass for equal too."""
    subject = case("bert")
    other = Reference(workload=subject)
    key = next(k for k in other.start if k.endswith("layer.0.attention.self.query.weight"))
    other.start = {**other.start, key: other.start[key].double() * (1 + 1e-6)}
    verdict = verify(subject, subject.plan(strategy, ranks=RANKS), pool(RANKS), reference=other)
    assert verdict is not None
    assert not verdict.equal


@pytest.mark.parametrize("text", ["monai_unet,batch=1", "monai_segresnet,batch=1", "llama,batch=1"])
def test_a_batch_of_one_on_two_by_two_ranks_leaves_some_without_samples_and_is_equal(text: str) -> None:
    subject = case(text)
    verdict = verify(subject, subject.plan("data+spatial", ranks=4), pool(4), reference=reference(text))
    assert verdict is not None
    assert verdict.equal, verdict.worst


@pytest.mark.parametrize("text", ["gpt2", "gpt2,eager=1"])
def test_heads_dealt_out_unevenly_cost_no_exchange_more_than_even_ones(text: str) -> None:
    """Four heads on three ranks: the fused projection is cut at heads, and stays cut there."""
    subject = case(text)
    moves = {n: len(lower(subject.graph, subject.plan("filter", ranks=n)).moves()) for n in (2, 3)}
    assert moves[3] == moves[2]


@pytest.mark.parametrize("name", FULL)
def test_a_model_of_full_size_is_lowered_in_less_than_two_seconds(name: str) -> None:
    factory, arguments = FULL[name]
    with torch.device("meta"):
        example: Example = getattr(foreign, factory)(**arguments)
    graph = capture(*example)
    for strategy in ("data", "filter", "spatial", "data+filter"):
        began = time.process_time()
        plan = named(strategy, graph, ranks=8, batch=arguments["batch"])
        lower(graph, replace(plan, model=name))
        assert time.process_time() - began < 2.0, strategy
