"""Match the parameter groups of an optimizer with the saved ones, and explain groups that do not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN = 3
"""Number of parameter names that a message lists."""


@dataclass(frozen=True)
class GroupMatch:
    """Parameter groups of an optimizer, paired with the saved groups.

    Attributes:
        own: Names of the parameters of each group in this run.
        saved: Names of the parameters of each saved group.
        twins: For each group in this run, the index of the saved group with the same parameters, or None.
    """

    own: list[list[str]]
    saved: list[list[str]]
    twins: list[int | None]

    @property
    def is_reordered(self) -> bool:
        """Whether the groups contain the same parameters as the saved groups, in any order."""
        return None not in self.twins and len(set(self.twins)) == len(self.twins) == len(self.saved)

    def find_source(self, number: int) -> int | None:
        """Return the index of the saved group that held most of the parameters of a group, or None if none held any.

        Args:
            number: Index of the group in this run.
        """
        members = set(self.own[number])
        counts = [len(members.intersection(each)) for each in self.saved]
        return counts.index(max(counts)) if any(counts) else None


def match_groups(own: list[list[str]], saved: list[list[str]]) -> GroupMatch:
    """Pair parameter groups with the saved groups that have the same parameters.

    Args:
        own: Names of the parameters of each group in this run.
        saved: Names of the parameters of each saved group.
    """
    known = {frozenset(each): number for number, each in enumerate(saved)}
    return GroupMatch(own, saved, [known.get(frozenset(each)) for each in own])


def explain_misfit(keys: list[list[str]], entry: Mapping[str, Any], index: int) -> str:
    """Return the message for an optimizer whose parameter groups differ from the saved ones.

    Args:
        keys: Names of the parameters of each group in this run.
        entry: Saved state of the optimizer, in which `convert_groups` has noted whether it can be converted.
        index: Index of the optimizer.
    """
    saved = entry["params"]
    own = [key for each in keys for key in each]
    held = [key for each in saved for key in each]
    several = any(not key.startswith("0/") for key in (*own, *held))
    lacking, extra = sorted(set(own) - set(held)), sorted(set(held) - set(own))
    if "whole" in entry and not lacking and not extra:
        return (
            f"optimizer {index} lists its parameters in a different order than the saved one. Its state_dict() identifies them by "
            "position, so build the optimizer with its parameters in the saved order"
        )
    twins = match_groups(keys, saved).twins
    moved = [key for each, twin in zip(keys, twins) if twin is None for key in each if key not in lacking]
    facts = [f"their number is {len(keys)} instead of {len(saved)}"] if len(keys) != len(saved) else []
    facts += [f"only in this run: {join_keys(lacking, several)}"] if lacking else []
    facts += [f"only in the checkpoint: {join_keys(extra, several)}"] if extra else []
    facts += [f"grouped differently: {join_keys(moved, several)}"] if moved and not lacking and not extra else []
    moved_from = entry.get("elsewhere", {})
    facts += [f"{join_keys([key], several)} was in optimizer {number}" for key, number in list(moved_from.items())[:1]]
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
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
