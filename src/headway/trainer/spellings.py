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
_NO_HUB = "nothing is uploaded; call trainer.save_model(folder) and upload that"

ANSWERS = {
    "per_gpu_train_batch_size": "use per_device_train_batch_size",
    "per_gpu_eval_batch_size": "use per_device_eval_batch_size",
    "train_batch_size": "use per_device_train_batch_size",
    "eval_batch_size": "use per_device_eval_batch_size",
    "batch_size": "use per_device_train_batch_size and per_device_eval_batch_size",
    "epochs": "use num_train_epochs",
    "overwrite_output_dir": "leave it out: an earlier run's checkpoints stay, and this run's are numbered after them",
    "do_train": "call trainer.train()",
    "do_eval": "call trainer.evaluate(), or set eval_strategy",
    "do_predict": "call trainer.predict(dataset)",
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
    "logging_nan_inf_filter": "leave it out: what is logged is what was computed",
    "logging_first_steps": "use logging_first_step",
    "early_stopping_patience": "use callbacks=[EarlyStoppingCallback(early_stopping_patience=...)] of the Trainer",
}
"""Arguments of other versions and libraries, and what to do instead."""


def explain_unknown(name: str, known: Collection[str]) -> str:
    """What to tell whoever gave the argument `name`."""
    if name in ANSWERS:
        return f"{name} is no argument: {ANSWERS[name]}"
    near = difflib.get_close_matches(name, [*known, *ACCEPTED], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "see docs/trainer.md for those that there are"
    return f"{name} is no argument of TrainingArguments; {hint}"


def translate(given: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The arguments by their own names.

    Raises:
        ConfigError: a name that means nothing here, or one argument by two names.
    """
    found: dict[str, Any] = {}
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
