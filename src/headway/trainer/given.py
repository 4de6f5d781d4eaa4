"""Checks what a Trainer is given and what a subclass overrides, for mistakes that would show late, unhelpfully or not at all."""

from typing import Any

from headway.errors import ConfigError
from headway.trainer.arguments import TrainingArguments


def checked_arguments(model: Any, args: Any) -> TrainingArguments:
    """The arguments, or the defaults.

    Raises:
        ConfigError: something else, or in the model's place.
    """
    if isinstance(model, TrainingArguments):
        raise ConfigError(
            "Trainer(model, args): the arguments came in the model's place; give Trainer(model, args, ...)"
        )
    if args is not None and not isinstance(args, TrainingArguments):
        what = f"{type(args).__module__.partition('.')[0]}'s {type(args).__name__}"
        hint = "; make it headway.TrainingArguments(...) with the same arguments" if "Argument" in what else ""
        raise ConfigError(f"the Trainer got {what} as args, which are headway.TrainingArguments{hint}")
    return TrainingArguments() if args is None else args


def check_pairs(
    args: TrainingArguments,
    first: Any,
    second: Any,
    processing_class: Any,
    tokenizer: Any,
    optimizers: tuple[Any, Any],
    named: Any,
) -> None:
    """Refuse what was given twice by two names."""
    if first is not None and second is not None:
        raise ConfigError("compute_loss_func and loss_function are two names of one thing; give one")
    if processing_class is not None and tokenizer is not None:
        raise ConfigError("tokenizer is the old name of processing_class; give one")
    if optimizers[0] is not None and named is not None:
        raise ConfigError("optimizers and optimizer_cls_and_kwargs are two optimizers; give one")
    if optimizers[0] is not None and args.per_device_train_batch_size == "largest":
        raise ConfigError(
            "per_device_train_batch_size='largest' tries updates, which would change the optimizer that you give; let the "
            "Trainer make it (optim, optimizer_cls_and_kwargs), or give a number"
        )


# ---------------------------------------------------------------- methods of transformers' Trainer

_NO_HUB = "nothing is uploaded; call trainer.save_model(folder), and huggingface_hub's upload_folder"
NOT_SERVED = {
    "hyperparameter_search": "write a function that makes TrainingArguments and a Trainer(model_init=...) from a trial and returns a "
    "metric of train() or evaluate(), and give it to Optuna's study.optimize",
    "push_to_hub": _NO_HUB,
    "init_hf_repo": _NO_HUB,
    "create_accelerator_and_postprocess": "override create_accelerator, which returns the Accelerator",
    "get_batch_samples": "batches come from the prepared loader; compute_loss(..., num_items_in_batch) is told how many labels count",
    "set_initial_training_values": "state.max_steps and state.num_train_epochs are there from on_train_begin on",
    "store_flos": "accelerator.profile and the run's log have FLOPs",
    "loss_is_scaled_for_ga": "accelerator.backward(loss, weight=...) takes care of the window's mean",
}
"""Methods that are not here, and what to do instead."""

_BY_CALLBACK = "Headway never calls it; use a callback's on_save"
HOOKS = {
    "_inner_training_loop": "Headway's loop is another one; use callbacks, or write a loop with the Accelerator",
    "_run_epoch": "Headway's loop is another one; use callbacks, or write a loop with the Accelerator",
    "_save_checkpoint": _BY_CALLBACK,
    "_save_optimizer_and_scheduler": _BY_CALLBACK,
    "_save_rng_state": _BY_CALLBACK,
    "_load_from_checkpoint": "use accelerator.register_load_state_pre_hook",
    "_load_optimizer_and_scheduler": "use accelerator.register_load_state_pre_hook",
    "_load_rng_state": "random streams are restored with each checkpoint",
    "_load_best_model": "use a callback's on_train_end",
    "_maybe_log_save_evaluate": "use a callback's on_step_end, which sets control.should_log, should_evaluate and should_save",
    "_evaluate": "override evaluate",
    "_wrap_model": "override create_accelerator, or wrap the model before the Trainer gets it",
    "_get_dataloader": "override get_train_dataloader and get_eval_dataloader",
    "_get_num_items_in_batch": "labels are counted in the loader; override compute_loss",
    "_clip_grad_norm": "set max_grad_norm=0 and clip in a callback's on_pre_optimizer_step",
    "_get_output_dir": "set output_dir",
    "_prepare_for_training": "override create_optimizer, create_scheduler and the loaders' methods",
    "_finalize_training": "use a callback's on_train_end",
    "_determine_best_metric": "set metric_for_best_model, or set the state's fields in a callback's on_evaluate",
    "_push_from_checkpoint": _NO_HUB,
    "_hp_search_setup": NOT_SERVED["hyperparameter_search"],
    **{
        name: NOT_SERVED[name]
        for name in (
            "create_accelerator_and_postprocess",
            "get_batch_samples",
            "set_initial_training_values",
            "push_to_hub",
            "init_hf_repo",
        )
    },
}
"""Methods of transformers' Trainer that an override of would do nothing here, and what to use."""


def check_hooks(kind: type) -> None:
    """Refuse a subclass whose overrides would never be called.

    Raises:
        ConfigError: naming them.
    """
    theirs = [each for each in kind.__mro__ if not each.__module__.startswith("headway.")]
    found = [f"{name}: {HOOKS[name]}" for name in HOOKS if any(name in vars(each) for each in theirs)]
    if found:
        raise ConfigError(f"{kind.__name__} overrides methods that Headway never calls: " + "; ".join(found))
