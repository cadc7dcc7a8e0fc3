"""What commands that plan, and run nothing, need to know of a model: its graph and the shapes of its inputs. No torch here.

A built-in model depends on its text, on Fourfold's own files and on torch's version alone, so its graph is kept on disk and a
second look at it loads no torch. Other models are captured each time: who knows what their code reads. What lies in the cache
can be deleted; what cannot be read or written there is captured.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fourfold
from fourfold.cluster.cache import cache_folder
from fourfold.graph import Graph
from fourfold.plans import Options, Plan, named

SOURCES = ("models/*.py", "graph/*.py")
"""What decides which graph a built-in model becomes."""


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A MODEL text, its batch, its graph, and shapes and dtypes of its inputs and targets."""

    text: str
    batch: int
    graph: Graph
    signature: Mapping[str, Any]

    def plan(self, strategy: str, *, ranks: int, options: Options | None = None) -> Plan:
        return self.adopted(named(strategy, self.graph, ranks=ranks, batch=self.batch, options=options))

    def adopted(self, plan: Plan) -> Plan:
        """A plan made for this model, in whatever precision, as one of this graph."""
        mine = replace(plan, graph=self.graph.hash, model=self.text)
        mine.check(self.graph)
        return replace(mine, signature=self.signature)


def sketch(text: str, *, batch: int | None = None) -> Sketch:
    """From the cache, or captured."""
    file = _file(text, batch) if ":" not in text.partition(",")[0] else None
    if file is not None:
        with suppress(OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError):
            found = pickle.loads(file.read_bytes())
            if isinstance(found, Sketch):
                return found
    from fourfold.runtime.parallel import signature_of
    from fourfold.runtime.subject import subject

    seen = subject(text, batch=batch, data=False)
    made = Sketch(text=text, batch=seen.batch, graph=seen.graph, signature=signature_of(seen.case.inputs, seen.case.targets))
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f"{file.name}.{os.getpid()}")
            beside.write_bytes(pickle.dumps(made))
            beside.replace(file)
    return made


def _file(text: str, batch: int | None) -> Path:
    """Where the sketch of a built-in model lies."""
    root = Path(fourfold.__file__).parent
    told = hashlib.sha256(f"{version('torch')} {text} {batch}".encode())
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        told.update(path.read_bytes())
    return cache_folder() / "graphs" / f"{told.hexdigest()[:32]}.pickle"
