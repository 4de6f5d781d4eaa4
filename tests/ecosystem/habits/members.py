"""Attributes that scripts and libraries read and set on an Accelerator, its states, models and optimizers."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.ecosystem.habits.material import loss_of, model, prepared


def flags():
    """Read settings of an Accelerator."""
    made = Accelerator(cpu=True)
    return [
        made.device_placement,
        made.rng_types,
        made.log_with,
        made.step,
        made.fp8_enabled,
        made.flag_tensor,
        made.has_lomo_optimizer,
    ]


def more_flags():
    """Read more settings of an Accelerator."""
    made = Accelerator(cpu=True)
    return [
        made.step_scheduler_with_optimizer,
        made.native_amp,
        made.has_fp8_handler,
        made.multi_device,
        made.use_distributed,
        made.split_batches,
        made.dispatch_batches,
        made.even_batches,
        made.non_blocking,
        made.use_seedable_sampler,
        made.use_stateful_dataloader,
    ]


def handlers():
    """Read the handlers, which are None if none was passed."""
    made = Accelerator(cpu=True)
    names = "autocast ddp scaler init profile fp8_recipe te_recipe msamp_recipe ao_recipe"
    return {name: getattr(made, f"{name}_handler") for name in names.split()}


def handlers_that_were_passed():
    """Check that the handlers are the objects that were passed."""
    from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, ProfileKwargs

    passed = [AutocastKwargs(), DistributedDataParallelKwargs(), GradScalerKwargs(), ProfileKwargs()]
    made = Accelerator(cpu=True, kwargs_handlers=passed)
    return [
        one is other
        for one, other in zip(
            passed, (made.autocast_handler, made.ddp_handler, made.scaler_handler, made.profile_handler)
        )
    ]


def writable():
    """Set the attributes that scripts set."""
    made = Accelerator(cpu=True)
    made.device_placement = False
    made.step = 5
    made.scaler = None
    made.project_configuration.iteration = 3
    made.log_with = []
    made.rng_types = ["torch"]
    return made.device_placement, made.step, made.scaler, made.save_iteration, made.log_with, made.rng_types


def the_scaler():
    """Read the scaler, which is None without fp16, and set it on an optimizer."""
    accelerator, _net, optimizer, *_ = prepared()
    first = accelerator.scaler, optimizer.scaler
    optimizer.scaler = None
    return first, optimizer.scaler


def settings_of_loaders():
    """Assign dataloader_config."""
    from accelerate import DataLoaderConfiguration

    made = Accelerator(cpu=True)
    made.dataloader_config = DataLoaderConfiguration(split_batches=True)
    return made.split_batches, made.dataloader_config.split_batches


def of_an_optimizer():
    """Read the attributes of an optimizer that libraries use."""
    _accelerator, _net, optimizer, *_ = prepared()
    return [
        optimizer.gradient_state.sync_gradients,
        optimizer.accelerator_state.num_processes,
        optimizer.device_placement,
        optimizer.step_was_skipped,
        type(optimizer.optimizer).__name__,
        optimizer._is_accelerate_prepared,
    ]


def setting_groups_of_an_optimizer():
    """Assign param_groups, state and defaults."""
    _accelerator, _net, optimizer, *_ = prepared()
    optimizer.param_groups = optimizer.param_groups
    optimizer.state = optimizer.state
    optimizer.defaults = optimizer.defaults
    optimizer.param_groups[0]["lr"] = 0.5
    return optimizer.optimizer.param_groups[0]["lr"]


def prepared_flags():
    """Read _is_accelerate_prepared."""
    _accelerator, net, optimizer, data, _ = prepared()
    return [getattr(each, "_is_accelerate_prepared", None) for each in (net, optimizer, data)]


def lists_of_what_is_prepared():
    """Read the lengths of _models and similar lists."""
    accelerator, *_ = prepared()
    return [
        len(getattr(accelerator, f"_{name}"))
        for name in ("models", "optimizers", "schedulers", "dataloaders", "custom_objects")
    ]


def process_facts():
    """Read the attributes that describe ranks."""
    made = Accelerator(cpu=True)
    return [
        made.process_index,
        made.local_process_index,
        made.num_processes,
        made.is_main_process,
        made.is_local_main_process,
        made.is_last_process,
        str(made.distributed_type),
        str(made.device.type),
    ]


def the_kind_of_distribution():
    """Read the name and value of distributed_type."""
    made = Accelerator(cpu=True)
    return made.distributed_type.name, made.distributed_type.value, made.state.distributed_type == made.distributed_type


def plugins_that_are_none():
    """Read the plugins of the state."""
    state = Accelerator(cpu=True).state
    return [
        state.deepspeed_plugin,
        state.fsdp_plugin if hasattr(state, "fsdp_plugin") else None,
        state.mixed_precision,
        state.initialized,
        str(state.dynamo_plugin.backend),
    ]


def states_share():
    """Read states from several instances, which share their values."""
    made = Accelerator(cpu=True)
    return [
        AcceleratorState().num_processes == made.num_processes,
        PartialState().default_device.type,
        PartialState().process_index == made.process_index,
        GradientState().sync_gradients,
        PartialState._shared_state != {},
        AcceleratorState._shared_state != {},
    ]


def states_after_a_reset():
    """Read a state after a reset, which raises AttributeError."""
    made = Accelerator(cpu=True)
    state = made.state
    AcceleratorState._reset_state()
    found = [AcceleratorState._shared_state == {}]
    for name in ("mixed_precision", "distributed_type", "num_processes"):
        try:
            getattr(state, name)
            found.append("there")
        except AttributeError:
            found.append("AttributeError")
    return found


def partial_state_after_a_reset():
    """Read a PartialState after a reset, which raises AttributeError."""
    state = PartialState(cpu=True)
    PartialState._reset_state()
    try:
        return str(state.process_index)
    except AttributeError as error:
        return "AttributeError", "_reset_state" in str(error)


def setting_a_field_of_a_state():
    """Assign attributes of a state."""
    state = PartialState(cpu=True)
    state.debug = True
    state.my_own = 3
    return PartialState().debug


def unknown_attribute():
    """Read an unknown attribute, which raises AttributeError."""
    try:
        return str(Accelerator(cpu=True).nothing_of_the_kind)
    except AttributeError:
        return "AttributeError"


def module_of_a_model():
    """Read model.module if the model is wrapped."""
    accelerator, net, *_ = prepared()
    bare = net.module if hasattr(net, "module") else net
    return (
        type(bare).__name__,
        type(accelerator.unwrap_model(net)).__name__,
        sorted(accelerator.unwrap_model(net).state_dict()),
    )


def unwrapping_a_compiled_model():
    """Unwrap a compiled model with and without keep_torch_compile."""
    net = torch.compile(model(), backend="eager")
    made = Accelerator(cpu=True)
    return type(made.unwrap_model(net, keep_torch_compile=False)).__name__, type(made.unwrap_model(net)).__name__


def unwrapping_data_parallel():
    """Unwrap a DataParallel model."""
    from accelerate.utils import extract_model_from_parallel

    net = torch.nn.DataParallel(model())
    return type(extract_model_from_parallel(net)).__name__, type(Accelerator(cpu=True).unwrap_model(net)).__name__


def unwrapping_compiled_data_parallel():
    """Unwrap a compiled DataParallel model."""
    from accelerate.utils import extract_model_from_parallel

    net = torch.compile(torch.nn.DataParallel(model()), backend="eager")
    return type(extract_model_from_parallel(net, keep_torch_compile=False)).__name__


def a_module_with_a_list_of_parameters():
    """Prepare a model whose parameters() returns a list."""

    class Listed(torch.nn.Linear):
        def parameters(self, recurse=True):
            return list(super().parameters(recurse))

    net = Accelerator(cpu=True).prepare(Listed(3, 1))
    return str(next(iter(net.parameters())).dtype)


def a_model_without_parameters():
    """Prepare a model without parameters."""
    return type(Accelerator(cpu=True).unwrap_model(Accelerator(cpu=True).prepare(torch.nn.Identity()))).__name__


def printing():
    """Call accelerator.print, which returns None."""
    return Accelerator(cpu=True).print("hello")


def only_on_some_ranks():
    """Use the decorators that run a function on some ranks."""
    made = Accelerator(cpu=True)
    found = []
    made.on_main_process(lambda: found.append("main"))()
    made.on_last_process(lambda: found.append("last"))()
    made.on_process(lambda: found.append("0"), process_index=0)()
    made.on_local_main_process(lambda: found.append("local"))()
    made.on_local_process(lambda: found.append("local 0"), local_process_index=0)()
    return found


def in_turn():
    """Use main_process_first and local_main_process_first."""
    made = Accelerator(cpu=True)
    with made.main_process_first(), made.local_main_process_first():
        return "done"


def triggers():
    """Use set_trigger and check_trigger."""
    made = Accelerator(cpu=True)
    if made.is_main_process:
        made.set_trigger()
    return made.check_trigger(), made.check_trigger()


def parts_for_processes():
    """Use split_between_processes."""
    made = Accelerator(cpu=True)
    found = []
    made_by = (lambda: list(range(5)), lambda: {"a": [1, 2, 3]}, lambda: torch.arange(3), lambda: (1, 2, 3, 4, 5))
    for make in made_by:
        for padded in (False, True):
            values = make()
            if isinstance(values, tuple) and padded:
                continue
            with made.split_between_processes(values, apply_padding=padded) as part:
                found.append(part.tolist() if isinstance(part, torch.Tensor) else part)
    return found


def freeing():
    """Call free_memory, which returns Nones and forgets the objects."""
    accelerator, net, optimizer, *_ = prepared()
    net, optimizer = accelerator.free_memory(net, optimizer)
    return net, optimizer, len(accelerator._models), accelerator.step


def autocast_after_freeing():
    """Call a model after free_memory. It still uses the run's precision, like a reference model."""
    made = Accelerator(cpu=True, mixed_precision="bf16")
    net = made.prepare_model(torch.nn.Linear(3, 1), evaluation_mode=True)
    torch.nn.init.constant_(net.weight, 0.1)
    torch.nn.init.zeros_(net.bias)
    made.free_memory()
    first = net(torch.ones(1, 3) / 3).item(), len(made._models)
    net = made.prepare(net)
    return first, str(net(torch.ones(1, 3) / 3).dtype)


