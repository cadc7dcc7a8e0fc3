"""From the MODEL text of the command line to a module with its data: built-in names, modules and files.

    resnet50,image=64            a built-in name, arguments after commas
    package.module:factory       anything importable
    path/file.py:factory,size=8  a file that is on no path

A factory returns `(module, inputs)` or `(module, inputs, targets, loss)`. Whatever is wrong with it is said here, in one
line, with its name: further inside nobody knows where the module came from.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.errors import InvalidInput, nearest
from fourfold.models import MODELS, Example
from fourfold.workload.arguments import arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A factory, how it is called in messages, and whether it is one of ours."""

    factory: Callable[..., Any]
    name: str
    built_in: bool


def build(text: str, *, batch: int | None = None, seed: int = 0, meta: bool = False) -> Example:
    """The example a MODEL text means. `meta` asks built-ins for shapes only; other factories decide for themselves."""
    if batch is not None and batch < 1:
        raise InvalidInput(f"the batch is {batch}; it must be at least 1")
    name, *items = (part.strip() for part in text.split(","))
    source = _source(name)
    given = arguments(source.factory, items, where=source.name)
    if batch is not None and "batch" in inspect.signature(source.factory).parameters:
        given["batch"] = batch
    torch.manual_seed(seed)
    example = _example_of(_call_factory(source, given, meta=meta), source.name)
    return example if batch is None or example.batch == batch else _resize(example, batch)


def _call_factory(source: _Source, given: Mapping[str, Any], *, meta: bool) -> Any:
    try:
        with torch.device("meta") if meta and source.built_in else nullcontext():
            return source.factory(**given)
    except SystemExit as error:
        raise InvalidInput(f"{source.name} called sys.exit({error.code!r}); return (module, inputs) instead") from error
    except Exception as error:
        kind = f"{type(error).__name__}: " if not (source.built_in and isinstance(error, ValueError)) else ""
        raise InvalidInput(f"{source.name} raised {kind}{error}" if kind else f"{source.name}: {error}") from error


def _source(name: str) -> _Source:
    place, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in MODELS:
            raise InvalidInput(
                f"unknown model '{name}'{nearest(name, MODELS)}; `fourfold models` lists them, "
                "your own are package.module:factory or path/file.py:factory"
            )
        return _Source(factory=MODELS[name], name=name, built_in=True)
    module = _file_module(place) if place.endswith(".py") or "/" in place else _named_module(place)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        offered = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        what = "has no" if factory is None else f"has a {type(factory).__name__}, no function,"
        raise InvalidInput(f"{place} {what} '{attribute}'{nearest(attribute, offered)}")
    return _Source(factory=factory, name=name, built_in=False)


def _named_module(place: str) -> Any:
    sys.path.insert(0, "")  # as `python -m` does: the user's own package is in the current folder
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and place.startswith(error.name):
            raise InvalidInput(f"there is no module '{error.name}' on the path; a file is path/file.py:factory") from error
        raise InvalidInput(f"importing {place} raised {type(error).__name__}: {error}") from error
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"importing {place} raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")


def _file_module(place: str) -> Any:
    path = Path(place)
    if not path.is_file():
        raise InvalidInput(f"there is no file {place}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{place} is not a Python file; give path/file.py:factory")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # so that it finds its neighbours, as when run itself
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"loading {place} raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _example_of(result: Any, name: str) -> Example:
    """The factory's answer as an `Example`, or a line that says what it returned instead."""
    wanted = "return (module, inputs) or (module, inputs, targets, loss)"
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 4):
        raise InvalidInput(f"{name} returned {_description(result)}; {wanted}")
    module, inputs, targets, loss = (*result, (), None) if len(result) == 2 else result
    if not isinstance(module, nn.Module):
        raise InvalidInput(f"{name} returned {_description(module)} as the module, not an nn.Module; {wanted}")
    if not isinstance(inputs, (tuple, list, Mapping)):
        raise InvalidInput(f"{name} returned {_description(inputs)} as inputs; they are a tuple or a dict of tensors")
    if not isinstance(targets, (tuple, list)):
        raise InvalidInput(f"{name} returned {_description(targets)} as targets; they are a tuple of tensors")
    if loss is not None and not callable(loss):
        raise InvalidInput(f"{name} returned {_description(loss)} as the loss; it is a function of outputs and targets")
    example = Example(module, dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs), tuple(targets), loss)
    for tensor in example.tensors:
        if not isinstance(tensor, Tensor):
            raise InvalidInput(f"{name} returned {_description(tensor)} among its inputs or targets; all are tensors")
    if not any(t.dim() for t in example.tensors):
        raise InvalidInput(f"{name} returned no tensor with a batch dim; the first dim of the inputs is the batch")
    return example


def _description(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}" if value is not None else "None"


def _resize(example: Example, batch: int) -> Example:
    """Every tensor that has the batch dim repeated and cut to the batch asked for."""
    before = example.batch

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != before:
            return tensor
        times = -(-batch // before)
        return tensor.repeat(times, *[1] * (tensor.dim() - 1))[:batch]

    inputs = (
        {k: resize(v) for k, v in example.inputs.items()}
        if isinstance(example.inputs, Mapping)
        else _all(resize, example.inputs)
    )
    return example._replace(inputs=inputs, targets=_all(resize, example.targets))


def _all(change: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(change(t) for t in tensors)
