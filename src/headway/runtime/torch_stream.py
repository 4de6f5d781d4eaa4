"""torch's global random stream on the host, read and written by one thread at a time.

A generator's own lock is taken with the interpreter's lock held, and reading its state may give that one up before the
generator's is free again: two threads that read at once can wait for each other for ever (torch 2.13, `THPGenerator_getState`).
A loader of a stream reads it at each batch, in whichever thread the loop runs.
"""

import os
import threading

import torch

_ONE_AT_A_TIME = threading.Lock()
# A worker that is forked while another thread reads must not wait for that thread, which it does not have.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ONE_AT_A_TIME._at_fork_reinit)  # type: ignore[attr-defined]


def read() -> torch.Tensor:
    """`torch.get_rng_state`."""
    with _ONE_AT_A_TIME:
        return torch.get_rng_state()


def write(state: torch.Tensor) -> None:
    """`torch.set_rng_state`."""
    with _ONE_AT_A_TIME:
        torch.set_rng_state(state)
