"""Names of training arguments: alternative names, and names of transformers' arguments that are not supported."""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar

from headway.core.config.other_library_names import explain_precision
from headway.core.config.values import suggest_word
from headway.errors import AttributeNotServed, ConfigError

Class = TypeVar("Class", bound=type)
ALTERNATIVE_NAMES = {
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "batch_size": "per_device_train_batch_size",
    "no_cuda": "use_cpu",
    "lr": "learning_rate",
    "eval_rehearsal": "eval_sanity_check",  # until the next release
}
"""Mapping from alternative argument names to Headway's names. It includes option names of the `headway` command."""
_PRECISION_ARGUMENTS: dict[str | None, dict[str, bool]] = {
    None: {},
    "no": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
}
"""Training arguments (`bf16` and `fp16`) for each value of the launcher's `mixed_precision`."""
_ADVICE = {
    "epochs": "use num_train_epochs",
    "adafactor": "use optim='adafactor'",
    "fsdp": "start the script with `headway launch --strategy fsdp`",
    "fsdp_config": "start the script with `headway launch --strategy fsdp` (options: docs/layouts.md#options)",
    "deepspeed": "start the script with `headway launch --strategy zero2` (or zero1, zero3), or use your own loop with "
    "DeepSpeedPlugin(hf_ds_config=...)",
    "early_stopping_patience": "use callbacks=[EarlyStoppingCallback(early_stopping_patience=...)] of the Trainer",
    "evaluate_during_training": "use eval_strategy='steps'",
    "sortish_sampler": "use train_sampling_strategy='group_by_length'",
    "save_only_model": "checkpoints always contain the full state: for weights alone, call trainer.save_model(folder)",
}
"""Advice by argument name, for unsupported arguments to which no supported name is similar."""
UNSUPPORTED_NAMES = frozenset(
    """
    adafactor average_tokens_across_devices bf16_full_eval dataloader_in_order dataloader_multiprocessing_context
    ddp_backend ddp_timeout debug
    deepspeed enable_jit_checkpoint eval_do_concat_batches eval_use_gather_object fp16_backend fp16_full_eval
    fp16_opt_level fsdp fsdp_config full_determinism half_precision_backend hub_always_push
    hub_strategy include_for_metrics
    jit_mode_eval liger_kernel_config local_rank log_level_replica log_on_each_node logging_nan_inf_filter
    optim_target_modules overwrite_output_dir parallelism_config project
    restore_callback_states_from_checkpoint save_on_each_node save_only_model save_safetensors sharded_ddp
    sortish_sampler
    torch_empty_cache_steps tpu_num_cores trackio_bucket_id
    trackio_space_id trackio_static_space_id use_liger_kernel use_mps_device
    """.split()  # noqa: SIM905
)
"""Arguments of transformers' Trainer that Headway's Trainer does not support."""
_OFF_VALUES: tuple[Any, ...] = (None, False, "", [], {})
"""Values with which an unsupported argument requests nothing."""
_IGNORED_VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("average_tokens_across_devices", "dataloader_in_order", "eval_do_concat_batches"), (True,)),
    "save_safetensors": (True,),
    **dict.fromkeys(("log_on_each_node", "logging_nan_inf_filter"), (True, False)),
    "restore_callback_states_from_checkpoint": (True, False),
    **dict.fromkeys(("half_precision_backend", "fp16_backend"), (None, "auto")),
    "ddp_timeout": (None, 1800),
    "fp16_opt_level": (None, "O1"),
    "hub_strategy": (None, "every_save"),
    "local_rank": (None, -1),
    "log_level_replica": (None, "passive", "warning"),
    "project": (None, "huggingface"),
}
"""Values of unsupported arguments that have no effect, by argument name. They are accepted and ignored.

For arguments that are not listed, these are the values in `_OFF_VALUES`.
"""
GENERAL_ADVICE = (
    "help(headway.Trainer) and help(headway.TrainingArguments) list the supported names; transformers' own Trainer, with all "
    "of its features, runs under `headway launch --as accelerate`"
)


def _has_no_effect(name: str, value: Any) -> bool:
    """Whether an argument is unsupported, but has a value with which it has no effect."""
    if name not in UNSUPPORTED_NAMES:
        return False
    plain = getattr(value, "value", value)  # the value of an enumeration
    ignored_values = _IGNORED_VALUES.get(name, _OFF_VALUES)
    # 0 and 1 equal False and True, but have other meanings.
    return any(plain == each and isinstance(plain, bool) == isinstance(each, bool) for each in ignored_values)


def _explain_unknown(name: str, known_names: Collection[str]) -> str:
    """Return the error message for an unknown argument, with advice or the most similar name."""
    if name in _ADVICE:
        return f"{name} is not an argument: {_ADVICE[name]}"
    hint = "" if name in UNSUPPORTED_NAMES else suggest_word(name, [*known_names, *ALTERNATIVE_NAMES])
    return f"{name} is not an argument of TrainingArguments{hint or '; ' + GENERAL_ADVICE}"


def translate_arguments(arguments: dict[str, Any], known_names: Collection[str]) -> dict[str, Any]:
    """Return the keyword arguments of a call under Headway's names.

    Unsupported arguments of transformers are removed if their values have no effect.

    Args:
        arguments: Keyword arguments of the call by name, which may be an alternative name.
        known_names: Names of Headway's arguments.

    Raises:
        ConfigError: If a name is unknown, one argument is given under two names, or `mixed_precision` is not allowed.
    """
    used = {name: value for name, value in arguments.items() if not _has_no_effect(name, value)}
    if "mixed_precision" in used:
        precision = used.pop("mixed_precision")
        if precision not in _PRECISION_ARGUMENTS or not {"bf16", "fp16"}.isdisjoint(used):
            raise ConfigError(
                f"mixed_precision={precision!r}; give no, bf16 or fp16, or one of the arguments bf16 and fp16 alone"
                f"{explain_precision(precision, [str(name) for name in _PRECISION_ARGUMENTS])}"
            )
        used |= _PRECISION_ARGUMENTS[precision]
    unknown = [name for name in used if name not in known_names and name not in ALTERNATIVE_NAMES]
    if unknown:
        raise ConfigError(". ".join(_explain_unknown(name, known_names) for name in unknown))
    translated: dict[str, Any] = {}
    for name, value in used.items():
        own_name = ALTERNATIVE_NAMES.get(name, name)
        if own_name in translated:
            raise ConfigError(f"{own_name} is given by two names of one argument; give {own_name} alone")
        translated[own_name] = value
    return translated


def accept_other_names(kind: Class) -> Class:
    """Make a dataclass's constructor accept alternative names of arguments. Used as a decorator.

    The constructor raises ConfigError with a hint if a name is unknown.
    """
    generated: Callable[..., None] = vars(kind)["__init__"]

    @wraps(generated)
    def initialize_translated(self: Any, *args: Any, **kwargs: Any) -> None:
        generated(self, *args, **translate_arguments(kwargs, type(self).__dataclass_fields__))

    type.__setattr__(kind, "__init__", initialize_translated)
    return kind


class UnknownMembers:
    """Base class whose instances raise AttributeNotServed, with advice, if an unknown attribute is read."""

    def __getattr__(self, name: str) -> Any:
        # Python calls this only if the object does not have the attribute.
        raise AttributeNotServed(f"{type(self).__name__}.{name} is not served: {GENERAL_ADVICE}")
