"""Test PartialState, AcceleratorState and GradientState on one process."""

import copy
import pickle

import pytest
import torch

from headway import Accelerator
from headway.compat.accelerate import state
from headway.compat.accelerate.constants import DistributedType
from headway.compat.accelerate.state import AcceleratorState, GradientState, PartialState, is_initialized
from headway.core.runtime import process
from headway.errors import ConfigError, UnsupportedError


@pytest.fixture(autouse=True)
def fresh_states():
    """Reset the states of Accelerate before and after each test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_distributed_types_equal_text_and_tpu_is_xla():
    assert DistributedType.NO == "NO"
    assert DistributedType.TPU is DistributedType.XLA
    assert DistributedType("MULTI_GPU") is DistributedType.MULTI_GPU
    assert str(DistributedType.NO) == "DistributedType.NO"


def test_partial_state_starts_the_runtime_once():
    assert PartialState._shared_state == {}
    first = PartialState(cpu=True)
    assert PartialState._shared_state["num_processes"] == 1
    assert first.initialized
    assert first.runtime is PartialState().runtime is Accelerator(cpu=True).runtime
    assert (first.device, first.is_main_process, first.distributed_type) == (torch.device("cpu"), True, "NO")
    assert (first.backend, first.debug, first.fork_launched) == (None, False, False)
    first.set_device()
    with pytest.raises(UnsupportedError, match="SageMaker"):
        PartialState(_use_sagemaker_dp=True)


def test_partial_state_decorates_and_prints(capsys):
    here = PartialState(cpu=True)
    assert here.on_main_process(lambda: 3)() == 3
    assert here.on_process(lambda: 3, process_index=0)() == 3
    with here.main_process_first(), here.local_main_process_first():
        here.print("here")
    here.wait_for_everyone()
    state.wait_for_everyone()
    assert capsys.readouterr().out == "here\n"


def test_query_does_not_restart_an_ended_run():
    accelerator = Accelerator(cpu=True)
    accelerator.end_training()
    assert not process.is_started()
    assert PartialState().is_main_process
    assert AcceleratorState().mixed_precision == "no"
    assert not process.is_started()


def test_partial_state_destroys_the_runtime():
    PartialState(cpu=True).destroy_process_group()
    assert not process.is_started()


def test_accelerator_state_is_shared_with_the_accelerator():
    assert not is_initialized()
    assert AcceleratorState._shared_state == {}
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert is_initialized()
    assert AcceleratorState._shared_state["_mixed_precision"] == "bf16"
    for each in (accelerator.state, AcceleratorState()):
        assert each.initialized
        assert each.mixed_precision == "bf16"
        assert each.deepspeed_plugin is each.fsdp_plugin is each.megatron_lm_plugin is each.parallelism_config is None
        assert each.dynamo_plugin.backend == "NO"
        assert not each.is_fsdp2
    assert "Mixed precision type: bf16" in repr(accelerator.state)
    assert accelerator.state is accelerator.state
    with pytest.raises(ConfigError, match="mixed_precision='fp16', but the Accelerator computes in 'bf16'"):
        AcceleratorState(mixed_precision="fp16")
    AcceleratorState._reset_state()
    assert not is_initialized()
    assert AcceleratorState(mixed_precision="bf16").mixed_precision == "bf16"


def test_gradient_state_works_without_an_accelerator():
    alone = GradientState()
    assert not alone.initialized
    assert (alone.sync_gradients, alone.num_steps, alone.in_dataloader, alone.remainder) == (True, 1, False, -1)
    assert alone.dataloader_references == [None]
    alone._set_sync_gradients(False)
    assert alone.sync_gradients


def test_gradient_state_reads_the_current_window():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    live = GradientState()
    assert live.initialized
    assert live.plugin_kwargs == {"num_steps": 2}
    seen = []
    for _ in range(4):
        with accelerator.accumulate(model):
            seen.append((live.sync_gradients, accelerator.gradient_state.sync_gradients))
            accelerator.backward(model(torch.ones(1, 1)).mean())
    assert seen == [(False, False), (True, True)] * 2
    assert "Sync Gradients: True" in repr(live)


def test_states_do_not_keep_prepared_objects_alive():
    import gc
    import weakref

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    gone = weakref.ref(model)
    del accelerator, model
    gc.collect()
    assert gone() is None
    assert GradientState().sync_gradients


def test_sync_gradients_set_by_hand_holds_step_and_zero_grad():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.item()
    accelerator.sync_gradients = False
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert model.weight.item() == before
    assert model.weight.grad.item() == 1.0
    accelerator.sync_gradients = True
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert model.weight.item() == pytest.approx(before - 2.0)
    assert model.weight.grad is None
    accelerator.sync_gradients = False
    with accelerator.accumulate(model):  # a new window ends the manual one
        assert accelerator.sync_gradients


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState, GradientState])
def test_pickled_or_copied_state_reads_the_current_process(kind):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    for read in (pickle.loads(pickle.dumps(kind())), copy.deepcopy(kind())):
        assert type(read) is kind
        if kind is GradientState:
            assert read.num_steps == 3
        else:
            assert read.runtime is accelerator.runtime


def test_state_from_a_file_of_accelerate_reads_the_current_process():
    """Accelerate stores the values of its state in the file. They are not valid for this process."""
    read = PartialState.__new__(PartialState)
    read.__setstate__({"device": torch.device("cpu"), "num_processes": 8, "process_index": 5, "_cpu": True})
    assert (read.num_processes, read.process_index) == (1, 0)
