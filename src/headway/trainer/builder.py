"""Construction of a Trainer's components, such as the model and the Accelerator, with checks of the arguments."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.core.config.compilation import TorchDynamoPlugin
from headway.core.config.run import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from headway.core.config.torch_kwargs import DistributedDataParallelKwargs
from headway.errors import ConfigError
from headway.extras.chunked_loss import chunk_loss, is_loss_chunked, restore_loss
from headway.extras.moving_average import ExponentialMovingAverage
from headway.trainer.accelerator_settings import ACCUMULATION, LOADER_NAMES, read_accelerator_config
from headway.trainer.arguments import TrainingArguments
from headway.trainer.checkpoints import find_next_number

# ---------------------------------------------------------------- arguments


def check_arguments(model: Any, args: Any, optimizer: Any) -> TrainingArguments:
    """Return the training arguments, or default arguments if `args` is None.

    Raises:
        ConfigError: If `args` is of another type or was passed as the model, or if a search for the largest batch is
            combined with the user's own `optimizer`.
    """
    if isinstance(model, TrainingArguments):
        raise ConfigError(
            "Trainer(model, args): the arguments were passed in place of the model; give Trainer(model, args, ...)"
        )
    if args is not None and not isinstance(args, TrainingArguments):
        kind = f"{type(args).__module__.partition('.')[0]}'s {type(args).__name__}"
        hint = "; make it headway.TrainingArguments(...) with the same arguments" if "Argument" in kind else ""
        raise ConfigError(f"the Trainer got {kind} as args, which are headway.TrainingArguments{hint}")
    checked = TrainingArguments() if args is None else args
    if optimizer is not None and checked.per_device_train_batch_size == "largest":
        raise ConfigError(
            "per_device_train_batch_size='largest' tries updates, which would change the optimizer that you give; let the "
            "Trainer make it (optim, optimizer_cls_and_kwargs), or give a number"
        )
    return checked


def check_not_both(name: str, value: Any, other_name: str, other_value: Any) -> None:
    """Raise ConfigError if an argument is given under both of its names.

    Args:
        name: First name of the argument.
        value: Value under the first name. None if not given.
        other_name: Second name of the argument.
        other_value: Value under the second name. None if not given.
    """
    if value is not None and other_value is not None:
        raise ConfigError(f"{name} and {other_name} are two names of one argument; give one")


def get_or_create_model(
    model: torch.nn.Module | None, model_init: Callable[[], torch.nn.Module] | None
) -> torch.nn.Module:
    """Return the given model, or create it with `model_init`.

    Raises:
        ConfigError: If neither or both are given, or the result is not a module.
    """
    if (model is None) == (model_init is None):
        raise ConfigError(
            "the Trainer needs a model: give `model`, or `model_init`, a function that makes it"
            if model is None
            else "the Trainer got `model` and `model_init`, which are two models; give one"
        )
    result = model_init() if model_init is not None else model
    if not isinstance(result, torch.nn.Module):
        raise ConfigError(f"the Trainer got a {type(result).__name__} as its model; give a torch.nn.Module")
    return result


def set_use_cache(model: torch.nn.Module, use_cache: bool) -> None:
    """Set `config.use_cache` of a model: whether its forward returns a KV cache.

    transformers' Trainer does so, too. Without a KV cache, transformers' models use position_ids to separate packed
    documents.

    Args:
        model: Model. It is left unchanged if it has no config, or its config has no `use_cache`.
        use_cache: Value to set.
    """
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        config.use_cache = use_cache


# ---------------------------------------------------------------- the Accelerator


def create_accelerator(args: TrainingArguments) -> Accelerator:
    """Create the Accelerator of one training run.

    Settings in `accelerator_config` take precedence over those that the Trainer derives from its other arguments.

    Raises:
        ConfigError: If the launcher's number of gradient accumulation steps contradicts the arguments.
    """
    keep_best = None
    if args.wanted_metric is not None:
        keep_best = "max" if args.greater_is_better else "min"
    folder = args.folder.absolute()
    project = ProjectConfiguration(
        # The default folder of the run's log is the parent of its checkpoints.
        folder,
        args.logging_dir or folder.parent,
        automatic_checkpoint_naming=args.save_strategy != "no",
        total_limit=args.save_total_limit,
        iteration=find_next_number(folder),
        keep_best=keep_best,
        num_best=args.num_best,
        keep_every=args.keep_every,
        total_limit_counts_best=keep_best is not None and args.save_total_limit is not None,
    )
    config = read_accelerator_config(args.accelerator_config) or {}
    loading: dict[str, Any] = {
        # Do not fill up an incomplete last batch: no row is seen twice, and any number of processes gives equal results.
        "even_batches": False,
        "data_seed": args.seed if args.data_seed is None else args.data_seed,
        "non_blocking": None if args.dataloader_pin_memory else False,
    }
    loading |= {name: config.pop(name) for name in LOADER_NAMES & config.keys()}
    settings: dict[str, Any] = {
        "cpu": args.use_cpu or None,
        "mixed_precision": args.mixed_precision,
        "project_config": project,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "scheduler_ticks": "updates",
        "dataloader_config": DataLoaderConfiguration(**loading),
        "microbatching": "auto" if args.auto_find_batch_size else None,
        "log_with": args.trackers or None,
    }
    if ddp_options := args.list_ddp_options():
        handlers = [*(config.pop("kwargs_handlers", None) or ()), DistributedDataParallelKwargs(**ddp_options)]
        settings["kwargs_handlers"] = handlers
    if args.torch_compile:
        settings["dynamo_plugin"] = TorchDynamoPlugin(args.torch_compile_backend or "inductor", args.torch_compile_mode)
    accumulation_options = config.pop(ACCUMULATION, None)
    if accumulation_options and "gradient_accumulation_steps" not in config:
        steps = settings.pop("gradient_accumulation_steps")
        settings["gradient_accumulation_plugin"] = GradientAccumulationPlugin(num_steps=steps, **accumulation_options)
    # Settings without an argument, such as preemption or the guard against non-finite losses, are passed this way.
    if isinstance(config.get("dataloader_config"), DataLoaderConfiguration):
        # Its default is True, with which evaluations would count repeated rows twice.
        config["dataloader_config"] = replace(config["dataloader_config"], even_batches=False)
    if isinstance(config.get("project_config"), dict):
        config["project_config"] = replace(project, **config["project_config"])
    accelerator = Accelerator(**{**settings, **config})
    num_steps = accelerator.gradient_accumulation_steps
    # A plugin with `num_steps=1` leaves the number to the launcher.
    if accumulation_options and num_steps != args.gradient_accumulation_steps:
        raise ConfigError(
            f"the launcher sets gradient_accumulation_steps to {num_steps}, but the TrainingArguments to "
            f"{args.gradient_accumulation_steps}; set it in one place"
        )
    return accelerator


def set_tf32(is_allowed: bool) -> None:
    """Allow or forbid TF32 for float32 matrix products and convolutions of this process.

    Raises:
        ConfigError: If it is to be allowed, but no GPU of this machine supports TF32.
    """
    if is_allowed and not (torch.cuda.is_available() and torch.cuda.is_tf32_supported()):
        raise ConfigError(
            "tf32=True needs an NVIDIA GPU of compute capability 8.0 or higher (Ampere), and there is none; leave it out"
        )
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


def apply_memory_savings(args: TrainingArguments, accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Enable activation checkpointing and the chunked loss on the model if the arguments request them.

    Raises:
        ConfigError: If `chunk_loss` is requested and the user has already called `headway.chunk_loss` on the model.
        PrepareError: If `chunk_loss` is requested and the model is not a transformers causal language model with the
            standard loss.
        UnsupportedError: If `chunk_loss` is requested and torch is older than 2.13.
    """
    if args.chunk_loss:
        if is_loss_chunked(model):
            raise ConfigError(
                "chunk_loss=True would be undone after the training, but headway.chunk_loss was called on this model already; do "
                "one of the two"
            )
        chunk_loss(model)
    if args.gradient_checkpointing:
        plan = args.get_checkpointing_plan()
        accelerator.checkpoint_activations(model, plan.every, plan.policy, plan.offload, plan.blocks)


def release_model(args: TrainingArguments, accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Restore the model's original class, forward and loss, and free its gradients and other memory used for training."""
    if args.gradient_checkpointing:
        accelerator.keep_activations(model)
    accelerator.free_memory()
    if args.chunk_loss:
        restore_loss(model)
    for parameter in model.parameters():
        parameter.grad = None


# ---------------------------------------------------------------- averaged weights


def create_average(args: TrainingArguments, model: torch.nn.Module) -> ExponentialMovingAverage | None:
    """Create the exponential moving average of the model's weights. Return None if the arguments request none.

    Args:
        args: Training arguments.
        model: Prepared model.

    Raises:
        ConfigError: If `ema_kwargs` has an argument that `ExponentialMovingAverage` does not have, or is given without
            `ema_decay`.
    """
    if args.ema_decay is None:
        if args.ema_kwargs:
            raise ConfigError(f"ema_kwargs={args.ema_kwargs!r} needs ema_decay, such as ema_decay=0.999")
        return None
    try:
        return ExponentialMovingAverage(model, args.ema_decay, **(args.ema_kwargs or {}))
    except TypeError as error:
        raise ConfigError(f"ema_kwargs={args.ema_kwargs!r} does not fit ExponentialMovingAverage: {error}") from error
