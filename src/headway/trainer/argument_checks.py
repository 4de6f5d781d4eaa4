"""Names, types and ranges of the training arguments: transformers' names are answered, each field and number is checked."""

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy

from headway.config.values import did_you_mean
from headway.errors import AttributeNotServed, ConfigError

# Own messages say more of these.
_SEEN_TO_ELSEWHERE = frozenset({"per_device_train_batch_size"})
_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    dict: "a dict",
    list: "a list of texts",
    type(None): "None",
}


class Range(NamedTuple):
    """What a number may be: from `low` to less than `below`, or `also`; with what that means."""

    low: float
    below: float = math.inf
    also: float | None = None
    meaning: str = ""

    def holds(self, value: float) -> bool:
        """Is the value allowed?"""
        return self.low <= value < self.below or value == self.also

    def __str__(self) -> str:
        text = f"{self.low:g} or more" + ("" if math.isinf(self.below) else f" and below {self.below:g}")
        if self.also is not None:
            text += f", or {self.also:g}"
        return text + (f" ({self.meaning})" if self.meaning else "")


_NOT_NEGATIVE = """
    num_train_epochs learning_rate weight_decay adam_epsilon max_grad_norm eval_delay warmup_steps dataloader_num_workers
"""
_POSITIVE = """
    per_device_eval_batch_size gradient_accumulation_steps eval_accumulation_steps save_total_limit dataloader_prefetch_factor
"""
RANGES = {
    **dict.fromkeys(_NOT_NEGATIVE.split(), Range(0)),
    **dict.fromkeys(_POSITIVE.split(), Range(1)),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "label_smoothing_factor"), Range(0, 1)),
    **dict.fromkeys(("seed", "data_seed"), Range(0, 2**32)),
    "max_steps": Range(0, also=-1, meaning="-1 and 0: as many as num_train_epochs says"),
    "warmup_ratio": Range(0, 1, meaning="a share of all updates"),
}


def checked(arguments: Any, kind: type) -> dict[str, Any]:
    """The values of a dataclass's fields, each of a type that its annotation allows, and in its range.

    NumPy's scalars become Python's, 0 and 1 truth values where such are wanted, and whole floats integers.

    Args:
        arguments: the object.
        kind: the dataclass whose fields are checked; a subclass may have others.

    Raises:
        ConfigError: naming the first field that is neither.
    """
    # Not the fields' own types, which HfArgumentParser writes over.
    hints = get_type_hints(kind)
    kinds = {field.name: _kinds(hints[field.name]) for field in fields(kind) if field.name not in _SEEN_TO_ELSEWHERE}
    kinds["resume_from_checkpoint"] += (bool,)
    return {name: _checked(name, getattr(arguments, name), allowed) for name, allowed in kinds.items()}


def _kinds(annotation: Any) -> tuple[type, ...]:
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(getattr(part, "__origin__", part) for part in parts)


def _checked(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    limits = RANGES.get(name)
    for kind in sorted(kinds, key=list(_WORDS).index):
        fits, found = _as_kind(value, kind)
        if fits and (limits is None or isinstance(found, bool | str | None) or limits.holds(found)):
            return found
    words = [_WORDS[kind] for kind in kinds if kind is not type(None)]
    allowed = " or ".join(words) + (f", {limits}" if limits else "") + (", or None" if type(None) in kinds else "")
    raise ConfigError(f"{name}={value!r}; give {allowed}")


def _as_kind(value: Any, kind: type) -> tuple[bool, Any]:
    """(is it of that kind, the value as that kind has it)."""
    if isinstance(value, numpy.generic):
        value = value.item()
    is_truth = isinstance(value, bool)
    if kind is type(None):
        return value is None, None
    if kind is bool:
        return is_truth or (isinstance(value, int) and value in (0, 1)), bool(value)
    if kind is int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return isinstance(value, int) and not is_truth, value
    if kind is float:
        return isinstance(value, int | float) and not is_truth and math.isfinite(value), value
    if kind is Path:
        return isinstance(value, os.PathLike), value
    if kind is list:
        return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value), value
    return isinstance(value, Mapping if kind is dict else kind), value


# -------------------------------------------------------------------- names that are taken, and those that are not

Class = TypeVar("Class", bound=type)

ACCEPTED = {
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "batch_size": "per_device_train_batch_size",
    "no_cuda": "use_cpu",
    "lr": "learning_rate",
    "eval_rehearsal": "eval_sanity_check",  # until the next release
}
"""Another spelling, headway's commands' among them, and the argument that it means."""

