"""Files that a command reaches by imports, and how often its calls change rooms: for a comparison of two checkouts.

python benchmarks/rooms.py src
"""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

SMALL = ["vgg16-cifar", "--batch", "8", "--strategy", "data"]
COMMANDS = {
    "plan": ["plan", *SMALL, "--cluster", "ethernet-1g", "--devices", "2"],
    "train": ["train", *SMALL, "--ranks", "1", "--steps", "1"],
}


def imports(file: Path, root: Path, *, inside: bool) -> Iterator[Path]:
    """Files of fourfold that a file imports at module top, or `inside` functions too."""
    for node in walk(ast.parse(file.read_text()), inside=inside):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            path = root / name.replace(".", "/")
            yield from (found for found in (path.with_suffix(".py"), path / "__init__.py") if found.is_file())


def walk(node: ast.AST, *, inside: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if inside or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from walk(child, inside=inside)


def reachable(entry: Path, root: Path, *, inside: bool) -> set[Path]:
    reached, todo = {entry}, [entry]
    while todo:
        new = set(imports(todo.pop(), root, inside=inside)) - reached
        reached |= new
        todo += new
    return reached


def first_visits(command: list[str], root: Path) -> list[str]:
    """The files of the functions that a command calls, in the order of first calls."""
    module = "main" if (root / "fourfold/cli/main.py").is_file() else "door"
    run = import_module(f"fourfold.cli.{module}").run

    codes: dict[object, str] = {}

    def profile(frame: object, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(root / "fourfold")):
            codes.setdefault(frame.f_code, frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        run(command)
    finally:
        sys.setprofile(None)
    return list(codes.values())


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(root))
    if len(sys.argv) == 2:  # each command in a process of its own
        for name in COMMANDS:
            subprocess.run([sys.executable, __file__, str(root), name], check=True)
        return
    entry = root / "fourfold/cli/app.py"
    top, every = (len(reachable(entry, root, inside=inside)) for inside in (False, True))
    files = first_visits(COMMANDS[sys.argv[2]], root)
    changes = sum(Path(a).parent != Path(b).parent for a, b in itertools.pairwise(files))
    counts = {"files_top": top, "files_with_inner": every, "functions": len(files), "room_changes": changes}
    print(json.dumps({"command": sys.argv[2], **counts}))


if __name__ == "__main__":
    main()
