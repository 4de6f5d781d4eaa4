"""`LegacyMembers`: members of transformers' Trainer that exist only for scripts written for it."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from headway.core.weights.pretrained_files import copy_files
from headway.errors import ConfigError
from headway.trainer.argument_names import UnknownMembers
from headway.trainer.files import FileMethods
from headway.trainer.schedule_free import set_optimizer_mode


class LegacyMembers(FileMethods, UnknownMembers):
    """Members of transformers' Trainer that scripts use, implemented by the corresponding members of Headway's Trainer.

    Attributes:
        optimizer: Optimizer of the Trainer. None before it is created.
        is_deepspeed_enabled: Always False.
        is_fsdp_enabled: Always False.
        is_model_parallel: Always False.
        place_model_on_device: Always True.
    """

    optimizer: Any
    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False
    place_model_on_device = True

    @property
    def model_wrapped(self) -> torch.nn.Module:
        """The model itself. Headway prepares it in place, so there is no separate wrapper."""
        return self.model

    @property
    def tokenizer(self) -> Any:
        """Processing class (such as a tokenizer), under its older name."""
        return self.processing_class

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return a context manager that enables the run's mixed precision.

        Args:
            cache_enabled: Ignored. Accepted for compatibility with transformers.
        """
        return self.accelerator.autocast()

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context manager in which `training_step` computes the loss.

        It enables the run's mixed precision.
        """
        return self.accelerator.autocast()

    def get_num_trainable_parameters(self) -> int:
        """Return the number of elements in parameters that require gradients."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group.

        Raises:
            ConfigError: If there is no optimizer yet.
        """
        return [float(group["lr"]) for group in self.get_optimizer_group()]

    def get_optimizer_group(self, param: torch.Tensor | None = None) -> Any:
        """Return the optimizer's parameter groups, or the group that contains a given parameter.

        Return None if no group contains the given parameter.

        Args:
            param: Parameter whose group is returned. None (the default): return all groups as a list.

        Raises:
            ConfigError: If there is no optimizer yet.
        """
        if self.optimizer is None:
            raise ConfigError("there is no optimizer before train(); create_optimizer() makes one")
        groups = self.optimizer.param_groups
        if param is None:
            return list(groups)
        return next((group for group in groups if any(param is each for each in group["params"])), None)

    def is_world_process_zero(self) -> bool:
        """Whether this process has global rank 0."""
        return self.accelerator.is_main_process

    def is_local_process_zero(self) -> bool:
        """Whether this process is the first one on its machine."""
        return self.accelerator.is_local_main_process

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> str | None:
        """Upload the model, its config, the processing class, the arguments and a model card to the Hub.

        Every rank must call it. The repository is the arguments' `hub_model_id`, or has the name of `output_dir`.

        Args:
            commit_message: Message of the commit. Default: "End of training".
            blocking: Ignored. Accepted for compatibility with transformers. The call always waits until the upload is
                complete.
            token: Token for the Hub. None (the default): `hub_token` of the arguments.
            revision: Branch to upload to. None (the default): `hub_revision` of the arguments.
            kwargs: Additional entries of the model card, as in `create_model_card`.

        Returns:
            URL of the commit on the main process; None on other processes.
        """
        args = self.args
        set_optimizer_mode(self.optimizer, is_training=False)
        self.create_model_card(**kwargs)
        folder = args.folder
        return self.accelerator.push_to_hub(
            self.model,
            args.hub_model_id or folder.absolute().name,
            self.processing_class,
            _PublishedFiles(folder, args.to_json_string()),
            private=args.hub_private_repo,
            token=token or args.hub_token,
            revision=revision or args.hub_revision,
            commit_message=commit_message or "End of training",
        )

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics from the main process, one per line.

        Args:
            split: Name of the data, such as "train", for the heading.
            metrics: Values by name.
        """
        if self.accelerator.is_main_process:
            print(f"***** {split} metrics *****")
            for name, value in sorted(metrics.items()):
                print(f"  {name} = {value}")


class _PublishedFiles:
    """Writer of the model card and the training arguments of a model that is published.

    It has the method `save_pretrained`, so that it can be published like a model.

    Args:
        folder: Folder that contains the model card.
        arguments: Training arguments as JSON text.
    """

    def __init__(self, folder: Path, arguments: str) -> None:
        self._folder = folder
        self._arguments = arguments

    def save_pretrained(self, folder: Path) -> None:
        """Write the model card and the training arguments to `folder`. The weights are not written here."""
        copy_files(self._folder, folder, ["README.md"])
        (folder / "training_args.json").write_text(self._arguments + "\n")
