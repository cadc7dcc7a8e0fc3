"""Arguments written as text, `image=64`, matched to the signature of a factory.

The type is the annotation's, else that of the default; without either the text is read as a number, a truth value, or
itself.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from fourfold.errors import InvalidInput, nearest

TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def arguments(factory: Callable[..., Any], items: Sequence[str], *, where: str) -> dict[str, Any]:
    """Keyword arguments for a factory from `name=value` items; refuses unknown names, wrong types and what is missing."""
    parameters = _parameters(factory, where)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    hints = _hints(factory)
    out: dict[str, Any] = {}
    for item in items:
        name, eq, text = (part.strip() for part in item.partition("="))
        if not eq:
            raise InvalidInput(f"argument '{item}' of {where} has no value; write name=value")
        if name not in names and not open_ended:
            known = f"it takes {', '.join(names)}" if names else "it takes none"
            raise InvalidInput(f"{where} has no argument '{name}'{nearest(name, names)}; {known}")
        if name in out:
            raise InvalidInput(f"argument '{name}' of {where} is given twice")
        default = parameters[name].default if name in parameters else None
        out[name] = _value(text, _types(hints.get(name), default), f"argument '{name}' of {where}")
    missing = [n for n in names if n not in out and parameters[n].default is inspect.Parameter.empty]
    if missing:
        raise InvalidInput(f"{where} needs {', '.join(missing)}; write {where},{missing[0]}=...")
    return out


def _parameters(factory: Callable[..., Any], where: str) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{where} has no signature that can be read; wrap it in a plain function") from error


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(factory)
    except Exception:  # an annotation that does not resolve says nothing; the default still may
        return {}


def _types(hint: Any, default: Any) -> tuple[type, ...]:
    """The plain types an argument may have, most particular first; empty if nothing is said."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    found = tuple(t for t in (bool, int, float, str) if t in members)
    if found:
        return found + ((types.NoneType,) if types.NoneType in members else ())
    return (type(default),) if type(default) in KINDS else ()


def _value(text: str, wanted: tuple[type, ...], what: str) -> Any:
    if types.NoneType in wanted and text.lower() == "none":
        return None
    for kind in wanted or (int, float, bool, str):
        if kind is bool and text.lower() in TRUTH and (wanted or not text.isdigit()):
            return TRUTH[text.lower()]
        if kind is str:
            return text
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    raise InvalidInput(f"{what} is '{text}'; it must be {' or '.join(KINDS[k] for k in wanted if k in KINDS)}")
