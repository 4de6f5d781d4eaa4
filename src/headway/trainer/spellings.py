"""Other names of the training arguments: those that are accepted, and those that are answered with what to use."""

import difflib
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar

from headway.errors import ConfigError

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
_ON_WRAPPER = "Headway keeps the replicas equal itself; leave it out"
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
    "ignore_data_skip": "leave it out: resuming reads no sample twice and skips none",
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
    "average_tokens_across_devices": (True,), "dataloader_in_order": (True,), "eval_do_concat_batches": (True,),
    "save_safetensors": (True,), "log_on_each_node": (True, False), "restore_callback_states_from_checkpoint": (True, False),
    "logging_nan_inf_filter": (True, False),
    "ddp_timeout": (None, 1800), "local_rank": (None, -1), "include_num_input_tokens_seen": ("no", False),
    "log_level_replica": (None, "passive", "warning"), "project": (None, "huggingface"), "hub_strategy": (None, "every_save"),
    "fp16_opt_level": (None, "O1"), "half_precision_backend": (None, "auto"), "fp16_backend": (None, "auto"),
}  # fmt: skip
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
