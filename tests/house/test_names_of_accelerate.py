"""Every public name of Accelerate, and every member of its Accelerator, is served or has an explanation.

Names can be served in two places: `headway`, for scripts that change their imports, and `accelerate`, where Headway
replaces it. The second place has more names. A name that only the second place has keeps its explanation in the first.
"""

import dataclasses
import importlib
import inspect
import pkgutil
from functools import cache

import accelerate
import accelerate.utils
import pytest

import headway
from headway.compat.accelerate.members import AccelerateMembers
from headway.compat.accelerate.provided_names.as_accelerate import find_as_accelerate
from headway.compat.accelerate.provided_names.as_headway import find_provided_name
from headway.compat.accelerate.provided_names.surface import describe_name
from headway.compat.accelerate.provided_names.tables import (
    AS_ACCELERATE,
    DIFFERENT,
    MEMBERS,
    MODULES,
    MODULES_AS_ACCELERATE,
    NAMES,
    PROVIDED,
    REFUSED,
    RENAMED,
    SURFACE,
)

pytestmark = pytest.mark.filterwarnings("ignore:memory_utils has been reorganized")

PRIVATE = ("accelerate.commands", "accelerate.test_utils")
OWN = {"accelerator"}


@cache
def list_modules():
    """Return the names of Accelerate's modules, without its commands and test helpers."""
    found = [info.name for info in pkgutil.walk_packages(accelerate.__path__, "accelerate.")]
    return [name for name in found if not name.startswith(PRIVATE)]


@cache
def list_public_names():
    """Return {name: module} for all public names that Accelerate's modules define."""
    found = {}
    for name in ["accelerate", *list_modules()]:
        try:
            module = importlib.import_module(name)
        except ImportError:  # accelerate.utils.rich requires an environment variable
            continue
        for each, value in vars(module).items():
            home = getattr(value, "__module__", None)
            is_home = callable(value) and isinstance(home, str) and home.startswith("accelerate")
            if (
                not each.startswith("_")
                and not inspect.ismodule(value)
                and (is_home or (each.isupper() and not callable(value)))
            ):
                found.setdefault(each, name)
    return found


def test_accelerates_names_are_found():
    assert len(list_modules()) > 30
    assert len(list_public_names()) > 350


def test_every_public_name_is_served_or_explained():
    answered = {*headway.__all__, *PROVIDED, *RENAMED, *NAMES}
    assert sorted(set(list_public_names()) - answered) == []


def test_headway_explains_names_that_only_accelerates_name_serves():
    theirs = set(AS_ACCELERATE) & set(list_public_names())
    assert sorted(theirs - {*headway.__all__, *PROVIDED, *RENAMED, *NAMES}) == []


MODULES_OF_COMMANDS_AND_TESTS = {
    "commands.config",
    "commands.launch",
    "commands.accelerate_cli",
    "test_utils.testing",
    "test_utils.training",
}


def test_table_of_headway_compat_lists_all_public_names():
    told = {name for module, names in SURFACE.items() for name in names if module not in MODULES_OF_COMMANDS_AND_TESTS}
    assert told == set(list_public_names())
    for module, names in SURFACE.items():
        home = importlib.import_module(f"accelerate.{module}") if module != "utils.rich" else None
        assert [name for name in names if not hasattr(home, name)] == []


def test_each_name_has_one_status():
    answers = [describe_name(name) for names in SURFACE.values() for name in names]
    assert {each.status for each in answers} == {"served", "differs", "not served"}
    assert [each.name for each in answers if each.status != "served" and len(each.note.split()) < 2] == []
    assert {each.name for each in answers if each.status == "not served"} <= {*NAMES, *REFUSED}


def test_documented_differences_concern_served_names():
    served = {*headway.__all__, *PROVIDED, *RENAMED, *AS_ACCELERATE}
    assert sorted(set(DIFFERENT) - served) == []
    assert sorted(set(DIFFERENT) - {name for names in SURFACE.values() for name in names}) == []


@pytest.mark.parametrize("name", sorted(AS_ACCELERATE))
def test_names_served_as_accelerate_exist_and_have_docstrings(name):
    value = find_as_accelerate(name)
    plain = isinstance(value, str | int | list | tuple | dict)
    assert plain or inspect.getdoc(value) or inspect.getdoc(type(value))


@cache
def list_all_callables():
    """Return {module: public callables} for all of Accelerate's modules, including its commands and test helpers."""
    found = {}
    for info in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if info.name.startswith("accelerate.test_utils.scripts."):
            found[info.name] = ()
            continue
        try:
            shown = vars(importlib.import_module(info.name)).items()
        except ImportError:
            continue
        found[info.name] = [
            name
            for name, value in shown
            if not name.startswith("_")
            and str(getattr(value, "__module__", "")).startswith("accelerate")
            and callable(value)
        ]
    return found