def clearing():
    """Call clear() without objects."""
    return Accelerator(cpu=True).clear()


def twice():
    """Create a second Accelerator, and one with another precision."""
    Accelerator(cpu=True)
    Accelerator(cpu=True)
    try:
        Accelerator(cpu=True, mixed_precision="bf16")
    except ValueError:
        return "ValueError"
    return "made"


def steps_in_two_ways():
    """Pass both gradient_accumulation_steps and a plugin."""
    from accelerate.utils import GradientAccumulationPlugin

    try:
        Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        )
    except ValueError:
        return "ValueError"
    return "made"


def an_unknown_precision():
    """Pass an unknown precision, which raises ValueError."""
    try:
        Accelerator(cpu=True, mixed_precision="fp7")
    except ValueError:
        return "ValueError"


def autocasting():
    """Use accelerator.autocast() with bf16."""
    made = Accelerator(cpu=True, mixed_precision="bf16")
    with made.autocast():
        inside = torch.is_autocast_enabled("cpu")
    return inside, torch.is_autocast_enabled("cpu")


def autocast_switched_off():
    """Use AutocastKwargs(enabled=False)."""
    from accelerate.utils import AutocastKwargs

    made = Accelerator(cpu=True, mixed_precision="bf16")
    with made.autocast(autocast_handler=AutocastKwargs(enabled=False)):
        return torch.is_autocast_enabled("cpu")


