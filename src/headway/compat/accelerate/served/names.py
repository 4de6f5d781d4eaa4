"""Accelerate's names and module paths: which are served besides Headway's own names, and from where.

The sentences for what is not served are in `not_served.py`; `finder.py` makes the modules. Together the tables answer for
every public name of Accelerate; a house test compares. Nothing here imports torch.
"""

from importlib import import_module
from typing import Any

from headway.compat.accelerate.served.only_there import PLACES

_BY_PLACE = {
    "headway.training.transforms.compiling": "has_compiled_regions is_compiled_module",
    "headway.config.engines": "TorchDynamoPlugin",
    "headway.strategies.deepspeed.plugin": "DeepSpeedPlugin DummyOptim DummyScheduler HfDeepSpeedConfig",
    "headway.config.layout_request": "TorchContextParallelConfig",
    "headway.config.launch": "DynamoBackend",
    "headway.config.values": "KwargsHandler",
    "headway.offload.quantisation": """
        BnbQuantizationConfig QuantizationOptions get_keys_to_not_convert has_4bit_bnb_layers load_and_quantize_model
    """,
    "headway.compat.accelerate.modules.casting": "LayerwiseCastingHook attach_layerwise_casting_hooks",
    "headway.compat.accelerate.state": "AcceleratorState GradientState PartialState is_initialized wait_for_everyone",
    "headway.compat.accelerate.files.sharded": """
        FSDP_AUTO_WRAP_POLICY FSDP_SHARDING_STRATEGY get_parameters_from_modules load_fsdp_model load_fsdp_optimizer
        save_fsdp_model save_fsdp_optimizer
    """,
    "headway.compat.accelerate.layouts": "DistributedType PrecisionType RNGType",
    "headway.compat.accelerate.recipes": "MegatronLMPlugin",
    "headway.compat.accelerate.fsdp_plugin": "FullyShardedDataParallelPlugin",
    "headway.compat.accelerate.plugins": """
        DeepSpeedSequenceParallelConfig ParallelismConfig TorchTensorParallelConfig TorchTensorParallelPlugin
    """,
    "headway.compat.accelerate.data.exchange": """
        broadcast broadcast_object_list copy_tensor_to_devices gather gather_object pad_across_processes reduce
        synchronize_rng_state
    """,
    "headway.compat.accelerate.data.batches": """
        concatenate convert_outputs_to_fp32 convert_to_fp32 find_device honor_type is_namedtuple is_torch_tensor listify
        recursively_apply send_to_device slice_tensors
    """,
    "headway.compat.accelerate.launching.environment": """
        are_libraries_initialized clear_environment convert_bytes convert_file_size_to_int get_int_from_env get_pretty_name
        is_port_in_use merge_dicts parse_choice_from_env parse_flag_from_env patch_environment
        purge_accelerate_environment recursive_getattr str_to_bool tqdm write_basic_config
    """,
    "headway.compat.accelerate.launching.available": """
        compare_versions is_4bit_bnb_available is_8bit_bnb_available is_aim_available is_amdsmi_available is_bf16_available
        is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available is_clearml_available
        is_comet_ml_available is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available
        is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available is_import_timer_available is_lomo_available
        is_matplotlib_available is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available
        is_msamp_available is_musa_available is_neuron_available is_npu_available is_numpy_available is_pandas_available
        is_peft_available is_pippy_available is_pynvml_available is_pytest_available is_rich_available is_rocm_available
        is_sagemaker_available is_schedulefree_available is_sdaa_available is_swanlab_available is_tensorboard_available
        is_timm_available is_torch_distributed_available is_torch_version is_torch_xla_available is_torchao_available
        is_torchdata_available is_torchdata_stateful_dataloader_available is_torchvision_available is_tqdm_available
        is_trackio_available is_transformer_engine_available is_transformer_engine_mxfp8_available
        is_transformers_available is_triton_available is_wandb_available is_weights_only_available is_xccl_available
        is_xpu_available
    """,
    "headway.compat.accelerate.modules.models": """
        extract_model_from_parallel get_module_class_from_name get_module_children_bottom_up is_peft_model load
        load_state_dict model_has_dtensor SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME save set_module_tensor_to_device WEIGHTS_NAME
    """,
}
SERVED: dict[str, str] = {name: place for place, names in _BY_PLACE.items() for name in names.split()}
"""Name -> module, for what is Accelerate's and not one of Headway's own names."""

