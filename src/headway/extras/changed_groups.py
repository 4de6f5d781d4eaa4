"""Load optimizer state into parameter groups that differ from the saved ones, matching parameters by name.

The state of each parameter is saved under its name, so it fits any grouping. A group gets its options, such as the
learning rate, from the saved group with the same parameters, even if the order of the groups has changed. A group
without such a counterpart keeps the options that the script has set, so the user must confirm the change with
`changed="groups"`.

The state of a learning-rate scheduler contains lists with one entry per group, such as the initial learning rates. They
are converted in the same way.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from headway.core.checkpoint.format.values import decode_value, encode_value
from headway.core.checkpoint.state import (
    CollectedState,
    StatefulObjects,
    get_state_exporter,
    has_torch_format,
    list_parameter_keys,
    map_parameter_names,
)
from headway.core.training.prepared.prepare import Preparation
from headway.extras.group_misfits import GroupMatch, join_keys, match_groups

_PER_GROUP = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "lr_lambdas", "base_momentums", "max_momentums")
"""Keys in the state dicts of torch's schedulers whose values are lists with one entry per parameter group."""


def convert_groups(
    parts: StatefulObjects, found: CollectedState, preparation: Preparation, changed: Collection[str] | None
) -> None:
    """Convert the saved states of optimizers and their schedulers to the parameter groups of this run.

    States that cannot be converted stay unchanged, and `explain_misfit` gives the reason. All states stay unchanged if
    the number of optimizers differs from that of the saved run.

    Args:
        parts: Objects that should load the state.
        found: Saved state, which is changed in place.
        preparation: Prepared objects with the optimizers and schedulers.
        changed: Names of the parts of the run that the user has changed on purpose. Without "groups", groups are
            converted only if nothing but their order differs.
    """
    names = map_parameter_names(parts.models)
    entries = found.state["optimizer"]
    if len(entries) != len(parts.optimizers):
        return
    for index, (optimizer, entry) in enumerate(zip(parts.optimizers, entries)):
        own = list_parameter_keys(optimizer, names)
        match = match_groups(own, entry["params"])
        is_alike = [set(each) for each in own] == [set(each) for each in match.saved]
        entry["elsewhere"] = _find_moved(entries, index, match)
        entry["is_convertible"] = _is_convertible(optimizer, entry, match, names.values())
        if is_alike or not entry["is_convertible"]:
            continue
        if not match.is_reordered and "groups" not in (changed or ()):
            continue
        before = _decode_groups(entry, found)
        groups = [_convert_group(optimizer, number, before, match) for number in range(len(own))]
        found.regrouped.extend(_describe_conversion(index, optimizer, groups, match, len(parts.models) > 1))
        values = {key: entry["values"][key] for keys in own for key in keys if key in entry["values"]}
        values |= _encode_new_states(parts, optimizer, index, match, found)
        entry["groups"] = [
            {key: encode_value(value, f"optimizer/{index}/regrouped/{number}/{key}", found.tensors) for key, value in group.items()}
            for number, group in enumerate(groups)
        ]  # fmt: skip
        entry["params"], entry["values"] = own, values
        rates = [group.get("lr") for group in groups]
        for number, made in enumerate(preparation.schedulers):
            if any(each.optimizer is optimizer for each in made.optimizers):
                state = decode_value(found.state["scheduler"][number], found.tensors)
                converted = _convert_schedule(state, made.scheduler.state_dict(), match, rates)
                found.state["scheduler"][number] = encode_value(
                    converted, f"scheduler/{number}/regrouped", found.tensors
                )


def _find_moved(entries: Sequence[Mapping[str, Any]], index: int, match: GroupMatch) -> dict[str, int]:
    """Return the parameters that have moved to an optimizer: in the saved run, only other optimizers held them.

    Args:
        entries: Saved states of all optimizers.
        index: Index of the optimizer.
        match: Groups of the optimizer, paired with the saved groups.

    Returns:
        For each such parameter, the index of the optimizer that held it.
    """
    others = {
        key: number
        for number, entry in enumerate(entries)
        if number != index
        for keys in entry["params"]
        for key in keys
    }
    held = {key for keys in match.saved for key in keys}
    return {key: others[key] for keys in match.own for key in keys if key in others and key not in held}


def _is_convertible(
    optimizer: torch.optim.Optimizer, entry: Mapping[str, Any], match: GroupMatch, names: Collection[str]
) -> bool:
    """Whether a saved optimizer state can be converted to this run's parameter groups.

    It cannot be converted in these cases:

    - The saved optimizer is of a different class.
    - The saved state dict is not in torch's format.
    - A parameter of this run's or of the saved groups belongs to no model of this run.
    - In the saved run, another optimizer had one of the parameters.

    Args:
        optimizer: Optimizer of this run.
        entry: Saved state of the optimizer, with the result of `_find_moved` under "elsewhere".
        match: Groups of the optimizer, paired with the saved groups.
        names: Names of the parameters of all models.
    """
    known = set(names)
    every = {key for keys in (*match.own, *match.saved) for key in keys}
    is_alike = "whole" not in entry and entry["type"] == type(optimizer).__qualname__
    return is_alike and every <= known and not entry["elsewhere"]


def _decode_groups(entry: Mapping[str, Any], found: CollectedState) -> list[dict[str, Any]]:
    return [dict(decode_value(group, found.tensors)) for group in entry["groups"]]


