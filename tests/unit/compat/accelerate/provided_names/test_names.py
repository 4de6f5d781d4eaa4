"""Test Accelerate's module paths under Headway's name, and the errors for names that Headway does not provide."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

import headway
from headway.compat.accelerate.provided_names.advice import ImportAdvisor
from headway.compat.accelerate.provided_names.finder import AccelerateFinder
from headway.compat.accelerate.provided_names.tables import MODULES
from headway.errors import NotServed


def test_names_come_from_accelerates_module_paths():
    from headway.logging import get_logger
    from headway.state import AcceleratorState, PartialState
    from headway.tracking import GeneralTracker
    from headway.utils import ProjectConfiguration, set_seed
    from headway.utils.operations import gather
    from headway.utils.random import set_seed as again

    assert (get_logger, AcceleratorState, PartialState) == (
        headway.get_logger,
        headway.AcceleratorState,
        headway.PartialState,
    )
    assert (ProjectConfiguration, set_seed, gather) == (headway.ProjectConfiguration, headway.set_seed, headway.gather)
    assert again is set_seed
    assert GeneralTracker is headway.GeneralTracker


def test_modules_are_attributes_too():
    assert headway.utils.set_seed is headway.set_seed
    assert headway.utils.operations.gather is headway.gather
    assert headway.state.is_initialized is headway.is_initialized
    assert importlib.util.find_spec("headway.utils").submodule_search_locations is not None


def test_function_is_not_hidden_by_the_module_of_the_same_name():
    import headway.utils.tqdm
    from headway.utils import tqdm
    from headway.utils.tqdm import tqdm as same

    assert tqdm is same is headway.tqdm
    assert callable(headway.utils.tqdm)


@pytest.mark.parametrize("place", ["headway", "headway.utils", "headway.inference"])
def test_importing_an_unsupported_name_names_the_alternative(place):
    with pytest.raises(NotServed, match="is part of Accelerate's `prepare_pippy`"):
        exec(f"from {place} import pippy_forward")
    with pytest.raises(ImportError):
        exec(f"from {place} import pippy_forward")


def test_reading_an_unsupported_name_is_an_attribute_error():
    with pytest.raises(
        AttributeError, match="headway has no 'TERecipeKwargs': Headway drives neither Transformer Engine"
    ):
        headway.TERecipeKwargs
    assert not hasattr(headway, "TERecipeKwargs")
    assert not hasattr(headway.utils, "TERecipeKwargs")
    assert headway.utils.AORecipeKwargs is headway.AORecipeKwargs


@pytest.mark.parametrize("place", ["headway", "headway.utils"])
def test_unknown_name_raises_pythons_own_error(place):
    with pytest.raises(ImportError, match="cannot import name 'nothing_like_it'"):
        exec(f"from {place} import nothing_like_it")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("headway.utilities")


def test_commands_and_test_utils_of_accelerate_are_explained():
    with pytest.raises(NotServed, match="Accelerate's commands have counterparts: `headway launch`"):
        importlib.import_module("headway.commands.launch")
    with pytest.raises(NotServed, match=r"keep importing them from accelerate\.test_utils"):
        importlib.import_module("headway.test_utils")


def test_finder_ignores_other_packages():
    found = AccelerateFinder()
    assert found.find_spec("torch.utils", None) is None
    assert found.find_spec("acceleratelike.utils", None) is None
    assert found.find_spec("accelerate.optimisers", None) is None
    found = ImportAdvisor("headway", MODULES)
    assert found.find_spec("headway.cli", None) is None
    assert found.find_spec("headwaylike.pippy_forward", None) is None


def test_advisor_is_installed_once():
    for _ in range(2):
        assert not hasattr(headway, "pippy_forward")
    assert [type(each).__name__ for each in sys.meta_path].count("ImportAdvisor") == 1


def test_each_module_is_a_file():
    for name in MODULES:
        module = importlib.import_module(f"headway.{name}")
        assert module.__file__.endswith(("__init__.py", f"{name.rpartition('.')[2]}.py"))
        assert "set_seed" in dir(module)
        assert module.set_seed is headway.set_seed


def test_importing_headway_imports_no_module_of_accelerate():
    code = "import sys; kept = list(sys.meta_path); import headway"
    code += (
        "; print([n for n in sys.modules if n.startswith('headway.')] + (sys.meta_path != kept) * ['headway.utils'])"
    )
    code += "; import headway.utils; assert sys.meta_path == kept"
    result = subprocess.run([sys.executable, "-c", code + "; print('torch' in sys.modules)"], capture_output=True, text=True,
                         env={"PYTHONPATH": ":".join(filter(None, sys.path))})  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, is_heavy = result.stdout.splitlines()
    assert "headway.utils" not in first
    assert "headway.compat" not in first
    assert is_heavy == "False"


def test_names_are_listed():
    assert {"gather_object", "DistributedType", "Accelerator"} <= set(dir(headway))
    assert "gather_object" in dir(headway.utils)
