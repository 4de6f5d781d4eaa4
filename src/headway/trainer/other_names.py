"""Names of transformers' Trainer: the small ones are served here, the others answered with what to use."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from headway.errors import ConfigError, MemberNotServed
from headway.trainer.arguments import TrainingArguments
from headway.trainer.callbacks import Callbacks
from headway.trainer.collate import Collating, drop_columns
from headway.trainer.data import length_of
from headway.trainer.files import Files
from headway.trainer.optimizer import OPTIMIZERS, optimizer_settings

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
    **{name: NOT_SERVED[name] for name in ("create_accelerator_and_postprocess", "get_batch_samples",
                                           "set_initial_training_values", "push_to_hub", "init_hf_repo")},
}  # fmt: skip
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


class OtherNames(Files):
    """Methods that scripts call, or override where it says so."""

    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False
    place_model_on_device = True
    _model_init: Callable[[], torch.nn.Module] | None

    def __getattr__(self, name: str) -> Any:
        # Asked for only where the object lacks it.
        if name in NOT_SERVED:
            raise MemberNotServed(f"Trainer.{name} is not served: {NOT_SERVED[name]}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # ---------------------------------------------------------------- other names of what there is

    @property
    def callback_handler(self) -> Callbacks:
        """The callbacks."""
        return self.callbacks

    @property
    def model_wrapped(self) -> torch.nn.Module:
        """The model: it is prepared in its place."""
        return self.model

    @property
    def compute_loss_func(self) -> Any:
        """The loss function; None: the model's own loss."""
        return self._loss_of.function

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

    def call_model_init(self, trial: Any = None) -> torch.nn.Module:
        """A new model of `model_init`.

        Raises:
            ConfigError: there is no `model_init`.
        """
        if self._model_init is None:
            raise ConfigError("call_model_init: the Trainer was given a model and no model_init")
        return self._model_init()

    def end(self) -> None:
        """End the run's log and trackers, and the process group."""
        self.accelerator.end_training()

    # ---------------------------------------------------------------- numbers

    def num_examples(self, dataloader: Any) -> int:
        """Rows of a loader's dataset; without a length: batches times their size."""
        rows = length_of(getattr(dataloader, "dataset", None))
        return rows if rows is not None else len(dataloader) * self.args.per_device_eval_batch_size

    def get_num_trainable_parameters(self) -> int:
        """Numbers in parameters that learn."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Of each group of parameters.

        Raises:
            ConfigError: there is no optimizer yet.
        """
        return [float(group["lr"]) for group in self.get_optimizer_group()]

    def _get_learning_rate(self) -> float:
        return self.get_learning_rates()[0]

    def get_optimizer_group(self, param: Any = None) -> Any:
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

    def get_total_train_batch_size(self, args: TrainingArguments | None = None) -> int:
        """Samples of one update, over all processes."""
        return self._train_batch_size * self.args.gradient_accumulation_steps * self.accelerator.num_processes

    def floating_point_ops(self, inputs: Any) -> int:
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

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The dataset without columns that forward does not take."""
        return drop_columns(dataset, self._kept)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """The collator, which drops columns that forward does not take."""
        return Collating(data_collator, self._kept, None)
