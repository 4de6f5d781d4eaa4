"""Public names of Accelerate that Headway does not serve, each with a sentence that says why and what to use instead."""

from functools import cache
from typing import NoReturn

from headway.errors import NotServed

_FSDP = (
    "sharded layouts need no calls of their own: `headway launch --strategy fsdp` or Accelerator(strategy='fsdp'), then prepare, "
    "save_state and save_model as usual (docs/layouts.md)"
)
_DEEPSPEED = (
    "DeepSpeed needs no calls of its own: `headway launch --strategy zero2` or Accelerator(strategy='zero2'), then prepare, "
    "save_state and save_model as usual (docs/deepspeed.md)"
)
_MEGATRON = (
    "Megatron-LM is not supported yet; it is planned. Until then, split matrices with Accelerator(strategy='fsdp+tp=2') "
    "(docs/tensor_parallel.md)"
)
_PIPELINE = (
    "it is part of Accelerate's `prepare_pippy`, which Headway implements differently; use `prepare_pippy` itself, or "
    "Accelerator(strategy='pp') to train"
)
_FP8 = (
    "float8 runs through torchao, and prepare() converts the model: Accelerator(mixed_precision='fp8', "
    "kwargs_handlers=[headway.Float8Options(...)]) (docs/float8.md)"
)
_FP8_ENGINES = (
    "Headway drives neither Transformer Engine nor MS-AMP; float8 runs through torchao: Accelerator(mixed_precision='fp8', "
    "kwargs_handlers=[headway.AORecipeKwargs()]) (docs/float8.md)"
)
_QUANTISED = (
    "it is part of Accelerate's `load_and_quantize_model`; use `headway.load_and_quantize_model` itself "
    "(docs/quantised_loading.md)"
)
_SAGEMAKER = "SageMaker's own launcher is not served; on SageMaker, start the script with torchrun or `headway launch`"
_PARALLEL = "give the sizes in the layout: `headway launch --strategy fsdp+tp=2` or ParallelismConfig(tp_size=2) (docs/layouts.md)"
_FILES = (
    "Headway's checkpoints have their own files and manifest (docs/checkpoints.md); use save_state, load_state and "
    "`headway inspect`"
)
_LOADERS = (
    "prepared loaders are one class, `headway.data.loader.PreparedLoader`, which splits the order of any sampler across ranks; use "
    "accelerator.prepare(loader), skip_first_batches and DataLoaderConfiguration"
)
_INSIDE = "this is internal to Accelerate and has no counterpart; leave the call out"
_LAUNCH = "`headway launch` builds its own commands (`--dry-run` shows them); use it, or notebook_launcher"
_REGISTER = (
    "pass an instance of your `headway.Tracker` to log_with, or register the class as an entry point (docs/tracking.md)"
)
_BUILT_IN = (
    "pass its name to log_with ('wandb', 'aim', ...: docs/tracking.md); accelerator.get_tracker(name) returns it"
)
_COMPILE = "compile_regions and TorchDynamoPlugin(use_regional_compilation=True) find repeated blocks automatically"
_NUMA = "start with `headway launch --enable_cpu_affinity`"
_COMMAND = (
    "it is a part of Accelerate's own commands; use `headway config`, `launch`, `estimate`, `merge`, `test` and `env`"
)
_CONSTANT = "this version bound or table concerns Accelerate itself; leave the check out"

