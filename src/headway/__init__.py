"""Headway: your own PyTorch loop, unchanged, on whatever hardware there is.

Every public name can be imported from here, and Accelerate's names too (`headway.familiar`), also by its module paths. Names
are loaded on first use, so that the command line never pays for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headway.familiar.modules import find, install
from headway.familiar.names import SERVED
from headway.version import __version__ as __version__

_PLACES = {
    "Accelerator": "headway.accelerator",
    "ActivationCheckpointing": "headway.config.strategies",
    "AlignDevicesHook": "headway.bigmodel.align",
    "AutocastKwargs": "headway.config.strategies",
    "CpuOffload": "headway.bigmodel.hooks",
    "CustomDtype": "headway.bigmodel.sizes",
    "DDPCommunicationHookType": "headway.config.strategies",
    "DataLoaderConfiguration": "headway.config.run",
    "DistributedDataParallelKwargs": "headway.config.strategies",
    "EarlyStoppingCallback": "headway.trainer.flow",
    "EvalPrediction": "headway.trainer.results",
    "GeneralTracker": "headway.tracking.base",
    "GradScalerKwargs": "headway.config.strategies",
    "GradientAccumulationPlugin": "headway.config.run",
    "InitProcessGroupKwargs": "headway.config.strategies",
    "LocalSGD": "headway.training.local_sgd",
    "LoggerType": "headway.tracking.base",
    "MemoryMonitor": "headway.memory.monitor",
    "ModelHook": "headway.bigmodel.hooks",
    "NonFinitePolicy": "headway.training.finite",
    "OffloadedWeightsLoader": "headway.bigmodel.dat_folder",
    "Preemption": "headway.config.preemption",
    "PrefixedDataset": "headway.bigmodel.dat_folder",
    "PrinterCallback": "headway.trainer.display",
    "ProfileKwargs": "headway.config.strategies",
    "ProgressCallback": "headway.trainer.display",
    "ProjectConfiguration": "headway.config.run",
    "SequentialHook": "headway.bigmodel.hooks",
    "Tracker": "headway.tracking.base",
    "Trainer": "headway.trainer.trainer",
    "TrainerCallback": "headway.trainer.callbacks",
    "TrainerControl": "headway.trainer.callbacks",
    "TrainerState": "headway.trainer.callbacks",
    "TrainingArguments": "headway.trainer.arguments",
    "UserCpuOffloadHook": "headway.bigmodel.hooks",
    "Workload": "headway.bigmodel.workload",
    "add_hook_to_module": "headway.bigmodel.hooks",
    "align_module_device": "headway.bigmodel.align",
    "all_memory_use": "headway.memory.use",
    "attach_align_device_hook": "headway.bigmodel.attach",
    "attach_align_device_hook_on_blocks": "headway.bigmodel.attach",
    "attach_execution_device_hook": "headway.bigmodel.attach",
    "calculate_maximum_sizes": "headway.bigmodel.sizes",
    "check_device_map": "headway.bigmodel.device_map",
    "clean_device_map": "headway.bigmodel.device_map",
    "clear_device_cache": "headway.memory.oom",
    "compute_module_sizes": "headway.bigmodel.sizes",
    "cpu_offload": "headway.bigmodel.dispatch",
    "cpu_offload_with_hook": "headway.bigmodel.dispatch",
    "debug_launcher": "headway.launch.notebook",
    "disk_offload": "headway.bigmodel.dispatch",
    "dispatch_model": "headway.bigmodel.dispatch",
    "dtype_byte_size": "headway.bigmodel.sizes",
    "errors": "headway.errors",
    "extract_submodules_state_dict": "headway.bigmodel.dat_folder",
    "find_batch_size": "headway.ops.tree",
    "find_executable_batch_size": "headway.memory.batch_size",
    "find_tied_parameters": "headway.bigmodel.sizes",
    "get_balanced_memory": "headway.bigmodel.device_map",
    "get_logger": "headway.log",
    "get_max_layer_size": "headway.bigmodel.sizes",
    "get_max_memory": "headway.bigmodel.budget",
    "has_offloaded_params": "headway.bigmodel.align",
    "infer_auto_device_map": "headway.bigmodel.device_map",
    "init_empty_weights": "headway.bigmodel.skeleton",
    "init_on_device": "headway.bigmodel.skeleton",
    "is_out_of_memory": "headway.memory.oom",
    "load_checkpoint_and_dispatch": "headway.bigmodel.dispatch",
    "load_checkpoint_in_model": "headway.bigmodel.weights",
    "load_offloaded_weight": "headway.bigmodel.dat_folder",
    "load_offloaded_weights": "headway.bigmodel.dat_folder",
    "memory_report": "headway.memory.report",
    "memory_use": "headway.memory.use",
    "named_module_tensors": "headway.bigmodel.sizes",
    "notebook_launcher": "headway.launch.notebook",
    "offload_pace": "headway.bigmodel.execution",
    "offload_state_dict": "headway.bigmodel.dat_folder",
    "offload_weight": "headway.bigmodel.dat_folder",
    "on_main_process": "headway.tracking.base",
    "print_gpu_utilization": "headway.memory.use",
    "print_summary": "headway.memory.use",
    "read_offload_index": "headway.bigmodel.dat_folder",
    "release_memory": "headway.memory.oom",
    "remove_hook_from_module": "headway.bigmodel.hooks",
    "remove_hook_from_submodules": "headway.bigmodel.hooks",
    "save_offload_index": "headway.bigmodel.dat_folder",
    "set_seed": "headway.runtime.seed",
    "skip_first_batches": "headway.data.skip",
    "synchronize_rng_states": "headway.ops.streams",
    "track": "headway.progress",
}

__all__ = ["__version__", *_PLACES]

if TYPE_CHECKING:
    from headway import errors as errors
    from headway.accelerator import Accelerator as Accelerator
    from headway.bigmodel.align import AlignDevicesHook as AlignDevicesHook
    from headway.bigmodel.align import align_module_device as align_module_device
    from headway.bigmodel.align import has_offloaded_params as has_offloaded_params
    from headway.bigmodel.attach import attach_align_device_hook as attach_align_device_hook
    from headway.bigmodel.attach import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
    from headway.bigmodel.attach import attach_execution_device_hook as attach_execution_device_hook
    from headway.bigmodel.budget import get_max_memory as get_max_memory
    from headway.bigmodel.dat_folder import OffloadedWeightsLoader as OffloadedWeightsLoader
    from headway.bigmodel.dat_folder import PrefixedDataset as PrefixedDataset
    from headway.bigmodel.dat_folder import extract_submodules_state_dict as extract_submodules_state_dict
    from headway.bigmodel.dat_folder import load_offloaded_weight as load_offloaded_weight
    from headway.bigmodel.dat_folder import load_offloaded_weights as load_offloaded_weights
    from headway.bigmodel.dat_folder import offload_state_dict as offload_state_dict
    from headway.bigmodel.dat_folder import offload_weight as offload_weight
    from headway.bigmodel.dat_folder import read_offload_index as read_offload_index
    from headway.bigmodel.dat_folder import save_offload_index as save_offload_index
    from headway.bigmodel.device_map import check_device_map as check_device_map
    from headway.bigmodel.device_map import clean_device_map as clean_device_map
    from headway.bigmodel.device_map import get_balanced_memory as get_balanced_memory
    from headway.bigmodel.device_map import infer_auto_device_map as infer_auto_device_map
    from headway.bigmodel.dispatch import cpu_offload as cpu_offload
    from headway.bigmodel.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from headway.bigmodel.dispatch import disk_offload as disk_offload
    from headway.bigmodel.dispatch import dispatch_model as dispatch_model
    from headway.bigmodel.dispatch import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from headway.bigmodel.execution import offload_pace as offload_pace
    from headway.bigmodel.hooks import CpuOffload as CpuOffload
    from headway.bigmodel.hooks import ModelHook as ModelHook
    from headway.bigmodel.hooks import SequentialHook as SequentialHook
    from headway.bigmodel.hooks import UserCpuOffloadHook as UserCpuOffloadHook
    from headway.bigmodel.hooks import add_hook_to_module as add_hook_to_module
    from headway.bigmodel.hooks import remove_hook_from_module as remove_hook_from_module
    from headway.bigmodel.hooks import remove_hook_from_submodules as remove_hook_from_submodules
    from headway.bigmodel.sizes import CustomDtype as CustomDtype
    from headway.bigmodel.sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from headway.bigmodel.sizes import compute_module_sizes as compute_module_sizes
    from headway.bigmodel.sizes import dtype_byte_size as dtype_byte_size
    from headway.bigmodel.sizes import find_tied_parameters as find_tied_parameters
    from headway.bigmodel.sizes import get_max_layer_size as get_max_layer_size
    from headway.bigmodel.sizes import named_module_tensors as named_module_tensors
    from headway.bigmodel.skeleton import init_empty_weights as init_empty_weights
    from headway.bigmodel.skeleton import init_on_device as init_on_device
    from headway.bigmodel.tensors import set_module_tensor_to_device as set_module_tensor_to_device
    from headway.bigmodel.weights import load_checkpoint_in_model as load_checkpoint_in_model
    from headway.bigmodel.workload import Workload as Workload
    from headway.config.preemption import Preemption as Preemption
    from headway.config.run import DataLoaderConfiguration as DataLoaderConfiguration
    from headway.config.run import GradientAccumulationPlugin as GradientAccumulationPlugin
    from headway.config.run import ProjectConfiguration as ProjectConfiguration
    from headway.config.strategies import ActivationCheckpointing as ActivationCheckpointing
    from headway.config.strategies import AutocastKwargs as AutocastKwargs
    from headway.config.strategies import DDPCommunicationHookType as DDPCommunicationHookType
    from headway.config.strategies import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from headway.config.strategies import GradScalerKwargs as GradScalerKwargs
    from headway.config.strategies import InitProcessGroupKwargs as InitProcessGroupKwargs
    from headway.config.strategies import ProfileKwargs as ProfileKwargs
    from headway.data.skip import skip_first_batches as skip_first_batches
    from headway.familiar.bar import tqdm as tqdm
    from headway.familiar.batches import concatenate as concatenate
    from headway.familiar.batches import convert_to_fp32 as convert_to_fp32
    from headway.familiar.batches import recursively_apply as recursively_apply
    from headway.familiar.batches import send_to_device as send_to_device
    from headway.familiar.environment import clear_environment as clear_environment
    from headway.familiar.environment import patch_environment as patch_environment
    from headway.familiar.environment import write_basic_config as write_basic_config
    from headway.familiar.exchange import broadcast as broadcast
    from headway.familiar.exchange import broadcast_object_list as broadcast_object_list
    from headway.familiar.exchange import gather as gather
    from headway.familiar.exchange import gather_object as gather_object
    from headway.familiar.exchange import pad_across_processes as pad_across_processes
    from headway.familiar.exchange import reduce as reduce
    from headway.familiar.files import load as load
    from headway.familiar.files import save as save
    from headway.familiar.kinds import DistributedType as DistributedType
    from headway.familiar.layouts import DummyOptim as DummyOptim
    from headway.familiar.layouts import DummyScheduler as DummyScheduler
    from headway.familiar.layouts import ParallelismConfig as ParallelismConfig
    from headway.familiar.layouts import TorchDynamoPlugin as TorchDynamoPlugin
    from headway.familiar.models import extract_model_from_parallel as extract_model_from_parallel
    from headway.familiar.models import is_peft_model as is_peft_model
    from headway.familiar.state import AcceleratorState as AcceleratorState
    from headway.familiar.state import GradientState as GradientState
    from headway.familiar.state import PartialState as PartialState
    from headway.familiar.state import wait_for_everyone as wait_for_everyone
    from headway.launch.notebook import debug_launcher as debug_launcher
    from headway.launch.notebook import notebook_launcher as notebook_launcher
    from headway.log import get_logger as get_logger
    from headway.memory.batch_size import find_executable_batch_size as find_executable_batch_size
    from headway.memory.monitor import MemoryMonitor as MemoryMonitor
    from headway.memory.oom import clear_device_cache as clear_device_cache
    from headway.memory.oom import is_out_of_memory as is_out_of_memory
    from headway.memory.oom import release_memory as release_memory
    from headway.memory.report import memory_report as memory_report
    from headway.memory.use import all_memory_use as all_memory_use
    from headway.memory.use import memory_use as memory_use
    from headway.memory.use import print_gpu_utilization as print_gpu_utilization
    from headway.memory.use import print_summary as print_summary
    from headway.ops.streams import synchronize_rng_states as synchronize_rng_states
    from headway.ops.tree import find_batch_size as find_batch_size
    from headway.progress import track as track
    from headway.runtime.seed import set_seed as set_seed
    from headway.tracking.base import GeneralTracker as GeneralTracker
    from headway.tracking.base import LoggerType as LoggerType
    from headway.tracking.base import Tracker as Tracker
    from headway.tracking.base import on_main_process as on_main_process
    from headway.trainer.arguments import TrainingArguments as TrainingArguments
    from headway.trainer.callbacks import TrainerCallback as TrainerCallback
    from headway.trainer.callbacks import TrainerControl as TrainerControl
    from headway.trainer.callbacks import TrainerState as TrainerState
    from headway.trainer.display import PrinterCallback as PrinterCallback
    from headway.trainer.display import ProgressCallback as ProgressCallback
    from headway.trainer.flow import EarlyStoppingCallback as EarlyStoppingCallback
    from headway.trainer.results import EvalPrediction as EvalPrediction
    from headway.trainer.trainer import Trainer as Trainer
    from headway.training.finite import NonFinitePolicy as NonFinitePolicy
    from headway.training.local_sgd import LocalSGD as LocalSGD


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
