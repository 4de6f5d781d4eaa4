"""Fixtures of the tests that run in this one process."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Machines are shared and slow at times: how long an example takes says nothing about the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operations wait for each other's threads on a machine that does other things too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
