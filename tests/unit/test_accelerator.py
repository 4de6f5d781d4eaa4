"""Test the Accelerator on one process: settings and their origins, memory, metrics outside a loop, and ranks."""

import gc
import json
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from headway import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.core.runtime import process
from headway.errors import ConfigError, DeviceUnavailable, LaunchError, StateError
from tests.unit.core.data.fakes import Numbers


def set_launch_environment(monkeypatch, num_processes=1, force=False, **settings):
    """Set the environment of a worker of `headway launch`."""
    told = {name: {"value": value, "origin": f"command line: --{name}"} for name, value in settings.items()}
    content = {"version": 1, "settings": told, "num_processes": num_processes, "force": force}
    monkeypatch.setenv("HEADWAY_RUN", json.dumps(content))


# -------------------------------------------------------------------- settings


def test_launcher_sets_what_the_code_leaves_open(monkeypatch):
    set_launch_environment(monkeypatch, mixed_precision="bf16", gradient_accumulation_steps=3, cpu=True)
    acc = Accelerator()
    assert (acc.mixed_precision, acc.gradient_accumulation_steps, acc.device.type) == ("bf16", 3, "cpu")


@pytest.mark.parametrize(
    ("said", "told"),
    [({"mixed_precision": "no"}, {"mixed_precision": "bf16"}),
     ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 7})],
)  # fmt: skip
def test_contradiction_of_code_and_command_line_names_both(monkeypatch, said, told):
    """Accelerate's environment overrides an explicit argument silently."""
    set_launch_environment(monkeypatch, **told)
    ((name, value),) = told.items()
    with pytest.raises(ConfigError, match=rf"test_accelerator.py:\d+ against --{name} {value}.*--force"):
        Accelerator(cpu=True, **said)
    set_launch_environment(monkeypatch, force=True, **told)
    assert getattr(Accelerator(cpu=True, **said), name) == value


def test_code_takes_precedence_over_a_variable(monkeypatch):
    monkeypatch.setenv("HEADWAY_GRADIENT_ACCUMULATION_STEPS", "7")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 7
    assert Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    monkeypatch.setenv("HEADWAY_GRADIENT_ACCUMULATION_STEPS", "many")
    with pytest.raises(ConfigError, match="HEADWAY_GRADIENT_ACCUMULATION_STEPS"):
        Accelerator(cpu=True)


def test_world_size_must_equal_the_launched_one(monkeypatch):
    set_launch_environment(monkeypatch, num_processes=2)
    with pytest.raises(LaunchError, match="asked for 2 processes, but this one finds itself in a world of 1"):
        Accelerator(cpu=True)


@pytest.mark.parametrize("name", ["tpu", "xla"])
def test_tpus_are_refused_by_name(monkeypatch, name):
    monkeypatch.setenv("HEADWAY_DEVICE", name)
    with pytest.raises(DeviceUnavailable, match=f"'{name}' was asked for.*torch_xla"):
        Accelerator()


def test_unknown_device_is_refused(monkeypatch):
    monkeypatch.setenv("HEADWAY_DEVICE", "abacus")
    with pytest.raises(DeviceUnavailable, match=r"not a kind of device that torch knows .*; available here: cpu"):
        Accelerator()


def test_setting_given_twice_is_refused():
    plugin = GradientAccumulationPlugin(num_steps=2)
    with pytest.raises(ConfigError, match="not both"):
        Accelerator(cpu=True, gradient_accumulation_steps=2, gradient_accumulation_plugin=plugin)
    with pytest.raises(ConfigError, match="derives"):
        Accelerator(cpu=True, global_batch_size=8, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="contradicts"):
        Accelerator(cpu=True, split_batches=True, dataloader_config=DataLoaderConfiguration())
    with pytest.raises(ConfigError, match="contradicts"):
        Accelerator(cpu=True, project_dir="a", project_config=ProjectConfiguration(project_dir="b"))
    with pytest.raises(ConfigError, match="fp7"):
        Accelerator(cpu=True, mixed_precision="fp7")


def test_properties_show_the_settings(tmp_path):
    config = DataLoaderConfiguration(split_batches=True, dispatch_batches=True, even_batches=False, non_blocking=True,
                                     use_seedable_sampler=False)  # fmt: skip
    acc = Accelerator(cpu=True, dataloader_config=config, project_dir=tmp_path)
    shown = (acc.split_batches, acc.dispatch_batches, acc.even_batches, acc.non_blocking, acc.use_seedable_sampler)
    assert shown == (True, True, False, True, False)
    assert (acc.project_dir, acc.logging_dir) == (tmp_path, tmp_path)
    acc.even_batches = True
    assert acc.even_batches is True
    acc.gradient_accumulation_steps = 5
    assert acc.gradient_accumulation_steps == 5
    with pytest.raises(ConfigError):
        acc.gradient_accumulation_steps = 0


def test_single_process_has_rank_0():
    acc = Accelerator(cpu=True)
    assert (acc.num_processes, acc.process_index, acc.local_process_index) == (1, 0, 0)
    assert (acc.is_main_process, acc.is_local_main_process, acc.is_last_process) == (True, True, True)
    assert acc.use_distributed is False
    assert [acc.check_trigger(), acc.set_trigger(), acc.check_trigger(), acc.check_trigger()] == [
        False,
        None,
        True,
        False,
    ]
    with pytest.raises(ConfigError, match="process_index=1; give a number from 0 to 0"):
        acc.on_process(process_index=1)
    with pytest.raises(ConfigError, match="process_index=None"):
        acc.on_process(lambda: None)
    with acc.split_between_processes([1, 2]) as part:
        assert part == [1, 2]
    acc.end_training()
    assert not process.is_started()


# -------------------------------------------------------------------- memory


def test_free_memory_frees_all_objects():
    acc = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model, loader = nn.Linear(4, 4), DataLoader(Numbers(8), batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, loader, scheduler = acc.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with acc.accumulate(model):
            acc.backward(model(batch.float()[:, None].expand(-1, 4)).float().square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    held = [weakref.ref(each) for each in (model, model.weight, optimizer.optimizer, optimizer, loader, scheduler)]
    model, optimizer, loader, scheduler = acc.free_memory(model, optimizer, loader, scheduler)
    assert (model, optimizer, loader, scheduler) == (None,) * 4
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    # The Accelerator can be used with other objects.
    model = acc.prepare(nn.Linear(1, 1))
    acc.backward(model(torch.ones(1, 1)).float().sum())
    assert model.weight.grad is not None


# -------------------------------------------------------------------- metrics


def test_metrics_of_a_loader_outside_its_loop_are_an_error():
    acc = Accelerator(cpu=True)
    loader = acc.prepare(DataLoader(Numbers(4), batch_size=2))
    assert acc.gather_for_metrics(torch.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(StateError, match="outside that loader's loop"):
        acc.gather_for_metrics(torch.arange(3), loader=loader)
    for batch in loader:
        break
    with pytest.raises(StateError, match="outside that loader's loop"):
        acc.gather_for_metrics(batch, loader=loader)


class ModuleWithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_save_model_reports_entries_that_are_not_tensors(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(ModuleWithExtraState(2, 2)))
    with pytest.raises(
        ConfigError, match=r"0\._extra_state of the model's state dict is a dict.*safe_serialization=False"
    ):
        accelerator.save_model(model, tmp_path)
    accelerator.save_model(model, tmp_path, safe_serialization=False)
    assert torch.load(tmp_path / "pytorch_model.bin")["0._extra_state"] == {"seen": 3}
