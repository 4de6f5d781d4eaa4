"""Release of prepared loaders that the script no longer refers to, as in loops that prepare a new loader in each epoch.

The registry of prepared objects refers to each loader, and through it to its dataset, because checkpoints contain the
loader's position. A resumed run does not prepare the loaders of earlier epochs again, so their positions are not needed.
"""

import sys
from collections.abc import Callable, Sequence

from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.checked import Collectives


def find_dropped_loaders(
    loaders: Sequence[PreparedLoader],
    other_lists: Sequence[Sequence[PreparedLoader]],
    epoch: int,
    everyone: Collectives,
    may_release: Callable[[], bool],
) -> list[int]:
    """Return the indices of loaders prepared in earlier epochs that no rank's script refers to, in descending order.

    All ranks must call it.

    Args:
        loaders: All prepared loaders.
        other_lists: Headway's other lists of loaders. References from these lists do not count as the script's.
        epoch: Epoch that begins.
        everyone: Collectives over all ranks.
        may_release: Function that returns whether this rank can release loaders now. If it returns False on any rank,
            the result is empty. It is only called if there are loaders of earlier epochs.
    """
    candidates = [i for i, each in enumerate(loaders) if each.origin is not None and each.origin.epoch < epoch]
    if not candidates:
        return []
    # Ranks may differ here: one alone can be in the middle of an evaluation. So all of them take part in the reduction.
    can_release = may_release()
    flags = [float(can_release and is_dropped(loaders, index, other_lists)) for index in candidates]
    are_dropped = everyone.reduce_numbers(flags, "min")
    return [index for index, is_unused in zip(reversed(candidates), reversed(are_dropped)) if is_unused]


def is_dropped(loaders: Sequence[PreparedLoader], index: int, other_lists: Sequence[Sequence[PreparedLoader]]) -> bool:
    """Whether only lists of Headway refer to a loader. Views of it (`PreparedLoader.skip`) share its position object."""
    # The number of references to an object that only one list holds, counted in the same way.
    alone = [object()]
    baseline = sys.getrefcount(alone[0])
    num_known = sum(each is loaders[index] for others in other_lists for each in others)
    is_last_trained = any(others and others[-1] is loaders[index] for others in other_lists)
    num_references = sys.getrefcount(loaders[index]) - baseline
    num_position_references = sys.getrefcount(loaders[index].pass_position) - baseline
    return not is_last_trained and num_references <= num_known and num_position_references <= 0
