"""What objects take from a manifest's state, looked at before any of them is changed: optimizers, loaders, RNG states.

RNG states are tried on generators that nobody uses.
"""

import random
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy
import torch

from headway.checkpoint.format.manifest import LARGEST, TypedReader
from headway.checkpoint.format.values import TAG, decode
from headway.checkpoint.state import CollectedState, StatefulObjects, parameter_names
from headway.data.sampling.rng import among_rng_states, is_generator_text, is_rng_states_text
from headway.errors import CheckpointError
from headway.runtime.device import Hardware
from headway.weights.pieces import is_spread

_SHAPED = "Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD SGD"
_OF_ONE_SHAPE = {getattr(torch.optim, name) for name in _SHAPED.split()}
"""What these keep of a parameter has its shape, or is one number."""
_KINDS: tuple[tuple[Any, Any], ...] = (
    (int | float, int | float | torch.Tensor | numpy.generic | None),
    (str, str | None),
    (list | tuple, list | tuple | None),
    (dict, dict | None),
)
"""What a schedule may have in the place of what another of its kind has."""


def check_objects(state: TypedReader, found: CollectedState) -> None:
    """Can what the models, optimizers, schedules and registered objects will be given be read?

    Raises:
        CheckpointError: naming the first value that is not as it must be.
    """
    for extra in state["extra"].items():
        for value in extra.table().values():
            decoded(value, found)
    for optimizer in state["optimizer"].items():
        _check_optimizer(optimizer, found)
    for name, kind in state.table().items():
        if name not in ("extra", "optimizer", "run", "loaders", "streams"):
            for value in kind.items():
                of_object = decoded(value, found)
                if name == "scheduler":
                    of_object.mapping()


def unfit(parts: StatefulObjects, found: CollectedState) -> list[str]:
    """What the objects would take and fail with later, of a state that `misfits` has nothing against; nothing is changed."""
    problems = []
    names = parameter_names(parts.models)
    for optimizer, entry in zip(parts.optimizers, found.state["optimizer"]):
        if type(optimizer) in _OF_ONE_SHAPE:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                name = names.get(id(parameter), "")
                shape = tuple(parts.part_of(parameter).shape)
                problems += _misshapen(name, shape, decode(entry["values"].get(name, {}), found.tensors))
    for index, (obj, value) in enumerate(zip(parts.others.get("scheduler", ()), found.state.get("scheduler", ()))):
        if type(obj).__module__ == torch.optim.lr_scheduler.__name__:
            problems += _unlike(obj.state_dict(), decode(value, found.tensors), f"schedule {index}'s state")
    return problems


def _misshapen(name: str, shape: tuple[int, ...], values: Mapping[Any, Any]) -> list[str]:
    problems = []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor | float | int | None) and not is_spread(value):
            problems.append(f"the optimizer's {key} of {name} is a {type(value).__name__}, where a tensor belongs")
        elif is_spread(value) or isinstance(value, torch.Tensor):
            found = tuple(value.shape)
            if prod(found) != 1 and found != shape:
                problems.append(f"the optimizer's {key} of {name} has the shape {found}, the parameter {shape}")
    return problems


def _unlike(own: Any, saved: Any, where: str) -> list[str]:
    """Where a schedule of torch's has numbers, text, lists and dicts, and the saved one something else."""
    if isinstance(own, dict) and isinstance(saved, dict):
        return [
            problem for key in own.keys() & saved.keys() for problem in _unlike(own[key], saved[key], f"{where} {key}")
        ]
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        is_short = where.endswith("_lrs") and len(own) != len(saved)
        problems = [f"{where} has {len(saved)} entries, {len(own)} belong there"] if is_short else []
        return problems + [problem for one, other in zip(own, saved) for problem in _unlike(one, other, where)]
    for kinds, allowed in _KINDS:
        if isinstance(own, kinds) and not isinstance(saved, allowed):
            return [f"{where} is a {type(saved).__name__}, where a {type(own).__name__} belongs"]
    return []


def decoded(told: TypedReader, found: CollectedState) -> TypedReader:
    """The value that was encoded, in its place."""
    return told.replaced(decode(told.value, found.tensors))


# -------------------------------------------------------------------- objects


def _check_optimizer(told: TypedReader, found: CollectedState) -> None:
    told["type"].text()
    names = [[name.text() for name in group.items()] for group in told["params"].items()]
    groups = told["groups"].items(len(names))
    for group in groups:
        _check_options(decoded(group, found))
    every = {name for group in names for name in group}
    if len(every) != sum(map(len, names)):
        told["params"].refuse("the parameters' names, each of them once,")
    for name, entry in told["values"].table().items():
        if name not in every:
            entry.refuse("no state: it belongs to none of the parameters")
        decoded(entry, found).mapping()
    for name in ("rest", "loose"):
        for each in told.given(name):
            decoded(each, found).mapping()
    told["rest"].mapping()


