"""What to tell a user whose model torch.export cannot trace: one line with the user's own line of code and what to do."""

from __future__ import annotations

import contextlib
import re
import traceback
from pathlib import Path

import torch
from torch import nn

_ROOTS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
"""The folders of code that is not the user's."""

_OTHERWISE = "it must run in eager PyTorch on inputs of these shapes, and its shapes must not depend on values"
_VALUES = "avoid .item(), .numpy() and control flow that depends on values in forward"
_LABELS = "if the loss wants class labels, give it targets of int64"
_REMEDIES = {
    "data-dependent": _VALUES,
    "DataDependent": _VALUES,
    ".numpy() is not supported": _VALUES,
    "fake tensor in the exported program": "forward reads or writes a weight's or buffer's .data; use .detach(), or write "
    "under torch.no_grad()",
    "is not a known type": "register it by torch.export.register_dataclass, or return a tuple or a dict",
    "for index": _LABELS,
    "expected scalar type Long": _LABELS,
}
"""What to do, by what torch says."""


def explained(model: nn.Module, error: Exception) -> str:
    """One line: what failed, at which line of the user's code, and what to do about it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.line and is_users(f.filename)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} `{frames[-1].line}`" if frames else ""
    head = f"{type(model).__name__} cannot be exported{where}"
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"module '{path}'" if path else "it"
            return f"{head}: {what} is scripted by torch.jit; use the plain module"
    reason = " ".join((str(error).strip() or type(error).__name__).split())
    said = f"{type(error).__name__} {reason}"
    remedy = next((remedy for sign, remedy in _REMEDIES.items() if sign in said), _OTHERWISE)
    return f"{head}: {_shortened(reason)}; {remedy}"


def users_line(stack_trace: str) -> str:
    """The last line of the user's code in a stack trace, as " (file:line)"; nothing where there is none."""
    places = [place for place in re.findall(r'File "([^"]+)", line (\d+)', stack_trace) if is_users(place[0])]
    return f" ({places[-1][0]}:{places[-1][1]})" if places else ""


def is_users(file: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not file.startswith(_ROOTS) and file != contextlib.__file__


def _shortened(text: str, most: int = 200) -> str:
    """The first sentences of a text, or its first words."""
    if len(text) <= most:
        return text
    sentences = text[:most].rpartition(". ")[0]
    return sentences or f"{text[:most].rpartition(' ')[0]} ..."
