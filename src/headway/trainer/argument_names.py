"""Names of other TrainingArguments: spellings that are accepted or answered, and what scripts ask about where they run."""

import difflib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

from headway import env
from headway.collectives.door import Collectives
from headway.collectives.ranks import RankAware
from headway.errors import AttributeNotServed, ConfigError
from headway.runtime import process

Class = TypeVar("Class", bound=type)

ACCEPTED = {
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "no_cuda": "use_cpu",
    "lr": "learning_rate",
}
"""Another spelling, and the argument that it means."""

_CPU_OR_NOT = "Headway finds the device; use_cpu=True stays on the CPU"
_WRAPPED = "give it to the Accelerator: accelerator_config={'kwargs_handlers': [DistributedDataParallelKwargs(...)]}"
_NOT_TRACKIO = "report_to has tensorboard, wandb and mlflow; name the project by run_name and logging_dir"
_NO_HUB = "nothing is uploaded; call trainer.save_model(folder) and upload that"

ANSWERS = {
    "per_gpu_train_batch_size": "use per_device_train_batch_size",
    "per_gpu_eval_batch_size": "use per_device_eval_batch_size",
    "train_batch_size": "use per_device_train_batch_size",
    "eval_batch_size": "use per_device_eval_batch_size",
    "batch_size": "use per_device_train_batch_size and per_device_eval_batch_size",
    "epochs": "use num_train_epochs",
    "overwrite_output_dir": "leave it out: an earlier run's checkpoints stay, and this run's are numbered after them",
    "evaluate_during_training": "use eval_strategy='steps'",
    "use_mps_device": _CPU_OR_NOT,
    "jit_mode_eval": "call torch.jit on the model yourself",
    "local_rank": "leave it out: `headway launch` says which rank a process is",
    "tpu_num_cores": "leave it out",
    "sharded_ddp": "leave it out",
    "fsdp": "leave it out: models are replicated",
    "fsdp_config": "leave it out: models are replicated",
    "deepspeed": "leave it out: models are replicated",
    "tf32": "call torch.set_float32_matmul_precision('high')",
    "torch_compile": "call model.compile() before the Trainer gets the model",
    "adafactor": "use optim='adafactor'",
    "half_precision_backend": "leave it out",
    "fp16_opt_level": "leave it out",
    "fp16_backend": "leave it out",
    "bf16_full_eval": "evaluation runs in the run's own precision: use bf16=True",
    "fp16_full_eval": "evaluation runs in the run's own precision: use fp16=True",
    "save_only_model": "leave it out: a checkpoint is what a run goes on from; weights alone: trainer.save_model(folder)",
    "save_safetensors": "leave it out: weights are always safetensors",
    "full_determinism": "call torch.use_deterministic_algorithms(True)",
    "push_to_hub": _NO_HUB,
    "hub_model_id": _NO_HUB,
    "hub_token": _NO_HUB,
    "hub_strategy": _NO_HUB,
    "ddp_find_unused_parameters": _WRAPPED,
    "ddp_bucket_cap_mb": _WRAPPED,
    "ddp_backend": "give it to the Accelerator: accelerator_config={'kwargs_handlers': [InitProcessGroupKwargs(...)]}",
    "ddp_timeout": "give it to the Accelerator: accelerator_config={'kwargs_handlers': [InitProcessGroupKwargs(...)]}",
    "hub_private_repo": _NO_HUB,
    "hub_always_push": _NO_HUB,
    "hub_revision": _NO_HUB,
    "ddp_broadcast_buffers": _WRAPPED,
    "ddp_static_graph": _WRAPPED,
    "parallelism_config": "leave it out: models are replicated",
    "optim_target_modules": "give parameter groups of your own: optimizers=(optimizer, None) of the Trainer",
    "average_tokens_across_devices": "leave it out: a loss is always a mean over the labels of all ranks",
    "torch_compile_backend": "call model.compile(backend=...) before the Trainer gets the model",
    "torch_compile_mode": "call model.compile(mode=...) before the Trainer gets the model",
    "use_liger_kernel": "call liger_kernel's function for your model before the Trainer gets it",
    "liger_kernel_config": "call liger_kernel's function for your model before the Trainer gets it",
    "use_cache": "set model.config.use_cache",
    "neftune_noise_alpha": "add the noise in a hook on the model's embeddings (register_forward_hook)",
    "torch_empty_cache_steps": "call torch.cuda.empty_cache() in a callback's on_step_end",
    "log_on_each_node": "leave it out: rank 0 logs",
    "log_level_replica": "leave it out: rank 0 logs, and other ranks where it matters; log_level is for all",
    "include_num_input_tokens_seen": "leave it out: the run's log has tokens_per_second",
    "project": _NOT_TRACKIO,
    "trackio_space_id": _NOT_TRACKIO,
    "trackio_bucket_id": _NOT_TRACKIO,
    "trackio_static_space_id": _NOT_TRACKIO,
    "eval_do_concat_batches": "use trainer.iterate_predictions(dataset), which gives batches as they come",
    "eval_use_gather_object": "leave it out: predictions are tensors, or tuples of them",
    "include_for_metrics": "compute_metrics is given predictions and labels; let the model return what else it needs",
    "save_on_each_node": "leave it out: whether machines share the folder is detected",
    "enable_jit_checkpoint": "leave it out: a run that is asked to end saves by itself (docs/preemption.md)",
    "restore_callback_states_from_checkpoint": "leave it out: callbacks with a state_dict are always restored",
    "dataloader_multiprocessing_context": "override get_train_dataloader and give it to your DataLoader",
    "dataloader_in_order": "leave it out: batches come in order",
    "debug": "leave it out: non-finite values are found by accelerator_config={'on_non_finite': ...}",
    "logging_nan_inf_filter": "leave it out: what is logged is what was computed",
    "logging_first_steps": "use logging_first_step",
    "early_stopping_patience": "use callbacks=[EarlyStoppingCallback(early_stopping_patience=...)] of the Trainer",
}
"""Arguments of other versions and libraries, and what to do instead."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "average_tokens_across_devices": (True,),
    "dataloader_in_order": (True,),
    "eval_do_concat_batches": (True,),
    "save_safetensors": (True,),
    "log_on_each_node": (True, False),
    "restore_callback_states_from_checkpoint": (True, False),
    "logging_nan_inf_filter": (True, False),
    "ddp_timeout": (None, 1800),
    "local_rank": (None, -1),
    "include_num_input_tokens_seen": ("no", False),
    "log_level_replica": (None, "passive", "warning"),
    "project": (None, "huggingface"),
    "hub_strategy": (None, "every_save"),
    "fp16_opt_level": (None, "O1"),
    "half_precision_backend": (None, "auto"),
    "fp16_backend": (None, "auto"),
}
"""Values of those arguments that ask for nothing that is not done anyway; of others: None, False and what is empty."""


def asks_for_nothing(name: str, value: Any) -> bool:
    """May an argument of `ANSWERS` be left out with this value?"""
    if name not in ANSWERS:
        return False
    value = getattr(value, "value", value)
    allowed = NEUTRAL.get(name, (None, False, "", [], {}))
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)


def explain_unknown(name: str, known: Collection[str]) -> str:
    """What to tell whoever gave the argument `name`."""
    if name in ANSWERS:
        return f"{name} is not an argument: {ANSWERS[name]}"
    near = difflib.get_close_matches(name, [*known, *ACCEPTED], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "see docs/trainer.md for those that there are"
    return f"{name} is not an argument of TrainingArguments; {hint}"


def translate(given: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The arguments by their own names; those of others that ask for nothing are left out.

    Raises:
        ConfigError: a name that means nothing here, or one argument by two names.
    """
    found: dict[str, Any] = {}
    given = {name: value for name, value in given.items() if not asks_for_nothing(name, value)}
    unknown = [name for name in given if name not in known and name not in ACCEPTED]
    if unknown:
        raise ConfigError(". ".join(explain_unknown(name, known) for name in unknown))
    for name, value in given.items():
        own = ACCEPTED.get(name, name)
        if own in found:
            other = next(each for each in given if each != name and ACCEPTED.get(each, each) == own)
            raise ConfigError(f"{other} and {name} are two names of one argument; give {own} alone")
        found[own] = value
    return found


