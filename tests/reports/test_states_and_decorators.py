"""What scripts match: the texts of states after a reset, and test classes that are decorated and then subclassed."""

import os
import unittest

import accelerate
import accelerate.state
import accelerate.utils
import pytest

from headway.compat.accelerate import state as own_state
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.launching.environment import purge_accelerate_environment

BOTH = pytest.mark.parametrize(
    ("module", "make"), [(accelerate.state, accelerate.Accelerator), (own_state, AccelerateAccelerator)], ids=["theirs", "ours"]
)  # fmt: skip
RESET = (
    "`{0}` object has no attribute `{1}`. This happens if `{0}._reset_state()` was called and an `Accelerator` or `PartialState` was "
    "not reinitialized."
)


@BOTH
def test_a_state_after_a_reset_says_so(module, make):
    make(cpu=True)
    partial, whole = module.PartialState(), module.AcceleratorState()
    assert partial._cpu is whole._cpu is True
    assert whole._mixed_precision == "no"
    module.AcceleratorState._reset_state(reset_partial_state=True)
    for state in (partial, whole):
        kind = type(state).__name__
        for name in ("device", "num_processes", "process_index", "local_process_index", "distributed_type", "backend"):
            with pytest.raises(AttributeError) as caught:
                getattr(state, name)
            assert str(caught.value) == RESET.format(kind, name)


@BOTH
def test_a_name_that_a_state_never_has_is_an_ordinary_error(module, make):
    make(cpu=True)
    for state in (module.PartialState(), module.AcceleratorState()):
        with pytest.raises(AttributeError) as caught:
            _ = state.no_such_name
        assert str(caught.value) == f"'{type(state).__name__}' object has no attribute 'no_such_name'"
    module.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "decorate", [accelerate.utils.purge_accelerate_environment, purge_accelerate_environment], ids=["theirs", "ours"]
)
@pytest.mark.parametrize("base", [object, unittest.TestCase], ids=["pytest", "unittest"])
def test_a_decorated_class_is_a_class_whose_tests_restore_variables(decorate, base, monkeypatch):
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

    for made in (First(), Second()):
        assert made.test_one() in (5, None)
        if isinstance(made, Second):
            made.test_two()
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
