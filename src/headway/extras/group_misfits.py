"""Match the parameter groups of an optimizer with the saved ones, and explain groups that do not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NUM_SHOWN = 3
"""Number of parameter names that a message lists."""


@dataclass(frozen=True)
class GroupMatch:
    """Parameter groups of an optimizer, paired with the saved groups.

    Attributes:
        own_groups: Names of the parameters of each group in this run.
        saved_groups: Names of the parameters of each saved group.
        saved_indices: For each group in this run, the index of the saved group with the same parameters, or None.
    """

    own_groups: list[list[str]]
    saved_groups: list[list[str]]
    saved_indices: list[int | None]

    @property
    def own_names(self) -> list[str]:
        """Names of all parameters of the optimizer in this run."""
        return [name for group in self.own_groups for name in group]

    @property
    def saved_names(self) -> list[str]:
        """Names of all parameters of the saved optimizer."""
        return [name for group in self.saved_groups for name in group]

    @property
    def is_reordered(self) -> bool:
        """Whether the groups contain the same parameters as the saved groups, in any order."""
        indices = self.saved_indices
        return None not in indices and len(set(indices)) == len(indices) == len(self.saved_groups)

    def find_main_source(self, number: int) -> int | None:
        """Return the index of the saved group that held most of the parameters of a group, or None if none held any.

        Args:
            number: Index of the group in this run.
        """
        members = set(self.own_groups[number])
        counts = [len(members.intersection(group)) for group in self.saved_groups]
        return counts.index(max(counts)) if any(counts) else None


def match_groups(own_groups: list[list[str]], saved_groups: list[list[str]]) -> GroupMatch:
    """Pair parameter groups with the saved groups that have the same parameters, in any order.

    Args:
        own_groups: Names of the parameters of each group in this run.
        saved_groups: Names of the parameters of each saved group.
    """
    index_by_members = {frozenset(group): index for index, group in enumerate(saved_groups)}
    return GroupMatch(own_groups, saved_groups, [index_by_members.get(frozenset(group)) for group in own_groups])


def explain_misfit(own_groups: list[list[str]], entry: Mapping[str, Any], index: int) -> str:
    """Return the message for an optimizer whose parameter groups differ from the saved ones.

    Args:
        own_groups: Names of the parameters of each group in this run.
        entry: Saved state of the optimizer, in which `convert_groups` has noted under "is_convertible" whether it can be
            converted, and under "previous_optimizers" which parameters came from other optimizers.
        index: Index of the optimizer.
    """
    match = match_groups(own_groups, entry["params"])
    own_names, saved_names = set(match.own_names), set(match.saved_names)
    has_several = any(not name.startswith("0/") for name in own_names | saved_names)
    new, lost = sorted(own_names - saved_names), sorted(saved_names - own_names)
    if "whole" in entry and not new and not lost:
        return (
            f"optimizer {index} lists its parameters in a different order than the saved one. Its state_dict() identifies them by "
            "position, so build the optimizer with its parameters in the saved order"
        )
    facts = []
    if len(match.own_groups) != len(match.saved_groups):
        facts.append(f"their number is {len(match.own_groups)} instead of {len(match.saved_groups)}")
    if new:
        facts.append(f"only in this run: {join_keys(new, has_several)}")
    if lost:
        facts.append(f"only in the checkpoint: {join_keys(lost, has_several)}")
    regrouped = [
        name
        for group, saved_index in zip(match.own_groups, match.saved_indices)
        if saved_index is None
        for name in group
    ]
    if regrouped and not new and not lost:
        facts.append(f"grouped differently: {join_keys(regrouped, has_several)}")
    for name, number in list(entry.get("previous_optimizers", {}).items())[:1]:
        facts.append(f"{join_keys([name], has_several)} was in optimizer {number}")
    advice = "Build the groups as they were (call add_param_group() before the load)"
    if entry.get("is_convertible", True):
        advice += (
            ". If the change is intended, pass changed='groups' to resume() or load_state(): each parameter then gets its own "
            "state, and changed groups keep the options of the script"
        )
    return f"optimizer {index} has other parameter groups than the saved one: {'; '.join(facts)}. {advice}"


def join_keys(keys: Sequence[str], has_several: bool) -> str:
    """Join the names of the first few parameters for a message, and add the number of remaining parameters.

    Args:
        keys: Names of parameters, which begin with the number of the model, as in "0/head.weight".
        has_several: Whether the run has several models. Otherwise the number of the model is left out.
    """
    names = [key if has_several else key.partition("/")[2] for key in keys]
    num_hidden = len(names) - _NUM_SHOWN
    return ", ".join(names[:_NUM_SHOWN]) + (f" and {num_hidden} more" if num_hidden > 0 else "")
