"""The arrows between rooms point one way, torch stays in its rooms, and only `cli` prints or exits.

A room is a package or module directly under `fourfold`. Imports are read from the source, those inside
functions and under TYPE_CHECKING included: a dependency is one wherever it is written.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "fourfold"

VALUES = {"errors", "units", "timeline", "index", "files", "table", "optimizers"}
THOUGHT = VALUES | {"graph", "ops", "plans"}
ALL = THOUGHT | {"models", "cluster", "oracle", "planner", "runtime", "gauge", "reproduce", "report"}
DOOR = "__init__"  # fourfold/__init__.py, which looks its names up lazily

MAY_IMPORT = {
    **{value: VALUES for value in VALUES},
    "models": VALUES,
    "graph": VALUES,
    "ops": VALUES | {"graph"},
    "plans": VALUES | {"graph", "ops"},
    "cluster": VALUES,
    "oracle": THOUGHT | {"cluster"},
    "planner": THOUGHT | {"cluster", "oracle"},
    "runtime": THOUGHT | {"models"},  # a rank builds its own module from the MODEL text
    "gauge": THOUGHT | {"cluster", "oracle", "runtime"},  # times what the oracle prices, as the runtime runs it
    "reproduce": THOUGHT | {"models", "cluster", "oracle", "planner", "runtime"},  # papers rerun, by what users run
    "report": ALL | {DOOR},
    "planning": ALL | {DOOR},  # the planner for Python: a module goes in
    "cli": ALL | {DOOR},
    DOOR: ALL | {"cli", "planning"},
    "__main__": {"cli"},
}
GRAPH_FILES = (
    "graph/capture.py", "graph/attributes.py", "graph/observe.py", "graph/failure.py", "graph/refusals.py", "graph/ranges.py",
    "graph/recurrence.py", "graph/walk.py", "graph/autocast.py",
)  # fmt: skip
WORLD_FILES = ("models/*", "runtime/*", "gauge/*", *GRAPH_FILES)
TORCH_FILES = (*WORLD_FILES, "reproduce/*", "report/*", "cli/*", "planning.py", "__init__.py")
TORCH_MODULES = ("torch", "fourfold.graph.capture", "fourfold.graph.walk", "fourfold.graph.autocast", "fourfold.gauge")
SPEAKING_FILES = ("cli/*", "cli.py", "__main__.py")


def room_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def matches(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def imported_modules(file: str, source: str) -> Iterator[str]:
    """Absolute dotted names, one per imported name: `from torch import nn` gives torch.nn."""
    package = ["fourfold", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*start, *(node.module or "").split(".")]).strip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def room_violations(file: str, source: str) -> Iterator[str]:
    room = room_of(file)
    for module in imported_modules(file, source):
        name, _, rest = module.partition(".")
        target = rest.split(".")[0]
        if name != "fourfold":
            continue
        target = target if target in MAY_IMPORT else DOOR
        if target != room and target not in MAY_IMPORT.get(room, set()):
            yield f"{file}: {room} may not import {module}"


def torch_violations(file: str, source: str) -> Iterator[str]:
    if matches(file, TORCH_FILES):
        return
    for module in imported_modules(file, source):
        if module.startswith(TORCH_MODULES):
            yield f"{file}: imports {module}, but no torch belongs here"


def speech_violations(file: str, source: str) -> Iterator[str]:
    if matches(file, SPEAKING_FILES):
        return
    banned = {"print", "exit", "quit", "SystemExit", "sys.exit", "typer.echo", "typer.secho", "typer.Exit"}
    banned |= {"sys.stdout.write", "sys.stderr.write"}
    for node in ast.walk(ast.parse(source)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        raised = ast.unparse(node.exc) if isinstance(node, ast.Raise) and node.exc else ""
        if {called, raised} & banned:
            yield f"{file}:{node.lineno}: {called or raised}, but only cli prints or exits"
    for module in imported_modules(file, source):
        if module.split(".")[0] == "typer" or module == "sys.exit":
            yield f"{file}: imports {module}, but only cli prints or exits"


def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(ROOT.rglob("*.py"))}


def test_every_room_is_known() -> None:
    assert {room_of(file) for file in sources()} <= set(MAY_IMPORT), "a new room needs arrows in MAY_IMPORT"


@pytest.mark.parametrize("violations", [room_violations, torch_violations, speech_violations])
def test_the_house_is_in_order(violations) -> None:
    found = [line for file, source in sources().items() for line in violations(file, source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("violations", "file", "source"),
    [
        (room_violations, "errors.py", "from fourfold.plans import Plan"),
        (room_violations, "graph/op.py", "from ..ops import conv"),
        (room_violations, "graph/op.py", "from .. import ops"),
        (room_violations, "ops/conv.py", "def f():\n    import fourfold.runtime.fetch"),
        (room_violations, "plans/mesh.py", "from fourfold import oracle"),
        (room_violations, "plans/mesh.py", "from fourfold import parallelize"),
        (room_violations, "runtime/kernels/conv.py", "from ...oracle.replay import replay"),
        (room_violations, "report/text.py", "import fourfold.cli"),
        (room_violations, "attic/old.py", "from fourfold.errors import Error"),
        (torch_violations, "plans/mesh.py", "import torch"),
        (torch_violations, "graph/graph.py", "from torch import nn"),
        (torch_violations, "graph/graph.py", "from .capture import capture"),
        (torch_violations, "oracle/cost.py", "from fourfold.graph import capture"),
        (torch_violations, "cluster/spec.py", "importlib.import_module('torch')"),
        (speech_violations, "runtime/train.py", "print('hello')"),
        (speech_violations, "runtime/train.py", "sys.stderr.write('hello')"),
        (speech_violations, "report/text.py", "import sys\nsys.exit(2)"),
        (speech_violations, "plans/plan.py", "raise SystemExit"),
        (speech_violations, "plans/plan.py", "import typer"),
    ],
)
def test_a_violation_is_noticed(violations, file: str, source: str) -> None:
    assert list(violations(file, source))


@pytest.mark.parametrize(
    ("violations", "file", "source"),
    [
        (room_violations, "graph/op.py", "from ..errors import Error\nfrom .spec import TensorSpec"),
        (room_violations, "runtime/kernels/conv.py", "from ..fetch import fetch\nfrom ...plans import Plan"),
        (room_violations, "cli/app.py", "from fourfold import __version__"),
        (torch_violations, "graph/capture.py", "import torch.export"),
        (torch_violations, "gauge/collectives.py", "import torch.distributed"),
        (speech_violations, "cli/app.py", "print('hello')"),
    ],
)
def test_what_is_allowed_passes(violations, file: str, source: str) -> None:
    assert not list(violations(file, source))


@pytest.mark.parametrize("module", ["", ".graph", ".ops", ".plans", ".cluster", ".oracle", ".planner"])
def test_importing_thought_leaves_torch_unloaded(module: str) -> None:
    place = ROOT.joinpath(module.strip("."))
    if not (place / "__init__.py").exists() and not place.with_suffix(".py").exists():
        pytest.skip(f"fourfold{module} does not exist yet")
    script = f"import sys, fourfold{module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"import fourfold{module} loads torch"
