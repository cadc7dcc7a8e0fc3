"""Errors keep their exit codes, survive the way from a rank to its parent, and suggest the nearest name."""

import pickle

import pytest

from fourfold import errors
from fourfold.errors import Error, Infeasible, WorkerFailed, nearest


def test_only_a_failed_worker_exits_with_three() -> None:
    assert {kind.exit_code for kind in Error.__subclasses__() if kind is not WorkerFailed} == {2}
    assert WorkerFailed.exit_code == 3


def test_the_drawn_tree_is_the_real_one() -> None:
    assert errors.__doc__ is not None
    for kind in [Error, *Error.__subclasses__()]:
        assert f"{kind.__name__} " in errors.__doc__


def test_infeasible_keeps_its_reason_across_processes() -> None:
    sent = Infeasible("conv1 has 3 channels, the axis has 4 ranks; use at most 3", reason="channel")
    received = pickle.loads(pickle.dumps(sent))
    assert (str(received), received.reason) == (str(sent), "channel")


def test_the_message_is_the_reason_if_none_is_named() -> None:
    assert Infeasible("too big").reason == "too big"


def test_worker_failed_is_caught_as_error() -> None:
    with pytest.raises(Error, match="rank 1"):
        raise WorkerFailed("rank 1 died")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("resnet5", "; did you mean 'resnet50'?"),
        ("ResNet50", "; did you mean 'resnet50'?"),
        ("vgg", "; did you mean 'VGG16-cifar'?"),
        ("quicksort", ""),
        ("", ""),
    ],
)
def test_the_nearest_name_is_suggested(name: str, suggestion: str) -> None:
    assert nearest(name, ["resnet50", "VGG16-cifar", "gpt2"]) == suggestion
