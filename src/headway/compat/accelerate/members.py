"""What scripts read from an Accelerator besides its own members: states, plugins that are None, what was prepared."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from headway.accelerator import Accelerator
from headway.compat.accelerate.constants import DistributedType
from headway.compat.accelerate.plugins import ParallelismConfig
from headway.compat.accelerate.served.names import member_advice
from headway.compat.accelerate.state import AcceleratorState, GradientState
from headway.config.values import did_you_mean
from headway.errors import AttributeNotServed, ConfigError, UnsupportedError
from headway.log import get_logger
from headway.strategies.deepspeed.plugin import DeepSpeedPlugin

log = get_logger(__name__)


def _along(axis: str, doc: str) -> property:
    """This process's coordinate on an axis of the layout."""

    def read(members: "Members") -> int:
        accelerator = members._accelerator
        return accelerator._run.chosen.layout.coordinates(accelerator.process_index)[axis]

    return property(read, doc=doc)


class Members:
    """The members that an Accelerator has for scripts written for Accelerate; it looks here for what it does not have itself.

    Args:
        accelerator: whose members these are.

    Attributes:
        state: this process and the run's settings (`AcceleratorState`).
        gradient_state: the windows (`GradientState`).
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.state = AcceleratorState(_run=accelerator._run)
        self.gradient_state = GradientState(_run=accelerator._run)

    def __getattr__(self, name: str) -> NoReturn:
        known = [] if name.startswith("_") else [each for each in dir(self._accelerator) if not each.startswith("_")]
        unknown = f"'Accelerator' object has no attribute {name!r}{did_you_mean(name, known)}"
        raise AttributeNotServed(member_advice(name) or unknown)

    # ---------------------------------------------------------------- surroundings

    @property
    def distributed_type(self) -> DistributedType:
        """How processes share the work: NO, or MULTI_ and the kind of device, such as MULTI_GPU."""
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        """Are there several processes, each with an accelerator?"""
        return self.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """DeepSpeed's settings, if it is the engine."""
        return self.state.deepspeed_plugin

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many processes each axis has; None if none was given and each process holds the whole model."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """torch's device mesh, its axes named pp, replicate, shard, cp and tp; None where replicas need none."""
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Are parameters sharded?"""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Are parameters sharded, so that other axes may be added?"""
        return self.is_fsdp2

    tensor_parallel_rank = _along(
        "tp", "This process's rank among those that share each matrix; 0 without tensor parallelism."
    )
    context_parallel_rank = _along(
        "cp", "Its rank among those that share each sequence; 0 without context parallelism."
    )
    pipeline_parallel_rank = _along("pp", "Its stage; 0 without a pipeline.")
    data_parallel_rank = _along("replicate", "The model replica that it belongs to, from 0.")
    data_parallel_shard_rank = _along(
        "shard", "Its rank among those that shard a replica's parameters; 0 without sharding."
    )

    @property
    def should_save_model(self) -> bool:
        """Is this the first process of its machine? `save_model` itself is called on all."""
        return self._accelerator.is_local_main_process

    # ---------------------------------------------------------------- precision

    @property
    def native_amp(self) -> bool:
        """Do forward passes use autocast?"""
        return self._accelerator.precision.is_mixed

    @property
    def fp8_backend(self) -> str | None:
        """Accelerate's word for what computes in float8: "AO", torchao; None without float8."""
        return "AO" if self._accelerator.mixed_precision == "fp8" else None

    # ---------------------------------------------------------------- the step

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Run the block as it is: a prepared model cuts the sequences that it is given itself, so buffers stay whole.

        Raises:
            ConfigError: not one dimension for each buffer, a buffer without that dimension, or one to leave cut that is none
                of them.
        """
        buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
        if len(buffers) != len(dims) or any(not -b.dim() <= d < b.dim() for b, d in zip(buffers, dims)):
            shapes = [tuple(each.shape) for each in buffers]
            raise ConfigError(
                f"maybe_context_parallel(buffer_seq_dims={dims}) does not give a dimension for each buffer, of the shapes {shapes}"
            )
        if any(all(each is not buffer for buffer in buffers) for each in no_restore_buffers or ()):
            raise ConfigError(
                "maybe_context_parallel(no_restore_buffers=...) holds a tensor that is not one of the buffers"
            )
        if self._accelerator._run.chosen.layout.cp > 1:
            log.info_once(
                "maybe_context_parallel leaves its buffers whole: the prepared model cuts the sequences that it is given itself"
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

    _models = property(lambda members: members._accelerator._preparation.models)
    _optimizers = property(lambda members: list(members._accelerator._preparation.optimizers))
    _schedulers = property(lambda members: list(members._accelerator._preparation.schedulers))
    _dataloaders = property(lambda members: list(members._accelerator._preparation.loaders))
    _custom_objects = property(lambda members: list(members._accelerator._run_state.custom))