_BY_SENTENCE = {
    _COMMAND: """
        ARGUMENT_KEY_MAPPING ARGUMENT_VALUE_MAPPING ARROW_KEY_FLAG BaseConfig BulletMenu CURSOR_TO_CHAR ConversionStatus
        CustomArgumentGroup CustomArgumentParser CustomHelpFormatter DYNAMO_BACKENDS Direction KEYMAP KeyHandler
        SubcommandHelpFormatter TERMINAL_WIDTH add_timm_hub_prefix check_has_model clean_lines clean_option clear_line
        compare_against_test config_command config_command_parser create_ascii_table create_empty_model
        deepspeed_launcher default_command_parser default_config_command env_command env_command_parser estimate_command
        estimate_command_parser estimate_training_usage forceWrite gather_data get_character get_cluster_input get_config_parser
        get_function_contents_by_name get_raw_chars get_sagemaker_input get_user_input hide hide_cursor linebreak load_config mark
        mark_multiple merge_command merge_command_parser mocked_dataloaders mocked_dataloaders_for_autoregressive_models
        move_cursor multi_gpu_launcher register reset_cursor sagemaker_launcher show_cursor simple_launcher test_command
        test_command_parser to_fsdp2_command to_fsdp2_command_parser tpu_command_launcher tpu_command_parser tpu_launcher
        tpu_pod_launcher update_command_parser update_config update_config_command verify_on_hub writeColor
    """,
    _FSDP: """
        FSDP2_PYTORCH_VERSION FSDP2_STATE_DICT_TYPE FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME
        FSDP_PYTORCH_VERSION FSDP_STATE_DICT_TYPE disable_fsdp_ram_efficient_loading
        enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names
        fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model fsdp2_switch_optimizer_parameters
        get_fsdp2_grad_scaler merge_fsdp_weights
        compile_regions_fsdp2
    """,
    _DEEPSPEED: """
        DEEPSPEED_MULTINODE_LAUNCHERS DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper
        GatheredParameters compile_regions_deepspeed deepspeed_required get_active_deepspeed_plugin
        map_pytorch_optim_to_deepspeed prepare_deepspeed_cmd_env BETA_SP_AVAILABLE_DEEPSPEED_VERSION
    """,
    _MEGATRON: """
        AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep MODEL_CONFIGS_TO_MEGATRON_PARSERS MegatronEngine
        MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper
        add_model_config_to_megatron_parser avg_losses_across_data_parallel_group finish_mpu_init
        gather_across_data_parallel_groups initialize model_provider_func parse_bert_config parse_glm4_moe_config
        parse_gpt2_config parse_llama_config parse_t5_config prepare_model_optimizer_scheduler
    """,
    _PIPELINE: "build_pipeline find_pippy_batch_size generate_device_map pad_input_tensors pippy_forward",
    _FP8: """
        FP8BackendType check_cuda_fp8_capability convert_model convert_model_to_fp8_ao filter_first_and_last_linear_layers
        filter_linear_layers find_first_last_linear_layers has_ao_layers setup_fp8_env torchao_required
    """,
    _FP8_ENGINES: """
        FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs apply_fp8_autowrap contextual_fp8_autocast
        has_transformer_engine_layers
    """,
    _QUANTISED: """
        get_parameter_device get_quantized_model_device_map quantize_and_offload_8bit replace_with_bnb_layers
    """,
    _SAGEMAKER: """
        ComputeEnvironment SageMakerConfig SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION
        SAGEMAKER_TRANSFORMERS_VERSION SageMakerDistributedType prepare_sagemager_args_inputs
    """,
    _PARALLEL: """
        BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
        DTENSOR_PYTORCH_VERSION get_model_tp_size prepare_extend_env_parallelism_config
    """,
    _FILES: """
        MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_PATTERN_NAME
        SAMPLER_NAME SCALER_NAME SCHEDULER_NAME WEIGHTS_INDEX_NAME WEIGHTS_PATTERN_NAME load_accelerator_state
        load_custom_state save_accelerator_state save_custom_state
    """,
    _LOADERS: """
        BatchSamplerShard DataLoaderAdapter DataLoaderDispatcher DataLoaderStateMixin IterableDatasetShard
        SeedableRandomSampler SkipBatchSampler SkipDataLoader get_sampler
    """,
    "use accelerator.prepare, or prepare_data_loader, prepare_model, prepare_optimizer and prepare_scheduler on it": (
        "prepare_data_loader prepare_optimizer prepare_scheduler"
    ),
    _INSIDE: """
        BaseEnum CPUInformation CUDA_DISTRIBUTED_TYPES CannotPadNestedTensorWarning ConvertOutputsToFp32
        EnumWithContains MITA_PROFILING_AVAILABLE_PYTORCH_VERSION STR_OPERATION_TO_FUNC
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING SharedDict ThreadLocalSharedDict TORCH_DISTRIBUTED_OPERATION_TYPES
        TORCH_SAFE_GLOBALS TensorInformation XPU_PROFILING_AVAILABLE_PYTORCH_VERSION chained_operation
        check_device_same check_os_kernel check_tied_parameters_in_config check_tied_parameters_on_same_device
        compute_module_total_buffer_size convert_dict_to_env_variables do_nothing fallback_allocate
        gather_tensor_shape get_cpu_distributed_information get_current_device_type get_data_structure get_module_leaves
        get_module_size_with_ties get_shape get_non_persistent_buffers id_tensor_storage ignorant_find_batch_size
        initialize_tensors is_tensor_information is_torch_xpu_tensor move_to_device patch_optimizer_step verify_operation
    """,
    _CONSTANT: """
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT TORCH_DYNAMO_MODES
        TORCH_LAUNCH_PARAMS TYPE_CHECKING USE_TORCH_XLA
    """,
    _LAUNCH: """
        PrepareForLaunch env_var_path_add prepare_multi_gpu_env prepare_simple_launcher_cmd_env prepare_tpu test_launch
    """,
    _REGISTER: "register_tracker_class",
    _BUILT_IN: """
        AimTracker ClearMLTracker CometMLTracker DVCLiveTracker LOGGER_TYPE_TO_CLASS MLflowTracker SwanLabTracker
        TensorBoardTracker TrackioTracker WandBTracker filter_trackers get_available_trackers
    """,
    _COMPILE: "has_repeated_blocks is_repeated_blocks",
    _NUMA: "override_numa_affinity set_numa_affinity",
    "Accelerate's commands have counterparts: `headway launch`, `config`, `env`, `estimate`, `merge`, `test`": "commands",
    "Accelerate's test helpers are its own; keep importing them from accelerate.test_utils": "test_utils",
    "TPUs are not supported yet; use a CPU, CUDA, XPU or MPS machine": "install_xla",
    "`headway env` and `headway doctor` show what this machine has": (
        "check_cuda_p2p_ib_support get_driver_version get_gpu_info"
    ),
    "the launcher and notebook_launcher pick free ports automatically": "get_free_port",
    "accelerator.scaler is the scaler in use; pass GradScalerKwargs to kwargs_handlers": "get_grad_scaler",
    "use accelerator.autocast(), which follows the run's precision": "get_mixed_precision_context_manager",
    "accelerator.save(obj, file, safe_serialization=True) and save_model keep shared tensors once": (
        "clean_state_dict_for_safetensors"
    ),
    "load_checkpoint_in_model keeps tied parameters tied; find_tied_parameters names them": "retie_parameters",
    "accelerator.get_state_dict(model) reads offloaded weights too": (
        "get_state_dict_from_offload get_state_dict_offloaded_model"
    ),
}
NAMES: dict[str, str] = {name: why for why, names in _BY_SENTENCE.items() for name in names.split()}
"""Name -> sentence."""

