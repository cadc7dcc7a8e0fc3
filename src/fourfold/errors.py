"""Every error Fourfold raises on purpose: callers can catch one class, the command line reads the exit code.

    Error                  2
    ├── InvalidInput       2   a name, file, argument or factory that cannot be used
    │   └── Damaged        2   a file that Fourfold keeps for itself and cannot use any more
    ├── Infeasible         2   a plan that cannot be run exactly: a split past its limit, too little memory
    ├── StalePlan          2   a plan made for another graph
    ├── CaptureFailed      2   a model that cannot be exported
    └── WorkerFailed       3   a rank died, raised or did not answer in time
        └── OutOfMemory    3   a rank's device has no memory left for what it was to do

The numbers are exit codes. A message says what, the two numbers, the remedy: "stage 2 needs 91.3 GiB, the
device holds 80.0 GiB; use more stages or recompute". Mistakes of our own are `assert`s, outside this tree.
"""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_NAME = 200  # characters of a name that is compared with others


class Error(Exception):
    """The root: its message is one line, fit for a user."""

    exit_code = 2


class InvalidInput(Error):
    """What the user gave cannot be used."""


class Damaged(InvalidInput):
    """A file of the cache that cannot be used any more, where nothing can take its place at once."""


class Infeasible(Error):
    """A plan that cannot be run exactly; `reason` names the limit for scripts, by default the message."""

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason


class StalePlan(Error):
    """A plan made for another graph than the one at hand."""


class CaptureFailed(Error):
    """A model that could not be captured; the message names the line and the remedy."""


class WorkerFailed(Error):
    """A rank died, raised or did not answer in time."""

    exit_code = 3


class OutOfMemory(WorkerFailed):
    """A rank's device has no memory left."""


class Notice(UserWarning):
    """Something a user of the Python interface should know; the command line prints it."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """The end of an "unknown name" message: "; did you mean 'resnet50'?", or nothing if no choice is near."""
    if len(name) > LONGEST_NAME:  # comparing takes the square of it
        return ""
    by_folded = {choice.casefold(): choice for choice in choices}
    folded = name.casefold()
    begun = [choice for choice in sorted(by_folded) if folded and choice.startswith(folded)]
    found = get_close_matches(folded, by_folded, n=1) or begun
    return f"; did you mean {by_folded[found[0]]!r}?" if found else ""
