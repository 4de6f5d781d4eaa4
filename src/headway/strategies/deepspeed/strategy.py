"""DeepSpeed's ZeRO as a strategy: optimizer state (1), gradients (2) and parameters (3) partitioned among the ranks.

The engine needs the model and its optimizer: `setup` takes the model, `adopt` makes the engine when prepare() knows
both. The model stays the user's own object, and so does the optimizer (`optimizer.py`); the windows' arithmetic goes through
the engine's loss scale (`engine.py`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from headway.common import env
from headway.common.optional import require
from headway.config.engines import EngineOptions
from headway.errors import ConfigError, PrepareError, StateError, UnsupportedError
from headway.log import get_logger
from headway.precision.mixed import Precision
from headway.runtime import process
from headway.runtime.collectives.checked import Collectives
from headway.strategies.base import Capabilities, Engine, Strategy, Transform
from headway.strategies.deepspeed.config import DeepSpeedConfigReport, Facts, StandIns, complete_config, known_keys
from headway.strategies.deepspeed.engine import ZeroEngine
from headway.strategies.deepspeed.optimizer import PartitionedOptimizer, ZeroState
from headway.strategies.deepspeed.plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler

log = get_logger(__name__)


class DeepSpeedStrategy(Strategy):
    """One model and one optimizer under ZeRO.

    Args:
        collectives: the processes.
        plugin: what was asked for.
        options: of the engines; the fp16 scaler's go into the JSON.

    Attributes:
        account: DeepSpeed's JSON as it got it, and what became of each key; None before prepare() knows the optimizer.
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

    def __init__(self, collectives: Collectives, plugin: DeepSpeedPlugin, options: EngineOptions) -> None:
        super().__init__(collectives)
        require("deepspeed", "strategy='deepspeed' needs", "deepspeed")
        self.gradient_divisor = collectives.world_size
        self.account: DeepSpeedConfigReport | None = None
        self._stage = int(plugin.zero_stage or 0)
        if self._stage == 3:
            self.capabilities = replace(self.capabilities, copies=False)
        self._plugin = plugin
        self._options = options
        self._stand_ins = StandIns(plugin.hf_ds_config)
        self._model: torch.nn.Module | None = None
        self._zero: ZeroEngine | None = None
        self._partitioned: PartitionedOptimizer | None = None
        self._state: ZeroState | None = None

    # ---------------------------------------------------------------- the engine

    def setup(self, model: torch.nn.Module, transforms: Iterable[Transform] = ()) -> Engine | None:
        """Apply the transforms; the engine is made when the optimizer is known."""
        super().setup(model, transforms)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return None
        self._model = model
        process.at_end(self.release, is_engine=True)

        def run(*args: object, **kwargs: object) -> Any:
            return self._engine().forward(*args, **kwargs)

        return run

    def adopt(
        self, optimizers: Sequence[torch.optim.Optimizer], precision: str, num_steps: int, micro_batches: Sequence[int]
    ) -> Sequence[torch.optim.Optimizer]:
        """Make the engine where model and optimizer are known.

        Args:
            optimizers: all that are prepared.
            precision: "no", "bf16" or "fp16".
            num_steps: micro-batches per update.
            micro_batches: rows per rank of each loader.

        Returns:
            The partitioned of the user's optimizer, when the engine was made.

        Raises:
            UnsupportedError: several optimizers, one that ZeRO cannot train with, or a parameter that it cannot.
            ConfigError: the JSON contradicts the run.
        """
        if len(optimizers) > 1:
            names = ", ".join(type(each).__name__ for each in optimizers)
            raise UnsupportedError(
                f"DeepSpeed trains with one optimizer, not {len(optimizers)} ({names}); give one with several parameter groups"
            )
        if self._model is None or not optimizers or self._zero is not None:
            return ()
        given, plugin = optimizers[0], self._plugin
        _check_scaler(self._options, precision)
        picked = (min if plugin.is_train_batch_min else max)(micro_batches) if micro_batches else None
        facts = Facts(
            self.data_group.world_size, num_steps, precision, picked, _hidden_size(self._model), self._options.scaler,
            self._stand_ins.optimizer, self._stand_ins.scheduler,
        )  # fmt: skip
        _check_shapes(self._model)
        account = complete_config(plugin.deepspeed_config, facts, known_keys)
        is_own = self._stand_ins.optimizer and account.config.pop("optimizer", None) is not None
        account.config.pop("scheduler", None)
        if not is_own and "optimizer" in account.config:
            raise ConfigError(
                f"the JSON has an optimizer, and a {type(given).__name__} was prepared; prepare a headway.DummyOptim instead"
            )
        self._partitioned = self._partition(given, account)
        self._zero = self._initialise(self._model, self._partitioned, account)
        self._state = ZeroState(self._zero, self._partitioned, self._model)
        self.account = account
        log.info("DeepSpeed ZeRO stage %d; its JSON: %s", self._stage, "; ".join(account.lines()))
        return (self._partitioned.inner,)

    def stand_for(self, dummy: DummyOptim | DummyScheduler, share: int) -> Any:
        """The optimizer or schedule that the JSON defines."""
        return self._stand_ins.real(dummy, share)

    def _partition(self, given: torch.optim.Optimizer, account: DeepSpeedConfigReport) -> PartitionedOptimizer:
        config = account.config
        is_offloaded = (config["zero_optimization"].get("offload_optimizer") or {}).get("device") in ("cpu", "nvme")
        # For torch's Adams DeepSpeed has a kernel of its own on the host.
        is_adam = type(given) in (torch.optim.Adam, torch.optim.AdamW)
        uses_kernel = bool(is_offloaded and is_adam and config.get("zero_force_ds_cpu_optimizer", True))
        partitioned = PartitionedOptimizer(given, bool(config.get("zero_allow_untested_optimizer")), uses_kernel)
        # Both have been looked at here.
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = uses_kernel
        return partitioned

    def _initialise(
        self, model: torch.nn.Module, partitioned: PartitionedOptimizer, account: DeepSpeedConfigReport
    ) -> ZeroEngine:
        import deepspeed

        # DeepSpeed tells at INFO, and through its own stream, what Headway's log says already.
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        device = next(iter(model.parameters())).device
        if deepspeed.get_accelerator().device_name() != device.type:
            raise ConfigError(
                f"DeepSpeed computes on {deepspeed.get_accelerator().device_name()} here, but this run uses {device.type}; "
                f"set DS_ACCELERATOR={device.type} in the environment"
            )
        if _ensure_group(device):
            process.at_end(self._end_group, is_engine=True)
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        if account.config.get("fp16", {}).get("enabled") and not deepspeed.get_accelerator().is_fp16_supported():
            raise UnsupportedError(f"DeepSpeed does not support float16 on {device.type}; use mixed_precision='bf16'")
        _name_blocks(model, self._plugin)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=partitioned.inner, config=account.config, dist_init_required=False
        )
        return ZeroEngine(engine, self._stage)

    def _engine(self) -> ZeroEngine:
        if self._zero is None:
            raise PrepareError(
                "DeepSpeed needs the model's optimizer before a forward with gradients: prepare both, in one call or two; for "
                "evaluation alone use torch.no_grad()"
            )
        return self._zero

    # ---------------------------------------------------------------- micro-batches

    def backward(self, loss: torch.Tensor, factor: float, precision: Precision, **kwargs: Any) -> None:
        """Through the engine, which scales fp16 losses itself."""
        self._engine().backward(loss, factor, **kwargs)

    # ---------------------------------------------------------------- gradients

    def drop_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Those in DeepSpeed's buffers too."""
        super().drop_gradients(parameters)
        if self._zero is not None:
            self._zero.drop()

    def local_gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's parts in DeepSpeed's buffers, when a window is closed: multiplied by its loss scale, before any limit."""
        return [] if self._zero is None else self._zero.local(parameters)

    def reduce_gradients(self, parameters: Sequence[torch.nn.Parameter] = (), has_gaps: bool = False) -> None:
        """The window is closed; DeepSpeed reduces when its gradients are asked for. Buffers follow rank 0."""
        self._engine().close()
        model = self._model
        if model is not None and model.training and self._options.ddp.broadcast_buffers:
            buffers = [buffer for buffer in model.buffers() if buffer.numel()]
            if buffers:
                self.data_group.broadcast_in_place(buffers)

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
        """At the step."""
        self._engine().correct(factor)

    def total_norm(self, parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """DeepSpeed's own norm, over all ranks.

        Raises:
            UnsupportedError: another norm than the Euclidean one, or other parameters than the optimizer's.
        """
        if norm_type != 2:
            raise UnsupportedError(f"DeepSpeed clips by the 2-norm; norm_type={norm_type!r} is not supported")
        engine, partitioned = self._engine(), self._partitioned
        assert partitioned is not None
        learns, given = ({id(p) for p in every} for every in (partitioned.parameters(), parameters))
        if not learns <= given:
            raise UnsupportedError(
                f"DeepSpeed clips all gradients of the optimizer together, and {len(learns - given)} of its {len(learns)} parameters "
                "were not passed; use clip_grad_norm_(model.parameters(), ...)"
            )
        return engine.norm()

    def clip(
        self, parameters: list[torch.nn.Parameter], max_norm: float, norm_type: float, known: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The norm now, the clipping in the step.

        Raises:
            ConfigError: the JSON clips to another norm.
        """
        fixed = 0.0 if self.account is None else self.account.clipping
        if fixed and fixed != max_norm:
            raise ConfigError(
                f"clip_grad_norm_(..., {max_norm!r}), but gradient_clipping={fixed!r} in DeepSpeed's JSON; give only one, or 'auto'"
            )
        norm = self.total_norm(parameters, norm_type) if known is None else known
        self._engine().limit(float(max_norm))
        return norm

    def step(self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None) -> bool:
        """DeepSpeed's step, with the settings that the user's optimizer has now.

        Raises:
            UnsupportedError: a closure.
            StateError: another optimizer than the prepared one.
        """
        engine, partitioned = self._engine(), self._partitioned
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) is not supported with DeepSpeed; call step() without a closure"
            )
        if partitioned is None or optimizer is not partitioned.given:
            raise StateError(
                f"{type(optimizer).__name__} is not the optimizer that was prepared for DeepSpeed; prepare it with the model"
            )
        groups = engine.inner.param_groups
        partitioned.push(groups)
        did_step = engine.step(0.0 if self.account is None else self.account.clipping)
        partitioned.pull(groups)
        # torch asks a schedule's optimizer whether it ever stepped.
        partitioned.given._opt_called = True  # type: ignore[attr-defined]
        return did_step

    def rollback(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Drop what DeepSpeed has kept, too."""
        super().rollback(optimizers)
        if self._zero is not None:
            self._zero.drop()

    # ---------------------------------------------------------------- state

    def export_state(self, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        """Pieces of what is parted, in float32; before the engine is there, and of other models, whole tensors."""
        if self._state is None or model is not self._model:
            return super().export_state(model)
        return self._state.export()

    def part_of(self, parameter: torch.Tensor) -> Any:
        """The piece of it that this rank holds."""
        return parameter if self._state is None else self._state.part_of(parameter)

    def exposed(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """With pieces of the engine's state."""
        return nullcontext() if self._state is None else self._state.exposed()

    def settle(self) -> None:
        """The engine's half-precision parameters and its optimizer follow what was loaded."""
        if self._state is not None:
            self._state.settle()

    def _end_group(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def release(self, model: torch.nn.Module | None = None) -> None:
        """Let go of the engine; a model of stage 3 stays in parts, because a whole one need not fit here."""
        super().release()
        zero, self._zero, self._partitioned, self._model, self._state = self._zero, None, None, None, None
        if zero is not None:
            zero.engine.destroy()


def _ensure_group(device: torch.device) -> bool:
    """DeepSpeed needs a group on one process, too, and a local rank; was one made? It keeps the group, so that stays to the end."""
    env.set_default("LOCAL_RANK", str(device.index or 0))
    if dist.is_initialized():
        return False
    backend = dist.get_default_backend_for_device(device.type)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return True


def _check_scaler(options: EngineOptions, precision: str) -> None:
    scaler = options.scaler
    if precision != "fp16":
        return
    if scaler.growth_factor != 2.0 or scaler.backoff_factor != 0.5:
        raise UnsupportedError(
            "DeepSpeed's fp16 loss scale always doubles and halves; leave growth_factor and backoff_factor out"
        )
    power = scaler.init_scale
    if power < 1 or power != 2.0 ** (int(power).bit_length() - 1):
        raise ConfigError(
            f"GradScalerKwargs(init_scale={power!r}): DeepSpeed starts with a power of two; give a power of two"
        )


def _check_shapes(model: torch.nn.Module) -> None:
    """DeepSpeed sends parameters as bytes, which torch cannot look at a tensor without dims as."""
    name = next((name for name, parameter in model.named_parameters() if not parameter.ndim), None)
    if name is not None:
        raise UnsupportedError(
            f"{name} of {type(model).__name__} has no dimensions, and DeepSpeed cannot send it; make it of shape (1,)"
        )


def _hidden_size(model: torch.nn.Module) -> int | None:
    """Of a transformers config, as Accelerate looks for it."""
    config = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        size = getattr(each, "hidden_size", None)
        if isinstance(size, int):
            return size
        sizes = getattr(each, "hidden_sizes", None)
        if isinstance(sizes, list | tuple) and sizes:
            return int(max(sizes))
    return None


def _name_blocks(model: torch.nn.Module, plugin: DeepSpeedPlugin) -> None:
    """Blocks that ZeRO-3 fetches whole, where the plugin names their classes."""
    text = plugin.transformer_moe_cls_names
    if not text or plugin.zero_stage != 3:
        return
    from deepspeed.utils import set_z3_leaf_modules

    wanted = [name.strip() for name in text.split(",")]
    found = {type(module).__name__: type(module) for module in model.modules()}
    lacking = [name for name in wanted if name not in found]
    if lacking:
        raise ConfigError(f"transformer_moe_cls_names: {type(model).__name__} has no {', '.join(lacking)}")
    set_z3_leaf_modules(model, [found[name] for name in wanted])
