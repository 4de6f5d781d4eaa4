"""Everything that a load takes from a manifest's `about` and `state`, looked at before an object is changed.

Types, ranges, and counts that must fit each other. What lies in random streams is tried on streams that nobody uses.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

from headway.checkpoint.state import Collected, Parts, parameter_names
from headway.checkpoint.told import MOST, Told
from headway.checkpoint.values import TAG, decode
from headway.data.randomness import among_streams, is_generator_text, is_streams_text
from headway.errors import CheckpointError
from headway.precision.base import Precision
from headway.runtime.device import Hardware

_MOST_RANKS, _MOST_STEPS = 2**24, 2**24
_WORD = 2**64
_OF_ONE_SHAPE = {
    torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD, torch.optim.SGD,
}  # fmt: skip
"""What these keep of a parameter has its shape, or is one number."""
_KINDS: tuple[tuple[Any, Any], ...] = (
    (int | float, int | float | torch.Tensor | numpy.generic | None), (str, str | None), (list | tuple, list | tuple | None),
    (dict, dict | None),
)  # fmt: skip
"""What a schedule may have in the place of what another of its kind has."""


def check_told(told_about: Mapping[str, Any], found: Collected, precision: Precision, hardware: Hardware) -> None:
    """Is everything there that a load will use, and can it be used?

    Args:
        told_about: the manifest's.
        found: its state, and the tensors that it names.
        precision, hardware: of this run.

    Raises:
        CheckpointError: naming the first value that is not as it must be.
    """
    about, state = Told(told_about, "about"), Told(found.state, "state")
    _check_names(found)
    num_ranks = _check_about(about)
    run = state["run"]
    num_loaders = _check_run(run, state)
    _check_scaler(run, precision)
    for extra in state["extra"].items():
        for value in extra.table().values():
            _decoded(value, found)
    for optimizer in state["optimizer"].items():
        _check_optimizer(optimizer, found)
    for name, kind in state.table().items():
        if name not in ("extra", "optimizer", "run", "loaders", "streams"):
            for value in kind.items():
                of_object = _decoded(value, found)
                if name == "scheduler":
                    of_object.mapping()
    for loaders in state["loaders"].items(num_ranks):
        for loader in _decoded(loaders, found).items(num_loaders):
            _check_loader(loader, hardware)
    for streams in state["streams"].items(num_ranks):
        _check_streams(_decoded(streams, found), hardware)


def unfit(parts: Parts, found: Collected) -> list[str]:
    """What the objects would take and fail with later, of a state that `misfits` has nothing against; nothing is changed."""
    problems = []
    names = parameter_names(parts.models)
    for optimizer, entry in zip(parts.optimizers, found.state["optimizer"]):
        if type(optimizer) in _OF_ONE_SHAPE:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                name = names.get(id(parameter), "")
                problems += _misshapen(name, parameter, decode(entry["values"].get(name, {}), found.tensors))
    for index, (obj, value) in enumerate(zip(parts.others.get("scheduler", ()), found.state.get("scheduler", ()))):
        if type(obj).__module__ == torch.optim.lr_scheduler.__name__:
            problems += _unlike(obj.state_dict(), decode(value, found.tensors), f"schedule {index}'s state")
    return problems


def _misshapen(name: str, parameter: torch.Tensor, values: Mapping[Any, Any]) -> list[str]:
    problems = []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor | float | int | None):
            problems.append(f"the optimizer's {key} of {name} is a {type(value).__name__}, where a tensor belongs")
        elif isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != parameter.shape:
            problems.append(
                f"the optimizer's {key} of {name} has the shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
            )
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


def _decoded(told: Told, found: Collected) -> Told:
    return told.replaced(decode(told.value, found.tensors))


# -------------------------------------------------------------------- counters


def _check_about(about: Told) -> int:
    """Of whose ranks the checkpoint holds the own state: how many they are."""
    for name in ("num_updates", "epoch"):
        about[name].whole()
    about["accumulation"].whole(1, _MOST_STEPS)
    world = about["world_size"].whole(1, _MOST_RANKS)
    for name, least in (("global_batch", 1), ("iteration", 0)):
        for each in about.given(name):
            each.whole(least)
    for each in about.given("metric"):
        each.number()
    for each in [*about.given("run", "device", "saved_at"), *about["versions"].table().values()]:
        each.text()
    for each in about.given("notes"):
        _check_notes(each)
    for each in about.given("saved_by"):
        ranks = [rank.whole(0, world - 1) for rank in each.items()]
        if len(set(ranks)) != len(ranks):
            each.refuse("a list of ranks, each of them once,")
        if ranks:
            return len(ranks)
    return world


def _check_notes(notes: Told) -> None:
    """A whole number is the step of a tracker."""
    for note in notes.table().values():
        if type(note.value) is int:
            note.whole(-MOST)


def _check_run(run: Told, state: Told) -> int:
    """The counters; returns for how many loaders."""
    for name in ("num_updates", "epoch"):
        run[name].whole()
    for each in run["optimizer_updates"].items(len(state["optimizer"].items())):
        each.whole()
    num_models = len(state["extra"].items())
    for pair in run["nominal"].items():
        numbers, weight = pair.items(2)
        for number in numbers.items():
            number.whole(0, num_models - 1)
        weight.number(0)
    num_processes, num_steps = run["ticks"].items(2)
    num_processes.whole(1, _MOST_RANKS)
    num_steps.whole(1, _MOST_STEPS)
    run["precision"].text()
    run["seed"].whole(0, _WORD)
    seeds = run["seeds"].items()
    for seed in seeds:
        seed.whole(-_WORD, _WORD)
    for each in run.given("counts_epochs"):
        each.flag()
    for each in run.given("trained_on"):
        for number in each.items():
            number.whole()
    _check_batch(run["batch"], len(seeds))
    return len(seeds)


def _check_batch(batch: Told, num_loaders: int) -> None:
    rows = [batch[name].items(num_loaders) for name in ("asked", "sizes", "units")]
    for row in zip(*rows):
        if any(each.is_none for each in row) and not all(each.is_none for each in row):
            batch.refuse("sizes that are known together")
        for each in row:
            if not each.is_none:
                each.whole(1)
    for number in batch["trained"].items():
        number.whole()


def _check_scaler(run: Told, precision: Precision) -> None:
    scaler = precision.scaler
    run["scaler"].mapping()
    if run["precision"].value != precision.name or scaler is None or not scaler.is_enabled():
        return
    state = run["scaler"]
    for name in ("scale", "growth_factor", "backoff_factor"):
        state[name].number(1e-300)
    state["growth_interval"].whole(1)
    state["_growth_tracker"].whole()


# -------------------------------------------------------------------- objects


def _check_optimizer(told: Told, found: Collected) -> None:
    told["type"].text()
    names = [[name.text() for name in group.items()] for group in told["params"].items()]
    groups = told["groups"].items(len(names))
    for group in groups:
        _check_options(_decoded(group, found))
    every = {name for group in names for name in group}
    if len(every) != sum(map(len, names)):
        told["params"].refuse("the parameters' names, each of them once,")
    for name, entry in told["values"].table().items():
        if name not in every:
            entry.refuse("no state: it belongs to none of the parameters")
        _decoded(entry, found).mapping()
    for name in ("rest", "loose"):
        for each in told.given(name):
            _decoded(each, found).mapping()
    told["rest"].mapping()


def _check_options(group: Told) -> None:
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


# -------------------------------------------------------------------- data and random streams


_NUMBERS = (("drawn", -(2**63), 2**63 - 1), ("num_rounds", 0, MOST), ("round_size", 1, MOST))


def _check_loader(loader: Told, hardware: Hardware) -> None:
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


def _check_states(source: Told, hardware: Hardware) -> None:
    """The random streams that a loader's pass goes on from."""
    generators = [each for each in source.given("base_seed") if each.text()]
    generators += [text for each in source.given("generators") for text in each.items()]
    for text in generators:
        if not is_generator_text(text.text(), is_on_cpu=hardware.kind == "cpu"):
            text.refuse("the state of a generator")
    streams = [*source.given("global")]
    streams += [text for each in source.given("workers") for text in each["streams"].items() if not text.is_none]
    for text in streams:
        if not is_streams_text(text.text()):
            text.refuse("the state of random streams")
    for line in (line for each in source.given("lines") for line in each.items()):
        place, number, text = line.items(3)
        number.whole(-1, MOST)
        if not is_streams_text(among_streams(text.text(), place.whole(0, 2))):
            text.refuse("the state of a random stream")


