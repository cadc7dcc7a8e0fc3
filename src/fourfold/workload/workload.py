"""What is trained: a module with its data, and the graph captured from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fourfold.errors import InvalidInput
from fourfold.graph import Graph
from fourfold.graph.capture import Inputs, Loss, WithLoss, batch_of, capture
from fourfold.models import Example
from fourfold.plans import Options, Plan
from fourfold.workload.materialise import materialise
from fourfold.workload.model_graph import ModelGraph
from fourfold.workload.model_text import build
from fourfold.workload.plan_inputs import signature_of


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A module with its data and its graph. `text`: the MODEL text that names them, empty for a module of the caller's."""

    text: str
    example: Example
    graph: Graph

    @classmethod
    def of(cls, module: nn.Module, inputs: Inputs, *, targets: tuple[Tensor, ...] = (), loss: Loss | None = None) -> Workload:
        """A module with one batch of data, captured."""
        batch_of(inputs)  # refuses inputs without a batch
        data = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)
        return cls(text="", example=Example(module, data, tuple(targets), loss), graph=capture(module, inputs, targets, loss))

    @property
    def batch(self) -> int:
        return self.example.batch

    @property
    def name(self) -> str:
        """The model without its arguments."""
        return self.text.partition(",")[0]

    @property
    def model_graph(self) -> ModelGraph:
        """All of it that plans depend on."""
        signature = signature_of(self.example.inputs, self.example.targets)
        return ModelGraph(text=self.text, batch=self.batch, graph=self.graph, signature=signature)

    def plan(self, strategy: str, *, ranks: int, options: Options | None = None) -> Plan:
        return self.model_graph.plan(strategy, ranks=ranks, options=options)

    def adopted(self, plan: Plan, made_for: Graph) -> Plan:
        """A plan as one of this graph. `made_for`: the graph it was made for, which in bf16 has autocast's casts too."""
        return self.model_graph.adopted(plan, made_for)


def load_workload(
    text: str, *, batch: int | None = None, seed: int = 0, data: bool = True, graph: Graph | None = None
) -> Workload:
    """Build and capture. Without `data`, shapes are enough: built-ins are made on meta and allocate nothing."""
    example = build(text, batch=batch, seed=seed, meta=not data)
    if data:
        example = materialise(example, seed=seed)
    captured = graph or capture(example.module, example.inputs, example.targets, example.loss)
    if captured.batch is not None and captured.batch != example.batch:
        raise InvalidInput(
            f"{text} fixes its batch at {captured.batch}, {example.batch} asked for; use --batch {captured.batch}"
        )
    return Workload(text=text, example=example, graph=captured)


def stored_tensors(example: Example) -> dict[str, Tensor]:
    """Parameters and buffers by the keys a graph knows them by; tied ones once."""
    whole = WithLoss(example.module, example.loss)
    return {k.removeprefix("model."): t for k, t in [*whole.named_parameters(), *whole.named_buffers()]}
