"""Small names of transformers' Trainer, served here; those that are not are answered with what to use."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from headway.accelerator import Accelerator
from headway.errors import AttributeNotServed, ConfigError
from headway.trainer.arguments import TrainingArguments
from headway.trainer.builder import Intake
from headway.trainer.callbacks import Callbacks
from headway.trainer.collate import Collate, Collating, drop_columns
from headway.trainer.data import length_of
from headway.trainer.given import NOT_SERVED
from headway.trainer.loss import LossFunction
from headway.trainer.optimizer import OPTIMIZERS, optimizer_settings


class Named(Protocol):
    """What the names below are about: the Trainer's public attributes."""

    args: TrainingArguments
    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: Any
    processing_class: Any
    _intake: Intake
    _train_batch_size: int

    @property
    def callbacks(self) -> Callbacks:
        """Who is told of events."""

    def get_learning_rates(self) -> list[float]:
        """Of each group of parameters."""

    def get_optimizer_group(self, param: torch.Tensor | None = None) -> Any:
        """The groups, or that of a parameter."""


class OtherNames:
    """Names that scripts ask of transformers' Trainer, each by what the Trainer has itself."""

    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False
    place_model_on_device = True

    def __getattr__(self, name: str) -> Any:
        # Asked for only where the object lacks it.
        if name in NOT_SERVED:
            raise AttributeNotServed(f"Trainer.{name} is not served: {NOT_SERVED[name]}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # ---------------------------------------------------------------- other names of what there is

    @property
    def callback_handler(self: Named) -> Callbacks:
        """The callbacks."""
        return self.callbacks

    @property
    def model_wrapped(self: Named) -> torch.nn.Module:
        """The model: it is prepared in its place."""
        return self.model

    @property
    def compute_loss_func(self: Named) -> LossFunction | None:
        """The loss function; None: the model's own loss."""
        return self._intake.loss_of.function

    @property
    def tokenizer(self: Named) -> Any:
        """The processing class by its old name."""
        return self.processing_class

    def autocast_smart_context_manager(self: Named, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """The run's mixed precision, for a block."""
        return self.accelerator.autocast()

    def compute_loss_context_manager(self: Named) -> AbstractContextManager[Any]:
        """The same: what `training_step` computes the loss in."""
        return self.accelerator.autocast()

    def end(self: Named) -> None:
        """End the run's log and trackers, and the process group."""
        self.accelerator.end_training()

    # ---------------------------------------------------------------- numbers

    def num_examples(self: Named, dataloader: DataLoader[Any]) -> int:
        """Rows of a loader's dataset; without a length: batches times their size."""
        rows = length_of(getattr(dataloader, "dataset", None))
        return rows if rows is not None else len(dataloader) * self.args.per_device_eval_batch_size

    def get_num_trainable_parameters(self: Named) -> int:
        """Numbers in parameters that learn."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self: Named) -> list[float]:
        """Of each group of parameters.

        Raises:
            ConfigError: there is no optimizer yet.
        """
        return [float(group["lr"]) for group in self.get_optimizer_group()]

    def _get_learning_rate(self: Named) -> float:
        return self.get_learning_rates()[0]

    def get_optimizer_group(self: Named, param: torch.Tensor | None = None) -> Any:
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

    def get_total_train_batch_size(self: Named, args: TrainingArguments | None = None) -> int:
        """Samples of one update, over all processes."""
        return (
            self._train_batch_size * self.args.gradient_accumulation_steps * self.accelerator.strategy.data_shard.count
        )

    def floating_point_ops(self: Named, inputs: Any) -> int:
        """As the model itself counts; 0 where it does not."""
        count = getattr(self.model, "floating_point_ops", None)
        return int(count(inputs)) if callable(count) else 0

    def get_tp_size(self) -> int:
        """Processes that share a tensor."""
        return 1

    def get_cp_size(self) -> int:
        """Processes that share a context."""
        return 1

    def get_sp_size(self) -> int:
        """Processes that share a sequence."""
        return 1

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """The optimizer's class and settings, by the arguments."""
        return OPTIMIZERS[args.optim][0], optimizer_settings(args)

    # ---------------------------------------------------------------- what overrides call

    def _remove_unused_columns(self: Named, dataset: Any, description: str | None = None) -> Any:
        """The dataset without columns that forward does not take."""
        return drop_columns(dataset, self._intake.kept)

    def _get_collator_with_removed_columns(
        self: Named, data_collator: Collate, description: str | None = None
    ) -> Collating:
        """The collator, which drops columns that forward does not take."""
        return Collating(data_collator, self._intake.kept, None)
