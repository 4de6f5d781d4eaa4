"""Optimizers that `TrainingArguments(optim=...)` selects by name, of torch, torchao, bitsandbytes and schedulefree.

Names and settings are those of transformers, except that "adafactor" is torch's.
"""

import inspect
from typing import Any, NamedTuple

import torch

from headway.common.optional import require
from headway.errors import ConfigError
from headway.trainer.arguments import TrainingArguments


class NamedOptimizer(NamedTuple):
    """Optimizer that `TrainingArguments(optim=...)` can select by name.

    Attributes:
        module: Dotted name of the module that contains the class.
        class_name: Name of the class.
        settings: Keyword arguments of the class that belong to the name, such as `{"optim_bits": 8}`.
    """

    module: str
    class_name: str
    settings: dict[str, Any]

    def load_class(self) -> type[torch.optim.Optimizer]:
        """Import and return the optimizer's class.

        Raises:
            OptionalDependencyMissing: If the package is not installed.
        """
        package = self.module.partition(".")[0]
        loaded: type[torch.optim.Optimizer] = getattr(
            require(self.module, f"{self.class_name} is an optimizer of", package), self.class_name
        )
        return loaded


_TORCH, _TORCHAO, _BITSANDBYTES = "torch.optim", "torchao.optim", "bitsandbytes.optim"

OPTIMIZERS = {
    "adamw_torch_fused": NamedOptimizer(_TORCH, "AdamW", {"fused": True}),
    "adamw_torch": NamedOptimizer(_TORCH, "AdamW", {}),
    "adam": NamedOptimizer(_TORCH, "Adam", {}),
    "nadamw": NamedOptimizer(_TORCH, "NAdam", {"decoupled_weight_decay": True}),
    "radam": NamedOptimizer(_TORCH, "RAdam", {"decoupled_weight_decay": True}),
    "adafactor": NamedOptimizer(_TORCH, "Adafactor", {}),
    "sgd": NamedOptimizer(_TORCH, "SGD", {}),
    "adagrad": NamedOptimizer(_TORCH, "Adagrad", {}),
    "rmsprop": NamedOptimizer(_TORCH, "RMSprop", {}),
    "adamw_torch_8bit": NamedOptimizer(_TORCHAO, "AdamW8bit", {"block_size": 256}),
    "adamw_torch_4bit": NamedOptimizer(_TORCHAO, "AdamW4bit", {"block_size": 256}),
    "adamw_8bit": NamedOptimizer(_BITSANDBYTES, "AdamW", {"optim_bits": 8}),
    "adamw_bnb_8bit": NamedOptimizer(_BITSANDBYTES, "AdamW", {"optim_bits": 8}),
    "paged_adamw_8bit": NamedOptimizer(_BITSANDBYTES, "AdamW", {"optim_bits": 8, "is_paged": True}),
    "paged_adamw_32bit": NamedOptimizer(_BITSANDBYTES, "AdamW", {"optim_bits": 32, "is_paged": True}),
    "lion_8bit": NamedOptimizer(_BITSANDBYTES, "Lion", {"optim_bits": 8}),
    "lion_32bit": NamedOptimizer(_BITSANDBYTES, "Lion", {"optim_bits": 32}),
    "paged_lion_8bit": NamedOptimizer(_BITSANDBYTES, "Lion", {"optim_bits": 8, "is_paged": True}),
    "paged_lion_32bit": NamedOptimizer(_BITSANDBYTES, "Lion", {"optim_bits": 32, "is_paged": True}),
    "rmsprop_bnb": NamedOptimizer(_BITSANDBYTES, "RMSprop", {"optim_bits": 32}),
    "rmsprop_bnb_32bit": NamedOptimizer(_BITSANDBYTES, "RMSprop", {"optim_bits": 32}),
    "rmsprop_bnb_8bit": NamedOptimizer(_BITSANDBYTES, "RMSprop", {"optim_bits": 8}),
    "schedule_free_adamw": NamedOptimizer("schedulefree", "AdamWScheduleFree", {}),
    "schedule_free_radam": NamedOptimizer("schedulefree", "RAdamScheduleFree", {}),
    "schedule_free_sgd": NamedOptimizer("schedulefree", "SGDScheduleFree", {}),
}
"""Optimizers by name."""


def list_hyperparameters(optimizer_class: type[torch.optim.Optimizer], args: TrainingArguments) -> dict[str, Any]:
    """Return the keyword arguments of an optimizer that have arguments of their own, such as `adam_beta1`.

    Args:
        optimizer_class: Class of the optimizer. It gets the betas if it has a parameter "betas", and then the epsilon if
            it has a parameter "eps". A schedule-free optimizer gets the length of the warm-up.
        args: Training arguments.

    Raises:
        ConfigError: If a schedule-free optimizer warms up, and the length is a fraction of all updates.
    """
    known_names = inspect.signature(optimizer_class).parameters
    found: dict[str, Any] = {"lr": args.learning_rate}
    if "betas" in known_names:
        found["betas"] = (args.adam_beta1, args.adam_beta2)
        if "eps" in known_names:
            found["eps"] = args.adam_epsilon
    if "warmup_steps" in known_names and args.warmup_steps:
        if args.warmup_steps < 1:
            raise ConfigError(
                f"optim={args.optim!r} warms up by itself and needs the number of updates, but warmup_steps={args.warmup_steps:g} is "
                "a fraction of all updates; give a whole number"
            )
        found["warmup_steps"] = int(args.warmup_steps)
    return found


def keep_embeddings_in_32_bits(optimizer: Any, model: torch.nn.Module) -> None:
    """Make an 8-bit optimizer of bitsandbytes store the state of embeddings in 32 bits, as transformers does.

    bitsandbytes recommends it, because the gradients of embeddings differ widely between tokens. bitsandbytes keeps
    options by the position of a parameter in the optimizer, for all optimizers of the process. `forget_options` removes
    them.

    Args:
        optimizer: Optimizer of bitsandbytes.
        model: Model with the parameters.
    """
    embedding_ids = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    forget_options(optimizer)
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in embedding_ids:
                optimizer.mng.index2config[(group_index, index)] = {"optim_bits": 32}


def forget_options(optimizer: Any) -> None:
    """Remove the options that `keep_embeddings_in_32_bits` has set, which would apply to later optimizers, too.

    Args:
        optimizer: Optimizer, not prepared. Nothing is done if it is None, or not one of bitsandbytes.
    """
    if not hasattr(optimizer, "mng"):
        return
    for group_index, group in enumerate(optimizer.param_groups):
        for index in range(len(group["params"])):
            optimizer.mng.index2config.pop((group_index, index), None)
