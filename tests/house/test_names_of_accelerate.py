"""Every public name of Accelerate, and every member of its Accelerator, is served or has a sentence.

There are two places: `headway`, for scripts that change their imports, and `accelerate` itself where Headway stands in for it,
which has more. A name that only the second has keeps its sentence for the first.
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
from headway.compat.accelerate.served.as_accelerate import find_as_accelerate
from headway.compat.accelerate.served.names import find
from headway.compat.accelerate.served.surface import describe_name
from headway.compat.accelerate.served.tables import (
    AS_ACCELERATE,
    DIFFERENT,
    MEMBERS,
    MODULES,
    MODULES_AS_ACCELERATE,
    NAMES,
    REFUSED,
    RENAMED,
    SERVED,
    SURFACE,
)

pytestmark = pytest.mark.filterwarnings("ignore:memory_utils has been reorganized")

PRIVATE = ("accelerate.commands", "accelerate.test_utils")
OWN = {"accelerator"}


@cache
def modules():
    found = [info.name for info in pkgutil.walk_packages(accelerate.__path__, "accelerate.")]
    return [name for name in found if not name.startswith(PRIVATE)]


@cache
def public_names():
    """Name -> where Accelerate defines it."""
    found = {}
    for name in ["accelerate", *modules()]:
        try:
            module = importlib.import_module(name)
        except ImportError:  # its rich module asks for a variable to be set
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


def test_there_is_something_to_compare():
    assert len(modules()) > 30
    assert len(public_names()) > 350


def test_every_public_name_is_served_or_explained():
    answered = {*headway.__all__, *SERVED, *RENAMED, *NAMES}
    assert sorted(set(public_names()) - answered) == []


def test_headway_answers_for_every_name_that_only_accelerate_has():
    theirs = set(AS_ACCELERATE) & set(public_names())
    assert sorted(theirs - {*headway.__all__, *SERVED, *RENAMED, *NAMES}) == []


PLACES_OF_THEIRS = {
    "commands.config",
    "commands.launch",
    "commands.accelerate_cli",
    "test_utils.testing",
    "test_utils.training",
}


def test_the_table_of_the_command_is_accelerates_surface():
    told = {name for module, names in SURFACE.items() for name in names if module not in PLACES_OF_THEIRS}
    assert told == set(public_names())
    for module, names in SURFACE.items():
        home = importlib.import_module(f"accelerate.{module}") if module != "utils.rich" else None
        assert [name for name in names if not hasattr(home, name)] == []


def test_each_name_has_one_answer():
    answers = [describe_name(name) for names in SURFACE.values() for name in names]
    assert {each.status for each in answers} == {"served", "differs", "not served"}
    assert [each.name for each in answers if each.status != "served" and len(each.note.split()) < 2] == []
    assert {each.name for each in answers if each.status == "not served"} <= {*NAMES, *REFUSED}


def test_differences_are_of_names_that_are_served():
    served = {*headway.__all__, *SERVED, *RENAMED, *AS_ACCELERATE}
    assert sorted(set(DIFFERENT) - served) == []
    assert sorted(set(DIFFERENT) - {name for names in SURFACE.values() for name in names}) == []


@pytest.mark.parametrize("name", sorted(AS_ACCELERATE))
def test_what_is_served_under_its_name_is_there_and_explains_itself(name):
    value = find_as_accelerate(name)
    plain = isinstance(value, str | int | list | tuple | dict)
    assert plain or inspect.getdoc(value) or inspect.getdoc(type(value))


@cache
def everything():
    """Every module of Accelerate, its commands and its tests' helpers too, and the names that each defines or shows."""
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
    assert sorted({name.partition(".")[2] for name in everything()} - MODULES_AS_ACCELERATE - {"utils.rich"}) == []
    missing = []
    for name in {each for names in everything().values() for each in names}:
        try:
            find_as_accelerate(name)
        except AttributeError:
            missing.append(name)
    assert missing == []


def test_what_is_not_served_says_so_when_it_is_called():
    refused = find_as_accelerate("MegatronEngine")
    assert (refused.__name__, refused) == ("MegatronEngine", find_as_accelerate("MegatronEngine"))
    assert not isinstance(3, refused)
    with pytest.raises(headway.errors.NotServed, match="Megatron-LM is not supported yet"):
        refused(1)


def test_the_test_helpers_of_accelerate_are_there():
    import accelerate.test_utils as theirs

    names = {name for name, value in vars(theirs).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert sorted(names - set(AS_ACCELERATE)) == []
    assert len(names) > 40
    assert {"test_utils", "test_utils.testing", "test_utils.training"} <= MODULES_AS_ACCELERATE


def test_no_name_is_both():
    assert (set(SERVED) | set(RENAMED) | set(headway.__all__)) & set(NAMES) == set()
    assert set(SERVED) & set(headway.__all__) == set()


@pytest.mark.parametrize("name", sorted({*SERVED, *RENAMED}))
def test_what_is_served_is_there_and_explains_itself(name):
    value = find(name)
    assert isinstance(value, str) or inspect.getdoc(value)


def test_what_is_explained_is_a_sentence():
    assert [why for why in {*NAMES.values(), *MEMBERS.values()} if len(why.split()) < 4 or why.endswith(".")] == []


def test_every_module_path_is_there():
    assert {name.removeprefix("accelerate.") for name in modules()} == MODULES | OWN


@pytest.fixture(scope="module")
def members():
    """Those of Accelerate's class and of an object of it."""
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
    wanted = {each for each in {*dir(theirs), *vars(theirs)} if not each.startswith("_")}
    del made
    accelerate.state.AcceleratorState._reset_state(True)
    ours = headway.Accelerator(cpu=True), getattr(headway, name)()
    assert sorted(wanted - set(dir(ours[1])) - {"get_deepspeed_plugin", "select_deepspeed_plugin"}) == []