def _check_streams(streams: Told, hardware: Hardware) -> None:
    """Would the process's own streams take them?"""
    _check_state(streams["torch"])
    for each in streams.given("loaders"):
        _check_state(each)
    for each in streams.given("device"):
        is_state = isinstance(each.value, torch.Tensor) and each.value.dtype == torch.uint8
        if hardware.kind != "cpu" and (not is_state or each.value.shape != hardware.module.get_rng_state().shape):
            each.refuse("the state of the device's random stream")
    python = streams["python"]
    gauss = python.items(3)[2]
    try:
        random.Random().setstate(python.value)
    except (TypeError, ValueError, OverflowError):
        python.refuse("the state of Python's random stream")
    if not gauss.is_none:
        gauss.number()
    for each in streams.given("numpy"):
        _check_numpy(each)


def _check_state(told: Told) -> None:
    try:
        torch.Generator().set_state(told.value)
    except (TypeError, RuntimeError):
        told.refuse("the state of torch's random stream")


def _check_numpy(told: Told) -> None:
    if isinstance(told.value, dict):  # another bit generator than the usual one
        own = numpy.random.get_state(legacy=False)
        if own["bit_generator"] == "MT19937" or told.value.keys() != own.keys():
            told.refuse("the state of NumPy's random stream")
        return
    name, keys, position, has_gauss, cached = told.items(5)
    is_sound = isinstance(keys.value, numpy.ndarray) and keys.value.shape == (624,) and keys.value.dtype == numpy.uint32
    if name.value != "MT19937" or not is_sound:
        told.refuse("the state of NumPy's random stream")
    position.whole(0, 624)
    has_gauss.whole(0, 1)
    cached.number()


# -------------------------------------------------------------------- tensors


def _check_names(found: Collected) -> None:
    """Each tensor that is not a weight stands for one value: what is read takes no more memory than the files have bytes."""
    seen: set[str] = set()
    for name in _named(found.state, found):
        if name in seen or name.startswith("model/"):
            raise CheckpointError(f"the manifest's state has the tensor {name!r} in a second place")
        seen.add(name)


def _named(value: Any, found: Collected) -> Iterator[str]:
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