def test_every_name_can_be_imported_from_every_module():
    assert (
        sorted({name.partition(".")[2] for name in list_all_callables()} - MODULES_AS_ACCELERATE - {"utils.rich"}) == []
    )
    missing = []
    for name in {each for names in list_all_callables().values() for each in names}:
        try:
            find_as_accelerate(name)
        except AttributeError:
            missing.append(name)
    assert missing == []


def test_unserved_name_raises_an_explanation_when_called():
    refused = find_as_accelerate("MegatronEngine")
    assert (refused.__name__, refused) == ("MegatronEngine", find_as_accelerate("MegatronEngine"))
    assert not isinstance(3, refused)
    with pytest.raises(headway.errors.NotServed, match="Megatron-LM is not supported yet"):
        refused(1)


def test_accelerates_test_helpers_are_served():
    import accelerate.test_utils as theirs

    names = {name for name, value in vars(theirs).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert sorted(names - set(AS_ACCELERATE)) == []
    assert len(names) > 40
    assert {"test_utils", "test_utils.testing", "test_utils.training"} <= MODULES_AS_ACCELERATE


def test_no_name_is_both_served_and_refused():
    assert (set(PROVIDED) | set(RENAMED) | set(headway.__all__)) & set(NAMES) == set()
    assert set(PROVIDED) & set(headway.__all__) == set()


@pytest.mark.parametrize("name", sorted({*PROVIDED, *RENAMED}))
def test_served_names_exist_and_have_docstrings(name):
    value = find_provided_name(name)
    assert isinstance(value, str) or inspect.getdoc(value)


def test_explanations_are_clauses_of_several_words():
    assert [why for why in {*NAMES.values(), *MEMBERS.values()} if len(why.split()) < 4 or why.endswith(".")] == []


def test_every_module_path_of_accelerate_can_be_imported():
    assert {name.removeprefix("accelerate.") for name in list_modules()} == MODULES | OWN


@pytest.fixture(scope="module")
def members():
    """Return the public members of Accelerate's Accelerator class and of one of its instances."""
    accelerate.state.AcceleratorState._reset_state(True)
    made = accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)
    return {name for name in {*dir(made), *vars(made)} if not name.startswith("_")}


def test_every_member_is_served_or_explained(members):
    ours = headway.Accelerator(cpu=True)
    assert sorted(members - set(dir(ours)) - set(MEMBERS)) == []
    assert set(MEMBERS) & set(dir(ours)) == set()


def test_arguments_come_in_the_same_order():
    theirs, ours = (list(inspect.signature(kind).parameters) for kind in (accelerate.Accelerator, headway.Accelerator))
    assert ours[: len(theirs)] == theirs


HANDLERS = """
    AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs GradScalerKwargs GradientAccumulationPlugin
    InitProcessGroupKwargs ProfileKwargs ProjectConfiguration TorchDynamoPlugin ParallelismConfig
    FullyShardedDataParallelPlugin TorchTensorParallelPlugin TorchTensorParallelConfig TorchContextParallelConfig
    DeepSpeedSequenceParallelConfig
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", HANDLERS)
def test_settings_have_the_same_fields(name):
    theirs, ours = (
        {field.name for field in dataclasses.fields(kind) if field.init}
        for kind in (getattr(accelerate.utils, name), getattr(headway, name))
    )
    assert theirs - ours == set()


METHODS = """
    accumulate autocast backward clip_grad_norm_ clip_grad_value_ free_memory gather gather_for_metrics get_state_dict
    get_tracker no_sync on_process pad_across_processes prepare_data_loader prepare_model prepare_optimizer prepare_scheduler
    reduce register_for_checkpointing save save_model skip_first_batches split_between_processes unscale_gradients unwrap_model
    lomo_backward maybe_context_parallel trigger_sync_in_backward verify_device_map join_uneven_inputs print profile
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_the_same_arguments_by_name(name):
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    theirs = inspect.signature(getattr(accelerate.Accelerator, name)).parameters.values()
    ours = set(
        inspect.signature(getattr(headway.Accelerator, name, None) or getattr(AccelerateMembers, name)).parameters
    )
    assert [each.name for each in theirs if each.kind not in variable and each.name not in ours] == []


STATES = ["PartialState", "AcceleratorState", "GradientState"]


@pytest.mark.parametrize("name", STATES)
def test_states_have_the_same_members(name):
    made = accelerate.state.AcceleratorState, accelerate.Accelerator(cpu=True)
    theirs = getattr(accelerate.state, name)()
    expected = {each for each in {*dir(theirs), *vars(theirs)} if not each.startswith("_")}
    del made
    accelerate.state.AcceleratorState._reset_state(True)
    ours = headway.Accelerator(cpu=True), getattr(headway, name)()
    assert sorted(expected - set(dir(ours[1])) - {"get_deepspeed_plugin", "select_deepspeed_plugin"}) == []
