"""Test members of Accelerate's Accelerator that Headway provides beside its own."""

import pytest
import torch

from headway import Accelerator, DataLoaderConfiguration, RNGType
from headway.common.tracebacks import format_short_traceback
from headway.core.runtime.collectives.rng import resolve_generator_names
from headway.errors import ConfigError, UnsupportedError


def test_properties_of_the_run():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    assert accelerator.distributed_type == "NO"
    assert not accelerator.multi_device
    assert accelerator.should_save_model
    assert accelerator.dataloader_config.split_batches
    assert not accelerator.use_stateful_dataloader
    assert not accelerator.is_composable_parallelism_enabled
    assert accelerator.fp8_backend is accelerator.torch_device_mesh is accelerator.deepspeed_plugin is None
    model, loader = accelerator.prepare(
        torch.nn.Linear(1, 1), torch.utils.data.DataLoader([torch.ones(1)] * 2, batch_size=1)
    )
    assert accelerator._models == [model]
    assert accelerator._dataloaders == [loader]
    assert accelerator._optimizers == accelerator._schedulers == []


def test_scaler_is_none_without_fp16():
    assert Accelerator(cpu=True).scaler is None
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.scaler is None
    assert accelerator.native_amp


def test_scaler_is_up_to_date_after_a_step():
    """A script that compares scales after a step must see an overflow, as after torch's `scaler.update()`."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(accelerator.scaler, torch.amp.GradScaler)
    before = accelerator.scaler.get_scale()
    accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
    optimizer.step()
    assert accelerator.scaler.get_scale() == before / 2
    assert accelerator.scaler.state_dict()["scale"] == before / 2
    assert accelerator.optimizer_step_was_skipped


def test_scaler_is_updated_after_the_last_optimizer():
    """Between two steps, the scale is still the one that scaled the second optimizer's gradients."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    kept = model[1].weight.item()
    before = accelerator.scaler.get_scale()
    accelerator.backward(model[0](torch.ones(1, 1)).sum() * float("inf") + model[1](torch.ones(1, 1)).sum())
    optimizers[0].step()
    assert accelerator.scaler.get_scale() == before
    optimizers[1].step()
    assert accelerator.scaler.get_scale() == before / 2
    assert model[1].weight.item() == pytest.approx(kept - 1.0, abs=1e-3)


def test_contexts_do_nothing_on_one_process_but_check_their_arguments(caplog):
    accelerator = Accelerator(cpu=True)
    buffer = torch.ones(1)
    with accelerator.maybe_context_parallel(buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}):
        assert buffer.shape == (1,)
    with accelerator.maybe_context_parallel():
        pass
    with pytest.raises(ConfigError, match=r"buffer_seq_dims=\[1\]\) does not give a dimension .* \[\(1,\)\]"):
        with accelerator.maybe_context_parallel(buffers=[buffer], buffer_seq_dims=[1]):
            pass
    with pytest.raises(ConfigError, match="a tensor that is not one of the buffers"):
        with accelerator.maybe_context_parallel(
            buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={torch.ones(1)}
        ):
            pass
    assert "context parallel" not in caplog.text
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 1


def test_unsupported_members_are_refused():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UnsupportedError, match="lomo_backward makes updates inside backward"):
        accelerator.lomo_backward(torch.ones(1), 0.1)
    with pytest.raises(UnsupportedError, match="slice_fn_for_dispatch is not supported"):
        accelerator.prepare_data_loader(torch.utils.data.DataLoader([1]), slice_fn_for_dispatch=len)
    with pytest.raises(AttributeError, match="Headway's Accelerator has no 'step': accelerator"):
        accelerator.step
    with pytest.raises(AttributeError, match="no attribute 'clip_grad_norm'; did you mean clip_grad_norm_") as info:
        accelerator.clip_grad_norm
    assert "frames of Headway" in format_short_traceback(info.value)[0]
    with pytest.raises(AttributeError, match=r"has no attribute '_clip_grad_norm'$"):
        accelerator._clip_grad_norm
    assert not hasattr(accelerator, "fp8_recipe_handler")


def test_model_over_several_devices_is_recognized():
    accelerator, model = Accelerator(cpu=True), torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"a": "cpu", "b": "disk"}
    assert accelerator.verify_device_map(model)


def test_generators_are_named_like_in_accelerate():
    assert resolve_generator_names(["torch", RNGType.CUDA, "xpu", RNGType.NPU, "mtia", "generator"]) == [
        "torch",
        "device",
        "generator",
    ]
    with pytest.raises(ConfigError, match="unknown generator 'dice'"):
        Accelerator(cpu=True, rng_types=["dice"])
    assert Accelerator(cpu=True, rng_types=[RNGType.GENERATOR, "cuda"]).num_processes == 1


def test_positions_of_arguments_equal_accelerates():
    accelerator = Accelerator(
        True, False, "bf16", 3, True, DataLoaderConfiguration(), None, None, None, None, ["torch"]
    )
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)


def test_prepare_optimizer_accepts_device_placement():
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), device_placement=True)
    assert optimizer.param_groups[0]["lr"] == 0.1
