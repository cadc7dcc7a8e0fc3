"""The sketches of models for commands that plan and run nothing, kept on disk. No torch here.

A built-in model depends on its text, on Fourfold's own files and on torch's version alone, so that a second look at it loads no
torch. Other models are captured each time: who knows what their code reads. What lies in the cache can be deleted; what cannot
be read or written there is captured.
"""

from __future__ import annotations

import hashlib
import pickle
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import fourfold
from fourfold.cluster.cache import cache_folder, write_whole
from fourfold.errors import InvalidInput
from fourfold.plans.sketch import Sketch

SOURCES = ("models/*.py", "graph/*.py")
"""What decides which graph a built-in model becomes."""


def sketch(text: str, *, batch: int | None = None) -> Sketch:
    """From the cache, or captured."""
    file = _file(text, batch) if ":" not in text.partition(",")[0] else None
    if file is not None:
        with suppress(Exception):  # no such file, or one that is broken in any way
            found = pickle.loads(file.read_bytes())
            if isinstance(found, Sketch):
                return found
    from fourfold.runtime.subject import subject

    made = subject(text, batch=batch, data=False).sketch
    if file is not None:
        with suppress(InvalidInput):  # a folder that cannot be written to
            write_whole(file, pickle.dumps(made))
    return made


def _file(text: str, batch: int | None) -> Path:
    """Where the sketch of a built-in model lies."""
    root = Path(fourfold.__file__).parent
    told = hashlib.sha256(f"{version('torch')} {text} {batch}".encode())
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        told.update(path.read_bytes())
    return cache_folder() / "graphs" / f"{told.hexdigest()[:32]}.pickle"
