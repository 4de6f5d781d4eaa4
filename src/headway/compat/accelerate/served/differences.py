"""How each public name of Accelerate is served: as in Accelerate, with a difference, or not at all. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

import headway
from headway.compat.accelerate.served.names import AS_ACCELERATE, MODULES_AS_ACCELERATE, RENAMED, SERVED
from headway.compat.accelerate.served.not_served import NAMES, REFUSED

Status = Literal["served", "differs", "not served", "unknown"]

_LOADER = "for isinstance only; all prepared loaders are of one class"
_TRACKER = "a missing package is an error, a failing tracker never stops training, a resumed run continues"
_FACTS = "the value is Accelerate's; Headway's own checkpoints have other files"
_SHARDED = "written by torch.distributed.checkpoint, whatever the plugin says"
_TRACKERS = "AimTracker ClearMLTracker CometMLTracker DVCLiveTracker MLflowTracker SwanLabTracker TensorBoardTracker WandBTracker"
_FILES = "MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME"
DIFFERENT: dict[str, str] = {
    "Accelerator": "Headway's, with Accelerate's division of losses and float32 outputs; prepare() returns your own model",
    "AcceleratorState": "a view of the Accelerator created last; megatron_lm_plugin is None",
    "DataLoaderAdapter": _LOADER,
    "DataLoaderStateMixin": _LOADER,
    "DeepSpeedPlugin": "a value that contradicts the run is an error; zero3_init_flag and several plugins are not served",
    "DistributedOperationException": "raised on all ranks, and without debug mode",
    "DistributedType": "one process is NO, even under a launcher",
    "FullyShardedDataParallelPlugin": "FSDP2 runs, and fsdp_version is 2 once an Accelerator uses the plugin",
    "GradientState": "a view of the Accelerator created last",
    "IterableDatasetShard": "epoch is 0 before set_epoch; in Accelerate it is missing, which raises AttributeError",
    "LocalSGD": "averages count each rank's samples",
    "ParallelismConfig": "sp_size must be 1",
    "PartialState": "a view of this process; debug changes nothing, as every exchange is checked",
    "TorchDynamoPlugin": "models are compiled in place and remain the same objects",
    "check_cuda_p2p_ib_support": "does not query CUDA",
    "compile_regions": "compiles only repeated blocks, in place",
    "concatenate": "a defaultdict stays one",
    "default_config_file": "the file that `headway config` writes",
    "execute_subprocess_async": "waits without an event loop; the same result",
    "filter_trackers": "an unknown name is a ValueError that lists the known ones",
    "find_executable_batch_size": "all ranks agree on the outcome",
    "gather_object": "a string is one item, not its characters",
    "get_launch_command": "returns `headway launch --as accelerate`",
    "get_logger": "in_order is accepted, but no rank waits for another",
    "has_compiled_regions": "a module that was compiled in place counts too",
    "is_compiled_module": "a module that was compiled in place counts too",
    "launch_command": "runs `headway launch --as accelerate`",
    "launch_command_parser": "accepts any command line; `headway launch` parses it",
    "load_fsdp_model": _SHARDED,
    "load_fsdp_optimizer": _SHARDED,
    "load_state_dict": "a device map over several devices is refused; use load_checkpoint_in_model",
    "main": "runs the corresponding `headway` command",
    "prepare_data_loader": "with even_batches=False, a rank that runs out gets batches of weight zero",
    "prepare_pippy": "batches of any size, without padding",
    "recursively_apply": "a defaultdict stays one",
    "save": "replaces files atomically",
    "save_fsdp_model": _SHARDED,
    "save_fsdp_optimizer": _SHARDED,
    "send_to_device": "a defaultdict stays one",
    "set_module_tensor_to_device": "does not support quantised parameters",
    "should_reduce_batch_size": "recognises more error messages",
    "write_basic_config": "writes Headway's config file",
    "TrackioTracker": f"{_TRACKER}; the configuration reaches the run, while Accelerate loses it",
    **dict.fromkeys(_TRACKERS.split(), _TRACKER),
    **dict.fromkeys(_FILES.split(), _FACTS),
}
"""Name -> how it differs."""


@dataclass(frozen=True)
class Answer:
    """How one name is served.

    Attributes:
        name: Accelerate's; with "Accelerator." before a member of it.
        status: "served", "differs", "not served", or "unknown": not a public name of Accelerate 1.15.
        note: the difference, or what to use instead; empty if it is served as in Accelerate.
    """

    name: str
    status: Status
    note: str = ""


def answer(name: str) -> Answer:
    """How `name`, a public name, a module ("utils.dataclasses") or a member ("Accelerator.step"), is served."""
    if name in REFUSED:
        return Answer(name, "not served", REFUSED[name])
    if name.startswith("Accelerator."):
        return Answer(name, "served")
    if name in DIFFERENT:
        return Answer(name, "differs", DIFFERENT[name])
    if name in AS_ACCELERATE or name in SERVED or name in RENAMED or name in headway.__all__:
        return Answer(name, "served")
    if name in NAMES:
        return Answer(name, "not served", NAMES[name])
    return Answer(name, "served" if name in MODULES_AS_ACCELERATE else "unknown")
