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
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.checkpoint.format.values import decode_value, encode_value
from headway.core.checkpoint.optimizer_state import get_state_exporter, has_torch_format, list_parameter_keys
from headway.core.checkpoint.state import CollectedState, StatefulObjects, map_parameter_names
from headway.core.training.prepared.prepare import Preparation
from headway.extras.group_misfits import GroupMatch, join_keys, match_groups

_PER_GROUP_KEYS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "lr_lambdas", "base_momentums", "max_momentums")
"""Keys in the state dicts of torch's schedulers whose values are lists with one entry per parameter group."""


@dataclass(frozen=True)
class _OptimizerPair:
    """Optimizer of this run, and the saved state that it should load.

    Attributes:
        index: Index of the optimizer in this and in the saved run.
        optimizer: torch's own optimizer, not the prepared one.
        entry: Saved state of the optimizer: a dict with its class ("type"), the parameter names of each group ("params"),
            the options of each group ("groups") and the state of each parameter ("values"). If the state dict is not in
            torch's format, "whole" contains it instead.
        match: Groups of the optimizer, paired with the saved groups.
    """

    index: int
    optimizer: torch.optim.Optimizer
    entry: dict[str, Any]
    match: GroupMatch


def convert_groups(
    objects: StatefulObjects, saved: CollectedState, preparation: Preparation, changed: Collection[str] | None
) -> None:
    """Convert the saved states of optimizers and their schedulers to the parameter groups of this run.

    States that cannot be converted keep their groups, and `explain_misfit` gives the reason. For it, each saved state
    gets the entries "previous_optimizers" (see `_find_previous_optimizers`) and "is_convertible". If the number of
    optimizers differs from that of the saved run, nothing is changed.

    Args:
        objects: Objects that should load the state.
        saved: Saved state, which is changed in place.
        preparation: Prepared objects with the optimizers and schedulers.
        changed: Names of the parts of the run that the user has changed on purpose. Without "groups" and with None,
            groups are converted only if nothing but their order differs.
    """
    names = map_parameter_names(objects.models)
    entries = saved.state["optimizer"]
    if len(entries) != len(objects.optimizers):
        return
    for index, (optimizer, entry) in enumerate(zip(objects.optimizers, entries)):
        match = match_groups(list_parameter_keys(optimizer, names), entry["params"])
        pair = _OptimizerPair(index, optimizer, entry, match)
        entry["previous_optimizers"] = _find_previous_optimizers(entries, pair)
        entry["is_convertible"] = _is_convertible(pair, names.values())
        has_equal_groups = [set(group) for group in match.own_groups] == [set(group) for group in match.saved_groups]
        is_permitted = match.is_reordered or "groups" in (changed or ())
        if entry["is_convertible"] and is_permitted and not has_equal_groups:
            group_options = _convert_optimizer(pair, objects, saved)
            _convert_schedulers(pair, group_options, saved, preparation)


def _find_previous_optimizers(entries: Sequence[Mapping[str, Any]], pair: _OptimizerPair) -> dict[str, int]:
    """Find the parameters of an optimizer that only other optimizers held in the saved run.

    Args:
        entries: Saved states of all optimizers.
        pair: Optimizer, with its saved state.

    Returns:
        For each such parameter, the index of the optimizer that held it.
    """
    holder_by_name = {
        name: index
        for index, entry in enumerate(entries)
        if index != pair.index
        for group in entry["params"]
        for name in group
    }
    saved_names = set(pair.match.saved_names)
    moved = [name for name in pair.match.own_names if name in holder_by_name and name not in saved_names]
    return {name: holder_by_name[name] for name in moved}


def _is_convertible(pair: _OptimizerPair, model_names: Collection[str]) -> bool:
    """Whether a saved optimizer state can be converted to this run's parameter groups.

    It cannot be converted in these cases:

    - The saved optimizer is of a different class.
    - The saved state dict is not in torch's format.
    - A parameter of this run's or of the saved groups belongs to no model of this run.
    - In the saved run, another optimizer had one of the parameters.

    Args:
        pair: Optimizer, with its saved state. The state contains the result of `_find_previous_optimizers`.
        model_names: Names of the parameters of all models.
    """
    entry, match = pair.entry, pair.match
    if "whole" in entry or entry["type"] != type(pair.optimizer).__qualname__:
        return False
    if entry["previous_optimizers"]:
        return False
    return {*match.own_names, *match.saved_names} <= set(model_names)


