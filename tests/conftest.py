"""Fixtures of the whole session: the pooled ranks are stopped when the last test is done."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements of earlier runs, or by the user, do not reach the tests."""
    os.environ["FOURFOLD_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield


@pytest.fixture(scope="session", autouse=True)
def stop_ranks() -> Iterator[None]:
    yield
    if "ranks" in sys.modules:  # only tests that use them import torch
        sys.modules["ranks"].close_pools()