RENAMED: dict[str, tuple[str, str]] = {
    "AcceleratedOptimizer": ("headway.training.prepared.optimizer", "PreparedOptimizer"),
    "AcceleratedScheduler": ("headway.training.prepared.scheduler", "PreparedScheduler"),
    "DeepSpeedSchedulerWrapper": ("headway.training.prepared.scheduler", "PreparedScheduler"),
    "DistributedOperationException": ("headway.errors", "CollectiveError"),
    "DataLoaderShard": ("headway.data.loader", "PreparedLoader"),
    "MultiProcessAdapter": ("headway.log", "RankLogger"),
    "should_reduce_batch_size": ("headway.memory.oom", "is_out_of_memory"),
}
"""Name -> (module, what it is called there), for `isinstance` above all."""

_MODULES = """
    big_modeling checkpointing data_loader hooks inference launchers local_sgd logging memory_utils optimizer
    parallelism_config scheduler state utils utils.ao utils.bnb utils.constants utils.dataclasses utils.deepspeed
    utils.environment utils.fsdp_utils utils.imports utils.launch utils.megatron_lm utils.memory utils.modeling utils.offload
    utils.operations utils.other utils.random utils.rich utils.torch_xla utils.tqdm utils.transformer_engine utils.versions
"""
MODULES = frozenset(_MODULES.split())
"""Accelerate's modules under the names that a changed import gives them: `headway.utils`, `headway.state`, ...

Not among them: `accelerator` and `tracking`, which Headway has itself.
"""

_DISPATCHED = "check_device_map cpu_offload disk_offload dispatch_model load_checkpoint_and_dispatch"
AS_ACCELERATE: dict[str, tuple[str, str]] = {
    "Accelerator": ("headway.compat.accelerate.accelerator", "AccelerateAccelerator"),
    "AcceleratedOptimizer": ("headway.compat.accelerate.prepared", "AcceleratedOptimizer"),
    "AcceleratedScheduler": ("headway.compat.accelerate.prepared", "AcceleratedScheduler"),
    "DataLoaderAdapter": ("headway.data.loader", "PreparedLoader"),
    "DataLoaderStateMixin": ("headway.data.loader", "PreparedLoader"),
    "compile_regions_fsdp2": ("headway", "compile_regions"),
    "find_executable_batch_size": ("headway.compat.accelerate.data.batch_sizes", "find_executable_batch_size"),
    **{name: ("headway.compat.accelerate.modules.dispatched", name) for name in _DISPATCHED.split()},
    **PLACES,
}
"""Name -> (module, name there), for what `import accelerate` gives where Headway stands in for it, and `headway` does not."""

_ONLY_THERE = """
    accelerator commands commands.accelerate_cli commands.config commands.config.cluster commands.config.config
    commands.config.config_args commands.config.config_utils commands.config.default commands.config.sagemaker
    commands.config.update commands.env commands.estimate commands.launch commands.menu commands.menu.cursor
    commands.menu.helpers commands.menu.input commands.menu.keymap commands.menu.selection_menu commands.merge commands.test
    commands.to_fsdp2 commands.tpu commands.utils test_utils test_utils.examples test_utils.scripts
    test_utils.scripts.external_deps test_utils.testing test_utils.training tracking
"""
_SCRIPTS = """
    external_deps.test_checkpointing external_deps.test_ds_alst_ulysses_sp external_deps.test_ds_multiple_model
    external_deps.test_metrics external_deps.test_peak_memory_usage external_deps.test_performance external_deps.test_pippy
    external_deps.test_zero3_integration test_cli test_ddp_comm_hook test_distributed_data_loop test_merge_weights test_notebook
    test_ops test_script test_sync
"""
MODULES_AS_ACCELERATE = MODULES | {*_ONLY_THERE.split(), *(f"test_utils.scripts.{name}" for name in _SCRIPTS.split())}
"""The modules of `accelerate` itself where Headway stands in for it."""


def find(name: str) -> Any:
    """What Accelerate calls `name`.

    Raises:
        AttributeError: it is not served; the message says what to use.
    """
    if name in SERVED:
        return getattr(import_module(SERVED[name]), name)
    if name in RENAMED:
        place, own = RENAMED[name]
        return getattr(import_module(place), own)
    if name in MODULES:
        return import_module(f"headway.{name}")
    from headway.compat.accelerate.served.not_served import advice

    raise AttributeError(advice(name) or f"module 'headway' has no name {name!r}")


def find_as_accelerate(name: str) -> Any:
    """What `accelerate.NAME` is where Headway stands in for Accelerate; of a name that is not served, a class that says so.

    Raises:
        AttributeError: Accelerate has no such name either.
    """
    if name in AS_ACCELERATE:
        place, own = AS_ACCELERATE[name]
        return getattr(import_module(place), own)
    try:
        return getattr(import_module("headway"), name)
    except AttributeError as error:
        from headway.compat.accelerate.served.not_served import advice, refused

        sentence = advice(name)
        if sentence is not None:
            return refused(name, sentence)  # a script that only imports it runs
        raise AttributeError(f"module 'accelerate', served by Headway, has no attribute {name!r}", name=name) from error
