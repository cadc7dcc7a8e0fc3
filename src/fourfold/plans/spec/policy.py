"""The sizes and distances by which lowering decides what is sent together and how far ahead. Part of every plan."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fourfold.errors import InvalidInput

MiB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Every field changes what is sent or when, and with it the time and the memory of a step."""

    bucket_bytes: int = 25 * MiB  # gradients summed by one all-reduce; a larger gradient is summed alone
    last_bucket_bytes: int = 1 * MiB  # the bucket that backward completes last: a small one ends the step sooner
    bunch_bytes: int = 4 * MiB  # divided weights (ZeRO-3) gathered by one message, and their gradients scattered by one
    prefetch: int = 1  # how many of these messages are sent ahead of the one in use
    sums_in_flight: int = 2  # messages with gradients of divided weights under way at once
    chunk_bytes: int = 4 * MiB  # what a rank sends at a time when updated slices (ZeRO-1) are gathered
    small_bytes: int = 64 * 2**10  # sums and gathers up to this size go through shared memory, larger ones through sockets

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InvalidInput(f"policy: {name} is {value!r}; use a whole number from {least} to {most}")

    def changes(self) -> dict[str, int]:
        """The fields that differ from the defaults: what a plan file stores."""
        return {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) != field.default}


BOUNDS = {
    "bucket_bytes": (1, 2**40),
    "last_bucket_bytes": (0, 2**40),
    "bunch_bytes": (1, 2**40),
    "prefetch": (0, 2**20),
    "sums_in_flight": (0, 2**20),
    "chunk_bytes": (1, 2**32),
    "small_bytes": (0, 2**28),
}
"""The least and the most of each field. Shared memory has two rows of `small_bytes` for every rank of a group."""
DEFAULT = Policy()
