"""Tests that Headway raises Accelerate's warnings in the same situations with the same class and text."""

import importlib
import json
import os
import subprocess
import sys
import warnings
from contextlib import suppress

import pytest
import torch

from headway.launch.stand_in import make_variables


def make_tracker_class(base):
    class Own(base):
        name = "tensorboard"
        requires_logging_directory = False

    return Own


SITUATIONS = {
    "no tracker": lambda get: get("Accelerator")(cpu=True, log_with="clearml"),
    "no tracker of two": lambda get: get("Accelerator")(cpu=True, log_with=["clearml", "aim"]),
    "tensor parallel plugin": lambda get: get("Accelerator")(cpu=True, torch_tp_plugin=get("TorchTensorParallelPlugin")()),
    "asynchronous tensor parallelism": lambda get: get("TorchTensorParallelConfig")(enable_async_tp=True),
    "old recipe": lambda get: get("FP8RecipeKwargs")(),
    "tracker registered again": lambda get: get("register_tracker_class")(make_tracker_class(get("GeneralTracker"))),
    "threshold in 4 bits": lambda get: get("BnbQuantizationConfig")(load_in_4bit=True, llm_int8_threshold=3.0),
    "key that fits nothing": lambda get: get("check_device_map")(torch.nn.Sequential(torch.nn.Linear(1, 1)), {"0": 0, "x": 0}),
    "memory_utils": lambda get: importlib.import_module("accelerate.memory_utils"),
}  # fmt: skip
QUIET = {
    "all trackers": lambda get: get("Accelerator")(cpu=True, log_with="all"),
    "nothing special": lambda get: get("Accelerator")(cpu=True),
    "threshold in 8 bits": lambda get: get("BnbQuantizationConfig")(load_in_8bit=True, llm_int8_threshold=3.0),
}


def find(name):
    """Return an attribute of `accelerate` or one of its modules, from whichever library is imported under that name."""
    places = ("", ".utils", ".tracking", ".big_modeling", ".utils.modeling")
    return next(
        getattr(module, name)
        for module in (importlib.import_module(f"accelerate{each}") for each in places)
        if hasattr(module, name)
    )


def collect():
    """Return the warnings of each situation as {situation: [[class, text]]}."""
    warnings_by_situation = {}
    for name, act in {**SITUATIONS, **QUIET}.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with suppress(ImportError):  # The recipe's library is not installed. The warning comes before the import.
                act(find)
        kinds = ("DeprecationWarning", "ResourceWarning")
        messages = [
            [each.category.__name__, str(each.message)] for each in caught if each.category.__name__ not in kinds
        ]
        warnings_by_situation[name] = [[kind, text.partition("<class")[0]] for kind, text in messages]
        find("PartialState")._reset_state()
        importlib.import_module("accelerate.state").AcceleratorState._reset_state()
    return warnings_by_situation


@pytest.mark.slow
def test_warnings_match_those_of_accelerate(tmp_path):
    code = "import json; from tests.reports.test_warnings_of_accelerate import collect; print('TOLD', json.dumps(collect()))"
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    given = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    results = []
    for environment in (given, {**given, **make_variables(given)}):
        line = [sys.executable, "-c", code]
        result = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, result.stderr[-3000:]
        results.append(json.loads(result.stdout.partition("TOLD ")[2]))
    theirs, ours = results
    assert ours == theirs
    assert all(theirs[name] for name in SITUATIONS)
    assert not any(theirs[name] for name in QUIET)


def test_star_import_covers_accelerates_names():
    """Each module's `__all__` includes the names that Accelerate defines in that module."""
    from headway.compat.accelerate.provided_names.finder import AccelerateModule

    spaces = {}
    for name in ("accelerate", "accelerate.utils", "accelerate.data_loader", "accelerate.tracking"):
        theirs = vars(importlib.import_module(name))
        ours = AccelerateModule(name)
        spaces[name] = set(ours.__all__)
        own = {each for each, value in theirs.items() if str(getattr(value, "__module__", "")) == name}
        assert own <= set(ours.__all__), name
        assert own <= set(dir(ours))
    assert {"Accelerator", "utils", "skip_first_batches"} <= spaces["accelerate"]
    assert "Trainer" not in spaces["accelerate"]
    exec("from headway.utils import *", filled := {})
    assert "set_seed" in filled
    assert "__version__" not in filled
