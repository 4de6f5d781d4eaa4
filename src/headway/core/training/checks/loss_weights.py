"""Check that either all ranks pass `weight=` to backward, or none does.

Weights that a script passes are summed over ranks in a collective. Row counts of a prepared loader are known on all
ranks, so their sum needs none. If only some ranks passed a weight, they would wait in a sum that the others never join.

The ranks compare their calls once, before the first backward of each set of models. From then on, each sum of weights
also shows whether all ranks have passed one, so that later windows need no additional collective.
"""

from headway.common.callsite import find_call_site
from headway.core.runtime.collectives.checked import Collectives, PendingHandshake
from headway.core.strategies.base import Strategy
from headway.core.training.windows import AccumulationWindow
from headway.errors import LossError
from headway.log import get_logger

log = get_logger(__name__)

_DIFFERENT_REDUCTIONS = (
    "ranks passed different values of reduction= to backward: %s. The update is exact only if each rank has reduced its loss in this "
    "way. If all ranks compute their losses alike, pass the same reduction on all of them"
)


class LossWeightSums:
    """Sums of loss weights over the ranks, which also check that all ranks or none of them pass `weight=`.

    Args:
        strategy: Strategy of the run.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def compare_calls(self, is_given: bool, reduction: str) -> bool:
        """Compare the arguments of the ranks' first calls of backward, in a collective of all ranks.

        If the reductions differ, log a warning. Ranks that ran out of memory are left out of the comparison.

        Args:
            is_given: Whether this rank passed `weight=`.
            reduction: "mean" or "sum".

        Returns:
            Whether loss weights must be summed over the ranks in a collective: all ranks have passed a weight, and there
            are several data shards.

        Raises:
            LossError: On all ranks, if only some of them passed `weight=`.
        """
        everyone = self._strategy.everyone
        if everyone.world_size == 1:
            return False
        own = float(is_given), float(not is_given), float(reduction == "sum")
        given_ranks: list[int] = []
        default_ranks: list[int] = []
        reductions: dict[int, str] = {}
        for rank, (gave_weight, used_default, is_sum) in enumerate(everyone.gather_numbers(own, "loss weights")):
            # A rank whose memory ran out joins with zeros, and calls backward later, when the batch is run again.
            if not gave_weight and not used_default:
                continue
            if gave_weight:
                given_ranks.append(rank)
            else:
                default_ranks.append(rank)
            reductions[rank] = "sum" if is_sum else "mean"
        if given_ranks and default_ranks:
            raise_difference(everyone, is_given)
        if len(set(reductions.values())) > 1:
            text = ", ".join(f"{name!r} on rank {rank}" for rank, name in reductions.items())
            log.warning_once(_DIFFERENT_REDUCTIONS, text)
        return is_given and self._strategy.data_shard.count > 1

    def start(self, window: AccumulationWindow) -> PendingHandshake | list[float]:
        """Start to sum the loss weights of an accumulation window over the ranks. Pass the result to `finish`."""
        values = [window.local_weight, float(window.has_given_weights), float(window.has_default_weights)]
        return self._strategy.data_group.start_sum(values, "loss weights")

    def finish(self, window: AccumulationWindow, pending: PendingHandshake | list[float]) -> float:
        """Wait for a sum that `start` has started, and return the total weight of the window over all ranks.

        Also record whether the next window of these models needs such a collective.

        Raises:
            LossError: On all ranks, if only some of them passed `weight=` in this window.
        """
        group = self._strategy.data_group
        total, num_given, num_default = group.finish_sum(pending)
        if any(0 < count < group.world_size for count in (num_given, num_default)):
            raise_difference(group, window.has_given_weights and not window.has_default_weights)
        window.sums_weights = num_given > 0
        return total


def raise_difference(group: Collectives, is_given: bool) -> None:
    """Raise an error with the line of each rank's call. All ranks of the group must call this function.

    Args:
        group: Collectives over the ranks that differ.
        is_given: Whether this rank passed `weight=` in all of its calls.

    Raises:
        LossError: Always.
    """
    calls = zip(group.list_ranks(), group.gather_objects((is_given, find_call_site())))
    lines = "\n".join(
        f"  rank {rank}: {'with' if has_weight else 'without'} weight= at {site}" for rank, (has_weight, site) in calls
    )
    raise LossError(
        f"backward() got weight= on some ranks only:\n{lines}\nLosses are weighted over all ranks, so pass weight= on all ranks or "
        "on none. A rank whose batch contains nothing to train on passes weight=0"
    )
