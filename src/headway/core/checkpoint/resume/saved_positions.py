"""Check saved positions of loaders and RNG states before any loader or generator is changed.

RNG states are tested on generators that are not in use.
"""

import random

import numpy
import torch

from headway.core.checkpoint.format.typed_reader import LARGEST, TypedReader
from headway.core.data.sampling.own_generators import is_generator_text
from headway.core.data.sampling.rng import complete_states_text, is_rng_states_text
from headway.core.runtime.device import Hardware

_SOURCE_COUNTS = (("drawn", -(2**63), 2**63 - 1), ("num_rounds", 0, LARGEST), ("round_size", 1, LARGEST))
"""Triples of (key, minimum, maximum) for integers in the saved position of a loader's source of samples."""


def check_loaders(loaders: TypedReader, count: int, hardware: Hardware) -> None:
    """Raise `CheckpointError` unless a value holds the positions of `count` loaders in a form that loaders accept.

    Args:
        loaders: Reader for the saved positions.
        count: Expected number of loaders.
        hardware: Device of this process.

    Raises:
        CheckpointError: If the number of positions or one of them is wrong.
    """
    for loader in loaders.read_items(count):
        _check_loader(loader, hardware)


def _check_loader(loader: TypedReader, hardware: Hardware) -> None:
    """Raise `CheckpointError` unless a value is the position of one loader: its epoch, samples, source and workers."""
    for name in ("epoch", "consumed"):
        loader[name].read_integer()
    if "source" not in loader.read_mapping():
        return
    source = loader["source"]
    for name, least, most in _SOURCE_COUNTS:
        for each in source.find_present(name):
            each.read_integer(least, most)
    if "round_size" in source.read_mapping():
        source["num_rounds"].read_integer()
    for each in source.find_present("is_idle"):
        each.read_flag()
    for each in (number for several in source.find_present("handover") for number in several.read_items()):
        each.read_integer(0, 2)
    if "workers" in source.read_mapping():
        workers = source["workers"]
        workers["num_batches"].read_integer()
        workers["streams"].read_items()
    _check_states(source, hardware)


def _check_states(source: TypedReader, hardware: Hardware) -> None:
    """Raise `CheckpointError` if a loader could not continue its pass with its saved RNG states."""
    generators = [each for each in source.find_present("base_seed") if each.read_text()]
    generators += [text for each in source.find_present("generators") for text in each.read_items()]
    for text in generators:
        if not is_generator_text(text.read_text(), is_on_cpu=hardware.kind == "cpu"):
            text.raise_error("the state of a generator")
    rng_states = [*source.find_present("global")]
    rng_states += [
        text for each in source.find_present("workers") for text in each["streams"].read_items() if not text.is_none
    ]
    for text in rng_states:
        if not is_rng_states_text(text.read_text()):
            text.raise_error("the states of generators")
    for each in source.find_present("lines"):
        for line in each.read_items():
            generator, number, text = line.read_items(3)  # generator: 0 for torch, 1 for Python, 2 for NumPy
            number.read_integer(-1, LARGEST)
            if not is_rng_states_text(complete_states_text(text.read_text(), generator.read_integer(0, 2))):
                text.raise_error("the state of a generator")


def check_rng_states(rng_states: TypedReader, hardware: Hardware) -> None:
    """Raise `CheckpointError` unless this process's generators would accept the RNG states.

    Args:
        rng_states: Reader for the saved RNG states.
        hardware: Device of this process.

    Raises:
        CheckpointError: If a state is wrong.
    """
    _check_torch_state(rng_states["torch"])
    for each in rng_states.find_present("loaders"):
        _check_torch_state(each)
    for each in rng_states.find_present("device"):
        is_state = isinstance(each.value, torch.Tensor) and each.value.dtype == torch.uint8
        read_state = None if hardware.kind == "cpu" else hardware.find_function("get_rng_state")
        if read_state is not None and (not is_state or each.value.shape != read_state().shape):
            each.raise_error("the state of the device's generator")
    python = rng_states["python"]
    _, _, gauss = python.read_items(3)
    try:
        random.Random().setstate(python.value)
    except (TypeError, ValueError, OverflowError):
        python.raise_error("the state of Python's generator")
    if not gauss.is_none:
        gauss.read_number()
    for each in rng_states.find_present("numpy"):
        _check_numpy(each)


def _check_torch_state(saved: TypedReader) -> None:
    try:
        torch.Generator().set_state(saved.value)
    except (TypeError, RuntimeError):
        saved.raise_error("the state of torch's generator")


def _check_numpy(saved: TypedReader) -> None:
    if isinstance(saved.value, dict):  # a bit generator other than MT19937
        own = numpy.random.get_state(legacy=False)
        if own["bit_generator"] == "MT19937" or saved.value.keys() != own.keys():
            saved.raise_error("the state of NumPy's generator")
        return
    name, keys, position, has_gauss, cached_gauss = saved.read_items(5)
    is_sound = isinstance(keys.value, numpy.ndarray) and keys.value.shape == (624,) and keys.value.dtype == numpy.uint32
    if name.value != "MT19937" or not is_sound:
        saved.raise_error("the state of NumPy's generator")
    position.read_integer(0, 624)
    has_gauss.read_integer(0, 1)
    cached_gauss.read_number()
