"""Tables of rules by kernel name, and the decorator that fills them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Rule = TypeVar("Rule")


def rule_for(table: dict[str, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator that puts a rule into a table under the names of its kernels."""

    def for_kernels(*names: str) -> Callable[[Rule], Rule]:
        def register(rule: Rule) -> Rule:
            table.update(dict.fromkeys(names, rule))
            return rule

        return register

    return for_kernels