def evaluating():
    """Prepare a model with evaluation_mode=True."""
    made = Accelerator(cpu=True)
    net = made.prepare_model(model(), evaluation_mode=True)
    return type(net).__name__, len(made._models)


def methods_of_a_wrapped_model():
    """Call a model's own method after unwrapping."""

    class Own(torch.nn.Linear):
        def twice(self):
            return 2

    made = Accelerator(cpu=True)
    net = made.prepare(Own(3, 1))
    return made.unwrap_model(net).twice()


def norm_of_gradients():
    """Read the norm that clip_grad_norm_ returns."""
    accelerator, net, _optimizer, data, _ = prepared()
    accelerator.backward(loss_of(net, next(iter(data))))
    return float(accelerator.clip_grad_norm_(net.parameters(), 1.0)), float(
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
    )


def empty_prepare():
    """Prepare None and other objects."""
    made = Accelerator(cpu=True)
    return made.prepare(None), made.prepare(1, "a"), made.prepare({"a": 1})


def placement_that_does_not_fit():
    """Pass a device_placement for a different number of objects."""
    try:
        Accelerator(cpu=True).prepare(model(), device_placement=[True, False])
    except ValueError:
        return "ValueError"


def placement_off():
    """Create an Accelerator with device_placement=False."""
    made = Accelerator(cpu=True, device_placement=False)
    return made.device_placement


def ranks_of_axes():
    """Read the attributes of parallel layouts."""
    made = Accelerator(cpu=True)
    return (
        made.should_save_model,
        made.is_fsdp2,
        made.is_composable_parallelism_enabled,
        made.parallelism_config,
        made.torch_device_mesh,
    )


def project_folders():
    """Read project_dir and logging_dir."""
    from accelerate.utils import ProjectConfiguration

    one = Accelerator(cpu=True, project_dir="there")
    config = ProjectConfiguration(project_dir="a", logging_dir="b")
    other = Accelerator(cpu=True, project_config=config)
    return one.project_dir, one.logging_dir, other.project_dir, other.logging_dir, other.project_configuration.iteration


def verifying_a_device_map():
    """Call verify_device_map with a plain model, which returns False."""
    return Accelerator(cpu=True).verify_device_map(model())


def repr_of_states():
    """Read the repr of states, which scripts print at the start."""
    made = Accelerator(cpu=True)
    return [
        "Mixed precision type: no" in repr(made.state),
        "Num processes" in repr(PartialState()),
        "Sync Gradients: True" in repr(made.gradient_state),
    ]


def environment_of_accumulation():
    """Set ACCELERATE_GRADIENT_ACCUMULATION_STEPS."""
    import os

    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"
    return Accelerator(cpu=True).gradient_accumulation_steps


def environment_of_precision():
    """Set ACCELERATE_MIXED_PRECISION."""
    import os

    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    return Accelerator(cpu=True).mixed_precision


def ending():
    """Call end_training."""
    made = Accelerator(cpu=True)
    made.end_training()
    return "done"
