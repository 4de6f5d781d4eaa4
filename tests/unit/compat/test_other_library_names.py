"""Test names from other libraries: each raises an error with Headway's own name, and none hides an existing name."""

import inspect
import subprocess
import sys

import pytest

import headway
from headway import Accelerator, TrainingArguments
from headway.compat import other_library_names
from headway.core.config.other_library_names import ARGUMENTS
from headway.errors import CallError


def test_foreign_words_are_no_names_of_headway():
    accepted = set(inspect.signature(Accelerator.__init__).parameters)
    assert accepted & set(ARGUMENTS) == set()
    assert [name for name in other_library_names.METHODS if hasattr(Accelerator, name)] == []
    assert [name for name in other_library_names.NAMES if hasattr(headway, name)] == []


def test_names_in_the_advice_exist():
    for advice in (*ARGUMENTS.values(), *other_library_names.METHODS.values(), *other_library_names.NAMES.values()):
        for word in advice.replace("(", " ").replace(")", " ").replace("`", " ").split():
            owner, dot, name = word.strip(".,;'").partition(".")
            if dot and owner == "accelerator":
                assert hasattr(Accelerator, name) or name == "device", advice
            if dot and owner == "headway" and name:
                assert hasattr(headway, name.partition(".")[0]), advice
    assert {"num_train_epochs", "max_steps"} <= set(inspect.signature(TrainingArguments).parameters)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument_of_another_library_is_explained(name):
    with pytest.raises(CallError) as error:
        Accelerator(**{name: 2})
    assert ARGUMENTS[name] in str(error.value)


def test_method_of_another_library_is_explained():
    with pytest.raises(AttributeError, match=r"no attribute 'setup': use accelerator.prepare\(model, optimizer\)"):
        Accelerator(cpu=True).setup


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from headway import Acelerator", "ImportNotServed: headway has no 'Acelerator'; did you mean Accelerator?"),
        ("from headway.utils import set_sed", "ImportNotServed: headway has no 'set_sed'; did you mean set_seed?"),
        ("import headway.utils; headway.utils.set_sed", "has no name 'set_sed'. Did you mean: 'set_seed'?"),
        ("from headway import Fabric", "ImportNotServed: headway has no 'Fabric': use headway.Accelerator"),
        ("from headway import nothing_like_it", "cannot import name 'nothing_like_it'"),
    ],
)
def test_misspelled_name_gets_a_suggestion(statement, message):
    """Use a new process, because the first request for a missing name changes how imports fail."""
    result = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True)
    assert result.returncode == 1
    assert message in result.stderr.splitlines()[-1]


def test_hasattr_of_a_misspelled_name_is_false():
    assert not hasattr(headway, "Acelerator")
    assert not hasattr(headway, "_acelerator")
