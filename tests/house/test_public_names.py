"""Public names are frozen: adding or removing one is a decision that shows in this file."""

import inspect

import pytest

import headway
from headway import Accelerator
from headway.cli import launch

NAMES = [
    "__version__", "Accelerator", "AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration",
    "DistributedDataParallelKwargs", "GradScalerKwargs", "GradientAccumulationPlugin", "InitProcessGroupKwargs",
    "ProfileKwargs", "ProjectConfiguration", "debug_launcher", "errors", "find_batch_size", "get_logger",
    "notebook_launcher", "set_seed", "skip_first_batches", "synchronize_rng_states", "track",
]  # fmt: skip

MEMBERS = """
    accumulate autocast backward check_trigger clear clip_grad_norm_ clip_grad_value_ device dispatch_batches
    end_training even_batches free_memory gather gather_for_metrics get_state_dict gradient_accumulation_steps
    is_last_process is_local_main_process is_main_process join_uneven_inputs local_main_process_first
    local_process_index logging_dir main_process_first no_sync non_blocking num_processes num_updates
    on_last_process on_local_main_process on_local_process on_main_process on_process
    optimizer_step_was_skipped pad_across_processes prepare prepare_data_loader prepare_model prepare_optimizer
    prepare_scheduler print process_index profile project_dir reduce reduce_mean save save_model set_trigger
    skip_first_batches split_batches split_between_processes sync_gradients unscale_gradients unwrap_model
    use_distributed use_seedable_sampler wait_for_everyone
"""

ARGUMENTS = [
    "device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu", "dataloader_config",
    "gradient_accumulation_plugin", "step_scheduler_with_optimizer", "adjust_scheduler_to_accumulation",
    "scheduler_ticks", "global_batch_size", "rng_types", "kwargs_handlers", "project_dir", "project_config",
    "loss_policy",
]  # fmt: skip


ACCELERATOR = set(MEMBERS.split())


def test_the_names_are_these():
    assert headway.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_can_be_imported_and_explains_itself(name):
    value = getattr(headway, name)
    assert name == "__version__" or inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no name 'Accelerate'"):
        headway.Accelerate


def test_the_accelerators_members_are_these():
    assert {name for name in dir(Accelerator) if not name.startswith("_")} == ACCELERATOR


def test_every_member_has_a_docstring():
    assert [name for name in sorted(ACCELERATOR) if not inspect.getdoc(inspect.getattr_static(Accelerator, name))] == []


def test_the_accelerators_arguments_are_these():
    assert list(inspect.signature(Accelerator).parameters) == ARGUMENTS


FLAGS = """
    num_processes cpu multi_gpu gpu_ids num_cpu_threads_per_process enable_cpu_affinity mixed_precision
    gradient_accumulation_steps num_machines machine_rank main_process_ip main_process_port rdzv_backend rdzv_conf
    rdzv_id max_restarts monitor_interval log_dir tee role debug quiet module no_python config_file dry_run force
"""


def test_the_flags_of_launch_are_these():
    assert {option.name for option in launch.command.params} == {*FLAGS.split(), "script", "script_args"}
