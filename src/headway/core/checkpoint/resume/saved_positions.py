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
    if drawn := source.get("drawn"):
        drawn.read_integer(-(2**63), 2**63 - 1)
    if num_rounds := source.get("num_rounds"):
        num_rounds.read_integer()
    if round_size := source.get("round_size"):
        round_size.read_integer(1)
    if "round_size" in source.read_mapping():
        source["num_rounds"].read_integer()
    if is_idle := source.get("is_idle"):
        is_idle.read_flag()
    if handover := source.get("handover"):
        handover.read_integers(0, 2)
    if "workers" in source.read_mapping():
        workers = source["workers"]
        workers["num_batches"].read_integer()
        workers["streams"].read_items()
    _check_source_rng(source, hardware)


def _check_source_rng(source: TypedReader, hardware: Hardware) -> None:
    """Raise `CheckpointError` if a loader could not continue its pass with its saved RNG states."""
    base_seed, generators = source.get("base_seed"), source.get("generators")
    if base_seed is not None and base_seed.read_text():
        _check_generator(base_seed, hardware)
    if generators is not None:
        for generator in generators.read_items():
            _check_generator(generator, hardware)
    if global_states := source.get("global"):
        _check_global_states(global_states)
    if workers := source.get("workers"):
        for worker_states in workers["streams"].read_items():
            if not worker_states.is_none:
                _check_global_states(worker_states)
    if lines := source.get("lines"):
        for line in lines.read_items():
            generator, number, text = line.read_items(3)  # generator: 0 for torch, 1 for Python, 2 for NumPy
            number.read_integer(-1, LARGEST)
            if not is_rng_states_text(complete_states_text(text.read_text(), generator.read_integer(0, 2))):
                text.raise_error("the state of a generator")


def _check_generator(text: TypedReader, hardware: Hardware) -> None:
    """Raise `CheckpointError` unless a value is the encoded state of one generator."""
    if not is_generator_text(text.read_text(), is_on_cpu=hardware.kind == "cpu"):
        text.raise_error("the state of a generator")


def _check_global_states(text: TypedReader) -> None:
    """Raise `CheckpointError` unless a value holds the encoded states of a process's global generators."""
    if not is_rng_states_text(text.read_text()):
        text.raise_error("the states of generators")


def check_rng_states(rng_states: TypedReader, hardware: Hardware) -> None:
    """Raise `CheckpointError` unless this process's generators would accept the RNG states.

    Args:
        rng_states: Reader for the saved RNG states.
        hardware: Device of this process.

    Raises:
        CheckpointError: If a state is wrong.
    """
    _check_torch_state(rng_states["torch"])
    if loaders := rng_states.get("loaders"):
        _check_torch_state(loaders)
    if device := rng_states.get("device"):
        is_state = isinstance(device.value, torch.Tensor) and device.value.dtype == torch.uint8
        read_state = None if hardware.kind == "cpu" else hardware.find_function("get_rng_state")
        if read_state is not None and (not is_state or device.value.shape != read_state().shape):
            device.raise_error("the state of the device's generator")
    python = rng_states["python"]
    _, _, gauss = python.read_items(3)
    try:
        random.Random().setstate(python.value)
    except (TypeError, ValueError, OverflowError):
        python.raise_error("the state of Python's generator")
    if not gauss.is_none:
        gauss.read_number()
    if numpy_state := rng_states.get("numpy"):
        _check_numpy(numpy_state)


def _check_torch_state(saved: TypedReader) -> None:
    """Raise `CheckpointError` if torch's CPU generator would not accept a saved state."""
    try:
        torch.Generator().set_state(saved.value)
    except (TypeError, RuntimeError):
        saved.raise_error("the state of torch's generator")


def _check_numpy(saved: TypedReader) -> None:
    """Raise `CheckpointError` if a saved state does not fit NumPy's global generator.

    The state is a dict for a bit generator other than MT19937, and the tuple of `numpy.random.get_state` for MT19937.
    """
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
