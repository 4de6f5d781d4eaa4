"""Headway: your own PyTorch loop, unchanged, on any hardware.

Every public name can be imported from here, and Accelerate's names too (`headway.compat.accelerate`), also by its module paths. Names
are loaded on first use, so that the command line never pays for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "headway.offload.placement.skeleton": "init_empty_weights init_on_device",
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
    "headway.training.transforms.compiling": "compile_regions",
    "headway.training.local_sgd": "LocalSGD",
}
_PLACES = {name: place for place, names in _BY_PLACE.items() for name in names.split()}

__all__ = ["__version__", *sorted(_PLACES)]

if TYPE_CHECKING:
    from headway import errors as errors
    from headway.accelerator import Accelerator as Accelerator
    from headway.compat.accelerate.data.batches import concatenate as concatenate
    from headway.compat.accelerate.data.batches import convert_to_fp32 as convert_to_fp32
    from headway.compat.accelerate.data.batches import recursively_apply as recursively_apply
    from headway.compat.accelerate.data.batches import send_to_device as send_to_device
    from headway.compat.accelerate.data.exchange import broadcast as broadcast
    from headway.compat.accelerate.data.exchange import broadcast_object_list as broadcast_object_list
    from headway.compat.accelerate.data.exchange import gather as gather
    from headway.compat.accelerate.data.exchange import gather_object as gather_object
    from headway.compat.accelerate.data.exchange import pad_across_processes as pad_across_processes
    from headway.compat.accelerate.data.exchange import reduce as reduce
    from headway.compat.accelerate.fsdp_plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from headway.compat.accelerate.launching.environment import clear_environment as clear_environment
    from headway.compat.accelerate.launching.environment import patch_environment as patch_environment
    from headway.compat.accelerate.launching.environment import tqdm as tqdm
    from headway.compat.accelerate.launching.environment import write_basic_config as write_basic_config
    from headway.compat.accelerate.layouts import DistributedType as DistributedType
    from headway.compat.accelerate.modules.align import AlignDevicesHook as AlignDevicesHook
    from headway.compat.accelerate.modules.align import align_module_device as align_module_device
    from headway.compat.accelerate.modules.align import has_offloaded_params as has_offloaded_params
    from headway.compat.accelerate.modules.attach import attach_align_device_hook as attach_align_device_hook
    from headway.compat.accelerate.modules.attach import (
        attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    )
    from headway.compat.accelerate.modules.attach import attach_execution_device_hook as attach_execution_device_hook
    from headway.compat.accelerate.modules.hooks import CpuOffload as CpuOffload
    from headway.compat.accelerate.modules.hooks import ModelHook as ModelHook
    from headway.compat.accelerate.modules.hooks import SequentialHook as SequentialHook
    from headway.compat.accelerate.modules.hooks import UserCpuOffloadHook as UserCpuOffloadHook
    from headway.compat.accelerate.modules.hooks import add_hook_to_module as add_hook_to_module
    from headway.compat.accelerate.modules.hooks import cpu_offload_with_hook as cpu_offload_with_hook
    from headway.compat.accelerate.modules.hooks import remove_hook_from_module as remove_hook_from_module
    from headway.compat.accelerate.modules.hooks import remove_hook_from_submodules as remove_hook_from_submodules
    from headway.compat.accelerate.modules.models import extract_model_from_parallel as extract_model_from_parallel
    from headway.compat.accelerate.modules.models import is_peft_model as is_peft_model
    from headway.compat.accelerate.modules.models import load as load
    from headway.compat.accelerate.modules.models import save as save
    from headway.compat.accelerate.modules.models import set_module_tensor_to_device as set_module_tensor_to_device
    from headway.compat.accelerate.plugins import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
    from headway.compat.accelerate.plugins import ParallelismConfig as ParallelismConfig
    from headway.compat.accelerate.plugins import TorchTensorParallelConfig as TorchTensorParallelConfig
    from headway.compat.accelerate.plugins import TorchTensorParallelPlugin as TorchTensorParallelPlugin
    from headway.compat.accelerate.state import AcceleratorState as AcceleratorState
    from headway.compat.accelerate.state import GradientState as GradientState
    from headway.compat.accelerate.state import PartialState as PartialState
    from headway.compat.accelerate.state import wait_for_everyone as wait_for_everyone
    from headway.config.engines import ActivationCheckpointing as ActivationCheckpointing
    from headway.config.engines import AORecipeKwargs as AORecipeKwargs
    from headway.config.engines import AutocastKwargs as AutocastKwargs
    from headway.config.engines import DDPCommunicationHookType as DDPCommunicationHookType
    from headway.config.engines import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from headway.config.engines import Float8Options as Float8Options
    from headway.config.engines import GradScalerKwargs as GradScalerKwargs
    from headway.config.engines import InitProcessGroupKwargs as InitProcessGroupKwargs
    from headway.config.engines import ProfileKwargs as ProfileKwargs
    from headway.config.engines import TorchDynamoPlugin as TorchDynamoPlugin
    from headway.config.layout_request import TorchContextParallelConfig as TorchContextParallelConfig
    from headway.config.parallelism import PipelineOptions as PipelineOptions
    from headway.config.parallelism import ShardingOptions as ShardingOptions
    from headway.config.parallelism import TensorParallelOptions as TensorParallelOptions
    from headway.config.run import DataLoaderConfiguration as DataLoaderConfiguration
    from headway.config.run import GradientAccumulationPlugin as GradientAccumulationPlugin
    from headway.config.run import Preemption as Preemption
    from headway.config.run import ProjectConfiguration as ProjectConfiguration
    from headway.data.build import skip_first_batches as skip_first_batches
    from headway.forecasting.solve import LongestSequence as LongestSequence
    from headway.launch.notebook import debug_launcher as debug_launcher
    from headway.launch.notebook import notebook_launcher as notebook_launcher
    from headway.log import get_logger as get_logger
    from headway.memory.monitor import MemoryMonitor as MemoryMonitor
    from headway.memory.oom import clear_device_cache as clear_device_cache
    from headway.memory.oom import is_out_of_memory as is_out_of_memory
    from headway.memory.oom import release_memory as release_memory
    from headway.memory.report import memory_report as memory_report
    from headway.memory.use import all_memory_use as all_memory_use
    from headway.memory.use import memory_use as memory_use
    from headway.memory.use import print_gpu_utilization as print_gpu_utilization
    from headway.memory.use import print_summary as print_summary
    from headway.offload.dispatch import cpu_offload as cpu_offload
    from headway.offload.dispatch import disk_offload as disk_offload
    from headway.offload.dispatch import dispatch_model as dispatch_model
    from headway.offload.dispatch import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from headway.offload.execution import offload_pace as offload_pace
    from headway.offload.load import load_checkpoint_in_model as load_checkpoint_in_model
    from headway.offload.offload_folder import OffloadedWeightsLoader as OffloadedWeightsLoader
    from headway.offload.offload_folder import PrefixedDataset as PrefixedDataset
    from headway.offload.offload_folder import extract_submodules_state_dict as extract_submodules_state_dict
    from headway.offload.offload_folder import load_offloaded_weight as load_offloaded_weight
    from headway.offload.offload_folder import load_offloaded_weights as load_offloaded_weights
    from headway.offload.offload_folder import offload_state_dict as offload_state_dict
    from headway.offload.offload_folder import offload_weight as offload_weight
    from headway.offload.offload_folder import read_offload_index as read_offload_index
    from headway.offload.offload_folder import save_offload_index as save_offload_index
    from headway.offload.placement.budget import get_max_memory as get_max_memory
    from headway.offload.placement.device_map import check_device_map as check_device_map
    from headway.offload.placement.device_map import clean_device_map as clean_device_map
    from headway.offload.placement.device_map import get_balanced_memory as get_balanced_memory
    from headway.offload.placement.device_map import infer_auto_device_map as infer_auto_device_map
    from headway.offload.placement.sizes import CustomDtype as CustomDtype
    from headway.offload.placement.sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from headway.offload.placement.sizes import compute_module_sizes as compute_module_sizes
    from headway.offload.placement.sizes import dtype_byte_size as dtype_byte_size
    from headway.offload.placement.sizes import find_tied_parameters as find_tied_parameters
    from headway.offload.placement.sizes import get_max_layer_size as get_max_layer_size
    from headway.offload.placement.sizes import named_module_tensors as named_module_tensors
    from headway.offload.placement.skeleton import init_empty_weights as init_empty_weights
    from headway.offload.placement.skeleton import init_on_device as init_on_device
    from headway.offload.placement.workload import Workload as Workload
    from headway.planning.cheapest import cheapest as cheapest
    from headway.planning.compare import plan as plan
    from headway.planning.forecast import forecast as forecast
    from headway.runtime.collectives.ranks import synchronize_rng_states as synchronize_rng_states
    from headway.runtime.collectives.tree import find_batch_size as find_batch_size
    from headway.runtime.seed import set_seed as set_seed
    from headway.strategies.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from headway.strategies.deepspeed.plugin import DummyOptim as DummyOptim
    from headway.strategies.deepspeed.plugin import DummyScheduler as DummyScheduler
    from headway.strategies.deepspeed.plugin import HfDeepSpeedConfig as HfDeepSpeedConfig
    from headway.strategies.pipeline.pippy import prepare_pippy as prepare_pippy
    from headway.tracking.base import GeneralTracker as GeneralTracker
    from headway.tracking.base import LoggerType as LoggerType
    from headway.tracking.base import Tracker as Tracker
    from headway.tracking.base import on_main_process as on_main_process
    from headway.tracking.progress import track as track
    from headway.trainer.arguments import TrainingArguments as TrainingArguments
    from headway.trainer.callbacks import EarlyStoppingCallback as EarlyStoppingCallback
    from headway.trainer.callbacks import TrainerCallback as TrainerCallback
    from headway.trainer.callbacks import TrainerControl as TrainerControl
    from headway.trainer.callbacks import TrainerState as TrainerState
    from headway.trainer.display import PrinterCallback as PrinterCallback
    from headway.trainer.display import ProgressCallback as ProgressCallback
    from headway.trainer.results import EvalPrediction as EvalPrediction
    from headway.trainer.trainer import Trainer as Trainer
    from headway.training.checks.finite import NonFinitePolicy as NonFinitePolicy
    from headway.training.local_sgd import LocalSGD as LocalSGD
    from headway.training.transforms.compiling import compile_regions as compile_regions


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
