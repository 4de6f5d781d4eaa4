"""Arguments of a training run, in one typed dataclass that is checked when it is created."""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from headway.common import env
from headway.common.object_path import expand_home, to_path
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.config.torch_kwargs import DistributedDataParallelKwargs
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.ranks import RankAware
from headway.errors import ConfigError
from headway.trainer.accelerator_settings import pop_accumulation_steps, read_accelerator_config, splits_batches
from headway.trainer.argument_checks import check_values
from headway.trainer.argument_names import UnknownMembers, accept_other_names

CHOICES: dict[str, tuple[Any, ...]] = {
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "logging_strategy": ("no", "steps", "epoch"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
    "packing_strategy": ("best_fit", "in_order", "split"),
    "packing_long_samples": ("error", "split", "truncate"),
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
    "log_level": (None, "passive", "debug", "detail", "info", "warning", "error", "critical"),
    "optim": tuple(
        """
        adamw_torch_fused adamw_torch adam nadamw radam adafactor sgd adagrad rmsprop adamw_torch_8bit adamw_torch_4bit
        adamw_8bit adamw_bnb_8bit paged_adamw_8bit paged_adamw_32bit lion_8bit lion_32bit paged_lion_8bit paged_lion_32bit
        rmsprop_bnb rmsprop_bnb_32bit rmsprop_bnb_8bit schedule_free_adamw schedule_free_radam schedule_free_sgd
        """.split()  # noqa: SIM905
    ),
    "lr_scheduler_type": tuple(
        """
        linear cosine cosine_with_restarts cosine_with_min_lr polynomial constant constant_with_warmup inverse_sqrt
        warmup_stable_decay reduce_lr_on_plateau
        """.split()  # noqa: SIM905
    ),
}
"""Allowed values by argument name.

`optimizer_names.py` implements those of `optim`, and `schedules.py` those of `lr_scheduler_type`.
"""


@accept_other_names
@dataclass
class TrainingArguments(UnknownMembers):
    """Arguments of a `Trainer`, with transformers' names. Give equal values on all ranks.

    An update is one step of the optimizer, on the samples of all ranks and all its micro-batches. Some other names are
    accepted, too, such as `lr` and `batch_size`. Any other unknown name raises an error with advice, such as a similar
    name. Values are checked when the object is created.

    Example::

        args = TrainingArguments("runs/first", per_device_train_batch_size=16, num_train_epochs=1, bf16=True)

    Attributes:
        output_dir: Folder or URL (`s3://bucket/run`) for checkpoints and the run's log. None (the default):
            "trainer_output".
        per_device_train_batch_size: Samples per micro-batch on each process. "largest": search for the largest number
            that fits. Default: 8.
        per_device_eval_batch_size: Samples per batch of an evaluation on each process. Default: 8.
        gradient_accumulation_steps: Micro-batches per update. Default: 1.
        num_train_epochs: Passes over the data; may be a fraction. Default: 3.0.
        max_steps: Number of updates. If positive, it overrides `num_train_epochs`. Default: -1, not set.
        learning_rate: Peak learning rate. Default: 5e-5.
        lr_scheduler_type: Name of the learning-rate schedule: "linear", "cosine", "cosine_with_restarts",
            "cosine_with_min_lr", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
            "warmup_stable_decay" or "reduce_lr_on_plateau". Default: "linear".
        lr_scheduler_kwargs: Additional arguments of the schedule, by name. None (the default): none.
        warmup_steps: Updates of linear warm-up. Below 1: that fraction of all updates. Default: 0.
        warmup_ratio: Older form of a `warmup_steps` below 1. Both together are an error. None (the default): not given.
        weight_decay: Coefficient of weight decay. Biases and parameters of norms are exempt. Default: 0.0.
        adam_beta1: First beta of Adam-type optimizers. Default: 0.9.
        adam_beta2: Second beta of Adam-type optimizers. Default: 0.999.
        adam_epsilon: Epsilon of Adam-type optimizers. Default: 1e-8.
        optim: Name of an optimizer of torch ("adamw_torch_fused", "adamw_torch", "adam", "nadamw", "radam", "adafactor",
            "sgd", "adagrad", "rmsprop"), torchao ("adamw_torch_8bit", "adamw_torch_4bit"), bitsandbytes ("adamw_8bit",
            "paged_adamw_8bit", "lion_8bit", and other names of transformers) or schedulefree ("schedule_free_adamw",
            "schedule_free_radam", "schedule_free_sgd"). For any other, pass `optimizers` to the Trainer. Default:
            "adamw_torch_fused".
        optim_args: Additional arguments of the optimizer, as "name=value, name=value". None (the default): none.
        max_grad_norm: Global norm to which gradients are clipped. 0 or None: do not clip. Default: 1.0.
        bf16: Whether to use bf16 mixed precision. If neither this nor `fp16` is set, the launcher's setting applies.
            Default: False.
        fp16: Whether to use fp16 mixed precision. Default: False.
        tf32: Whether matrix products and convolutions in float32 may use TF32 on NVIDIA GPUs, which is faster and keeps 10
            bits of each mantissa. None (the default): torch's current setting.
        ema_decay: Decay of an exponential moving average of the weights. Evaluations use the averages. After training,
            the model's weights are the averages. None (the default): no average.
        ema_kwargs: Additional arguments of `headway.ExponentialMovingAverage`, such as `{"update_after": 100}`. None
            (the default): none.
        label_smoothing_factor: Fraction of each target's probability that is spread evenly over all classes. Default:
            0.0.
        gradient_checkpointing: Whether to recompute activations in backward instead of storing them. Default: False.
        gradient_checkpointing_kwargs: Fields of `headway.ActivationCheckpointing`, by name. None (the default): "recompute" for all
            blocks.
        chunk_loss: Whether a transformers causal language model computes its training loss in chunks of tokens, as
            `headway.chunk_loss` does, so that the logits of a batch never exist all at once. Default: False.
        neftune_noise_alpha: Strength of uniform noise on the token embeddings in training (NEFTune), such as 5. The model
            needs a method `get_input_embeddings()`. None (the default) or 0: no noise.
        torch_compile: Whether to compile the model with `torch.compile`. Default: False, or True if one of the next two
            arguments is given.
        torch_compile_backend: Backend of torch.compile. None (the default): "inductor".
        torch_compile_mode: Mode of torch.compile, such as "reduce-overhead". None (the default): torch's default.
        use_cache: Whether transformers' models keep keys and values in each forward. Packed documents then attend to
            each other. Default: False.
        auto_find_batch_size: Whether to repeat a batch in smaller micro-batches if memory runs out. The training does
            not restart. Default: False.
        logging_strategy: When to log: "no", "steps" (every `logging_steps` updates) or "epoch". Default: "steps".
        logging_steps: Updates between two log entries. Below 1: that fraction of all updates. Default: 500.
        logging_first_step: Whether to log the first update too. Default: False.
        logging_dir: Folder of the run's log. None (the default): `output_dir`.
        run_name: Name of the run in W&B, Trackio, MLflow, SwanLab and ClearML. With `logging_dir`, it is also the name
            of the log's subfolder. None (the default): the name of `output_dir`.
        include_num_input_tokens_seen: Tokens to count in `state.num_input_tokens_seen` and in the log, over all ranks and
            resumes: "all" (also True), "non_padding" or "no" (also False). They are those of the model's
            `main_input_name`. Default: "no".
        report_to: Trackers in addition to the JSON lines of the run's log: "none", "all", a name such as "wandb", or a
            list of names. Default: "none".
        log_level: Level of Headway's messages: "debug", "detail", "info", "warning", "error" or "critical". None and
            "passive" do not change it. Default: None.
        disable_tqdm: Whether to print lines instead of a progress bar. None (the default): False.
        eval_strategy: When to evaluate: "no", "steps" (every `eval_steps` updates) or "epoch". With "steps", the last
            update is evaluated, too. Default: "no".
        eval_steps: Updates between two evaluations. Below 1: that fraction of all updates. None (the default):
            `logging_steps`.
        eval_delay: Updates (epochs if `eval_strategy="epoch"`) before the first evaluation. Default: 0.
        eval_on_start: Whether to evaluate before the first update. Default: False.
        eval_sanity_check: Whether to try the evaluation on a few rows before the first update, so that errors in it
            occur early. Default: True.
        eval_accumulation_steps: Ignored. Accepted for compatibility with transformers. Predictions are moved to host
            memory batch by batch.
        batch_eval_metrics: Whether to call `compute_metrics(prediction, compute_result)` for each batch. Default:
            False.
        prediction_loss_only: Whether to evaluate only the loss. Default: False.
        predict_with_generate: Whether predictions are the tokens that `model.generate` generates, as in transformers'
            Seq2SeqTrainer. Default: False.
        generation_max_length: `max_length` of `generate`. None (the default): that of the model's `generation_config`.
        generation_num_beams: `num_beams` of `generate`. None (the default): that of the model's `generation_config`.
        generation_config: `GenerationConfig` that replaces the model's: an object, or the path or Hub ID of one. None
            (the default): the model's own.
        save_strategy: When to save a checkpoint: "no", "steps" (every `save_steps` updates), "epoch", or "best"
            (whenever the metric is the best so far). Default: "steps".
        save_steps: Updates between two checkpoints. Below 1: that fraction of all updates. With
            `save_strategy="steps"`, the last update is saved, too. Default: 500.
        save_total_limit: Number of checkpoints to keep: the newest ones, and the `num_best` best ones, if
            there is a metric for the best model. The newest one and the best ones are kept even if that is more. None
            (the default): all.
        num_best: Number of best checkpoints that `save_total_limit` keeps, by `metric_for_best_model`. Default: 1.
        keep_every: Also keep one checkpoint for every this many updates, in addition to `save_total_limit`: the first
            one that is saved at or after each multiple. None (the default): no additional checkpoints.
        load_best_model_at_end: Whether to load the weights of the best evaluation at the end. Evaluations at updates
            without a checkpoint do not count, except with `save_strategy="best"`, which saves each best one. Default:
            False.
        metric_for_best_model: Metric that determines the best evaluation, with or without the prefix "eval_". None (the
            default): the loss if `load_best_model_at_end`, `save_strategy="best"` or "reduce_lr_on_plateau" needs a
            metric. Otherwise no evaluation counts as the best one.
        greater_is_better: Whether a greater metric is better. None (the default): True unless the metric's name ends in
            "loss".
        seed: Seed of all random number generators. Default: 42.
        data_seed: Seed of the order of the data. None (the default): `seed`.
        dataloader_drop_last: Whether to omit an incomplete last batch of the training data. Evaluations use all rows.
            Default: False.
        dataloader_num_workers: Number of worker processes that load data. 0: the training process loads it. Default: 0.
        dataloader_pin_memory: Whether batches are copied to pinned memory. Default: True.
        dataloader_persistent_workers: Whether worker processes are kept between epochs. Default: False.
        dataloader_prefetch_factor: Batches that each worker loads in advance. None (the default): torch's
            default, 2 if there are workers.
        remove_unused_columns: Whether to remove columns that the model's forward does not accept. Default: True.
        label_names: Keys of the batch that are labels. None (the default): ["labels"], or the label parameters of the
            model's forward.
        train_sampling_strategy: Order of the training data: "random", "sequential" or "group_by_length" (rows of
            similar length share a batch). Default: "random".
        group_by_length: Older form of `train_sampling_strategy="group_by_length"`. Default: False.
        length_column_name: Column with the lengths. Without such a column, `input_ids` are measured. Default: "length".
        packing: Whether to pack several samples into each sequence, as `headway.PackedDataset` does, for training and
            for evaluations without `compute_metrics`. Batch sizes then count sequences. Default: False.
        packing_length: Tokens per packed sequence. Required with `packing`, and not allowed without it. None (the
            default): no packing.
        packing_strategy: How samples are assigned to sequences: "best_fit", "in_order" or "split", as for
            `headway.PackedDataset`. Default: "best_fit".
        packing_long_samples: Treatment of samples longer than a sequence: "error", "split" or "truncate". Default:
            "error".
        ddp_find_unused_parameters: Whether DDP searches for parameters that do not take part in the loss. None (the
            default): False. Like the next three, it applies to the layout "ddp" with several processes.
        ddp_bucket_cap_mb: Size in MiB of the buckets in which DDP reduces gradients. None (the default): 25.
        ddp_broadcast_buffers: Whether DDP copies rank 0's buffers to all ranks before each forward. None (the default):
            True.
        ddp_static_graph: Whether the parameters that take part in the loss never change. None (the default): False.
        use_cpu: Whether to compute on the CPU, even if an accelerator is available. Default: False.
        do_train: Whether a script should train. Only scripts read it; the Trainer ignores it. Default: False.
        do_eval: Whether a script should evaluate. Only scripts read it; the Trainer ignores it. Default: False.
        do_predict: Whether a script should predict. Only scripts read it; the Trainer ignores it. Default: False.
        resume_from_checkpoint: Checkpoint to resume from, if `Trainer.train` is not given one: a folder, or True for
            the newest one in `output_dir`. False: start from the beginning. None (the default): resume only a run that
            was preempted.
        ignore_data_skip: Whether the data differ from those of the checkpoint. A resumed run then starts its epoch at
            the first batch. Default: False.
        skip_memory_metrics: Whether to omit the peak memory of each phase from the results. Default: True.
        push_to_hub: Whether `Trainer.save_model` also uploads what it writes. Checkpoints are not uploaded. Default:
            False.
        hub_model_id: Repository on the Hub. None (the default): the name of `output_dir`.
        hub_token: Token for the Hub. None (the default): the token of `hf auth login` or HF_TOKEN.
        hub_private_repo: Whether a new repository is private. None (the default): the owner's settings decide.
        hub_revision: Branch to upload to, created if it does not exist. None (the default): the main branch.
        accelerator_config: Additional arguments of `headway.Accelerator` by name, as a dict or the path of a JSON file.
            If "project_config" is a dict, it changes only the fields that it names, such as `keep_in_memory`. Names of
            transformers' `AcceleratorConfig` are allowed, too, and so is such an object. None (the default): none.

    Raises:
        ConfigError: If a name or value is not allowed, or two arguments contradict each other.
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
    tf32: bool | None = None
    ema_decay: float | None = None
    ema_kwargs: dict[str, Any] | None = None
    label_smoothing_factor: float = 0.0
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    chunk_loss: bool = False
    neftune_noise_alpha: float | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    use_cache: bool = False
    auto_find_batch_size: bool = False
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    logging_dir: str | Path | None = None
    run_name: str | None = None
    include_num_input_tokens_seen: str = "no"  # or a bool, which HfArgumentParser does not support in the annotation
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
    predict_with_generate: bool = False
    generation_max_length: int | None = None
    generation_num_beams: int | None = None
    # Or a path or an object, which HfArgumentParser does not support in the annotation
    generation_config: str | None = None
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    num_best: int = 1
    keep_every: int | None = None
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
    packing: bool = False
    packing_length: int | None = None
    packing_strategy: str = "best_fit"
    packing_long_samples: str = "error"
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_static_graph: bool | None = None
    use_cpu: bool = False
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False
    resume_from_checkpoint: str | Path | None = None  # or a bool, which HfArgumentParser does not support here
    ignore_data_skip: bool = False
    skip_memory_metrics: bool = True
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_revision: str | None = None
    accelerator_config: dict[str, Any] | str | None = None

    def __post_init__(self) -> None:
        self.output_dir = "trainer_output" if self.output_dir is None else expand_home(self.output_dir)
        self.logging_dir = expand_home(self.logging_dir)
        counted = str(self.include_num_input_tokens_seen).lower()  # a command line passes a bool as text
        if counted in ("true", "false"):
            self.include_num_input_tokens_seen = "all" if counted == "true" else "no"
        for name in CHOICES.keys() - {"log_level"}:
            value = getattr(self, name)
            # Enumerations of other libraries have the word as their value.
            setattr(self, name, str(getattr(value, "value", value)).lower())
        resume_text = str(self.resume_from_checkpoint).lower()
        if resume_text in ("true", "false"):  # a command line passes it as text or as a path
            object.__setattr__(self, "resume_from_checkpoint", resume_text == "true")
        self.gradient_checkpointing = False if self.gradient_checkpointing is None else self.gradient_checkpointing
        self.accelerator_config = read_accelerator_config(self.accelerator_config)
        self.gradient_accumulation_steps = pop_accumulation_steps(
            self.accelerator_config, self.gradient_accumulation_steps
        )
        for name, value in check_values(self, TrainingArguments).items():
            setattr(self, name, value)
        config = self.generation_config
        if config is not None and not isinstance(config, str | Path) and not hasattr(config, "to_diff_dict"):
            raise ConfigError(f"generation_config={config!r}; give a GenerationConfig, a path, a Hub ID, or None")
        self._convert_old_arguments()
        self._check_choices()
        self._check_numbers()
        self._check_contradictions()
        is_plateau = self.lr_scheduler_type == "reduce_lr_on_plateau"
        needs_metric = self.load_best_model_at_end or self.save_strategy == "best" or is_plateau
        if self.metric_for_best_model is None and needs_metric:
            self.metric_for_best_model = "loss"
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    def _convert_old_arguments(self) -> None:
        """Convert arguments in older forms, `group_by_length` and `warmup_ratio`, to the present ones.

        Raises:
            ConfigError: If an older form and its present form contradict each other.
        """
        if self.group_by_length:
            if self.train_sampling_strategy not in ("random", "group_by_length"):
                raise ConfigError(
                    f"group_by_length=True contradicts train_sampling_strategy={self.train_sampling_strategy!r}; give one"
                )
            self.train_sampling_strategy = "group_by_length"
        if self.torch_compile_backend is not None or self.torch_compile_mode is not None:
            self.torch_compile = True
        if self.warmup_ratio is not None:
            if self.warmup_steps:
                raise ConfigError("warmup_ratio and warmup_steps are two lengths of one warm-up; give one")
            self.warmup_steps = self.warmup_ratio  # a value below 1 is a fraction of all updates
            self.warmup_ratio = None

    def _check_choices(self) -> None:
        """Raise `ConfigError` if an argument with a fixed set of values has another value."""
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}; allowed: {', '.join(map(str, allowed))}")

    def _check_numbers(self) -> None:
        """Raise `ConfigError` if the batch size, or the interval of logs, evaluations or checkpoints is out of range."""
        size = self.per_device_train_batch_size
        if size != "largest" and (isinstance(size, str | bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(
                f"per_device_train_batch_size={size!r}; give samples per process, 1 or more, or 'largest'"
            )
        for name in ("logging_steps", "eval_steps", "save_steps"):
            value = getattr(self, name)
            if value is None:
                continue
            is_fraction_of_all = 0 < value < 1
            is_whole = value >= 1 and value == int(value)
            if not is_fraction_of_all and not is_whole:
                raise ConfigError(f"{name}={value!r}; give whole updates, 1 or more, or a share of all, below 1")

    def _check_contradictions(self) -> None:
        """Raise `ConfigError` if two arguments contradict each other, or an argument has no effect without another one."""
        self._check_packing()
        if self.bf16 and self.fp16:
            raise ConfigError("bf16=True and fp16=True are two precisions; give one")
        if self.auto_find_batch_size and self.per_device_train_batch_size == "largest":
            raise ConfigError(
                "auto_find_batch_size=True and per_device_train_batch_size='largest' both manage memory: the first splits batches "
                "of the size you give, the second chooses the size; give one"
            )
        if self.per_device_train_batch_size == "largest" and splits_batches(self.accelerator_config):
            raise ConfigError(
                "per_device_train_batch_size='largest' searches for rows per process, but split_batches=True in accelerator_config "
                "makes the batch size that of all processes; give one"
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
        self._check_retention()
        if self.chunk_loss and self.label_smoothing_factor:
            raise ConfigError(
                f"chunk_loss=True computes no logits, which label_smoothing_factor={self.label_smoothing_factor} needs; leave one out"
            )
        config = read_accelerator_config(self.accelerator_config) or {}
        compiler = sorted({"dynamo_backend", "dynamo_plugin"} & config.keys())
        if self.torch_compile and compiler:
            raise ConfigError(
                f"torch_compile and {compiler[0]} in accelerator_config both set up torch.compile; give one of them"
            )
        handlers = config.get("kwargs_handlers") or []
        if self.list_ddp_options() and any(isinstance(each, DistributedDataParallelKwargs) for each in handlers):
            raise ConfigError(
                f"{', '.join(f'ddp_{name}' for name in self.list_ddp_options())} and DistributedDataParallelKwargs in "
                "accelerator_config both set options of DDP; give one of them"
            )
        if self.lr_scheduler_type == "reduce_lr_on_plateau" and self.eval_strategy == "no":
            raise ConfigError(
                "lr_scheduler_type='reduce_lr_on_plateau' needs evaluations, but eval_strategy is 'no'; set it to 'steps' or 'epoch'"
            )
        if self.gradient_checkpointing:
            self.get_checkpointing_plan()

    def _check_packing(self) -> None:
        """Raise `ConfigError` if the arguments of packing are incomplete or contradict another argument."""
        if self.packing and self.packing_length is None:
            raise ConfigError("packing=True needs packing_length, the number of tokens per sequence, such as 2048")
        if self.packing_length is not None and not self.packing:
            raise ConfigError(
                f"packing_length={self.packing_length} has an effect only with packing=True; set it, or leave the length out"
            )
        if self.packing and self.train_sampling_strategy == "group_by_length":
            raise ConfigError(
                "packing=True fills every sequence, so there are no lengths to group; leave out "
                "train_sampling_strategy='group_by_length'"
            )

    def _check_retention(self) -> None:
        """Raise ConfigError if `num_best` or `keep_every` would have no effect."""
        needs_metric = self.load_best_model_at_end or self.save_strategy == "best"
        if self.num_best > 1 and self.metric_for_best_model is None and not needs_metric:
            raise ConfigError(
                f"num_best={self.num_best} needs a metric to compare checkpoints by; set metric_for_best_model, such as 'loss'"
            )
        if self.num_best > 1 and self.eval_strategy == "no":
            raise ConfigError(
                f"num_best={self.num_best} needs evaluations, but eval_strategy is 'no'; set it to 'steps' or 'epoch'"
            )
        for name, value in (
            ("num_best", self.num_best if self.num_best > 1 else None),
            ("keep_every", self.keep_every),
        ):
            if value is not None and (self.save_total_limit is None or self.save_strategy == "no"):
                raise ConfigError(
                    f"{name}={value} chooses which checkpoints are not deleted, but without save_total_limit and a save_strategy, "
                    f"none are deleted; set these, or leave {name} out"
                )

    def _check_best(self) -> None:
        """Raise ConfigError unless evaluations can find the best model, and checkpoints contain it."""
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
        if self.eval_strategy == "epoch":
            return
        save_steps, eval_steps = self.save_steps, self.logging_steps if self.eval_steps is None else self.eval_steps
        if (save_steps < 1) != (eval_steps < 1):
            if self.max_steps <= 0:
                raise ConfigError(
                    f"load_best_model_at_end needs an evaluation at each checkpoint, but save_steps={save_steps:g} and "
                    f"eval_steps={eval_steps:g} are a number of updates and a share of all; give both in one form, or max_steps"
                )
            save_steps, eval_steps = (self.get_interval(name, self.max_steps) for name in ("save_steps", "eval_steps"))
        ratio = save_steps / eval_steps
        # Both can be fractions of all updates, so the ratio can have a rounding error.
        is_multiple = abs(ratio - round(ratio)) <= 1e-9 and ratio >= 1 - 1e-9
        if not is_multiple:
            raise ConfigError(
                f"load_best_model_at_end needs an evaluation at each checkpoint, but save_steps={save_steps:g} is not a "
                f"multiple of eval_steps={eval_steps:g}; make it one, or use save_strategy='best'"
            )

    # ---------------------------------------------------------------- derived values

    @property
    def wanted_metric(self) -> str | None:
        """Name that the metric for the best model has in the results of an evaluation.

        It is `metric_for_best_model` with the prefix "eval_", or None if `metric_for_best_model` is not set.
        """
        name = self.metric_for_best_model
        return name if name is None or name.startswith("eval_") else f"eval_{name}"

    @property
    def mixed_precision(self) -> str | None:
        """Mixed precision for the Accelerator: "bf16", "fp16", or None for the launcher's setting."""
        if self.bf16:
            return "bf16"
        return "fp16" if self.fp16 else None

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers in `report_to`. Empty for "none" and None."""
        names = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ())
        return [] if names == ["none"] else names

    def list_ddp_options(self) -> dict[str, Any]:
        """Return the options of torch's DistributedDataParallel that were given, by torch's names."""
        names = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")
        options = {name: getattr(self, f"ddp_{name}") for name in names}
        return {name: value for name, value in options.items() if value is not None}

    def get_checkpointing_plan(self) -> ActivationCheckpointing:
        """Return `gradient_checkpointing_kwargs` as an `ActivationCheckpointing`.

        `use_reentrant` is ignored, and `every_n_layers` is another name of `every`.

        Raises:
            ConfigError: If `gradient_checkpointing_kwargs` contains an unknown name or a value that is not allowed.
        """
        # Headway's checkpointing is never reentrant, so the argument is not needed.
        options = {k: v for k, v in (self.gradient_checkpointing_kwargs or {}).items() if k != "use_reentrant"}
        if "every_n_layers" in options:
            options["every"] = options.pop("every_n_layers")
        allowed = ("every", "policy", "offload", "blocks")
        unknown = sorted(set(options) - set(allowed))
        if unknown:
            raise ConfigError(
                f"gradient_checkpointing_kwargs holds {', '.join(unknown)}; allowed: {', '.join(allowed)}"
            )
        return ActivationCheckpointing(**options)

    def get_interval(self, name: str, num_updates: int) -> int:
        """Return an interval as a number of updates.

        Args:
            name: "logging_steps", "eval_steps" or "save_steps".
            num_updates: Number of updates of the training run. An interval below 1 is a fraction of this number.
        """
        value = self.logging_steps if name == "eval_steps" and self.eval_steps is None else getattr(self, name)
        return int(value) if value >= 1 else max(1, math.ceil(value * num_updates))

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the length of the warm-up in updates: `warmup_steps`, or if it is below 1, that fraction of all updates.

        Args:
            num_training_steps: Number of updates of the training run.
        """
        return int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(self.warmup_steps * num_training_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments as a dict for JSON. The Hub token is replaced by a placeholder.

        Paths and the values in `accelerator_config` become text.
        """
        values = asdict(self) if self.accelerator_config is None else asdict(_replace_objects_by_text(self))
        if hasattr(values["generation_config"], "to_dict"):
            values["generation_config"] = values["generation_config"].to_dict()
        values["hub_token"] = values["hub_token"] and "<HUB_TOKEN>"  # this dict is written to logs and files
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def to_sanitized_dict(self) -> dict[str, bool | int | float | str]:
        """Return all arguments as numbers, booleans and strings, for trackers."""
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in self.to_dict().items()
        }

    def to_json_string(self) -> str:
        """Return all arguments as JSON text. The Hub token is replaced by a placeholder."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    # ---------------------------------------------------------------- this process

    @property
    def folder(self) -> Path:
        """`output_dir` as a path object. It supports folders and URLs."""
        return to_path(self.output_dir or ".")

    @property
    def device(self) -> torch.device:
        """Device of this process. Reading it starts the process runtime if it has not started yet."""
        return process.start(cpu=self.use_cpu).device

    @property
    def n_gpu(self) -> int:
        """Number of accelerators that this process computes on: 1, or 0 on a CPU."""
        return int(self.device.type != "cpu")

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return env.get_world_size()

    @property
    def process_index(self) -> int:
        """Global rank of this process."""
        return env.get_rank()

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return env.get_local_rank()

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine, or -1 if there is only one process.

        Scripts compare it with -1 to detect a distributed run.
        """
        return env.get_local_rank() if env.get_world_size() > 1 else -1

    @property
    def train_batch_size(self) -> int | str:
        """Number of samples per micro-batch on this process.

        It is "largest" if the Trainer searches for the largest size. `TrainerState.train_batch_size` has the result.
        """
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Number of samples per batch of an evaluation on this process."""
        return self.per_device_eval_batch_size

    @property
    def should_save(self) -> bool:
        """Whether this process prints messages and writes files that only one process may write. True on rank 0.

        Checkpoints are written by all ranks.
        """
        return env.get_rank() == 0

    should_log = should_save

    def get_process_log_level(self) -> int:
        """Return the level for `logging`: INFO on rank 0, WARNING on other ranks."""
        return logging.INFO if env.get_rank() == 0 else logging.WARNING

    @contextmanager
    def main_process_first(
        self, local: bool = True, desc: str = "work", timeout: float | timedelta | None = None
    ) -> Iterator[None]:
        """Return a context manager whose block the first process executes before all others.

        Args:
            local: Whether each machine has its own first process. Otherwise rank 0 is the only one. Default: True.
            desc: Ignored. Accepted for compatibility with transformers.
            timeout: Time that the other processes wait for the first one, as for `Accelerator.main_process_first`. None
                (the default): the run's timeout.

        Raises:
            ConfigError: If `timeout` is negative or not a number.
        """
        runtime = process.start(cpu=self.use_cpu)
        ranks = RankAware(runtime, Collectives(runtime))
        with ranks.local_main_process_first(timeout) if local else ranks.main_process_first(timeout):
            yield


def _replace_objects_by_text(arguments: TrainingArguments) -> TrainingArguments:
    """Return a copy of the arguments in which the values of `accelerator_config` are replaced by text.

    Objects among these values, such as those in `kwargs_handlers`, may contain callables that cannot be copied.
    """
    copied = object.__new__(type(arguments))  # the constructor would check the text as settings
    copied.__dict__.update(vars(arguments))
    config = read_accelerator_config(arguments.accelerator_config) or {}
    copied.accelerator_config = {name: repr(value) for name, value in config.items()}
    return copied
