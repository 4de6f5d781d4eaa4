"""Fixtures of all unit tests, which run in one process."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# No deadlines: machines are shared and can be slow, so the time for an example is not a property of the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def single_torch_thread() -> Iterator[None]:
    """Limit torch to one thread, because threads for tiny operations wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
