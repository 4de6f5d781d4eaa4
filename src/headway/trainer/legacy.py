"""Names of transformers' Trainer and of its arguments: what is taken, and one answer for everything else."""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

from headway.accelerator import Accelerator
from headway.config.values import did_you_mean
from headway.errors import AttributeNotServed, ConfigError
from headway.weights.export import copy_files

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

_OTHERWISE = (
    "docs/trainer.md lists what there is; transformers' own Trainer, with everything that it has, runs under "
    "`headway launch --as accelerate`"
)

_NEVER_CALLED = frozenset(
    """
    _clip_grad_norm _determine_best_metric _evaluate _finalize_training _finish_current_push _get_dataloader
    _get_num_items_in_batch _get_output_dir _hp_search_setup _inner_training_loop _load_best_model
    _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state _load_scaler
    _maybe_log_save_evaluate _prepare_for_training _push_from_checkpoint _run_epoch _save_checkpoint
    _save_optimizer_and_scheduler _save_rng_state _save_scaler _wrap_model create_accelerator_and_postprocess
    get_batch_samples init_hf_repo set_initial_training_values
    """.split()  # noqa: SIM905
)
"""Methods of transformers' Trainer that an override of would silently do nothing here."""


# ---------------------------------------------------------------- arguments


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
    return f"{name} is not an argument of TrainingArguments{hint or '; ' + _OTHERWISE}"


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


# ---------------------------------------------------------------- the Trainer


def overridden(kind: type, names: Iterable[str]) -> list[str]:
    """Which of these methods of the Trainer a subclass has of its own."""
    theirs = [each for each in kind.__mro__ if not each.__module__.startswith("headway.")]
    return sorted(name for name in names if any(name in vars(each) for each in theirs))


def check_overrides(kind: type) -> None:
    """Refuse a subclass whose overrides would never be called.

    Raises:
        ConfigError: naming them.
    """
    found = overridden(kind, _NEVER_CALLED)
    if found:
        raise ConfigError(
            f"{kind.__name__} overrides methods that Headway never calls: {', '.join(found)}; use callbacks, or one of the methods "
            f"that may be overridden. {_OTHERWISE}"
        )


class UnknownMembers:
    """Answers a name that an object does not have."""

    def __getattr__(self, name: str) -> Any:
        # Asked for only where the object lacks it.
        raise AttributeNotServed(f"{type(self).__name__}.{name} is not served: {_OTHERWISE}")


class _Records:
    """The model card and the arguments, written where a model is published.

    Args:
        home: has the card.
        arguments: as JSON.
    """

    def __init__(self, home: Path, arguments: str) -> None:
        self._home, self._arguments = home, arguments

    def save_pretrained(self, folder: Path) -> None:
        """Write them."""
        copy_files(self._home, folder, ["README.md"])
        (folder / "training_args.json").write_text(self._arguments + "\n")


class LegacyMembers(UnknownMembers):
    """Small names that scripts ask of transformers' Trainer, each by what the Trainer has itself."""

    accelerator: Accelerator
    args: Any
    create_model_card: Callable[..., None]
    model: torch.nn.Module
    optimizer: Any
    processing_class: Any
    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False
    place_model_on_device = True

    @property
    def model_wrapped(self) -> torch.nn.Module:
        """The model: it is prepared in its place."""
        return self.model

    @property
    def tokenizer(self) -> Any:
        """The processing class by its old name."""
        return self.processing_class

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """The run's mixed precision, for a block."""
        return self.accelerator.autocast()

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """The same: what `training_step` computes the loss in."""
        return self.accelerator.autocast()

    def get_num_trainable_parameters(self) -> int:
        """Numbers in parameters that learn."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Of each group of parameters.

        Raises:
            ConfigError: there is no optimizer yet.
        """
        return [float(group["lr"]) for group in self.get_optimizer_group()]

    def get_optimizer_group(self, param: torch.Tensor | None = None) -> Any:
        """The groups of parameters, or the one that a parameter is in.

        Raises:
            ConfigError: there is no optimizer yet.
        """
        if self.optimizer is None:
            raise ConfigError("there is no optimizer before train(); create_optimizer() makes one")
        groups = self.optimizer.param_groups
        if param is None:
            return list(groups)
        return next((group for group in groups if any(param is each for each in group["params"])), None)

    def is_world_process_zero(self) -> bool:
        """Is this process rank 0 of all machines?"""
        return self.accelerator.is_main_process

    def is_local_process_zero(self) -> bool:
        """Is this the first process of its machine?"""
        return self.accelerator.is_local_main_process

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Upload the model, its config, the processing class, the arguments and a model card to the Hub; every rank calls it.

        The repository is the arguments' `hub_model_id`, or the name of `output_dir`.

        Args:
            commit_message: the commit's message.
            blocking: accepted for compatibility; the upload has always ended when this returns.
            token, revision: None: those of the arguments.
            kwargs: more for the model card, as for `create_model_card`.

        Returns:
            The commit's URL on the main process, None elsewhere.
        """
        args = self.args
        self.create_model_card(**kwargs)
        home = args.folder
        return self.accelerator.push_to_hub(
            self.model,
            args.hub_model_id or home.absolute().name,
            self.processing_class,
            _Records(home, args.to_json_string()),
            private=args.hub_private_repo,
            token=token or args.hub_token,
            revision=revision or args.hub_revision,
            commit_message=commit_message or "End of training",
        )

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics, one a line, from the main process."""
        if self.accelerator.is_main_process:
            print(f"***** {split} metrics *****")
            for name, value in sorted(metrics.items()):
                print(f"  {name} = {value}")
