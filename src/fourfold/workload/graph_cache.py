"""What planning needs to know of models, for commands that plan and run nothing, kept on disk as data. No torch here.

A built-in model depends on its text, on Fourfold's own files and on torch's version alone, so that a second look at it loads no
torch. Other models are captured each time: who knows what their code reads. Graphs lie in files named by their content hash;
with those, `explain` and `report` find the graph of a plan without a look at the model. What lies in the cache can be deleted;
what cannot be read or written there is captured.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import fourfold
from fourfold.cluster.cache import cache_folder, read_cached, write_cached
from fourfold.errors import InvalidInput
from fourfold.graph.graph_file import VERSION, graph_data, graph_from
from fourfold.workload.model_graph import ModelGraph

if TYPE_CHECKING:
    from fourfold.graph import Graph
    from fourfold.plans import Plan

SOURCES = ("models/*.py", "graph/*.py")
"""What decides which graph a built-in model becomes."""


def model_graph(text: str, *, batch: int | None = None) -> ModelGraph:
    """From the cache, or captured."""
    file = _model_graph_file(text, batch) if ":" not in text.partition(",")[0] else None
    known = _cached_model_graph(file, text) if file is not None else None
    if known is not None:
        return known
    from fourfold.workload.workload import load_workload

    made = load_workload(text, batch=batch, data=False).model_graph
    if file is not None:
        with suppress(InvalidInput):  # a folder that cannot be written to
            cache_graph(made.graph)
            write_cached(
                file, VERSION, {"text": text, "batch": made.batch, "graph": made.graph.hash, "signature": made.signature}
            )
    return made


def graph_of_plan(file: Path, plan: Plan, model: str | None) -> tuple[Graph, str]:
    """The graph a plan was made for, and what to call its model. What the file names as its model is a text and no more: the
    graph comes from the MODEL of the command line or, by its content hash, from the cache."""
    if model is not None:
        graph, name = model_graph(model, batch=plan.batch).graph, model
    else:
        known = cached_graph(plan.graph)
        if known is None:
            raise InvalidInput(f"the graph {plan.graph} of {file} is not in the cache; name its model with --model MODEL")
        graph, name = known, plan.model or f"graph {plan.graph}"
    plan.check(graph)
    return graph, name


def cache_graph(graph: Graph) -> None:
    """Write a graph to the cache under its content hash."""
    file = _graph_file(graph.hash)
    if cached_graph(graph.hash) is None:
        write_cached(file, VERSION, {"graph": graph_data(graph)})


def cached_graph(content: str) -> Graph | None:
    """The graph with a content hash; None if it is not in the cache, or its file is damaged."""
    data = read_cached(_graph_file(content), VERSION) if re.fullmatch(r"[0-9a-f]{16}", content) else None
    with suppress(KeyError, ValueError):
        found = graph_from(data["graph"]) if data is not None else None
        return found if found is not None and found.hash == content else None
    return None


def _cached_model_graph(file: Path, text: str) -> ModelGraph | None:
    data = read_cached(file, VERSION)
    if data is None or data.get("text") != text:
        return None
    graph = cached_graph(str(data.get("graph")))
    with suppress(KeyError):
        return (
            ModelGraph(text=text, batch=data["batch"], graph=graph, signature=data["signature"]) if graph is not None else None
        )
    return None


def _graph_file(content: str) -> Path:
    return cache_folder() / "graphs" / f"{content}.json"


def _model_graph_file(text: str, batch: int | None) -> Path:
    """The cache file of a built-in model."""
    root = Path(fourfold.__file__).parent
    digest = hashlib.sha256(f"{version('torch')} {text} {batch}".encode())
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        digest.update(path.read_bytes())
    return cache_folder() / "sketches" / f"{digest.hexdigest()[:32]}.json"
