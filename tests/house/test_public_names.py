"""Public names, members, arguments and launch flags are frozen, so that adding or removing one requires a change in this file."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import headway
from headway import Accelerator
from headway.cli import launch
from headway.compat.accelerate.members import AccelerateMembers
from headway.compat.accelerate.provided_names import tables
from headway.compat.accelerate.provided_names.as_accelerate import find_as_accelerate
from headway.errors import ImportFailed

NAMES = [
    "__version__", "AORecipeKwargs", "Accelerator", "ActivationCheckpointing", "AlignDevicesHook", "AutocastKwargs",
    "ChatDataset", "ChatTokenizer", "CpuOffload", "CustomDtype", "DDPCommunicationHookType", "DataLoaderConfiguration",
    "DistributedDataParallelKwargs", "EarlyStopping", "EarlyStoppingCallback", "EvalPrediction",
    "ExponentialMovingAverage", "Float8Options", "GeneralTracker",
    "GradScalerKwargs", "GradientAccumulationPlugin", "InitProcessGroupKwargs", "LocalSGD", "LoggerType",
    "LongestSequence", "MatrixOptimizer", "MemoryMonitor", "Mixture",
    "ModelHook", "NonFinitePolicy", "OffloadedWeightsLoader", "PackedDataset", "PackingCollator", "ParameterGroups", "ParameterNorms",
    "PipelineOptions", "PowerDecay", "Preemption", "PreferenceCollator", "PreferenceTokenizer", "PrefixedDataset", "PrinterCallback",
    "ProfileKwargs", "ProgressCallback", "ProjectConfiguration", "SequentialHook", "ShardedDataset", "ShardingOptions",
    "SourceLosses", "SpikePolicy", "TensorParallelOptions", "TokenBatchSampler", "TokenDataset",
    "Tracker", "Trainer", "TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments", "UserCpuOffloadHook",
    "WeightChannel", "Workload",
    "add_hook_to_module", "align_module_device", "all_memory_use", "attach_align_device_hook",
    "attach_align_device_hook_on_blocks", "attach_execution_device_hook", "calculate_maximum_sizes",
    "cheapest", "check_device_map", "check_document_boundaries",
    "chunk_loss", "clean_device_map", "clear_device_cache", "compile_regions", "compute_module_sizes",
    "cpu_offload", "cpu_offload_with_hook", "debug_launcher", "disk_offload", "dispatch_model", "dtype_byte_size", "errors",
    "extract_submodules_state_dict", "find_batch_size", "find_executable_batch_size", "find_tied_parameters", "forecast",
    "get_balanced_memory", "get_logger", "get_max_layer_size", "get_max_memory", "has_offloaded_params",
    "infer_auto_device_map", "init_empty_weights", "init_on_device", "is_out_of_memory",
    "load_checkpoint_and_dispatch", "load_checkpoint_in_model", "load_offloaded_weight",
    "load_offloaded_weights", "memory_report", "memory_use", "named_module_tensors", "notebook_launcher",
    "offload_pace", "offload_state_dict", "offload_weight", "on_main_process", "parameter_groups", "plan", "prepare_pippy",
    "print_gpu_utilization", "print_summary", "read_offload_index", "reconstruct_average", "release_memory",
    "remove_hook_from_module", "remove_hook_from_submodules", "save_offload_index", "set_seed", "skip_first_batches",
    "synchronize_rng_states", "track",
]  # fmt: skip

MEMBERS = """
    accumulate autocast backward best_checkpoint check_preemption check_trigger checkpoint_activations clear clip_grad_norm_
    clip_grad_value_ data_shard_index device dispatch_batches end_trackers end_training epochs even_batches forecast forward_backward
    free_memory gather gather_for_metrics get_state_dict get_tracker gradient_accumulation_steps init_trackers
    log log_artifact log_event log_images trackers is_last_process
    is_local_main_process is_main_process join_uneven_inputs keep_activations load_state load_weights
    local_main_process_first local_process_index logging_dir main_process_first microbatches no_sync
    non_blocking non_finite num_data_shards num_processes num_updates on_last_process on_local_main_process on_local_process
    on_main_process on_process optimizer_step_was_skipped pad_across_processes preempted prepare
    prepare_data_loader prepare_model prepare_optimizer prepare_scheduler print process_index
    profile project_configuration project_dir push_to_hub reduce reduce_mean register_for_checkpointing register_load_state_pre_hook
    register_save_state_pre_hook resume save save_iteration save_model save_state set_trigger
    skip_first_batches spikes split_batches split_between_processes start_watching stop_watching stream_weights
    sync_gradients unscale_gradients throughput unwrap_model use_distributed use_seedable_sampler wait_for_everyone wait_for_save
    verify dataloader_config scaler trigger_sync_in_backward use_stateful_dataloader