_PRECISIONS = {None: {}, "no": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
"""`mixed_precision` as the launcher has it, in transformers' arguments."""

_INSTEAD = {
    "epochs": "use num_train_epochs",
    "adafactor": "use optim='adafactor'",
    "early_stopping_patience": "use callbacks=[EarlyStoppingCallback(early_stopping_patience=...)] of the Trainer",
    "evaluate_during_training": "use eval_strategy='steps'",
    "save_only_model": "checkpoints are always whole: for weights alone, call trainer.save_model(folder)",
    "torch_compile": "call model.compile() before the Trainer gets the model",
}
"""Arguments that no close match explains, and what to do."""

NOT_TAKEN = frozenset(
    """
    adafactor average_tokens_across_devices bf16_full_eval dataloader_in_order dataloader_multiprocessing_context
    ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug
    deepspeed enable_jit_checkpoint eval_do_concat_batches eval_use_gather_object fp16_backend fp16_full_eval
    fp16_opt_level fsdp fsdp_config full_determinism half_precision_backend hub_always_push
    hub_strategy include_for_metrics include_num_input_tokens_seen
    jit_mode_eval liger_kernel_config local_rank log_level_replica log_on_each_node logging_nan_inf_filter
    neftune_noise_alpha optim_target_modules overwrite_output_dir parallelism_config project
    restore_callback_states_from_checkpoint save_on_each_node save_only_model save_safetensors sharded_ddp tf32
    torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps tpu_num_cores trackio_bucket_id
    trackio_space_id trackio_static_space_id use_cache use_liger_kernel use_mps_device
    """.split()  # noqa: SIM905
)
"""Arguments of transformers' Trainer that Headway's does not have."""

_OFF: tuple[Any, ...] = (None, False, "", [], {})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("average_tokens_across_devices", "dataloader_in_order", "eval_do_concat_batches"), (True,)),
    **dict.fromkeys(("save_safetensors",), (True,)),
    **dict.fromkeys(("log_on_each_node", "logging_nan_inf_filter"), (True, False)),
    "restore_callback_states_from_checkpoint": (True, False),
    **dict.fromkeys(("half_precision_backend", "fp16_backend"), (None, "auto")),
    "ddp_timeout": (None, 1800),
    "fp16_opt_level": (None, "O1"),
    "hub_strategy": (None, "every_save"),
    "include_num_input_tokens_seen": (False, "no"),
    "local_rank": (None, -1),
    "log_level_replica": (None, "passive", "warning"),
    "project": (None, "huggingface"),
}
"""Values of these that ask for nothing that is not done anyway; of the others, those of `_OFF`."""

OTHERWISE = (
    "docs/trainer.md lists what there is; transformers' own Trainer, with everything that it has, runs under "
    "`headway launch --as accelerate`"
)


def _asks_for_nothing(name: str, value: Any) -> bool:
    value = getattr(value, "value", value)  # enumerations carry the word
    allowed = _NEUTRAL.get(name, _OFF)
    return name in NOT_TAKEN and any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
    )


def _explain_unknown(name: str, known: Collection[str]) -> str:
    if name in _INSTEAD:
        return f"{name} is not an argument: {_INSTEAD[name]}"
    hint = "" if name in NOT_TAKEN else did_you_mean(name, [*known, *ACCEPTED])
    return f"{name} is not an argument of TrainingArguments{hint or '; ' + OTHERWISE}"


def translate_arguments(given: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The arguments by their own names; those of transformers that ask for nothing are left out.

    Raises:
        ConfigError: a name that means nothing here, or one argument by two names.
    """
    found: dict[str, Any] = {}
    given = {name: value for name, value in given.items() if not _asks_for_nothing(name, value)}
    if "mixed_precision" in given:
        word = given.pop("mixed_precision")
        if word not in _PRECISIONS or not {"bf16", "fp16"}.isdisjoint(given):
            raise ConfigError(
                f"mixed_precision={word!r}; give no, bf16 or fp16, or one of the arguments bf16 and fp16 alone"
            )
        given |= _PRECISIONS[word]
    unknown = [name for name in given if name not in known and name not in ACCEPTED]
    if unknown:
        raise ConfigError(". ".join(_explain_unknown(name, known) for name in unknown))
    for name, value in given.items():
        own = ACCEPTED.get(name, name)
        if own in found:
            raise ConfigError(f"{own} is given by two names of one argument; give {own} alone")
        found[own] = value
    return found


def accepting_other_names(kind: Class) -> Class:
    """Class decorator: let the dataclass take other spellings, and answer names that it does not know."""
    generated: Callable[..., None] = vars(kind)["__init__"]

    @wraps(generated)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        generated(self, *args, **translate_arguments(kwargs, type(self).__dataclass_fields__))

    type.__setattr__(kind, "__init__", initialise)
    return kind


class UnknownMembers:
    """Answers a name that an object does not have."""

    def __getattr__(self, name: str) -> Any:
        # Asked for only where the object lacks it.
        raise AttributeNotServed(f"{type(self).__name__}.{name} is not served: {OTHERWISE}")
