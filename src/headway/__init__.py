"""Headway: your own PyTorch training loop, on any hardware.

Every public name can be imported from here, and Accelerate's names too (`headway.compat.accelerate`), also by its module paths. Names
are loaded on first use, so that the command line never pays for torch; `__init__.pyi` tells type checkers about them.
"""

from importlib import import_module
from typing import Any

from headway.compat.accelerate.served.finder import install
from headway.compat.accelerate.served.names import SERVED, find
from headway.version import __version__ as __version__

_BY_PLACE = {
    "headway.accelerator": "Accelerator",
    "headway.compat.accelerate.modules.align": "AlignDevicesHook align_module_device has_offloaded_params",
    "headway.compat.accelerate.modules.attach": """
        attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook
    """,
    "headway.compat.accelerate.modules.hooks": """
        CpuOffload ModelHook SequentialHook UserCpuOffloadHook add_hook_to_module cpu_offload_with_hook
        remove_hook_from_module remove_hook_from_submodules
    """,
    "headway.config.engines": """
        AORecipeKwargs ActivationCheckpointing AutocastKwargs DDPCommunicationHookType DistributedDataParallelKwargs
        Float8Options GradScalerKwargs InitProcessGroupKwargs ProfileKwargs
    """,
    "headway.config.parallelism": "PipelineOptions ShardingOptions TensorParallelOptions",
    "headway.config.run": "DataLoaderConfiguration GradientAccumulationPlugin Preemption ProjectConfiguration",
    "headway.data.build": "skip_first_batches",
    "headway.errors": "errors",
    "headway.forecasting.solve": "LongestSequence",
    "headway.launch.notebook": "debug_launcher notebook_launcher",
    "headway.log": "get_logger",
    "headway.memory.batch_size": "find_executable_batch_size",
    "headway.memory.monitor": "MemoryMonitor",
    "headway.memory.oom": "clear_device_cache is_out_of_memory release_memory",
    "headway.memory.report": "memory_report",
    "headway.memory.use": "all_memory_use memory_use print_gpu_utilization print_summary",
    "headway.offload.dispatch": "cpu_offload disk_offload dispatch_model load_checkpoint_and_dispatch",
    "headway.offload.execution": "offload_pace",
    "headway.offload.load": "load_checkpoint_in_model",
    "headway.offload.offload_folder": """
        OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight
        load_offloaded_weights offload_state_dict offload_weight read_offload_index save_offload_index
    """,
    "headway.offload.placement.budget": "get_max_memory",
    "headway.offload.placement.device_map": """
        check_device_map clean_device_map get_balanced_memory infer_auto_device_map
    """,
    "headway.offload.placement.sizes": """
        CustomDtype calculate_maximum_sizes compute_module_sizes dtype_byte_size find_tied_parameters
        get_max_layer_size named_module_tensors
    """,
    "headway.offload.placement.meta_model": "init_empty_weights init_on_device",
    "headway.offload.placement.workload": "Workload",
    "headway.planning.cheapest": "cheapest",
    "headway.planning.compare": "plan",
    "headway.planning.forecast": "forecast",
    "headway.runtime.collectives.ranks": "synchronize_rng_states",
    "headway.runtime.collectives.tree": "find_batch_size",
    "headway.runtime.seed": "set_seed",
    "headway.strategies.pipeline.pippy": "prepare_pippy",
    "headway.tracking.base": "GeneralTracker LoggerType Tracker on_main_process",
    "headway.tracking.progress": "track",
    "headway.trainer.arguments": "TrainingArguments",
    "headway.trainer.callbacks": "EarlyStoppingCallback TrainerCallback TrainerControl TrainerState",
    "headway.trainer.display": "PrinterCallback ProgressCallback",
    "headway.trainer.results": "EvalPrediction",
    "headway.trainer.trainer": "Trainer",
    "headway.training.checks.finite": "NonFinitePolicy",
    "headway.training.checks.spikes": "SpikePolicy",
    "headway.training.transforms.chunked_loss": "chunk_loss",
    "headway.training.transforms.compiling": "compile_regions",
    "headway.training.local_sgd": "LocalSGD",
    "headway.weights.channel": "WeightChannel",
}
_PLACES = {name: place for place, names in _BY_PLACE.items() for name in names.split()}

__all__ = ["__version__", *sorted(_PLACES)]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        value = find(name)
    else:
        module = import_module(place)
        value = module if place == f"headway.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *SERVED})


install()
