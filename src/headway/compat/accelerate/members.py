"""Members that only Accelerate's Accelerator has, such as its states, its plugins and the ranks along mesh axes."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NoReturn

import torch

from headway.compat.accelerate.constants import DistributedType
from headway.compat.accelerate.plugins import ParallelismConfig
from headway.compat.accelerate.provided_names.advice import explain_member
from headway.compat.accelerate.state import AcceleratorState, GradientState
from headway.compat.other_library_names import METHODS
from headway.core.checkpoint.resume.state import CheckpointState
from headway.core.config.values import suggest_word
from headway.core.precision.mixed import Precision
from headway.core.runtime.collectives.ranks import RankAware
from headway.core.training.facts import AcceleratorFacts
from headway.core.training.prepared.prepare import Preparation
from headway.errors import AttributeNotServed, ConfigError, UnsupportedError
from headway.layouts.deepspeed.plugin import DeepSpeedPlugin
from headway.log import get_logger

log = get_logger(__name__)


def _make_axis_rank(axis: str, doc: str) -> property:
    """Return a property whose value is the process's coordinate along one axis of the device mesh.

    Args:
        axis: Name of the axis, such as "tp".
        doc: Docstring of the property.
    """

    def read_coordinate(accelerator: "AccelerateMembers") -> int:
        return accelerator._facts.resolved_layout.layout.find_coordinates(accelerator.process_index)[axis]

    return property(read_coordinate, doc=doc)


class _ComputedAttribute:
    """Descriptor of an attribute that is computed at each access until a script assigns a value to it.

    It has no `__set__`, so that an assigned value is stored on the Accelerator and takes precedence.

    Args:
        read: Function that returns the value for an Accelerator.
    """

    def __init__(self, read: "Callable[[AccelerateMembers], list[Any]]") -> None:
        self._read = read

    def __get__(self, accelerator: "AccelerateMembers | None", owner: type | None = None) -> Any:
        return self if accelerator is None else self._read(accelerator)


class AccelerateMembers(RankAware):
    """Mixin with the members that Accelerate's Accelerator has and Headway's own class lacks.

    `headway.Accelerator` also provides these members, for scripts in which only the imports were changed. It loads
    `read_member` through the registry of extensions, because `headway.accelerator` must not import `headway.compat`.

    Attributes:
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        precision: Precision of the training step.
    """

    mixed_precision: str
    precision: Precision
    _facts: AcceleratorFacts
    _preparation: Preparation
    _checkpoint_state: CheckpointState

    @cached_property
    def state(self) -> AcceleratorState:
        """Accelerate's `AcceleratorState`: the state of this process and the settings of the run."""
        return AcceleratorState(_run=self._facts)

    @cached_property
    def gradient_state(self) -> GradientState:
        """Accelerate's `GradientState`: the state of the accumulation windows."""
        return GradientState(_run=self._facts)

    # ---------------------------------------------------------------- processes and layout

    @property
    def distributed_type(self) -> DistributedType:
        """Type of distribution: NO, FSDP, DEEPSPEED, or MULTI_ with the device type, such as MULTI_GPU."""
        return self.state.distributed_type

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes. False for replicas on CPUs, but True for a sharded layout on CPUs."""
        return self.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """DeepSpeed's settings if the run uses DeepSpeed, else None."""
        return self.state.deepspeed_plugin

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """`ParallelismConfig` with the number of processes along each axis of the run's layout.

        None if the script gave no ParallelismConfig, and the run uses DeepSpeed or each process holds a full replica of
        the model.
        """
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """torch's device mesh, with axes named as in `headway.core.config.mesh`, such as "shard" and "tp".

        None if each process holds a full replica of the model and no mesh was created.
        """
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 shards parameters over several ranks."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are sharded by FSDP2, which can be combined with other kinds of parallelism."""
        return self.is_fsdp2

    tensor_parallel_rank = _make_axis_rank(
        "tp", "Rank of this process among those that share each matrix. 0 without tensor parallelism."
    )
    context_parallel_rank = _make_axis_rank(
        "cp", "Rank of this process among those that share each sequence. 0 without context parallelism."
    )
    pipeline_parallel_rank = _make_axis_rank("pp", "Pipeline stage of this process. 0 without a pipeline.")
    data_parallel_rank = _make_axis_rank("replicate", "Index of the model replica of this process, from 0.")
    data_parallel_shard_rank = _make_axis_rank(
        "shard", "Rank of this process among those that shard a replica's parameters. 0 without sharding."
    )

    @property
    def should_save_model(self) -> bool:
        """Whether this process is the local main process, which should write the files that a script saves itself.

        There is one such process on each machine. `save_model` must be called on all processes, not only on this one.
        """
        return self.is_local_main_process

    # ---------------------------------------------------------------- precision

    @cached_property
    def native_amp(self) -> bool:
        """Whether forward passes use autocast."""
        return self.precision.is_mixed

    @property
    def fp8_backend(self) -> str | None:
        """Accelerate's name for the library that computes in float8: "AO" (torchao), or None without float8."""
        return "AO" if self.mixed_precision == "fp8" else None

    # ---------------------------------------------------------------- the step

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Return a context manager without effect, because a prepared model splits its own input sequences.

        Args:
            buffers: Tensors that Accelerate would split along their sequence dimensions. They are only checked.
                None (the default): none.
            buffer_seq_dims: Sequence dimension of each buffer. None (the default): none, without `buffers`.
            no_restore_buffers: Buffers that Accelerate would not restore afterwards. They are only checked.
                None (the default): none.

        Raises:
            ConfigError: If there is not one valid dimension per buffer, or if `no_restore_buffers` contains a tensor
                that is not in `buffers`.
        """
        buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
        if len(buffers) != len(dims) or any(not -b.dim() <= d < b.dim() for b, d in zip(buffers, dims)):
            shapes = [tuple(each.shape) for each in buffers]
            raise ConfigError(
                f"maybe_context_parallel(buffer_seq_dims={dims}) does not give a dimension for each buffer, of the shapes {shapes}"
            )
        if any(all(each is not buffer for buffer in buffers) for each in no_restore_buffers or ()):
            raise ConfigError(
                "maybe_context_parallel(no_restore_buffers=...) contains a tensor that is not one of the buffers"
            )
        if self._facts.resolved_layout.layout.cp > 1:
            log.info_once(
                "maybe_context_parallel leaves its buffers unsharded, because the prepared model shards its input sequences itself"
            )
        yield

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> NoReturn:
        """Raise `UnsupportedError`, because the LOMO optimizer updates parameters inside backward.

        Accumulation, clipping and the skipping of updates cannot be applied to such updates.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "lomo_backward makes updates inside backward, where no window, clipping or skipping can act; use another optimizer, "
            "and accelerator.checkpoint_activations(model) where memory is short"
        )

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Whether the model or one of its submodules has a device map with several devices."""
        return any(len(getattr(module, "hf_device_map", ())) > 1 for module in model.modules())

    # ---------------------------------------------------------------- prepared objects

    _models = _ComputedAttribute(lambda accelerator: accelerator._preparation.models)
    _optimizers = _ComputedAttribute(lambda accelerator: list(accelerator._preparation.optimizers))
    _schedulers = _ComputedAttribute(lambda accelerator: list(accelerator._preparation.schedulers))
    _dataloaders = _ComputedAttribute(lambda accelerator: list(accelerator._preparation.loaders))
    _custom_objects = _ComputedAttribute(lambda accelerator: list(accelerator._checkpoint_state.run.custom))


def list_members() -> list[str]:
    """Return the names of the members that only Accelerate's Accelerator has."""
    return [name for name in vars(AccelerateMembers) if not name.startswith("__")]


def read_member(accelerator: Any, name: str) -> Any:
    """Return the value of an attribute that Headway's Accelerator lacks and `AccelerateMembers` defines.

    Args:
        accelerator: Accelerator that has no such attribute itself.
        name: Name of the attribute.

    Raises:
        AttributeNotServed: If there is no such member. The message names an alternative or a similar name.
    """
    member = vars(AccelerateMembers).get(name)
    if member is not None:
        return member.__get__(accelerator, type(accelerator))
    public_names = [] if name.startswith("_") else [each for each in dir(accelerator) if not each.startswith("_")]
    hint = f": {METHODS[name]}" if name in METHODS else suggest_word(name, public_names)
    message = f"'Accelerator' object has no attribute {name!r}{hint}"
    raise AttributeNotServed(explain_member(name) or message)
