"""Checks of what a user writes after a model's name, so that `resnet50,image=8` fails here with the remedy.

Without them the complaint would come from a pooling kernel many layers deep. Each raises ValueError saying
what, the two numbers and what to do. Also the one layer whose presence is an argument: dropout.
"""

from torch import nn


def require_at_least(minimum: int, **values: int) -> None:
    """Refuse the first of the named values that is below the minimum."""
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"{name} is {value}, the least is {minimum}; use {name}={minimum} or more")


def require_multiple(divisor: int, why: str, **values: int) -> None:
    """Refuse the first of the named values that the divisor does not divide; `why` explains the divisor."""
    for name, value in values.items():
        if value % divisor:
            nearest = max(divisor, round(value / divisor) * divisor)
            raise ValueError(f"{name} is {value}, not a multiple of {divisor} ({why}); use {name}={nearest}")


def require_probability(**values: float) -> None:
    """Refuse the first of the named values outside [0, 1)."""
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} is {value}, outside 0 to 1 (excluded); use {name}=0 for none")


def dropout_layer(probability: float) -> nn.Module:
    """Dropout, or nothing in the graph at probability zero; parameter names are the same both ways."""
    return nn.Dropout(probability) if probability else nn.Identity()
