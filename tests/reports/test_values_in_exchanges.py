"""Tests of collective operations with values that are not tensors: an error names the entry."""

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from headway.errors import CallError, CollectiveError
from tests.distributed.ranks import run_ranks

Pair = collections.namedtuple("Pair", "left right")


@dataclass
class Scores:
    values: torch.Tensor
    threshold: Any


X = torch.ones(2)
VALUES = {
    "float": (1.5, "a float (1.5)", ""),
    "int in a dict": ({"x": X, "y": 2}, "a int (2)", "['y']"),
    "bool in a named tuple": (Pair(X, [True]), "a bool (True)", ".right[0]"),
    "array": (numpy.ones(2), "a numpy.ndarray of shape (2,)", ""),
    "numpy scalar in a list": ([X, numpy.float32(3)], "a numpy.float32", "[1]"),
    "text in a dataclass": (Scores(X, "high"), "a str ('high')", ".threshold"),
    "None": (None, "None", ""),
}
FUNCTIONS = ("gather", "reduce", "pad_across_processes")


def catch(function: Callable[..., Any], value: Any) -> tuple[str, str]:
    """Return the error's class and text, or "" and the result's repr."""
    try:
        return "", repr(function(value))
    except Exception as error:
        return type(error).__name__, str(error)


def call_native_api() -> dict[str, Any]:
    from headway import Accelerator

    accelerator = Accelerator(cpu=True)
    results = {
        (name, kind): catch(getattr(accelerator, name), value)
        for name in FUNCTIONS
        for kind, (value, *_) in VALUES.items()
    }
    results["broadcast", "float"] = catch(accelerator.collectives.broadcast, 1.5)
    results["none inside"] = accelerator.gather({"x": X, "y": None})
    results["empty"] = accelerator.gather([])
    from headway.utils import gather_object

    results["objects"] = gather_object([accelerator.process_index])
    # Only one rank passes a number. Both ranks learn of it in the handshake.
    try:
        accelerator.gather({"loss": X if accelerator.process_index == 0 else 0.5})
    except (CollectiveError, CallError) as error:
        results["ranks differ"] = str(error)
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_collective_operation_on_other_values_names_the_entry(world_size):
    for results in run_ranks(call_native_api, world_size):
        for name in FUNCTIONS:
            for kind, (_, description, entry) in VALUES.items():
                raised, text = results[name, kind]
                assert raised == "CallError", (name, kind, text)
                assert f"{name}() got {description}" in text
                assert (f"in the entry {entry}," in text) == bool(entry)
        assert results["broadcast", "float"][0] == "CallError"
        assert results["none inside"]["x"].tolist() == [1.0, 1.0] * world_size
        assert results["none inside"]["y"] is None
        assert results["empty"] == []
        assert results["objects"] == list(range(world_size))
        assert ("ranks differ" in results) == (world_size > 1)


ACCELERATE_NAMES = {
    "gather": "_gpu_gather_one",
    "broadcast": "_gpu_broadcast_one",
    "reduce": "_reduce_across_processes",
    "pad_across_processes": "_pad_across_processes",
}


def check_with_accelerate(name: str, value: Any, world_size: int) -> tuple[str, str]:
    """Return the error that Accelerate 1.15 raises when it walks over the value with the named function."""
    from accelerate.utils.operations import recursively_apply

    if world_size == 1 and name in ("gather", "broadcast"):
        return catch(lambda value: value, value)
    function = type("", (), {"__call__": lambda self, tensor, *args: tensor, "__name__": ACCELERATE_NAMES[name]})()
    return catch(lambda value: recursively_apply(function, value, error_on_other_type=True), value)


def call_accelerate_api() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the errors of Headway's Accelerate API and those of Accelerate."""
    from headway.compat.accelerate.accelerator import AccelerateAccelerator
    from headway.compat.accelerate.data import batches

    accelerator = AccelerateAccelerator(cpu=True)
    ours, expected = {}, {}
    for name in ACCELERATE_NAMES:
        for kind, (value, *_) in VALUES.items():
            expected[name, kind] = check_with_accelerate(name, value, accelerator.num_processes)
            ours["function", name, kind] = catch(getattr(batches, name), value)
            if name != "broadcast":
                ours["method", name, kind] = catch(getattr(accelerator, name), value)
    return ours, expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_accelerate_api_raises_accelerates_type_error(world_size):
    for ours, expected in run_ranks(call_accelerate_api, world_size):
        for (_, name, kind), raised in ours.items():
            assert raised == expected[name, kind], (name, kind)
        raised = {kind for (name, kind), (error, _) in expected.items() if name == "reduce" and error == "TypeError"}
        assert raised == set(VALUES)