def _convert_group(
    optimizer: torch.optim.Optimizer, number: int, before: list[dict[str, Any]], match: GroupMatch
) -> dict[str, Any]:
    """Return the options of a parameter group: those of the saved group with the same parameters, or else the script's.

    Some of the script's options are adjusted. The learning rate is scaled by the factor by which the schedule had
    changed the saved one. The optimizer itself changes some options during training, such as the step counter of a
    schedule-free optimizer. These are taken from the saved group that held most of the parameters.

    Args:
        optimizer: Optimizer of this run.
        number: Index of the group in this run.
        before: Options of the saved groups.
        match: Groups of the optimizer, paired with the saved groups.
    """
    twin = match.twins[number]
    if twin is not None:
        return before[twin]
    own = {key: value for key, value in optimizer.param_groups[number].items() if key not in ("params", "param_names")}
    source = match.find_source(number)
    if source is not None:
        inits = [vars(kind)["__init__"] for kind in type(optimizer).__mro__ if "__init__" in vars(kind)]
        chosen = {name for init in inits if inspect.isfunction(init) for name in inspect.signature(init).parameters}
        counters = [key for key in optimizer.defaults if key not in chosen and key in own and key in before[source]]
        own |= {key: before[source][key] for key in counters}
    former = before[source or 0] if before else {}
    start, initial = former.get("initial_lr"), own.get("initial_lr")
    if start and initial is not None and "lr" in former:
        own["lr"] = initial * (former["lr"] / start)
    return own


def _encode_new_states(
    parts: StatefulObjects, optimizer: torch.optim.Optimizer, index: int, match: GroupMatch, found: CollectedState
) -> dict[str, Any]:
    """Return the current optimizer states of parameters that the saved optimizer did not hold, encoded for loading.

    Parameters without state are left out. Most parameters have none before their first update. The result is empty if
    the optimizer's state dict is not in torch's format.

    Args:
        parts: Objects that should load the state.
        optimizer: Optimizer of this run.
        index: Index of the optimizer.
        match: Groups of the optimizer, paired with the saved groups.
        found: Saved state, to whose tensors those of the new states are added.
    """
    held = {key for keys in match.saved for key in keys}
    if all(key in held for keys in match.own for key in keys):
        return {}
    with parts.expose_state(optimizer):
        state = optimizer.state_dict()
        if not has_torch_format(optimizer, state):
            return {}
        numbers = {
            key: number
            for keys, group in zip(match.own, state["param_groups"])
            for key, number in zip(keys, group["params"])
            if key not in held and number in state["state"]
        }
        tensors: dict[str, Any] = {}
        export = get_state_exporter(optimizer)
        values = {
            key: encode_value(export(state["state"][number]), f"optimizer/{index}/{key}", tensors)
            for key, number in numbers.items()
        }
    found.tensors.update(
        {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in tensors.items()}
    )
    found.owned.update(tensors)
    return values


def _convert_schedule(saved: Any, own: Any, match: GroupMatch, rates: Sequence[Any]) -> Any:
    """Return a scheduler's saved state, with its per-group lists rearranged to match this run's groups.

    A saved state is returned unchanged if it or the current state is not a dict.

    Args:
        saved: Saved state of the scheduler.
        own: Current state of the scheduler, which provides the entries of groups without a counterpart.
        match: This run's groups, paired with the saved groups.
        rates: Learning rates of this run's groups after the load.
    """
    if not isinstance(saved, dict) or not isinstance(own, dict):
        return saved
    converted = dict(saved)
    for key in saved.keys() & own.keys():
        if key == "_schedulers":
            converted[key] = [_convert_schedule(one, other, match, rates) for one, other in zip(saved[key], own[key])]
        elif key in _PER_GROUP and isinstance(saved[key], list | tuple) and isinstance(own[key], list | tuple):
            current = rates if key == "_last_lr" else own[key]
            converted[key] = type(saved[key])(
                saved[key][twin] if twin is not None and twin < len(saved[key]) else value
                for twin, value in zip(match.twins[: len(own[key])], current)
            )
    return converted


# ---------------------------------------------------------------- messages


def _describe_conversion(
    index: int, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], match: GroupMatch, has_several: bool
) -> list[str]:
    """Describe the conversion of an optimizer's parameter groups, as lines for `Restored.differences`.

    The lines name the groups that keep the script's options, the parameters without saved state, and the saved states
    that are left out.

    Args:
        index: Index of the optimizer.
        optimizer: Optimizer, whose class is named.
        groups: Options of this run's groups after the conversion.
        match: Groups of the optimizer, paired with the saved groups.
        has_several: Whether the run has several models, whose numbers are then part of the parameters' names.
    """
    name = f"optimizer {index} ({type(optimizer).__name__})"
    if match.is_reordered:
        return [f"{name}: its groups have another order; their options follow the names of the parameters"]
    held = {key for keys in match.saved for key in keys}
    lines = []
    for number, (keys, group) in enumerate(zip(match.own, groups)):
        if match.twins[number] is None:
            rate = f", with a learning rate of {float(group['lr']):g}" if "lr" in group else ""
            lines.append(
                f"{name}: group {number} ({join_keys(keys, has_several)}) keeps the options of the script{rate}"
            )
    new = [key for keys in match.own for key in keys if key not in held]
    own = {key for keys in match.own for key in keys}
    lost = [key for keys in match.saved for key in keys if key not in own]
    if new:
        lines.append(f"{name}: {join_keys(new, has_several)} begin without saved state")
    if lost:
        lines.append(f"{name}: the state of {join_keys(lost, has_several)} was left out")
    return lines
