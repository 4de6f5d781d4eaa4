"""Test what only `import accelerate` provides: its constants, enumerations, recipes, utilities and test helpers."""

import pickle
import subprocess
import sys
import warnings

import accelerate.test_utils as their_tests
import accelerate.utils as theirs
import numpy
import pytest
import torch
from accelerate.utils import constants as their_constants
from accelerate.utils import dataclasses as their_settings

import headway
from headway.compat.accelerate import constants, recipes, testing
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.data import batches
from headway.compat.accelerate.launching import available
from headway.compat.accelerate.modules import casting, models
from headway.compat.accelerate.provided_names.as_accelerate import find_as_accelerate
from headway.core.config.values import KwargsHandler
from headway.errors import HeadwayError, UnsupportedError

FACTS = sorted(name for name in vars(constants) if name.isupper() and not name.startswith("_"))


@pytest.mark.parametrize("name", FACTS)
def test_constants_equal_accelerates(name):
    assert getattr(constants, name) == getattr(their_constants, name)


def test_constants_are_many():
    assert len(FACTS) > 35


@pytest.mark.parametrize("name", ["ComputeEnvironment", "SageMakerDistributedType", "FP8BackendType"])
def test_enumerations_have_the_same_members(name):
    one, other = getattr(their_settings, name), getattr(constants, name)
    assert {each.name: each.value for each in other} == {each.name: each.value for each in one}


def test_enumerations_can_be_defined_by_scripts():
    for base in (their_settings.BaseEnum, constants.BaseEnum):
        kind = base("Colour", {"RED": "red", "BLUE": "blue"})
        assert "red" in kind
        assert "green" not in kind
        assert kind.list() == ["red", "blue"]
        assert str(kind.RED) == "red"


def test_settings_list_the_values_that_differ_from_the_defaults():
    ours = headway.GradScalerKwargs(growth_factor=3.0)
    assert isinstance(ours, KwargsHandler)
    assert ours.to_kwargs() == theirs.GradScalerKwargs(growth_factor=3.0).to_kwargs()
    assert ours.to_dict()["growth_factor"] == 3.0


def test_recipes_are_read_and_checked_like_in_accelerate(monkeypatch):
    monkeypatch.setattr(their_settings, "is_transformer_engine_available", lambda: True)
    one, other = their_settings.TERecipeKwargs(fp8_format="e4m3"), recipes.TERecipeKwargs(fp8_format="e4m3")
    assert other.to_dict() == one.to_dict()
    assert recipes.MSAMPRecipeKwargs().to_dict() == their_settings.MSAMPRecipeKwargs().to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        one = their_settings.FP8RecipeKwargs()
    assert recipes.FP8RecipeKwargs().to_dict() == one.to_dict() | {"opt_level": "O2"}  # None in Accelerate
    for kind in (their_settings, recipes):
        with pytest.raises(ValueError, match="fp8_format"):
            kind.TERecipeKwargs(fp8_format="E9")
        with pytest.raises(ValueError, match="opt_level"):
            kind.MSAMPRecipeKwargs(opt_level="O9")


def test_unsupported_recipe_and_plugin_are_refused_when_used():
    with pytest.raises(UnsupportedError, match=r"TERecipeKwargs in kwargs_handlers.*AORecipeKwargs"):
        AccelerateAccelerator(cpu=True, kwargs_handlers=[recipes.TERecipeKwargs()])
    plugin = recipes.MegatronLMPlugin(2, pp_degree=4)
    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches) == (2, 4, 1)
    assert repr(plugin) == "MegatronLMPlugin(tp_degree=2, pp_degree=4)"
    with pytest.raises(HeadwayError, match="Megatron-LM"):
        AccelerateAccelerator(cpu=True, megatron_lm_plugin=plugin)


def test_autocast_follows_the_accelerators_precision():
    accelerator = headway.Accelerator(cpu=True, mixed_precision="bf16")
    with casting.get_mixed_precision_context_manager(True):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16
    with casting.get_mixed_precision_context_manager(False):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
    with casting.get_mixed_precision_context_manager(True, headway.AutocastKwargs(enabled=False)):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
    assert accelerator.mixed_precision == "bf16"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no CUDA here
        scaler = casting.get_grad_scaler(init_scale=4.0, enabled=False)
    assert isinstance(scaler, torch.amp.GradScaler)


def double(x):
    return {"y": x * 2}


def test_outputs_are_converted_to_float32():
    for kind in (theirs.operations.ConvertOutputsToFp32, casting.ConvertOutputsToFp32):
        wrapped = kind(double)
        assert wrapped(torch.ones(2, dtype=torch.bfloat16))["y"].dtype == torch.float32
        assert wrapped.__name__ == "double"
    assert pickle.loads(pickle.dumps(casting.ConvertOutputsToFp32(double)))(torch.ones(1))["y"].item() == 2.0