# ---------------------------------------------------------------- optimizers


def _convert_optimizer(pair: _OptimizerPair, objects: StatefulObjects, saved: CollectedState) -> list[dict[str, Any]]:
    """Convert an optimizer's saved state to this run's groups, in place. Return the options of each group.

    Args:
        pair: Optimizer, with its saved state.
        objects: Objects that should load the state.
        saved: Saved state of the run, whose tensors and messages are extended.
    """
    index, entry, match = pair.index, pair.entry, pair.match
    saved_options = [dict(decode_value(group, saved.tensors)) for group in entry["groups"]]
    options = [_convert_group(pair, number, saved_options) for number in range(len(match.own_groups))]
    saved.regrouped.extend(_describe_conversion(pair, options, has_several_models=len(objects.models) > 1))
    kept_values = {name: entry["values"][name] for name in match.own_names if name in entry["values"]}
    entry["values"] = kept_values | _encode_new_states(pair, objects, saved)
    entry["params"] = match.own_groups
    entry["groups"] = [
        {key: encode_value(value, f"optimizer/{index}/regrouped/{number}/{key}", saved.tensors) for key, value in group.items()}
        for number, group in enumerate(options)
    ]  # fmt: skip
    return options


def _convert_group(pair: _OptimizerPair, group_index: int, saved_options: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options that a parameter group of this run gets after loading.

    If a saved group has the same parameters, return its options. Otherwise return the script's options with two changes:

    - Options that are not arguments of the optimizer's constructor, such as a step counter, come from the main source: the
      saved group that held most of this group's parameters.
    - `lr` becomes `initial_lr` times the ratio `lr / initial_lr` of the main source, which is the factor of its schedule.
      Without a main source, the first saved group provides the ratio. `lr` stays unchanged if one of the values is missing.

    Args:
        pair: Optimizer, with its saved state.
        group_index: Index of the group in this run.
        saved_options: Options of the saved groups.
    """
    optimizer, match = pair.optimizer, pair.match
    saved_index = match.saved_indices[group_index]
    if saved_index is not None:
        return saved_options[saved_index]
    group = optimizer.param_groups[group_index]
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    source = match.find_main_source(group_index)
    if source is not None:
        options |= _select_counters(optimizer, options, saved_options[source])
    if saved_options:
        _apply_schedule_factor(options, saved_options[source or 0])
    return options


def _select_counters(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a saved group that count the optimizer's progress, such as its steps.

    They are the options with a default value that no argument of a constructor sets.

    Args:
        optimizer: Optimizer of this run.
        options: Options of the group in this run.
        saved: Options of the saved group.
    """
    arguments = _list_init_arguments(type(optimizer))
    counters = [key for key in optimizer.defaults if key not in arguments]
    return {key: saved[key] for key in counters if key in options and key in saved}


def _apply_schedule_factor(options: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Set `lr` to `initial_lr` times the saved group's ratio of both. Leave it unchanged if a value is missing.

    Args:
        options: Options of the group in this run, which are changed in place.
        saved: Options of the saved group.
    """
    initial, saved_initial = options.get("initial_lr"), saved.get("initial_lr")
    if saved_initial and initial is not None and "lr" in saved:
        options["lr"] = initial * (saved["lr"] / saved_initial)


def _list_init_arguments(optimizer_class: type) -> set[str]:
    """Return the argument names of the constructors of a class and of its base classes."""
    constructors = [vars(base)["__init__"] for base in optimizer_class.__mro__ if "__init__" in vars(base)]
    return {
        name
        for constructor in constructors
        if inspect.isfunction(constructor)  # not the built-in one of `object`
        for name in inspect.signature(constructor).parameters
    }


def _encode_new_states(pair: _OptimizerPair, objects: StatefulObjects, saved: CollectedState) -> dict[str, Any]:
    """Return the current optimizer states of parameters that the saved optimizer did not hold, encoded for loading.

    Parameters without state are left out. Most parameters have none before their first update. The result is empty if
    the optimizer's state dict is not in torch's format.

    Args:
        pair: Optimizer, with its saved state.
        objects: Objects that should load the state.
        saved: Saved state of the run, to whose tensors those of the new states are added.
    """
    optimizer, match = pair.optimizer, pair.match
    saved_names = set(match.saved_names)
    if saved_names.issuperset(match.own_names):
        return {}
    with objects.expose_state(optimizer):
        state = optimizer.state_dict()
        if not has_torch_format(optimizer, state):
            return {}
        # torch's state dict identifies parameters by number.
        numbers = {
            name: number
            for names, group in zip(match.own_groups, state["param_groups"])
            for name, number in zip(names, group["params"])
            if name not in saved_names and number in state["state"]
        }
        tensors: dict[str, Any] = {}
        export = get_state_exporter(optimizer)
        values = {
            name: encode_value(export(state["state"][number]), f"optimizer/{pair.index}/{name}", tensors)
            for name, number in numbers.items()
        }
    # These are the optimizer's live tensors, but `owned` promises that nothing else uses their memory.
    copies = {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in tensors.items()}
    saved.tensors.update(copies)
    saved.owned.update(copies)
    return values


# ---------------------------------------------------------------- schedulers


def _convert_schedulers(
    pair: _OptimizerPair, group_options: Sequence[Mapping[str, Any]], saved: CollectedState, preparation: Preparation
) -> None:
    """Convert the saved states of an optimizer's schedulers to this run's groups, in place.

    Args:
        pair: Optimizer, with its saved state.
        group_options: Options of this run's groups after the conversion.
        saved: Saved state of the run.
        preparation: Prepared objects with the schedulers.
    """
    rates = [options.get("lr") for options in group_options]
    for number, prepared in enumerate(preparation.schedulers):
        if any(each.optimizer is pair.optimizer for each in prepared.optimizers):
            state = decode_value(saved.state["scheduler"][number], saved.tensors)
            converted = _convert_schedule(state, prepared.scheduler.state_dict(), pair.match, rates)
            saved.state["scheduler"][number] = encode_value(converted, f"scheduler/{number}/regrouped", saved.tensors)


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
        if key == "_schedulers":  # SequentialLR and ChainedScheduler contain other schedulers
            pairs = zip(saved[key], own[key])
            converted[key] = [_convert_schedule(one_saved, one_own, match, rates) for one_saved, one_own in pairs]
        elif key in _PER_GROUP_KEYS and isinstance(saved[key], list | tuple) and isinstance(own[key], list | tuple):
            defaults = rates if key == "_last_lr" else own[key]
            values = []
            for index, default in zip(match.saved_indices[: len(own[key])], defaults):
                has_saved_value = index is not None and index < len(saved[key])
                values.append(saved[key][index] if has_saved_value else default)
            converted[key] = type(saved[key])(values)
    return converted


# ---------------------------------------------------------------- messages


def _describe_conversion(
    pair: _OptimizerPair, group_options: list[dict[str, Any]], has_several_models: bool
) -> list[str]:
    """Describe the conversion of an optimizer's parameter groups, as lines for `Restored.differences`.

    The lines name the groups that keep the script's options, the parameters without saved state, and the saved states
    that are left out.

    Args:
        pair: Optimizer, with its saved state.
        group_options: Options of this run's groups after the conversion.
        has_several_models: Whether the run has several models, whose numbers are then part of the parameters' names.
    """
    match = pair.match
    title = f"optimizer {pair.index} ({type(pair.optimizer).__name__})"
    if match.is_reordered:
        return [f"{title}: its groups have another order; their options follow the names of the parameters"]
    lines = []
    for number, (names, options) in enumerate(zip(match.own_groups, group_options)):
        if match.saved_indices[number] is None:
            rate = f", with a learning rate of {float(options['lr']):g}" if "lr" in options else ""
            members = join_keys(names, has_several_models)
            lines.append(f"{title}: group {number} ({members}) keeps the options of the script{rate}")
    own_names, saved_names = set(match.own_names), set(match.saved_names)
    new = [name for name in match.own_names if name not in saved_names]
    lost = [name for name in match.saved_names if name not in own_names]
    if new:
        lines.append(f"{title}: {join_keys(new, has_several_models)} begin without saved state")
    if lost:
        lines.append(f"{title}: the state of {join_keys(lost, has_several_models)} was left out")
    return lines
