"""The layout of a run that goes on with fewer ranks than it was launched on, after machines were lost. Torch-free.

The sizes that were asked for stay where they fit. Where they do not::

    tp, cp            shrink to a divisor of what they were, as heads and sequences divide by those too
    pp                becomes shards, as stages stand beside replicas alone
    replicas, shards  share the ranks that remain: as many replicas as there can be without a larger part of the model on any rank

All ranks that are left take part. `fsdp+tp=2` of 8 ranks is 3 x 2 on 6 and fsdp=7 on 7; `hsdp=2` of 4 is fsdp=3 on 3.
"""

from math import gcd

from headway.config.layout.mesh import Asked, Layout, parse, written
from headway.config.load import asked_num_processes
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_INNER = ("tp", "cp", "pp")
"""Axes whose ranks read the same data, in the order in which they keep their ranks."""


def launched_on(num_ranks: int) -> int | None:
    """How many ranks the run was launched on, where machines have been lost since; else None, and without the launcher."""
    asked = asked_num_processes()
    return asked[-1] if asked is not None and num_ranks in asked[:-1] else None


def on_ranks(asked: Asked, num_ranks: int, ranks_per_machine: int) -> Layout:
    """The layout on this run's ranks, as it was asked for or as it fits what is left.

    Args:
        asked: the layout.
        num_ranks: over all machines, now.
        ranks_per_machine: how many each has.

    Raises:
        ConfigError: the sizes do not fit, and no rank was lost.
    """
    launched = launched_on(num_ranks)
    if launched is None:
        return asked.resolve(num_ranks, ranks_per_machine)
    return after_loss(asked, launched, num_ranks, ranks_per_machine)


def after_loss(asked: Asked, launched: int, left: int, ranks_per_machine: int | None = None) -> Layout:
    """The layout with which a run goes on.

    Args:
        asked: the layout that it was launched with.
        launched: ranks that it had.
        left: ranks that it has, fewer.
        ranks_per_machine: how many each machine has; None: all are on one.
    """
    whole = asked.resolve(launched, ranks_per_machine)
    as_asked = _resolved(asked, left, ranks_per_machine)
    if as_asked is not None and not any(_size(whole, axis) % _size(as_asked, axis) for axis in _INNER):
        return as_asked
    inner: dict[str, int] = {}
    rest, lost = left, 1
    for axis in _INNER:
        inner[axis] = gcd(_size(whole, axis), rest)
        rest //= inner[axis]
        lost *= _size(whole, axis) // inner[axis]
    if whole.is_replicas_only:
        return Layout(replicate=rest)
    if whole.pp > 1:
        return Layout(shard=left)
    wanted = whole.shard * lost  # what is no longer cut along the inner axes is cut into shards
    shard = next(size for size in range(min(wanted, rest), rest + 1) if rest % size == 0)
    return Layout(replicate=rest // shard, shard=shard, **inner)


def _size(layout: Layout, axis: str) -> int:
    return int(getattr(layout, axis))


def _resolved(asked: Asked, left: int, ranks_per_machine: int | None) -> Layout | None:
    try:
        return asked.resolve(left, ranks_per_machine)
    except ConfigError:
        return None


def tell(text: str, layout: Layout, num_ranks: int, ranks_per_machine: int) -> None:
    """Warn where ranks were lost and the layout is another one than was asked for."""
    launched = launched_on(num_ranks)
    if launched is not None and (said := changed(text, layout, launched, num_ranks, ranks_per_machine)):
        log.warning_once("%s", said)


def changed(text: str, layout: Layout, launched: int, left: int, ranks_per_machine: int | None = None) -> str:
    """In words, what a layout has become; empty where it fits as it was asked for."""
    if _resolved(parse(text), left, ranks_per_machine) == layout:
        return ""
    now = f"{written(layout.sizes)} ({layout.describe()})"
    return f"layout {text} of {launched} ranks does not fit {left}: the run continues with {now}"