def _check_options(group: TypedReader) -> None:
    """What torch's optimizers compute with."""
    group.mapping()
    for each in group.given("params"):
        each.refuse("no list of parameters")
    for each in group.given("lr", "weight_decay", "momentum", "eps", "initial_lr", "dampening", "alpha", "rho"):
        if isinstance(each.value, str | bytes | dict | bool):
            each.refuse("a number")
    for each in group.given("betas"):
        for beta in each.items(2):
            if not isinstance(beta.value, torch.Tensor):
                beta.number()


# -------------------------------------------------------------------- data and RNG states


_NUMBERS = (("drawn", -(2**63), 2**63 - 1), ("num_rounds", 0, LARGEST), ("round_size", 1, LARGEST))


def check_loaders(loaders: TypedReader, count: int, hardware: Hardware) -> None:
    """Are these the positions of so many loaders, and would the loaders take them?"""
    for loader in loaders.items(count):
        _check_loader(loader, hardware)


def _check_loader(loader: TypedReader, hardware: Hardware) -> None:
    for name in ("epoch", "consumed"):
        loader[name].whole()
    source = loader.get("source")
    if source is None:
        return
    for name, least, most in _NUMBERS:
        for each in source.given(name):
            each.whole(least, most)
    if source.get("round_size") is not None:
        source["num_rounds"].whole()
    for each in source.given("is_idle"):
        each.flag()
    workers = source.get("workers")
    if workers is not None:
        workers["num_batches"].whole()
        workers["streams"].items()
    _check_states(source, hardware)


def _check_states(source: TypedReader, hardware: Hardware) -> None:
    """The RNG states that a loader's pass goes on from."""
    generators = [each for each in source.given("base_seed") if each.text()]
    generators += [text for each in source.given("generators") for text in each.items()]
    for text in generators:
        if not is_generator_text(text.text(), is_on_cpu=hardware.kind == "cpu"):
            text.refuse("the state of a generator")
    rng_states = [*source.given("global")]
    rng_states += [text for each in source.given("workers") for text in each["streams"].items() if not text.is_none]
    for text in rng_states:
        if not is_rng_states_text(text.text()):
            text.refuse("the states of generators")
    for line in (line for each in source.given("lines") for line in each.items()):
        place, number, text = line.items(3)
        number.whole(-1, LARGEST)
        if not is_rng_states_text(among_rng_states(text.text(), place.whole(0, 2))):
            text.refuse("the state of a generator")


def check_rng_states(rng_states: TypedReader, hardware: Hardware) -> None:
    """Would the process's own generators take them?"""
    _check_state(rng_states["torch"])
    for each in rng_states.given("loaders"):
        _check_state(each)
    for each in rng_states.given("device"):
        is_state = isinstance(each.value, torch.Tensor) and each.value.dtype == torch.uint8
        read = None if hardware.kind == "cpu" else hardware.ability("get_rng_state")
        if read is not None and (not is_state or each.value.shape != read().shape):
            each.refuse("the state of the device's generator")
    python = rng_states["python"]
    gauss = python.items(3)[2]
    try:
        random.Random().setstate(python.value)
    except (TypeError, ValueError, OverflowError):
        python.refuse("the state of Python's generator")
    if not gauss.is_none:
        gauss.number()
    for each in rng_states.given("numpy"):
        _check_numpy(each)


def _check_state(told: TypedReader) -> None:
    try:
        torch.Generator().set_state(told.value)
    except (TypeError, RuntimeError):
        told.refuse("the state of torch's generator")


def _check_numpy(told: TypedReader) -> None:
    if isinstance(told.value, dict):  # another bit generator than the usual one
        own = numpy.random.get_state(legacy=False)
        if own["bit_generator"] == "MT19937" or told.value.keys() != own.keys():
            told.refuse("the state of NumPy's generator")
        return
    name, keys, position, has_gauss, cached = told.items(5)
    is_sound = isinstance(keys.value, numpy.ndarray) and keys.value.shape == (624,) and keys.value.dtype == numpy.uint32
    if name.value != "MT19937" or not is_sound:
        told.refuse("the state of NumPy's generator")
    position.whole(0, 624)
    has_gauss.whole(0, 1)
    cached.number()


# -------------------------------------------------------------------- tensors


def check_names(found: CollectedState) -> None:
    """Each tensor that is not a weight stands for one value: what is read takes no more memory than the files have bytes."""
    seen: set[str] = set()
    for name in _named(found.state, found):
        if name in seen or name.startswith("model/"):
            raise CheckpointError(f"the manifest's state has the tensor {name!r} in a second place")
        seen.add(name)


def _named(value: Any, found: CollectedState) -> Iterator[str]:
    """The tensors that a value names, as often as it does."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            if TAG in item and isinstance(item.get("name"), str) and item["name"] in found.tensors:
                yield item["name"]
            left += item.values()
