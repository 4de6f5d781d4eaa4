"""Tests of the errors of states after a reset, and of decorated test classes that are subclassed."""

import os
import unittest

import accelerate
import accelerate.state
import accelerate.utils
import pytest

from headway.compat.accelerate import state as own_state
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.launching.environment import purge_accelerate_environment

FOR_BOTH_LIBRARIES = pytest.mark.parametrize(
    ("module", "make"), [(accelerate.state, accelerate.Accelerator), (own_state, AccelerateAccelerator)], ids=["theirs", "ours"]
)  # fmt: skip
RESET = (
    "`{0}` object has no attribute `{1}`. This happens if `{0}._reset_state()` was called and an `Accelerator` or `PartialState` was "
    "not reinitialized."
)


@FOR_BOTH_LIBRARIES
def test_state_after_a_reset_raises_accelerates_error(module, make):
    make(cpu=True)
    partial, full = module.PartialState(), module.AcceleratorState()
    assert partial._cpu is full._cpu is True
    assert full._mixed_precision == "no"
    module.AcceleratorState._reset_state(reset_partial_state=True)
    for state in (partial, full):
        kind = type(state).__name__
        for name in ("device", "num_processes", "process_index", "local_process_index", "distributed_type", "backend"):
            with pytest.raises(AttributeError) as exc_info:
                getattr(state, name)
            assert str(exc_info.value) == RESET.format(kind, name)


@FOR_BOTH_LIBRARIES
def test_unknown_attribute_of_a_state_raises_the_ordinary_error(module, make):
    make(cpu=True)
    for state in (module.PartialState(), module.AcceleratorState()):
        with pytest.raises(AttributeError) as exc_info:
            _ = state.no_such_name
        assert str(exc_info.value) == f"'{type(state).__name__}' object has no attribute 'no_such_name'"
    module.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "decorate", [accelerate.utils.purge_accelerate_environment, purge_accelerate_environment], ids=["theirs", "ours"]
)
@pytest.mark.parametrize("base", [object, unittest.TestCase], ids=["pytest", "unittest"])
def test_decorated_class_restores_variables_after_each_test(decorate, base, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")

    @decorate
    class First(base):
        def helper(self):
            os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"

        def test_one(self):
            self.helper()
            os.environ["ACCELERATE_USE_FSDP"] = "true"
            return 5

    class Second(First):
        def test_two(self):
            self.helper()

    for test_case in (First(), Second()):
        assert test_case.test_one() in (5, None)
        if isinstance(test_case, Second):
            test_case.test_two()
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert isinstance(First, type)
    assert Second.test_two.__name__ == "test_two"

    @decorate
    def run(value, *, more):
        os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
        return value + more

    assert run(1, more=2) == 3
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"
