"""What scripts read from an Accelerator besides its own members: states, the gradient scaler, plugins that are None."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from headway.config.run import DataLoaderConfiguration
from headway.errors import UnsupportedError
from headway.familiar.kinds import DistributedType
from headway.familiar.layouts import ParallelismConfig
from headway.familiar.not_served import member_advice
from headway.familiar.state import AcceleratorState, GradientState, Run, announce
from headway.log import get_logger
from headway.ops.collectives import Collectives
from headway.precision.base import Precision
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.training.accumulation import Accumulation
from headway.training.prepare import Preparation

log = get_logger(__name__)


class Familiar:
    """The part of the Accelerator that scripts written for Accelerate read.

    Attributes:
        state: this process and the run's settings (`AcceleratorState`).
        gradient_state: the windows (`GradientState`).
    """

    runtime: ProcessRuntime
    collectives: Collectives
    precision: Precision
    strategy: Strategy
    _accumulation: Accumulation
    _preparation: Preparation

    def __init__(self, run: Run) -> None:
        if run.parallelism_config is not None:
            run.parallelism_config.check_world(self.runtime.world_size)
        announce(run, self.collectives)
        self.state = AcceleratorState(_run=run)
        self.gradient_state = GradientState(_run=run)

    if not TYPE_CHECKING:  # a type checker goes on to report what does not exist

        def __getattr__(self, name: str) -> NoReturn:
            sentence = member_advice(name)
            raise AttributeError(sentence or f"{type(self).__name__!r} object has no attribute {name!r}")

    # ---------------------------------------------------------------- surroundings

    @property
    def distributed_type(self) -> DistributedType:
        """How processes share the work: NO, MULTI_CPU, MULTI_GPU or MULTI_XPU."""
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        """Are there several processes, each with an accelerator?"""
        return self.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU)

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed is not there yet."""
        return self.state.deepspeed_plugin

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """What the Accelerator was given."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> None:
        """None: replicas need no mesh."""
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """False: there is no sharded layout yet."""
        return False

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """False: there is no sharded layout yet."""
        return False

    @property
    def should_save_model(self) -> bool:
        """Is this the first process of its machine? `save_model` itself is called on all."""
        return self.runtime.is_local_main_process

    # ---------------------------------------------------------------- precision and data

    @property
    def native_amp(self) -> bool:
        """Do forward passes autocast?"""
        return self.precision.is_mixed

    @property
    def fp8_backend(self) -> None:
        """None: there is no fp8 yet."""
        return None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler under fp16, up to date with the steps done; None otherwise. prepare() makes optimizers use it."""
        self.precision.settle(len(self._preparation.optimizers))
        return self.precision.scaler

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How prepared loaders split, pad and move batches."""
        return self._preparation.loading

    @property
    def use_stateful_dataloader(self) -> bool:
        """Are loaders torchdata's StatefulDataLoader?"""
        return self._preparation.loading.use_stateful_dataloader

    # ---------------------------------------------------------------- the step

    @contextmanager
    def trigger_sync_in_backward(self, model: torch.nn.Module) -> Iterator[None]:
        """Let the next backward send gradients although its forward ran in `no_sync`."""
        self.strategy.expect_backward([model])
        yield

    @contextmanager
    def maybe_context_parallel(self, buffers: Sequence[torch.Tensor] | None = None, buffer_seq_dims: Sequence[int] | None = None,
                               no_restore_buffers: Any = None) -> Iterator[None]:  # fmt: skip
        """Run the block as it is: there is no context parallelism yet, and every process holds whole sequences."""
        log.warning_once(
            "maybe_context_parallel has no effect: there is no context parallelism yet, so sequences stay whole"
        )
        yield

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> NoReturn:
        """Refused: LOMO makes its updates inside backward, where no window, clipping or skipping can act.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "lomo_backward makes updates inside backward, where no window, clipping or skipping can act; use another optimizer, "
            "and accelerator.checkpoint_activations(model) where memory is short"
        )

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Was the model, or a part of it, placed over several devices?"""
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())

    # ---------------------------------------------------------------- what was prepared

    @property
    def _models(self) -> list[torch.nn.Module]:
        return self._preparation.models

    @property
    def _optimizers(self) -> list[Any]:
        return list(self._preparation.optimizers)

    @property
    def _schedulers(self) -> list[Any]:
        return list(self._preparation.schedulers)

    @property
    def _dataloaders(self) -> list[Any]:
        return list(self._preparation.loaders)
