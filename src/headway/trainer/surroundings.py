"""What scripts ask the training arguments about where they run; thin, since the Accelerator knows more."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headway import env
from headway.errors import MemberNotServed
from headway.ops.collectives import Collectives
from headway.ops.ranks import RankAware
from headway.runtime import process

_GIVE = "give the values to TrainingArguments(...) itself"
_NOT_SERVED = {
    **dict.fromkeys(("set_dataloader", "set_evaluate", "set_logging", "set_lr_scheduler", "set_optimizer", "set_save", "set_testing",
                     "set_training"), _GIVE),
    "set_push_to_hub": "nothing is uploaded; call trainer.save_model(folder) and upload that",
    "parallel_mode": "models are replicated on world_size processes",
    "place_model_on_device": "the Trainer moves the model to its device",
    "default_optim": "the default is 'adamw_torch_fused'",
    "ddp_timeout_delta": "use `headway launch --patience`",
    "is_torch_greater_or_equal_than_2_8": "ask torch.__version__",
}  # fmt: skip


class Surroundings:
    """Names of transformers' TrainingArguments that are not arguments."""

    per_device_train_batch_size: int | str
    per_device_eval_batch_size: int
    use_cpu: bool

    @property
    def device(self) -> torch.device:
        """This process's; the process's runtime starts where it has not yet."""
        return process.start(cpu=self.use_cpu).device

    @property
    def n_gpu(self) -> int:
        """GPUs that this process computes on: 1, or 0 on a CPU."""
        return int(self.device.type != "cpu")

    @property
    def world_size(self) -> int:
        """Processes."""
        return env.world_size()

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return env.rank()

    @property
    def local_process_index(self) -> int:
        """Its rank on its machine."""
        return env.local_rank()

    @property
    def local_rank(self) -> int:
        """Its rank on its machine; -1 where there is one process, as scripts ask for `local_rank != -1`."""
        return env.local_rank() if env.world_size() > 1 else -1

    @property
    def train_batch_size(self) -> int | str:
        """Samples of a micro-batch on this process."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Likewise in evaluations."""
        return self.per_device_eval_batch_size

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Updates of linear warm-up."""
        return self.num_warmup_updates(num_training_steps)

    def num_warmup_updates(self, num_updates: int) -> int:
        """The same by Headway's name."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """All arguments, as JSON has them."""
        raise NotImplementedError

    def to_sanitized_dict(self) -> dict[str, Any]:
        """All arguments as numbers, truth values and texts, for trackers."""
        return {name: value if isinstance(value, bool | int | float | str) else str(value)
                for name, value in self.to_dict().items()}  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        # Asked for only where the object lacks it.
        if name in _NOT_SERVED:
            raise MemberNotServed(f"TrainingArguments.{name} is not served: {_NOT_SERVED[name]}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def should_log(self) -> bool:
        """Does this process speak? Rank 0 does."""
        return env.rank() == 0

    @property
    def should_save(self) -> bool:
        """Does this process write what is written once? Rank 0 does; checkpoints are written by all."""
        return env.rank() == 0

    def get_process_log_level(self) -> int:
        """A level for `logging`: informative on rank 0, warnings on others."""
        return 20 if env.rank() == 0 else 30

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """The first process runs the block before all others.

        Args:
            local: of each machine; False: of all.
            desc: accepted for the name's sake.
        """
        runtime = process.start(cpu=self.use_cpu)
        ranks = RankAware(runtime, Collectives(runtime))
        with ranks.local_main_process_first() if local else ranks.main_process_first():
            yield