def with_other_spellings(kind: Class) -> Class:
    """Class decorator: let the dataclass take other spellings, and answer names that it does not know."""
    generated: Callable[..., None] = vars(kind)["__init__"]

    @wraps(generated)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        generated(self, *args, **translate(kwargs, type(self).__dataclass_fields__))

    type.__setattr__(kind, "__init__", initialise)
    return kind


# ---------------------------------------------------------------- what is asked about the place

_GIVE = "give the values to TrainingArguments(...) itself"
_NOT_MEMBERS = {
    **dict.fromkeys(
        (
            "set_dataloader",
            "set_evaluate",
            "set_logging",
            "set_lr_scheduler",
            "set_optimizer",
            "set_save",
            "set_testing",
            "set_training",
        ),
        _GIVE,
    ),
    "set_push_to_hub": "nothing is uploaded; call trainer.save_model(folder) and upload that",
    "parallel_mode": "models are replicated on world_size processes",
    "place_model_on_device": "the Trainer moves the model to its device",
    "default_optim": "the default is 'adamw_torch_fused'",
    "ddp_timeout_delta": "use `headway launch --patience`",
    "is_torch_greater_or_equal_than_2_8": "ask torch.__version__",
}


class Surroundings:
    """Names of transformers' TrainingArguments that are not arguments."""

    per_device_train_batch_size: int | str
    per_device_eval_batch_size: int
    use_cpu: bool

    @property
    def device(self) -> torch.device:
        """This process's; the process's runtime starts where it has not yet."""
        return process.start(cpu=self.use_cpu).device

    @property
    def n_gpu(self) -> int:
        """GPUs that this process computes on: 1, or 0 on a CPU."""
        return int(self.device.type != "cpu")

    @property
    def world_size(self) -> int:
        """Processes."""
        return env.world_size()

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return env.rank()

    @property
    def local_process_index(self) -> int:
        """Its rank on its machine."""
        return env.local_rank()

    @property
    def local_rank(self) -> int:
        """Its rank on its machine; -1 where there is one process, as scripts ask for `local_rank != -1`."""
        return env.local_rank() if env.world_size() > 1 else -1

    @property
    def train_batch_size(self) -> int | str:
        """Samples of a micro-batch on this process."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Likewise in evaluations."""
        return self.per_device_eval_batch_size

    def __getattr__(self, name: str) -> Any:
        # Asked for only where the object lacks it.
        if name in _NOT_MEMBERS:
            raise AttributeNotServed(f"TrainingArguments.{name} is not served: {_NOT_MEMBERS[name]}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def should_log(self) -> bool:
        """Does this process speak? Rank 0 does."""
        return env.rank() == 0

    @property
    def should_save(self) -> bool:
        """Does this process write what is written once? Rank 0 does; checkpoints are written by all."""
        return env.rank() == 0

    def get_process_log_level(self) -> int:
        """A level for `logging`: informative on rank 0, warnings on others."""
        return 20 if env.rank() == 0 else 30

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """The first process runs the block before all others.

        Args:
            local: of each machine; False: of all.
            desc: accepted for the name's sake.
        """
        runtime = process.start(cpu=self.use_cpu)
        ranks = RankAware(runtime, Collectives(runtime))
        with ranks.local_main_process_first() if local else ranks.main_process_first():
            yield
