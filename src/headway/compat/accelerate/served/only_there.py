"""Names that `accelerate` has when Headway stands in for it, but `headway` itself does not, by the file that serves them.

Nothing here imports torch.
"""

_BY_FILE = {
    "launching.commands": """
        ClusterConfig convert_config_to_fsdp2 default_config_file default_json_config_file default_yaml_config_file launch_command
        launch_command_parser load_config_from_file main to_fsdp2_command to_fsdp2_command_parser
    """,
    "constants": """
        BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION
        BETA_TP_AVAILABLE_TRANSFORMERS_VERSION CUDA_DISTRIBUTED_TYPES DEEPSPEED_MULTINODE_LAUNCHERS DTENSOR_PYTORCH_VERSION
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION FSDP2_STATE_DICT_TYPE FSDP_BACKWARD_PREFETCH
        FSDP_MODEL_NAME FSDP_PYTORCH_VERSION FSDP_STATE_DICT_TYPE MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME
        OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_PATTERN_NAME
        SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION SAGEMAKER_TRANSFORMERS_VERSION
        SAMPLER_NAME SCALER_NAME SCHEDULER_NAME STR_OPERATION_TO_FUNC SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DYNAMO_MODES
        TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS WEIGHTS_INDEX_NAME WEIGHTS_PATTERN_NAME
        XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
    """,
    "launching.gpus": """
        check_cuda_fp8_capability check_cuda_p2p_ib_support get_current_device_type get_driver_version get_free_port get_gpu_info
    """,
    "files.sharded": "fsdp2_prepare_model",
    "modules.greedy_map": "infer_auto_device_map",
    "modules.half": "ConvertOutputsToFp32 get_fsdp2_grad_scaler get_grad_scaler get_mixed_precision_context_manager",
    "launching.launch_words": """
        convert_dict_to_env_variables disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading
        get_active_deepspeed_plugin
    """,
    "modules.sizes": "compute_module_sizes compute_module_total_buffer_size dtype_byte_size get_balanced_memory",
    "modules.module_parts": """
        check_os_kernel check_tied_parameters_in_config check_tied_parameters_on_same_device get_module_size_with_ties
        get_parameter_device get_state_dict_from_offload
        check_device_same filter_first_and_last_linear_layers filter_linear_layers find_first_last_linear_layers
        get_module_leaves get_non_persistent_buffers get_state_dict_offloaded_model has_ao_layers has_repeated_blocks
        is_repeated_blocks
    """,
    "data.loaders": "DataLoaderDispatcher DataLoaderShard prepare_data_loader",
    "recipes": "FP8RecipeKwargs MSAMPRecipeKwargs MegatronLMPlugin TERecipeKwargs",
    "data.samplers": """
        BatchSamplerShard IterableDatasetShard SeedableRandomSampler SkipBatchSampler SkipDataLoader get_sampler
    """,
    "modules.shared_tensors": """
        chained_operation is_torch_xpu_tensor move_to_device pad_input_tensors TENSOR_INT_TO_DTYPE
        TENSOR_TYPE_TO_INT verify_operation
        TensorInformation clean_state_dict_for_safetensors get_data_structure get_shape id_tensor_storage
        ignorant_find_batch_size initialize_tensors
        is_tensor_information retie_parameters
    """,
    "testing": """
        AccelerateTestCase DEFAULT_LAUNCH_COMMAND MockingTestCase RegressionDataset RegressionModel SubprocessCallException
        TempDirTestCase are_the_same_tensors assert_exception capture_call_output device_count execute_subprocess_async
        get_backend get_launch_command get_torch_dist_unique_port memory_allocated_func path_in_accelerate_package
        pytest_xdist_worker_id run_command run_first skip slow torch_device
        require_aim require_bnb require_clearml require_comet_ml require_cpu require_cuda require_cuda_or_hpu require_cuda_or_xpu
        require_datasets require_deepspeed require_dvclive require_fp16 require_fp8 require_fsdp2 require_huggingface_suite
        require_import_timer require_matplotlib require_mlflow require_mlu require_mps require_multi_device require_multi_gpu
        require_multi_gpu_or_xpu require_multi_xpu require_musa require_neuron require_non_cpu require_non_hpu
        require_non_torch_xla require_non_xpu require_npu require_pandas require_peft require_pippy require_schedulefree
        require_sdaa require_single_device require_single_gpu require_single_xpu require_swanlab require_tensorboard
        require_timm require_torch_min_version require_torchao require_torchdata_stateful_dataloader require_torchvision
        require_tp require_tpu require_trackers require_trackio require_transformer_engine require_transformer_engine_mxfp8
        require_transformers require_triton require_wandb require_xpu
    """,
    "trackers": """
        AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker LOGGER_TYPE_TO_CLASS MLflowTracker SwanLabTracker
        TensorBoardTracker TrackioTracker WandBTracker filter_trackers get_available_trackers register_tracker_class
    """,
    "words": """
        BaseEnum CannotPadNestedTensorWarning ComputeEnvironment EnumWithContains FP8BackendType SageMakerDistributedType
    """,
}
PLACES: dict[str, tuple[str, str]] = {
    name: (f"headway.compat.accelerate.{file}", name) for file, names in _BY_FILE.items() for name in names.split()
}
"""Name -> (module, name there)."""