MEMBERS: dict[str, str] = {
    "ao_recipe_handler": "pass Float8Options to kwargs_handlers; accelerator.options.float8 holds them",
    "autocast_handler": "pass AutocastKwargs to kwargs_handlers; accelerator.options.autocast holds them",
    "ddp_handler": "pass DistributedDataParallelKwargs to kwargs_handlers; accelerator.options.ddp holds them",
    "deepspeed_ulysses_dl_adapter": _PARALLEL,
    "delayed_fp8_autocast": _FP8_ENGINES,
    "device_placement": "pass it to prepare(..., device_placement=[...])",
    "flag_tensor": "use set_trigger() and check_trigger()",
    "fp8_enabled": "compare accelerator.mixed_precision with 'fp8'",
    "fp8_recipe_handler": _FP8_ENGINES,
    "has_fp8_handler": "pass Float8Options to kwargs_handlers; accelerator.options.float8 holds them",
    "has_lomo_optimizer": "LOMO is not served; use another optimizer",
    "init_handler": "pass InitProcessGroupKwargs to kwargs_handlers; accelerator.options.process_group holds them",
    "log_with": "accelerator.trackers lists the trackers in use",
    "msamp_recipe_handler": _FP8_ENGINES,
    "profile_handler": "pass ProfileKwargs to kwargs_handlers or to accelerator.profile()",
    "rng_types": "pass it to Accelerator(rng_types=...)",
    "scaler_handler": "pass GradScalerKwargs to kwargs_handlers; accelerator.options.scaler holds them",
    "step": "accelerator.num_updates counts updates, accelerator.sync_gradients says whether this micro-batch ends a window",
    "step_scheduler_with_optimizer": "pass it to Accelerator(step_scheduler_with_optimizer=...)",
    "te_recipe_handler": _FP8_ENGINES,
}
"""Member of Accelerate's Accelerator -> sentence."""


REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"),
        f"can be created, but the Accelerator refuses it: {_FP8_ENGINES}",
    ),
    "MegatronLMPlugin": f"can be created, but the Accelerator refuses it: {_MEGATRON}",
    "Accelerator.deepspeed_ulysses_dl_adapter": _PARALLEL,
    "Accelerator.lomo_backward": "it makes updates inside backward, where no window can act; use another optimizer",
    "megatron_lm_plugin=": _MEGATRON,
    "slice_fn_for_dispatch=": "dispatched batches are cut by rows; leave it out",
    "ignored_modules=": "FSDP2 shards every module; leave it out, or freeze the modules' parameters",
    "param_init_fn=": "models without values are initialised by their own reset_parameters; leave it out",
}
"""What is there under Accelerate's name and refused when it is used: names, members, and arguments of calls -> sentence."""


class Refused(type):
    """Classes that stand for what is not served: they can be imported and named, and say so when they are called or subclassed."""

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        """Refuse.

        Raises:
            NotServed: always; the message says what to use.
        """
        raise NotServed(cls.__doc__ or cls.__name__)


@cache
def refused(name: str, sentence: str) -> Refused:
    """What stands for a name that is not served: the same object each time."""
    return Refused(name, (), {"__doc__": sentence, "__module__": "accelerate"})


def advice(name: str) -> str | None:
    """What an error says about an Accelerate name that is not served; None for any other name."""
    why = NAMES.get(name)
    return None if why is None else f"headway has no {name!r}: {why}"


def member_advice(name: str) -> str | None:
    """The same for a member of the Accelerator."""
    why = MEMBERS.get(name)
    return None if why is None else f"Headway's Accelerator has no {name!r}: {why}"