"""

MEMBERS_OF_ACCELERATE = """
    context_parallel_rank data_parallel_rank data_parallel_shard_rank deepspeed_plugin distributed_type fp8_backend gradient_state
    is_composable_parallelism_enabled is_fsdp2 lomo_backward maybe_context_parallel multi_device native_amp parallelism_config
    pipeline_parallel_rank should_save_model state tensor_parallel_rank torch_device_mesh verify_device_map
"""

ARGUMENTS = [
    # in Accelerate's order
    "device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu", "dataloader_config",
    "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "rng_types", "log_with", "project_dir",
    "project_config", "gradient_accumulation_plugin", "step_scheduler_with_optimizer", "kwargs_handlers", "dynamo_backend",
    "dynamo_plugin", "deepspeed_plugins", "parallelism_config",
    # Headway's own
    "adjust_scheduler_to_accumulation", "scheduler_ticks", "global_batch_size", "loss_policy", "microbatching",
    "on_non_finite", "preemption", "strategy", "on_spike",
]  # fmt: skip


ACCELERATOR = set(MEMBERS.split())


def test_public_names():
    assert headway.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_public_name_can_be_imported_and_has_a_docstring(name):
    value = getattr(headway, name)
    assert name == "__version__" or inspect.getdoc(value)


def test_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no name 'Accelerate'"):
        headway.Accelerate


@pytest.mark.parametrize("table", ["own", "accelerate's", "as accelerate"])
def test_attribute_error_during_an_import_is_not_hidden(table, monkeypatch):
    """Python answers an AttributeError of a module's `__getattr__` with "cannot import name", which hides its cause."""
    if table == "own":
        monkeypatch.setitem(headway._MODULES_OF_NAMES, "Broken", "headway.errors")
    elif table == "accelerate's":
        monkeypatch.setitem(tables.PROVIDED, "Broken", "headway.errors")
    else:
        monkeypatch.setitem(tables.AS_ACCELERATE, "Broken", ("headway.errors", "Broken"))
    message = r"Broken cannot be imported: module 'headway\.errors' has no attribute 'Broken'"
    with pytest.raises(ImportFailed, match=message):
        find_as_accelerate("Broken") if table == "as accelerate" else headway.Broken


def test_stub_file_declares_every_public_name():
    stub = ast.parse((Path(headway.__file__).with_suffix(".pyi")).read_text())
    found = {name.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert set(NAMES) <= found.keys()
    assert all(
        getattr(import_module(place), name) is getattr(headway, name) for name, place in found.items() if name != "Any"
    )


def test_members_of_the_accelerator_are_frozen():
    assert {name for name in dir(Accelerator) if not name.startswith("_")} == ACCELERATOR


def test_additional_members_for_scripts_of_accelerate_are_frozen():
    accelerator = Accelerator(cpu=True)
    additional = {name for name in dir(accelerator) if not name.startswith("_")} - set(vars(accelerator)) - ACCELERATOR
    assert additional == set(MEMBERS_OF_ACCELERATE.split())
    assert all(hasattr(accelerator, name) for name in additional)


@pytest.mark.parametrize(("kind", "names"), [(Accelerator, MEMBERS), (AccelerateMembers, MEMBERS_OF_ACCELERATE)])
def test_every_member_has_a_docstring(kind, names):
    found = {name: inspect.getattr_static(kind, name, kind) for name in names.split()}
    assert [name for name, member in found.items() if not inspect.getdoc(member)] == []


def test_arguments_of_the_accelerator_are_frozen():
    assert list(inspect.signature(Accelerator).parameters) == ARGUMENTS


FLAGS = """
    num_processes cpu multi_gpu gpu_ids num_cpu_threads_per_process enable_cpu_affinity mixed_precision
    dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation
    gradient_accumulation_steps num_machines min_machines machine_rank main_process_ip main_process_port rdzv_backend rdzv_conf
    rdzv_id secret max_restarts timeout monitor_interval machine_timeout grace log_dir tee metrics_port
    role debug quiet module no_python run_as config_file dry_run force strategy fsdp_reshard_after_forward fsdp_offload_params
    fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params activation_checkpointing
    activation_checkpointing_offload help_all cp_comm_strategy deepspeed_config_file offload_optimizer_device offload_param_device
    offload_optimizer_nvme_path offload_param_nvme_path gradient_clipping
"""


def test_flags_of_launch_are_frozen():
    shown = {option.name for option in launch.command.params if not getattr(option, "hidden", False)}
    assert shown == {*FLAGS.split(), "script", "script_args"}
