"""Roll call at the start of a run: each rank announces itself, and an error names the missing ranks."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

from headway.common.text import join_names
from headway.common.untrusted import escape_text
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.control_plane.store import wait_for_keys
from headway.errors import LaunchError


def check_in(store: SealedStore, rank: int, world_size: int, timeout: timedelta) -> None:
    """Announce this rank, and wait until all ranks have announced themselves.

    Args:
        store: Store that all ranks share.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Maximum time to wait.

    Raises:
        LaunchError: If ranks are missing at the timeout, or if two processes have the same rank. The message names the
            ranks.
    """
    own_process = f"pid {os.getpid()} on {socket.gethostname()}"
    if store.add(f"here/{rank}/count", 1) > 1:
        other_process = find_process_location(store, rank) or "another process"
        raise LaunchError(
            f"more processes than the {world_size} that were asked for: rank {rank} was started twice "
            f"({other_process}, and {own_process}). Start each rank once, "
            "and do not pass the variable RANK to processes that are not ranks"
        )
    store.set(f"here/{rank}", own_process.encode())
    keys = [f"here/{other}" for other in range(world_size)]
    if wait_for_keys(store, keys, timeout):
        return
    missing = [other for other in range(world_size) if not store.check([keys[other]])]
    if missing:
        raise LaunchError(describe_missing(world_size, missing, f"within the timeout of {timeout.total_seconds():g} s"))


def find_process_location(store: SealedStore, rank: int) -> str:
    """Return the process ID and host of a rank as text, or "" if the rank has not announced itself."""
    return escape_text((store.find(f"here/{rank}") or b"").decode())


def list_present(store: SealedStore, world_size: int) -> list[int]:
    """Return the ranks that have announced themselves."""
    return [rank for rank in range(world_size) if store.check([f"here/{rank}"])]


def describe_missing(world_size: int, missing: Sequence[int], when: str) -> str:
    """Return a sentence for error messages that names the missing ranks and counts those that are present.

    Args:
        world_size: Number of ranks.
        missing: Missing ranks.
        when: Phrase for the time limit, such as "within 60 s".
    """
    num_present = world_size - len(missing)
    return (
        f"{world_size} processes were asked for and {num_present} {'have' if num_present != 1 else 'has'} come {when}: missing "
        f"{name_ranks(missing)}. Find out what delays these ranks (an import, a download, a branch that leaves early), or allow "
        "more time with --timeout"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return text that lists ranks, such as "rank 3" or "ranks 1, 3". A long list is truncated."""
    return f"rank{'s' if len(ranks) > 1 else ''} {join_names(list(map(str, ranks)), 20)}"
