"""The predicted batch size under a real limit of the address space, on one rank and on two ranks with different limits."""

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import run_ranks

WIDTH, START = 250_000, 200
"""A row takes 1 MB in each of several activations. glibc maps each one separately, so freed memory is returned."""

M_ARENA_MAX = -8
"""Option of glibc's `mallopt` for the number of arenas, from malloc.h."""


def search_batch_size(rooms):
    """Search for a batch size, with `rooms[rank]` bytes more address space than at the start.

    Returns:
        (batch size, number of updates) of each call, the final size, and whether its weights equal those of a plain run.
    """
    import headway
    from headway import Accelerator

    rank = Accelerator(cpu=True).process_index
    warm_up()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + rooms[rank]
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    headway.set_seed(5)
    calls = []

    @headway.find_executable_batch_size(starting_batch_size=START, search="predicted")
    def train(batch_size):
        calls.append([batch_size, 0])
        return update(batch_size, 4, calls[-1])

    weights = train()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    headway.set_seed(5)
    plain = update(train.batch_size, 4, [0, 0])
    Accelerator(cpu=True).end_training()
    return calls, train.batch_size, torch.equal(weights, plain)


def warm_up():
    """Start threads and load libraries, so that they take their address space before the limit is set.

    glibc would reserve further arenas of 64 MiB of address space when threads allocate at the same time, which is a matter of
    chance. Without them, each run has the same room.
    """
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    update(2, 1, [0, 0])


def update(batch_size, num_updates, counts):
    from headway import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(num_updates):
        hidden = model(torch.rand(batch_size * WIDTH // 8, 1))
        accelerator.backward(hidden.square().mean())
        counts[1] += 1
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    accelerator.free_memory()
    return weights


@pytest.mark.parametrize("rooms", [(300 << 20,), (600 << 20, 300 << 20)], ids=["one rank", "two ranks"])
def test_size_predicted_from_two_probes_trains_like_a_plain_run(rooms):
    results = run_ranks(search_batch_size, len(rooms), rooms, timeout=120)
    for calls, size, is_equal in results:
        assert calls == results[0][0]
        assert [each[0] for each in calls[:2]] == [2, 4]
        assert [each[1] for each in calls[:2]] == [2, 2], "each probe ends in the second update"
        assert calls[-1] == [size, 4]
        assert is_equal
    assert START // 32 <= size < START, "the predicted size is too small, or the limit had no effect"
