"""DeepSpeed's ZeRO as a strategy: optimizer state, gradients and parameters partitioned across ranks.

The engine needs the model together with its optimizer. `setup_model` only keeps the model, and `create_engine` creates
the engine when both have been prepared. The user's model and optimizer objects stay in use (`optimizer.py`).
Corrections for accumulation windows use the engine's loss scale (`engine.py`). Checkpoints contain each rank's shards of
the engine's state (`zero_state.py`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headway.common import env
from headway.common.optional import require
from headway.core.config.engines import EngineOptions
from headway.core.precision.mixed import Precision
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.base import Capabilities, Engine, Strategy, Transform
from headway.core.strategies.placeholders import Placeholder
from headway.errors import ConfigError, PrepareError, StateError, UnsupportedError
from headway.layouts.adapters import check_adapters
from headway.layouts.deepspeed.config import DeepSpeedConfigReport, RunValues, complete_config
from headway.layouts.deepspeed.engine import ZeroEngine
from headway.layouts.deepspeed.known_keys import find_known_keys
from headway.layouts.deepspeed.optimizer import PartitionedOptimizer
from headway.layouts.deepspeed.stand_ins import StandIns
from headway.layouts.deepspeed.zero_state import ZeroState
from headway.log import get_logger

log = get_logger(__name__)


class DeepSpeedSettings(Protocol):
    """Interface of the settings that the strategy reads. `headway.DeepSpeedPlugin` implements it.

    Attributes:
        hf_ds_config: DeepSpeed's JSON as an `HfDeepSpeedConfig`.
        zero_stage: ZeRO stage 1, 2 or 3.
        is_train_batch_min: Whether DeepSpeed is configured with the smallest of the loaders' batch sizes. False: with
            the largest.
        transformer_moe_cls_names: Class names, separated by commas, of blocks whose parameters ZeRO-3 gathers all at
            once.
    """

    hf_ds_config: Any
    zero_stage: int | None
    is_train_batch_min: bool
    transformer_moe_cls_names: str | None

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's JSON as a dict."""


