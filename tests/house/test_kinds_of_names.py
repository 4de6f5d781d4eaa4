"""Every public name of Accelerate is the same kind of object in Headway's replacement: a class, a function or a constant."""

import importlib
import inspect
import pkgutil
import types
from functools import cache

import accelerate
import pytest

from headway.compat.accelerate.provided_names.as_accelerate import NotServedType, find_as_accelerate

pytestmark = pytest.mark.filterwarnings("ignore:memory_utils has been reorganized")

# Constants of commands that Headway does not have. Each is replaced by a class that raises an explanation when called.
NO_CONSTANTS = {
    "ARGUMENT_KEY_MAPPING", "ARGUMENT_VALUE_MAPPING", "ARROW_KEY_FLAG", "CURSOR_TO_CHAR", "KEYMAP",
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS", "TERMINAL_WIDTH", "TORCH_SAFE_GLOBALS",
}  # fmt: skip
# Documented differences (docs/accelerate_name.md): one loader class replaces two, and only prepare() creates optimizers.
OTHER_ARGUMENTS = {
    "AcceleratedOptimizer", "AcceleratorState", "DataLoaderAdapter", "DataLoaderDispatcher", "DataLoaderShard",
    "DataLoaderStateMixin", "DeepSpeedSchedulerWrapper", "find_batch_size", "should_reduce_batch_size",
}  # fmt: skip
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@cache
def list_public_names():
    """Return {name: object} for all public names that Accelerate's modules define."""
    found = {}
    for info in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if ".scripts." in info.name or info.name.endswith("utils.rich"):
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            own = str(getattr(value, "__module__", "")).startswith("accelerate")
            is_constant = name.isupper() and not callable(value) and not inspect.ismodule(value)
            if not name.startswith("_") and (is_constant or (own and callable(value))):
                found.setdefault(name, value)
    return found


def get_kind(value):
    """Return "class", "module", "function", "object" (other callables) or "constant"."""
    if inspect.isclass(value):
        return "class"
    if inspect.ismodule(value):
        return "module"
    return "function" if inspect.isroutine(value) else "object" if callable(value) else "constant"


def test_each_name_is_the_same_kind_of_object():
    kinds = {name: (get_kind(value), get_kind(find_as_accelerate(name))) for name, value in list_public_names().items()}
    assert len(kinds) > 500
    differing = {name: both for name, both in kinds.items() if both[0] != both[1]}
    assert differing == dict.fromkeys(NO_CONSTANTS, ("constant", "class"))


def test_each_class_can_be_a_base():
    for name, theirs in list_public_names().items():
        ours = find_as_accelerate(name)
        if inspect.isclass(theirs) and not issubclass(theirs, types.SimpleNamespace):
            try:
                types.new_class("Own", (theirs,))
            except TypeError:  # an enumeration with members
                continue
            assert issubclass(types.new_class("Own", (ours,)), ours), name


def test_each_class_supports_isinstance():
    for name, theirs in list_public_names().items():
        if inspect.isclass(theirs):
            assert not isinstance(name, find_as_accelerate(name)) or theirs is str, name


def get_parameters(value):
    """Return the parameter names that a caller may use, in order, and whether the callable accepts arbitrary others."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return [], True
    return [each.name for each in parameters if each.kind in NAMED], any(each.kind in ANY for each in parameters)


def test_each_call_takes_the_same_arguments():
    lost = {}
    for name, theirs in list_public_names().items():
        ours = find_as_accelerate(name)
        is_decorator = name.startswith("require_")  # receives the decorated object as its positional argument
        is_refused = isinstance(ours, NotServedType) or getattr(ours, "__module__", "") == "accelerate"
        if not callable(theirs) or is_refused or is_decorator or name in OTHER_ARGUMENTS:
            continue
        (expected, _), (taken, takes_more) = get_parameters(theirs), get_parameters(ours)
        missing = [each for each in expected if each not in taken and not each.startswith("_")]
        if missing and not takes_more:
            lost[name] = missing
    assert lost == {}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("accelerate.commands.launch", "_validate_launch_command"), ("accelerate.utils.launch", "_convert_nargs_to_dict"),
        ("accelerate.utils.launch", "_filter_args"), ("accelerate.utils.operations", "_gpu_gather"),
        ("accelerate.utils.operations", "_gpu_gather_object"), ("accelerate.utils.operations", "_gpu_broadcast"),
        ("accelerate.utils.modeling", "_get_proper_dtype"), ("accelerate.utils.modeling", "_get_param_device"),
        ("accelerate.utils.imports", "_is_package_available"), ("accelerate.data_loader", "_PYTORCH_DATALOADER_KWARGS"),
        ("accelerate.utils.fsdp_utils", "_get_model_state_dict"), ("accelerate.utils.fsdp_utils", "_set_model_state_dict"),
    ],
)  # fmt: skip
def test_private_names_that_other_projects_import_are_there(module, name):
    theirs, ours = getattr(importlib.import_module(module), name), find_as_accelerate(name)
    assert get_kind(theirs) == get_kind(ours)
    if callable(theirs):
        assert get_parameters(theirs) == get_parameters(ours)
    else:
        assert theirs == ours


def test_private_functions_compute_the_same():
    from accelerate.utils import imports, launch, modeling

    line = ["--rate", "1e-3", "--epochs", "3", "--name", "x", "--is_fast", "True"]
    assert find_as_accelerate("_convert_nargs_to_dict")(line) == launch._convert_nargs_to_dict(line)
    for wrong in (["--flag"], ["--flag", "--epochs", "3"]):
        for function in (find_as_accelerate("_convert_nargs_to_dict"), launch._convert_nargs_to_dict):
            with pytest.raises(ValueError, match="argparse actions for `store_true` or `store_false`"):
                function(wrong)
    for package in ("torch", "tests", "no_such_package"):
        assert find_as_accelerate("_is_package_available")(package) == bool(imports._is_package_available(package))
    for given in ("torch.float16", "bfloat16", modeling.torch.int8):
        assert find_as_accelerate("_get_proper_dtype")(given) == modeling._get_proper_dtype(given)
    for param in ("a.b.weight", "a.weight", "c.weight"):
        places = {"a.b": 1, "a": "cpu", "": "disk"}
        assert find_as_accelerate("_get_param_device")(param, places) == modeling._get_param_device(param, places)
