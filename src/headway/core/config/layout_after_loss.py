"""Adaptation of the requested layout if a run continues after it has lost machines.

The requested sizes are kept if they fit the remaining ranks. If they do not::

    tp, cp, ep        shrink to a divisor of their size, because heads, sequences and experts are divisible by it too
    pp                becomes shards, because stages can only be combined with replicas
    replicas, shards  use the remaining ranks: as many replicas as possible without a larger part of the model per
        rank

All remaining ranks take part. For example, `fsdp+tp=2` on 8 ranks becomes `fsdp=3+tp=2` on 6 ranks and `fsdp=7` on 7
ranks, and `hsdp=2` on 4 ranks becomes `fsdp=3` on 3 ranks. This module does not import torch.
"""

from math import gcd

from headway.core.config.load import (
    read_requested_num_processes,
)
from headway.core.config.mesh import Layout, ParsedLayout, format_sizes, parse_layout
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_INNER_AXES = ("tp", "cp", "ep", "pp")
"""Axes that split a fixed number of items, such as heads.

If a run has lost ranks, the remaining ranks are distributed to the axes in this order.
"""


def find_launched_ranks(num_ranks: int) -> int | None:
    """Return the number of ranks with which the run was launched, if it has lost machines since. Otherwise return None.

    Args:
        num_ranks: Current number of ranks.
    """
    allowed = read_requested_num_processes()
    if allowed is None:
        return None
    max_ranks = allowed[-1]
    return max_ranks if num_ranks in allowed and num_ranks < max_ranks else None


def resolve_on_ranks(requested: ParsedLayout, num_ranks: int, ranks_per_machine: int) -> Layout:
    """Return the layout for the current number of ranks: as requested, or adapted if machines were lost.

    Args:
        requested: Requested layout.
        num_ranks: Current number of ranks over all machines.
        ranks_per_machine: Number of ranks on each machine.

    Raises:
        ConfigError: If the sizes do not fit and no rank was lost.
    """
    num_launched = find_launched_ranks(num_ranks)
    if num_launched is None:
        return requested.resolve(num_ranks, ranks_per_machine)
    return shrink_layout(requested, num_launched, num_ranks, ranks_per_machine)


def shrink_layout(
    requested: ParsedLayout, num_launched: int, num_remaining: int, ranks_per_machine: int | None = None
) -> Layout:
    """Return the layout with which a run continues after it has lost ranks.

    Args:
        requested: Layout with which the run was launched.
        num_launched: Number of ranks at launch.
        num_remaining: Number of ranks that remain.
        ranks_per_machine: Number of ranks on each machine. None: all ranks are on one machine.
    """
    launched = requested.resolve(num_launched, ranks_per_machine)
    unchanged = _resolve_or_none(requested, num_remaining, ranks_per_machine)
    if unchanged is not None:
        has_divisors = all(_get_size(launched, axis) % _get_size(unchanged, axis) == 0 for axis in _INNER_AXES)
        if has_divisors:
            return unchanged
    inner_sizes: dict[str, int] = {}
    num_free = num_remaining  # ranks that the inner axes do not use
    shrink_factor = 1  # factor by which the inner axes together have become smaller
    for axis in _INNER_AXES:
        size = _get_size(launched, axis)
        inner_sizes[axis] = gcd(size, num_free)
        num_free //= inner_sizes[axis]
        shrink_factor *= size // inner_sizes[axis]
    if launched.is_replicas_only:
        return Layout(replicate=num_free)
    if launched.pp > 1:
        return Layout(shard=num_remaining)
    # Parts that the inner axes no longer split are sharded instead, so that no rank has a larger part of the model.
    min_shards = launched.shard * shrink_factor
    shard = next(size for size in range(min(min_shards, num_free), num_free + 1) if num_free % size == 0)
    return Layout(replicate=num_free // shard, shard=shard, **inner_sizes)


def warn_of_change(text: str, layout: Layout, num_ranks: int, ranks_per_machine: int) -> None:
    """Log a warning if ranks were lost and the layout differs from the requested one.

    Args:
        text: Requested layout.
        layout: Layout of this run.
        num_ranks: Current number of ranks over all machines.
        ranks_per_machine: Number of ranks on each machine.
    """
    num_launched = find_launched_ranks(num_ranks)
    if num_launched is None:
        return
    change = describe_change(text, layout, num_launched, num_ranks, ranks_per_machine)
    if change:
        log.warning_once("%s", change)


def describe_change(
    text: str, layout: Layout, num_launched: int, num_remaining: int, ranks_per_machine: int | None = None
) -> str:
    """Return a sentence that describes how the layout changed, or "" if the layout is as requested.

    Args:
        text: Requested layout.
        layout: Layout with which the run continues.
        num_launched: Number of ranks at launch.
        num_remaining: Number of ranks that remain.
        ranks_per_machine: Number of ranks on each machine. None: all ranks are on one machine.
    """
    if _resolve_or_none(parse_layout(text), num_remaining, ranks_per_machine) == layout:
        return ""
    new_layout = f"{format_sizes(layout.sizes)} ({layout.describe()})"
    return f"layout {text} of {num_launched} ranks does not fit {num_remaining}: the run continues with {new_layout}"


def _resolve_or_none(requested: ParsedLayout, num_ranks: int, ranks_per_machine: int | None) -> Layout | None:
    """Return the requested layout on this number of ranks, or None if it does not fit."""
    try:
        return requested.resolve(num_ranks, ranks_per_machine)
    except ConfigError:
        return None


def _get_size(layout: Layout, axis: str) -> int:
    return int(getattr(layout, axis))