class DeepSpeedStrategy(Strategy):
    """Strategy that trains one model and one optimizer with DeepSpeed's ZeRO.

    Args:
        collectives: Collectives over all processes.
        plugin: DeepSpeed's settings as requested by the script or the launcher.
        options: Options from `kwargs_handlers`. Those of the fp16 gradient scaler are written into the JSON.

    Attributes:
        config_report: DeepSpeed's completed JSON, and how each key was handled. None before `prepare()` gets the
            optimizer.

    Raises:
        OptionalDependencyMissing: If DeepSpeed is not installed.
    """

    name = "deepspeed"
    capabilities = Capabilities(
        several_models=False,
        clip_by_value=False,
        rollback=False,
        lone_forward=False,
        whole_gradients=False,
        optimizer_state=False,
        scales_losses=True,
        lone_pieces=False,
        local_training=False,
    )

    def __init__(self, collectives: Collectives, plugin: DeepSpeedSettings, options: EngineOptions) -> None:
        super().__init__(collectives)
        require("deepspeed", "strategy='deepspeed' needs", "deepspeed")
        self.gradient_divisor = collectives.world_size
        self.config_report: DeepSpeedConfigReport | None = None
        self._stage = int(plugin.zero_stage or 0)
        if self._stage == 3:
            self.capabilities = replace(self.capabilities, copies=False)
        self._plugin = plugin
        self._options = options
        self._stand_ins = StandIns(plugin.hf_ds_config)
        self._model: torch.nn.Module | None = None  # set by `setup_model`
        # `create_engine` sets these three together.
        self._zero_engine: ZeroEngine | None = None
        self._partitioned: PartitionedOptimizer | None = None  # the user's optimizer and the copy that the engine steps
        self._state: ZeroState | None = None  # for checkpoints

    # ---------------------------------------------------------------- the engine

    def setup_model(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Apply the transforms to the model, and return a function that runs the forward of the DeepSpeed engine.

        The engine is created later, by `create_engine`. Return None if no parameter is trainable.

        Raises:
            PrepareError: If stage 3 would partition AdaLoRA adapters.
        """
        if self._stage == 3:
            check_adapters(model, "ZeRO stage 3")
        super().setup_model(model, transforms)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return None
        self._model = model
        process.release_at_end(self.release_model, ends_with_group=True)

        def run(*args: object, **kwargs: object) -> Any:
            return self._require_engine().forward(*args, **kwargs)

        return run

    def create_engine(
        self, optimizers: Sequence[torch.optim.Optimizer], precision: str, num_steps: int, micro_batches: Sequence[int]
    ) -> Sequence[torch.optim.Optimizer]:
        """Create DeepSpeed's engine once both the model and the optimizer have been prepared.

        Args:
            optimizers: All prepared optimizers.
            precision: "no", "bf16" or "fp16".
            num_steps: Number of micro-batches per optimizer step.
            micro_batches: Rows per rank and micro-batch, for each loader.

        Returns:
            Sequence with the partitioned copy of the user's optimizer. Empty if no engine was created.

        Raises:
            UnsupportedError: If there are several optimizers, or ZeRO cannot train with this optimizer or a parameter.
                Also if the JSON or a scaler option requests an unsupported feature.
            ConfigError: If the JSON contradicts the run, has unknown keys, or defines an optimizer although the script
                has prepared its own.
            PrepareError: If none of the optimizer's parameters is trainable.
        """
        if len(optimizers) > 1:
            names = ", ".join(type(each).__name__ for each in optimizers)
            raise UnsupportedError(
                f"DeepSpeed trains with one optimizer, not {len(optimizers)} ({names}); give one with several parameter groups"
            )
        if self._model is None or not optimizers or self._zero_engine is not None:
            return ()
        user_optimizer, plugin = optimizers[0], self._plugin
        _check_scaler(self._options, precision)
        micro_batch = None
        if micro_batches:
            micro_batch = min(micro_batches) if plugin.is_train_batch_min else max(micro_batches)
        run = RunValues(
            num_ranks=self.data_group.world_size,
            num_steps=num_steps,
            precision=precision,
            micro_batch=micro_batch,
            hidden_size=_find_hidden_size(self._model),
            scaler=self._options.scaler,
            optimizer=self._stand_ins.optimizer_values,
            scheduler=self._stand_ins.scheduler_values,
        )
        _check_shapes(self._model)
        report = complete_config(plugin.deepspeed_config, run, find_known_keys)
        # DeepSpeed gets the optimizer object that Headway has created from the JSON, and schedulers stay with Headway.
        if self._stand_ins.optimizer_values:
            report.config.pop("optimizer", None)
        report.config.pop("scheduler", None)
        if "optimizer" in report.config:
            raise ConfigError(
                f"the JSON has an optimizer, and a {type(user_optimizer).__name__} was prepared; prepare a headway.DummyOptim instead"
            )
        self._partitioned = self._create_partitioned_optimizer(user_optimizer, report.config)
        self._zero_engine = self._initialize_engine(self._model, self._partitioned, report.config)
        self._state = ZeroState(self._zero_engine, self._partitioned, self._model)
        self.config_report = report
        log.info("DeepSpeed ZeRO stage %d; its JSON: %s", self._stage, "; ".join(report.format_lines()))
        return (self._partitioned.stepped_copy,)

    def replace_placeholder(self, placeholder: Placeholder, update_ratio: int) -> Any:
        """Return the optimizer or scheduler that replaces a placeholder, as DeepSpeed's JSON defines it.

        A scheduler placeholder with an `lr_scheduler_callable` is replaced by that function's scheduler. Later calls with the
        same placeholder return the same object.

        Args:
            placeholder: Placeholder that the script has prepared.
            update_ratio: Number of updates that a single-process run makes on the data of one update of this run. A
                scheduler's `total_num_steps`, which is given for a single-process run, is divided by it.

        Raises:
            ConfigError: If the JSON does not define the object, names an unknown scheduler, or has optimizer settings that the
                class does not accept.
            UnsupportedError: If the JSON's optimizer is not one of the supported torch optimizers.
            PrepareError: If the `DummyOptim` of a scheduler is not prepared.
        """
        return self._stand_ins.get_replacement(placeholder, update_ratio)

    def _create_partitioned_optimizer(
        self, user_optimizer: torch.optim.Optimizer, config: dict[str, Any]
    ) -> PartitionedOptimizer:
        """Return the user's optimizer with a copy for DeepSpeed, following the JSON's rules for optimizers.

        Args:
            user_optimizer: User's optimizer.
            config: DeepSpeed's completed JSON. Its keys `zero_allow_untested_optimizer` and
                `zero_force_ds_cpu_optimizer` are replaced, because this method has already applied them.
        """
        is_offloaded = (config["zero_optimization"].get("offload_optimizer") or {}).get("device") in ("cpu", "nvme")
        # DeepSpeed has its own CPU kernel for torch's Adam and AdamW.
        is_adam = type(user_optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        uses_cpu_adam = bool(is_offloaded and is_adam and config.get("zero_force_ds_cpu_optimizer", True))
        allows_untested = bool(config.get("zero_allow_untested_optimizer"))
        partitioned = PartitionedOptimizer(user_optimizer, allows_untested, uses_cpu_adam)
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = uses_cpu_adam
        return partitioned

    def _initialize_engine(
        self, model: torch.nn.Module, partitioned: PartitionedOptimizer, config: dict[str, Any]
    ) -> ZeroEngine:
        """Create DeepSpeed's engine for a model and an optimizer, and a process group if the run has none.

        Args:
            model: User's model, on the device of the run. DeepSpeed partitions it at stage 3.
            partitioned: User's optimizer and the copy that the engine steps.
            config: DeepSpeed's completed JSON.

        Raises:
            ConfigError: If DeepSpeed computes on another kind of device than the run.
            UnsupportedError: If DeepSpeed does not support float16 on this device.
        """
        import deepspeed

        # At INFO, DeepSpeed would repeat Headway's log on its own stream.
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        device = next(iter(model.parameters())).device
        if deepspeed.get_accelerator().device_name() != device.type:
            raise ConfigError(
                f"DeepSpeed computes on {deepspeed.get_accelerator().device_name()} here, but this run uses {device.type}; "
                f"set DS_ACCELERATOR={device.type} in the environment"
            )
        if _ensure_process_group(device):
            process.release_at_end(self._destroy_process_group, ends_with_group=True)
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        if config.get("fp16", {}).get("enabled") and not deepspeed.get_accelerator().is_fp16_supported():
            raise UnsupportedError(f"DeepSpeed does not support float16 on {device.type}; use mixed_precision='bf16'")
        _mark_leaf_modules(model, self._plugin)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=partitioned.stepped_copy, config=config, dist_init_required=False
        )
        return ZeroEngine(engine, self._stage)

    def _require_engine(self) -> ZeroEngine:
        """Return the ZeRO engine.

        Raises:
            PrepareError: If the engine does not exist yet, because the model's optimizer was not prepared.
        """
        if self._zero_engine is None:
            raise PrepareError(
                "DeepSpeed needs the model's optimizer before a forward with gradients: prepare both, in one call or two; for "
                "evaluation alone use torch.no_grad()"
            )
        return self._zero_engine

    # ---------------------------------------------------------------- micro-batches

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Run the engine's backward on `loss * factor`, and accumulate gradients.

        `precision` is ignored, because the engine applies its own fp16 loss scale.
        """
        self._require_engine().backward(loss, factor, **kwargs)

    # ---------------------------------------------------------------- gradients

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Discard the gradients, including those in DeepSpeed's buffers."""
        super().drop_gradients(parameters)
        if self._zero_engine is not None:
            self._zero_engine.drop_gradients()

    def get_local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's gradient shards in DeepSpeed's buffers.

        The gradients are not clipped yet, and they are still multiplied by the loss scale. The list is empty while the
        accumulation window is open.
        """
        return [] if self._zero_engine is None else self._zero_engine.get_local_gradients(parameters)

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """Mark the accumulation window as complete, and broadcast rank 0's module buffers.

        DeepSpeed reduces the gradients later, when they are first read. Buffers are broadcast only if the model is in
        training mode and the option `broadcast_buffers` is set. Both arguments are ignored.
        """
        self._require_engine().close_window()
        model = self._model
        if model is not None and model.training and self._options.ddp.broadcast_buffers:
            buffers = [buffer for buffer in model.buffers() if buffer.numel()]
            if buffers:
                self.data_group.broadcast_in_place(buffers)

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
        """Multiply the gradients of the accumulation window by a factor.

        The multiplication happens in the optimizer step.
        """
        self._require_engine().correct_gradients(factor)

    def compute_total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return DeepSpeed's norm of all gradients over all ranks. Every rank must call it.

        The norm is NaN while the accumulation window is open, and 0 if no gradients were computed since the last step.

        Args:
            parameters: Parameters, which must include all trainable ones of the optimizer.
            norm_type: Must be 2.

        Raises:
            UnsupportedError: If `norm_type` is not 2, or if `parameters` lacks some of the optimizer's parameters.
        """
        if norm_type != 2:
            raise UnsupportedError(f"DeepSpeed clips by the 2-norm; norm_type={norm_type!r} is not supported")
        engine, partitioned = self._require_engine(), self._partitioned
        assert partitioned is not None
        trained_ids = {id(p) for p in partitioned.parameters()}
        missing_ids = trained_ids - {id(p) for p in parameters}
        if missing_ids:
            raise UnsupportedError(
                f"DeepSpeed clips all gradients of the optimizer together, and {len(missing_ids)} of its {len(trained_ids)} "
                "parameters were not passed; use clip_grad_norm_(model.parameters(), ...)"
            )
        return engine.compute_norm()

    def clip_gradients(
        self, parameters: list[torch.nn.Parameter], max_norm: float, norm_type: float, known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the norm of all gradients before clipping, and make the next step clip to `max_norm`.

        If several limits are set before a step, the smallest applies.

        Args:
            parameters: Parameters, which must include all trainable ones of the optimizer.
            max_norm: Largest norm after clipping.
            norm_type: Must be 2.
            known: Norm that was already computed. It is returned, and the two requirements above are not checked. None
                (the default): compute the norm.

        Raises:
            ConfigError: If DeepSpeed's JSON sets `gradient_clipping` to a different value than `max_norm`.
            UnsupportedError: If `norm_type` is not 2, or if `parameters` lacks some of the optimizer's parameters.
        """
        json_max_norm = 0.0 if self.config_report is None else self.config_report.clipping
        if json_max_norm and json_max_norm != max_norm:
            raise ConfigError(
                f"clip_grad_norm_(..., {max_norm!r}), but gradient_clipping={json_max_norm!r} in DeepSpeed's JSON; give only one, "
                "or 'auto'"
            )
        norm = self.compute_total_norm(parameters, norm_type) if known is None else known
        self._require_engine().limit_norm(float(max_norm))
        return norm

    def step_optimizer(
        self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None
    ) -> bool:
        """Run DeepSpeed's step with the current settings of the user's optimizer, such as its learning rate.

        Gradients are clipped to the norm of `clip_gradients`, or else to the JSON's `gradient_clipping`.

        Args:
            optimizer: The user's optimizer, which must be the prepared one.
            precision: Ignored, because the engine handles its fp16 loss scale.
            closure: Must be None.

        Returns:
            Whether the parameters were updated. False: the step was skipped.

        Raises:
            UnsupportedError: If a closure is given.
            StateError: If the optimizer is not the prepared one.
        """
        engine, partitioned = self._require_engine(), self._partitioned
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) is not supported with DeepSpeed; call step() without a closure"
            )
        if partitioned is None or optimizer is not partitioned.user_optimizer:
            raise StateError(
                f"{type(optimizer).__name__} is not the optimizer that was prepared for DeepSpeed; prepare it with the model"
            )
        groups = engine.zero_optimizer.param_groups
        partitioned.push_settings(groups)
        did_step = engine.step(0.0 if self.config_report is None else self.config_report.clipping)
        partitioned.pull_settings(groups)
        # torch's schedulers warn if their optimizer has never stepped.
        partitioned.user_optimizer._opt_called = True  # type: ignore[attr-defined]
        return did_step

    def discard_update(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Discard the gradients of an optimizer step that is skipped, including those in DeepSpeed's buffers."""
        super().discard_update(optimizers)
        if self._zero_engine is not None:
            self._zero_engine.drop_gradients()

    # ---------------------------------------------------------------- state

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        """Return (name, tensor) pairs of the model's state dict. Partitioned tensors are returned as float32 shards.

        Before the engine exists, tensors are not partitioned. Models other than the engine's are never partitioned.
        """
        if self._state is None or model is not self._model:
            return super().export_state(model)
        return self._state.export_state()

    def get_part(self, parameter: torch.Tensor) -> Any:
        """Return this rank's shard of a parameter, or the parameter itself if it is not partitioned."""
        return parameter if self._state is None else self._state.get_part(parameter)

    def expose_state(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Return a context in which the user's optimizer holds the engine's state, as `ShardPiece` objects.

        On exit, the state of the user's optimizer is cleared. Before the engine exists, the context does nothing.
        """
        return nullcontext() if self._state is None else self._state.expose_state()

    def apply_loaded_values(self) -> None:
        """Copy the values loaded from a checkpoint into the engine's parameters and its optimizer."""
        if self._state is not None:
            self._state.apply_loaded_values()

    def _destroy_process_group(self) -> None:
        """Destroy the default process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def release_model(self, model: torch.nn.Module | None = None) -> None:
        """Release the model, and destroy DeepSpeed's engine if it was created.

        A stage 3 model stays partitioned, because the full model might not fit into memory. There is only one model, so
        the argument `model` is ignored.
        """
        super().release_model()
        zero_engine = self._zero_engine
        # The references are removed first, so that nothing uses an engine whose destruction has failed.
        self._zero_engine = None
        self._partitioned = None
        self._model = None
        self._state = None
        if zero_engine is not None:
            zero_engine.engine.destroy()


def _ensure_process_group(device: torch.device) -> bool:
    """Create a process group if there is none, because DeepSpeed needs one even in a single-process run.

    The environment variable `LOCAL_RANK` is set, too, if it is not set yet. DeepSpeed keeps using the process group, so
    the caller must destroy it at the end of the run.

    Returns:
        Whether a process group was created.
    """
    env.set_default("LOCAL_RANK", str(device.index or 0))
    if dist.is_initialized():
        return False
    backend = dist.get_default_backend_for_device(device.type)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return True


def _check_scaler(options: EngineOptions, precision: str) -> None:
    """Check that DeepSpeed's fp16 loss scale can follow the options of the gradient scaler.

    Raises:
        UnsupportedError: If the scale should not double and halve.
        ConfigError: If the initial scale is not a power of two.
    """
    if precision != "fp16":
        return
    scaler = options.scaler
    if scaler.growth_factor != 2.0 or scaler.backoff_factor != 0.5:
        raise UnsupportedError(
            "DeepSpeed's fp16 loss scale always doubles and halves; leave growth_factor and backoff_factor out"
        )
    scale = scaler.init_scale
    if scale < 1 or scale != 2.0 ** (int(scale).bit_length() - 1):
        raise ConfigError(
            f"GradScalerKwargs(init_scale={scale!r}): DeepSpeed starts with a power of two; give a power of two"
        )


def _check_shapes(model: torch.nn.Module) -> None:
    """Raise an error if a parameter has no dimensions.

    DeepSpeed sends parameters as bytes, and torch cannot view a tensor without dimensions as bytes.

    Raises:
        UnsupportedError: If a parameter has no dimensions.
    """
    name = next((name for name, parameter in model.named_parameters() if not parameter.ndim), None)
    if name is not None:
        raise UnsupportedError(
            f"{name} of {type(model).__name__} has no dimensions, and DeepSpeed cannot send it; make it of shape (1,)"
        )


def _find_hidden_size(model: torch.nn.Module) -> int | None:
    """Return the hidden size from the model's transformers config, or None if the config has none.

    It is `hidden_size`, or the largest of `hidden_sizes`, of the config or of its `text_config`, as in Accelerate.
    """
    config = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        size = getattr(each, "hidden_size", None)
        if isinstance(size, int):
            return size
        sizes = getattr(each, "hidden_sizes", None)
        if isinstance(sizes, list | tuple) and sizes:
            return int(max(sizes))
    return None


def _mark_leaf_modules(model: torch.nn.Module, plugin: DeepSpeedSettings) -> None:
    """Mark the blocks whose parameters ZeRO-3 gathers all at once, given the class names in the plugin.

    DeepSpeed calls such blocks leaf modules. Do nothing below ZeRO stage 3 or without class names.

    Raises:
        ConfigError: If the model contains no module of one of the classes.
    """
    if not plugin.transformer_moe_cls_names or plugin.zero_stage != 3:
        return
    from deepspeed.utils import set_z3_leaf_modules

    names = [name.strip() for name in plugin.transformer_moe_cls_names.split(",")]
    classes = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in names if name not in classes]
    if missing:
        raise ConfigError(f"transformer_moe_cls_names: {type(model).__name__} has no {', '.join(missing)}")
    set_z3_leaf_modules(model, [classes[name] for name in names])
