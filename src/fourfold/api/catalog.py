"""What is built in, models and clusters, and what a model consists of."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fourfold.cluster import LOCAL, Cluster, cluster_named, preset_names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fourfold.graph.capture import Inputs, Loss
    from fourfold.report.survey import Survey
    from fourfold.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A built-in model: its name, what it is, its arguments with their defaults."""

    name: str
    about: str
    arguments: Mapping[str, Any]


def models() -> tuple[ModelInfo, ...]:
    """The built-in models."""
    from fourfold.models import MODELS, describe

    return tuple(ModelInfo(name=name, about=describe(name), arguments=_defaults(factory)) for name, factory in MODELS.items())


def _defaults(factory: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in signatures.signature(factory).parameters.items()}


def clusters() -> tuple[Cluster, ...]:
    """The built-in clusters, and this machine as ``local``."""
    return tuple(map(cluster, (*preset_names(), LOCAL)))


def cluster(name: str) -> Cluster:
    """A preset, a TOML file or ``local``, with all its devices."""
    return cluster_named(name)


def inspect(
    model: str | nn.Module | Workload,
    inputs: Inputs | None = None,
    *,
    targets: tuple[Tensor, ...] = (),
    loss: Loss | None = None,
    batch: int | None = None,
    depth: int | None = None,
) -> Survey:
    """Ops, parameters, FLOPs and activations by layer group, and how far each split can go. `depth`: parts of a module path
    that make a group; the model is named as for `plan`."""
    from fourfold.api.planning import graph_of
    from fourfold.report.survey import survey
    from fourfold.workload.workload import load_workload

    if isinstance(model, str) and inputs is None and not targets and loss is None:
        source = load_workload(model, batch=batch, data=False).model_graph
    else:
        source = graph_of(model, inputs, targets=targets, loss=loss, batch=batch)
    return survey(source.graph, source.batch, depth=depth)