def test_shared_tensors_are_left_out_like_in_accelerate(caplog):
    def build_state():
        weight = torch.arange(6.0).view(2, 3)
        return {"a": weight, "b": weight, "c": weight.t(), "d": torch.ones(2), "e": "text", "f": torch.ones(4)[::2]}

    sys.modules["accelerate"].PartialState()  # Accelerate's logger needs it
    one, other = (
        kind.clean_state_dict_for_safetensors(build_state()) for kind in (sys.modules["accelerate.utils"], models)
    )
    assert list(other) == list(one) == ["a", "d", "e", "f"]
    assert all(not isinstance(each, torch.Tensor) or each.is_contiguous() for each in other.values())
    assert "share the memory of others: b, c" in caplog.text
    tensor = torch.ones(3)
    assert models.id_tensor_storage(tensor) == theirs.modeling.id_tensor_storage(tensor)


def test_parameters_are_tied_again():
    def build_model():
        made = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2), "two": torch.nn.Linear(2, 2)})
        made["one"].weight = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
        return made

    for retie in (theirs.retie_parameters, models.retie_parameters):
        made = build_model()
        kept = made["two"].weight
        retie(made, [["one.weight", "two.weight"]])
        assert made["one"].weight is kept
        assert made["two"].weight is kept


def test_batches_are_built_from_their_shapes():
    batch = {"x": torch.ones(2, 3), "y": [torch.zeros(4, dtype=torch.int64)]}
    assert batches.get_shape(batch) == theirs.operations.get_shape(batch) == {"x": [2, 3], "y": [[4]]}
    made = batches.initialize_tensors(batches.get_data_structure(batch))
    assert (made["x"].shape, made["y"][0].dtype) == ((2, 3), torch.int64)


def test_port_device_type_and_gpu_info_equal_accelerates(monkeypatch):
    assert 1024 <= find_as_accelerate("get_free_port")() < 65536
    assert available.get_current_device_type() == theirs.environment.get_current_device_type()
    monkeypatch.setattr(
        available,
        "_query_nvidia_smi",
        lambda field: {"name": ["GeForce RTX 4090"] * 2, "driver_version": ["535.1.2"]}[field],
    )
    assert available.get_gpu_info() == (["GeForce RTX 4090"] * 2, 2)
    assert available.check_cuda_p2p_ib_support() is False
    monkeypatch.setattr(
        available, "_query_nvidia_smi", lambda field: {"name": ["H100"] * 2, "driver_version": ["535.1.2"]}[field]
    )
    assert available.check_cuda_p2p_ib_support() is True


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an NVIDIA driver")
def test_driver_version_without_a_driver_is_an_error():
    assert available.check_cuda_p2p_ib_support() is True
    with pytest.raises(headway.errors.ConfigError, match="nvidia-smi does not answer"):
        available.get_driver_version()


def test_regression_dataset_and_model_equal_accelerates():
    one, other = their_tests.RegressionDataset(length=20, seed=3), testing.RegressionDataset(length=20, seed=3)
    assert len(one) == len(other) == 20
    assert all(numpy.array_equal(one[i]["y"], other[i]["y"]) and one[i]["x"] == other[i]["x"] for i in range(20))
    model = testing.RegressionModel(2, 3)
    assert model(torch.tensor([1.0, 2.0])).tolist() == [5.0, 7.0]


def test_require_decorators_skip_like_accelerates():
    import unittest

    for name in ("require_cpu", "require_non_cpu", "require_cuda", "require_multi_device", "require_transformers"):

        class One(unittest.TestCase):
            @getattr(their_tests.testing, name)
            def test_it(self):
                pass

        class Other(unittest.TestCase):
            @getattr(testing, name)
            def test_it(self):
                pass

        ran = [unittest.TestResult() for _ in range(2)]
        for kind, result in zip((One, Other), ran):
            unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
        assert len(ran[0].skipped) == len(ran[1].skipped), name
    with pytest.raises(AttributeError, match="no 'require_moon'"):
        testing.require_moon


def test_commands_are_run_and_failures_are_reported(capfd):
    ran = testing.execute_subprocess_async([sys.executable, "-c", "print('one')"])
    assert (ran.returncode, ran.stdout) == (0, ["one"])
    with pytest.raises(RuntimeError, match=r"ended with exit code 3(?s:.*)sorry"):
        testing.execute_subprocess_async(
            [sys.executable, "-c", "import sys; print('sorry', file=sys.stderr); sys.exit(3)"]
        )
    assert testing.run_command([sys.executable, "-c", "print('two')"], return_stdout=True) == "two\n"
    with pytest.raises(testing.SubprocessCallException, match="ended with exit code 1"):
        testing.run_command([sys.executable, "-c", "raise SystemExit(1)"])
    assert testing.capture_call_output(print, "three") == "three\n"
    with testing.assert_exception(ValueError, "four"):
        raise ValueError("it is four")
    with pytest.raises(AssertionError, match="nothing was raised"):
        with testing.assert_exception(ValueError):
            pass
    command = testing.get_launch_command(num_processes=2, cpu=True, debug=False)
    assert command[1:] == ["-m", "headway", "launch", "--as", "accelerate", "--num_processes=2", "--cpu"]
    assert testing.path_in_accelerate_package("__init__.py").is_file()
    assert subprocess.run([*testing.get_launch_command(), "--help"], capture_output=True).returncode == 0
