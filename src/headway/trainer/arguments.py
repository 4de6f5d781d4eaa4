"""The arguments of a training: one typed dataclass, checked when it is made."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headway.common import env
from headway.common.object_path import to_path
from headway.config.engines import ActivationCheckpointing
from headway.errors import ConfigError
from headway.runtime import process
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.ranks import RankAware
from headway.trainer.argument_checks import UnknownMembers, accepting_other_names, checked

CHOICES: dict[str, tuple[Any, ...]] = {
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "logging_strategy": ("no", "steps", "epoch"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
    "log_level": (None, "passive", "debug", "detail", "info", "warning", "error", "critical"),
    "optim": ("adamw_torch_fused", "adamw_torch", "adam", "nadamw", "radam", "adafactor", "sgd", "adagrad", "rmsprop"),
    "lr_scheduler_type": tuple(
        """
        linear cosine cosine_with_restarts cosine_with_min_lr polynomial constant constant_with_warmup inverse_sqrt
        warmup_stable_decay reduce_lr_on_plateau
        """.split()  # noqa: SIM905
    ),
}
"""The words that an argument may be; `optimizer.py` knows what those of the last two mean."""


@accepting_other_names
@dataclass
class TrainingArguments(UnknownMembers):
    """How a `Trainer` trains. A name that is not known here is an error that says the nearest one.

    Attributes:
        output_dir: where checkpoints and the run's log go, a folder or a URL (`s3://bucket/run`); None: "trainer_output".
        per_device_train_batch_size: samples of a micro-batch on each process; "largest": search for the most that fits.
        per_device_eval_batch_size: likewise for evaluation.
        gradient_accumulation_steps: micro-batches per update.
        num_train_epochs: passes over the data; may be a fraction.
        max_steps: updates; above 0 it decides instead of the epochs; -1 and 0: the epochs do.
        learning_rate: the highest one.
        lr_scheduler_type: the schedule's name, one of `headway.trainer.optimizer.SCHEDULES`.
        lr_scheduler_kwargs: further settings of it.
        warmup_steps: updates of linear warm-up; below 1: that share of all updates.
        warmup_ratio: the same share by its old name.
        weight_decay: of weights; biases and what belongs to norms is spared.
        adam_beta1, adam_beta2, adam_epsilon: of Adam's kind.
        optim: the optimizer's name, one of `headway.trainer.optimizer.OPTIMIZERS`.
        optim_args: further settings of it, as "name=value, name=value".
        max_grad_norm: clip to this global norm; 0: do not clip.
        bf16, fp16: mixed precision; neither: as launched.
        label_smoothing_factor: share of the target that is spread over all classes.
        gradient_checkpointing: compute activations again in backward instead of keeping them.
        gradient_checkpointing_kwargs: fields of `headway.ActivationCheckpointing`.
        auto_find_batch_size: where memory runs out, run the batch again in smaller pieces; nothing starts over.
        logging_strategy: "no", "steps" or "epoch"; logging_steps: updates between two (below 1: a share of all).
        logging_first_step: log the first update too.
        logging_dir: where the run's log goes; None: `output_dir`.
        run_name: the run's name in trackers; None: the name of `output_dir`.
        report_to: trackers beside the JSON lines: "none", "all", a name or several.
        log_level: of Headway's messages; None and "passive" leave it.
        disable_tqdm: no bar; printed lines instead.
        eval_strategy: "no", "steps" or "epoch"; eval_steps: updates between two; None: as `logging_steps`.
        eval_delay: updates (epochs, with "epoch") before the first one.
        eval_on_start: evaluate before the first update.
        eval_sanity_check: try the evaluation on a few rows before the first update, so that its mistakes show then.
        eval_accumulation_steps: accepted for the name's sake: predictions go to host memory batch by batch.
        batch_eval_metrics: call `compute_metrics(prediction, compute_result)` for each batch.
        prediction_loss_only: evaluate the loss alone.
        save_strategy: "no", "steps", "epoch", or "best": whenever the metric is the best so far.
        save_steps: updates between two checkpoints; the last update is saved in any case.
        save_total_limit: how many checkpoints stay, the best one apart; None: all.
        load_best_model_at_end: the model ends with the weights of the best evaluation.
        metric_for_best_model: which metric that is, with or without "eval_"; None: the loss.
        greater_is_better: None: unless the metric's name ends in "loss".
        seed: of everything random; data_seed: of the data's order; None: `seed`.
        dataloader_drop_last, dataloader_num_workers, dataloader_pin_memory, dataloader_persistent_workers,
            dataloader_prefetch_factor: as torch's DataLoader takes them.
        remove_unused_columns: leave out what the model's forward does not take.
        label_names: the batch's keys that are labels; None: ["labels"], or what forward calls so.
        train_sampling_strategy: "random", "sequential" or "group_by_length" (rows of like length share a batch).
        group_by_length: the same by its old name.
        length_column_name: the column of lengths; where there is none, `input_ids` are measured.
        use_cpu: compute on the CPU.
        do_train, do_eval, do_predict: for scripts that ask for them; the Trainer does not.
        resume_from_checkpoint: as `Trainer.train` takes it.
        ignore_data_skip: the data are not those of the checkpoint: a resumed run begins its epoch at the first batch.
        skip_memory_metrics: False: results carry the peak of each phase.
        push_to_hub: True: `Trainer.save_model` also uploads what it writes. Checkpoints are not uploaded.
        hub_model_id: the repository; None: the name of `output_dir`. hub_token, hub_private_repo, hub_revision: as for
            `Accelerator.push_to_hub`.
        accelerator_config: further arguments of `headway.Accelerator`, by name; a dict as "project_config" changes the fields that it
            names, such as `keep_in_memory`.

    Raises:
        ConfigError: a name or value that is not allowed, or two that contradict each other.
    """

    output_dir: str | Path | None = None
    per_device_train_batch_size: int | str = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: float = 0
    warmup_ratio: float | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    max_grad_norm: float | None = 1.0
    bf16: bool = False
    fp16: bool = False
    label_smoothing_factor: float = 0.0
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    auto_find_batch_size: bool = False
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    logging_dir: str | Path | None = None
    run_name: str | None = None
    report_to: None | str | list[str] = "none"  # noqa: RUF036  (the order that HfArgumentParser understands)
    log_level: str | None = None
    disable_tqdm: bool | None = None
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    eval_sanity_check: bool = True
    eval_accumulation_steps: int | None = None
    batch_eval_metrics: bool = False
    prediction_loss_only: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    seed: int = 42
    data_seed: int | None = None
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    remove_unused_columns: bool = True
    label_names: list[str] | None = None
    train_sampling_strategy: str = "random"
    group_by_length: bool = False
    length_column_name: str = "length"
    use_cpu: bool = False
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False
    resume_from_checkpoint: str | Path | None = None  # True and False, too; HfArgumentParser knows no such union
    ignore_data_skip: bool = False
    skip_memory_metrics: bool = True
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_revision: str | None = None
    accelerator_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.output_dir = "trainer_output" if self.output_dir is None else self.output_dir
        for name in CHOICES.keys() - {"log_level"}:
            value = getattr(self, name)
            # Enumerations of other libraries carry the word as their value.
            setattr(self, name, str(getattr(value, "value", value)).lower())
        asked = str(self.resume_from_checkpoint).lower()
        if asked in ("true", "false"):  # a command line gives it as text, or as a path
            object.__setattr__(self, "resume_from_checkpoint", asked == "true")
        self.gradient_checkpointing = False if self.gradient_checkpointing is None else self.gradient_checkpointing
        for name, value in checked(self, TrainingArguments).items():
            setattr(self, name, value)
        self._take_old_forms()
        self._check_choices()
        self._check_numbers()
        self._check_contradictions()
        if self.metric_for_best_model is None and (
            self.load_best_model_at_end
            or self.save_strategy == "best"
            or self.lr_scheduler_type == "reduce_lr_on_plateau"
        ):
            self.metric_for_best_model = "loss"
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    def _take_old_forms(self) -> None:
        if self.group_by_length:
            if self.train_sampling_strategy not in ("random", "group_by_length"):
                raise ConfigError(
                    f"group_by_length=True contradicts train_sampling_strategy={self.train_sampling_strategy!r}; give one"
                )
            self.train_sampling_strategy = "group_by_length"
        if self.warmup_ratio is not None:
            if self.warmup_steps:
                raise ConfigError("warmup_ratio and warmup_steps are two lengths of one warm-up; give one")
            self.warmup_steps, self.warmup_ratio = self.warmup_ratio, None

    def _check_choices(self) -> None:
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                raise ConfigError(f"{name}={getattr(self, name)!r}; allowed: {', '.join(map(str, words))}")

    def _check_numbers(self) -> None:
        size = self.per_device_train_batch_size
        if size != "largest" and (isinstance(size, str | bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(
                f"per_device_train_batch_size={size!r}; give samples per process, 1 or more, or 'largest'"
            )
        for name in ("logging_steps", "eval_steps", "save_steps"):
            value = getattr(self, name)
            if value is not None and (not value > 0 or (value >= 1 and value != int(value))):
                raise ConfigError(f"{name}={value!r}; give whole updates, 1 or more, or a share of all, below 1")

    def _check_contradictions(self) -> None:
        if self.bf16 and self.fp16:
            raise ConfigError("bf16=True and fp16=True are two precisions; give one")
        if self.auto_find_batch_size and self.per_device_train_batch_size == "largest":
            raise ConfigError(
                "auto_find_batch_size=True and per_device_train_batch_size='largest' both see to memory: the first cuts batches of "
                "the size you give, the second chooses the size; give one"
            )
        if not self.dataloader_num_workers and (
            self.dataloader_persistent_workers or self.dataloader_prefetch_factor is not None
        ):
            raise ConfigError(
                "dataloader_persistent_workers and dataloader_prefetch_factor are about worker processes, and "
                "dataloader_num_workers is 0; set that, or leave them out"
            )
        if self.load_best_model_at_end or self.save_strategy == "best":
            self._check_best()
        if self.lr_scheduler_type == "reduce_lr_on_plateau" and self.eval_strategy == "no":
            raise ConfigError(
                "lr_scheduler_type='reduce_lr_on_plateau' goes by evaluations, and eval_strategy is 'no'; make it 'steps' or 'epoch'"
            )
        if self.gradient_checkpointing:
            self.checkpointing_plan()

    def _check_best(self) -> None:
        if self.eval_strategy == "no":
            raise ConfigError(
                "the best model is found by evaluations, and eval_strategy is 'no'; set it to 'steps' or 'epoch'"
            )
        if self.save_strategy == "best":
            return
        if self.save_strategy != self.eval_strategy:
            raise ConfigError(
                f"load_best_model_at_end needs a checkpoint of each evaluation, but eval_strategy={self.eval_strategy!r} and "
                f"save_strategy={self.save_strategy!r}; make them equal, or use save_strategy='best'"
            )
        every = self.logging_steps if self.eval_steps is None else self.eval_steps
        ratio = self.save_steps / every
        if self.eval_strategy == "steps" and (abs(ratio - round(ratio)) > 1e-9 or ratio < 1 - 1e-9):
            raise ConfigError(
                f"load_best_model_at_end needs an evaluation at each checkpoint, but save_steps={self.save_steps:g} is not a "
                f"multiple of eval_steps={every:g}; make it one, or use save_strategy='best'"
            )

    # ---------------------------------------------------------------- what follows from them

    @property
    def wanted_metric(self) -> str | None:
        """`metric_for_best_model` as results call it."""
        name = self.metric_for_best_model
        return name if name is None or name.startswith("eval_") else f"eval_{name}"

    @property
    def mixed_precision(self) -> str | None:
        """As the Accelerator takes it."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else None

    @property
    def trackers(self) -> list[str]:
        """`report_to` as a list; empty for "none"."""
        given = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ())
        return [] if given == ["none"] else given

    def checkpointing_plan(self) -> ActivationCheckpointing:
        """`gradient_checkpointing_kwargs` as `Accelerator.checkpoint_activations` takes them.

        Raises:
            ConfigError: a name that it does not know.
        """
        # Never reentrant here; other libraries' scripts say so themselves.
        given = {k: v for k, v in (self.gradient_checkpointing_kwargs or {}).items() if k != "use_reentrant"}
        if "every_n_layers" in given:
            given["every"] = given.pop("every_n_layers")
        allowed = ("every", "policy", "offload", "blocks")
        unknown = sorted(set(given) - set(allowed))
        if unknown:
            raise ConfigError(
                f"gradient_checkpointing_kwargs holds {', '.join(unknown)}; allowed: {', '.join(allowed)}"
            )
        return ActivationCheckpointing(**given)

    def interval(self, name: str, num_updates: int) -> int:
        """`logging_steps`, `eval_steps` or `save_steps` in updates, of a training of `num_updates`."""
        value = self.logging_steps if name == "eval_steps" and self.eval_steps is None else getattr(self, name)
        return int(value) if value >= 1 else max(1, math.ceil(value * num_updates))

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """`warmup_steps` in updates."""
        return int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(self.warmup_steps * num_training_steps)

    def to_dict(self) -> dict[str, Any]:
        """All arguments, as JSON, without the token."""
        found = asdict(self) if self.accelerator_config is None else asdict(_without_objects(self))
        found["hub_token"] = found["hub_token"] and "<HUB_TOKEN>"  # this goes to logs and files
        return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}

    def to_sanitized_dict(self) -> dict[str, bool | int | float | str]:
        """All arguments as numbers, truth values and texts, for trackers."""
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in self.to_dict().items()
        }

    def to_json_string(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    # ---------------------------------------------------------------- this process

    @property
    def folder(self) -> Path:
        """`output_dir` as a path, also where it is a URL."""
        return to_path(self.output_dir or ".")

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

    @property
    def should_save(self) -> bool:
        """Does this process write what is written once, and speak? Rank 0 does; checkpoints are written by all."""
        return env.rank() == 0

    should_log = should_save

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


def _without_objects(arguments: TrainingArguments) -> TrainingArguments:
    """A copy whose `accelerator_config` holds texts: handlers may be callables, which cannot be copied."""
    made = object.__new__(type(arguments))
    made.__dict__.update(vars(arguments))
    made.accelerator_config = {name: repr(value) for name, value in (arguments.accelerator_config or {}).items()}
    return made
