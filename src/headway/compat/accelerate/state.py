"""Accelerate's state classes: PartialState, AcceleratorState and GradientState.

They describe this process, the settings of the run, and its accumulation windows. Each class reads the process runtime
and the Accelerator that was created last. In Accelerate, all instances of such a class share one dict. Here, instances
always agree because they read the same objects.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from headway.compat.accelerate.constants import DistributedType, find_distributed_type
from headway.compat.accelerate.plugins import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
    get_fsdp_plugin,
    get_parallelism_config,
)
from headway.core.config.compilation import TorchDynamoPlugin
from headway.core.config.load import UNSET, resolve_run_setting
from headway.core.data.batch_reads import BatchReads
from headway.core.data.loader import PreparedLoader
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.ranks import RankAware
from headway.core.runtime.device import detect_hardware
from headway.core.runtime.group import find_backend
from headway.core.training.facts import AcceleratorFacts
from headway.core.training.windows import AccumulationWindows
from headway.errors import ConfigError, UnsupportedError
from headway.layouts.deepspeed.plugin import DeepSpeedPlugin


def get_collectives() -> Collectives:
    """Return the `Collectives` of the Accelerator that was created last.

    If there is no Accelerator for the current runtime, return a new object. If this process has no runtime, start it.
    """
    runtime, latest = process.current(), AcceleratorFacts.latest
    return latest.collectives if latest is not None and latest.collectives.runtime is runtime else Collectives(runtime)


def _start_runtime(options: Mapping[str, Any]) -> Collectives:
    """Start the process runtime if needed, and return its `Collectives`.

    After the end of a run, a call without options does not start the runtime again. It returns the `Collectives` of
    the last Accelerator.
    """
    latest = AcceleratorFacts.latest
    if not process.is_started() and latest is not None and latest.is_available_after_end and not options:
        return latest.collectives
    process.start(**options)
    return get_collectives()


class _SharedState:
    """Descriptor for the attribute `_shared_state`, which scripts compare with {} to detect an uninitialized state."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read

    def __get__(self, instance: Any, owner: Any = None) -> dict[str, Any]:
        return self._read()


def _read_process_values() -> dict[str, Any]:
    """Return the device, the number of processes and the index of this process. Empty before the process group exists."""
    if not process.is_started():
        return {}
    runtime = process.current()
    return {"device": runtime.device, "num_processes": runtime.world_size, "process_index": runtime.rank}


def _read_run_values() -> dict[str, Any]:
    latest = AcceleratorFacts.latest
    return {} if latest is None else {"_mixed_precision": latest.mixed_precision, **_read_process_values()}


def is_initialized() -> bool:
    """Whether an Accelerator has been created in this process."""
    return AcceleratorFacts.latest is not None


def wait_for_everyone() -> None:
    """Wait until every process has called this function."""
    get_collectives().barrier()


class PartialState(RankAware):
    """State of this process. Creating one starts the process group if the launcher started several processes.

    Args:
        cpu: Whether to compute on the CPU even if an accelerator is available. Default: False.
        backend, init_method, timeout: As in `InitProcessGroupKwargs`.

    Raises:
        ConfigError: If this process has a runtime on another device, or `timeout` contradicts the command line.
        UnsupportedError: If SageMaker's data parallelism is requested.
    """

    _shared_state = _SharedState(_read_process_values)
    _values: ClassVar[dict[str, Any]] = {}
    _known_attrs: ClassVar[list[str]] = [
        "_cpu", "_mixed_precision", "_shared_state", "backend", "debug", "device", "distributed_type", "fork_launched",
        "local_process_index", "num_processes", "process_index",
    ]  # fmt: skip
    """Names of attributes whose AttributeError says that the state was reset. Scripts match this text of Accelerate."""
    debug: bool = False  # assignments have no effect, because every collective is checked in any case

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        _use_sagemaker_dp: bool | None = None,
    ) -> None:
        if _use_sagemaker_dp:
            raise UnsupportedError(
                "SageMaker's own data parallelism is not served; start the script with torchrun or SLURM"
            )
        self.__dict__ = self._values  # all instances share one dict
        options = {"cpu": cpu, "backend": backend, "init_method": init_method, "timeout": timeout}
        collectives = _start_runtime({name: value for name, value in options.items() if value})
        super().__init__(collectives.runtime, collectives)

    def __getattr__(self, name: str) -> Any:
        # Python also calls this for a property whose getter raises AttributeError, because the runtime has ended.
        class_name = type(self).__name__
        if name not in self._known_attrs:
            raise AttributeError(f"{class_name!r} object has no attribute {name!r}")
        raise AttributeError(
            f"`{class_name}` object has no attribute `{name}`. This happens if `{class_name}._reset_state()` was called and an "
            "`Accelerator` or `PartialState` was not reinitialized."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # transformers pickles one in its TrainingArguments. The unpickled state describes the process that reads it.
        return type(self), ()

    def __setstate__(self, state: object) -> None:
        # Pickles that the real Accelerate wrote contain values. They are ignored, because the current values apply.
        self.__init__()  # type: ignore[misc]

    @staticmethod
    def _reset_state() -> None:
        """End the runtime, and the process group if Headway started it.

        The next state or Accelerator starts a new one.
        """
        process.reset()
        PartialState._values.clear()
        if AcceleratorFacts.latest is not None:
            AcceleratorFacts.latest.is_available_after_end = False

    @property
    def initialized(self) -> bool:
        """Whether this process has a runtime."""
        return process.is_started()

    @property
    def distributed_type(self) -> DistributedType:
        """Type of distribution, determined by world size and device type."""
        return find_distributed_type(self.runtime)

    @property
    def _cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def backend(self) -> str | None:
        """Backend of the process group for this device, such as "nccl".

        None in a single-process run, or if there is no process group.
        """
        if self.num_processes == 1:
            return None
        return find_backend(self.device) if dist.is_initialized() else None

    @property
    def default_device(self) -> torch.device:
        """Device of the accelerator type that torch detects on this machine, else the CPU."""
        return torch.device(detect_hardware().kind)

    @property
    def fork_launched(self) -> bool:
        """Always False. Headway does not record whether `notebook_launcher` forked this process."""
        return False

    def set_device(self) -> None:
        """Do nothing, because the runtime made its device the current one when it started."""

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a process group.

        Args:
            group: Group to destroy. None: end the runtime together with the default process group.
        """
        if group is not None:
            dist.destroy_process_group(group)
        else:
            self._reset_state()

    def __repr__(self) -> str:
        rows = {
            "Distributed environment": f"{self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}",
            "Num processes": self.num_processes,
            "Process index": self.process_index,
            "Local process index": self.local_process_index,
            "Device": self.device,
        }
        return "".join(f"{name}: {value}\n" for name, value in rows.items())


class AcceleratorState(PartialState):
    """State of this process, plus the settings of the Accelerator that was created last.

    Args:
        mixed_precision: Precision to report if there is no Accelerator yet. None (the default): the launcher's setting,
            else "no".
        cpu: Whether to compute on the CPU even if an accelerator is available. Default: False.
        options: Other arguments of `PartialState`.

    Raises:
        ConfigError: If `mixed_precision` differs from the Accelerator's.
    """

    _shared_state = _SharedState(_read_run_values)
    _values: ClassVar[dict[str, Any]] = {}
    _known_attrs: ClassVar[list[str]] = [
        *PartialState._known_attrs, "deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "dynamo_plugin",
    ]  # fmt: skip

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        *,
        _run: AcceleratorFacts | None = None,
        _from_accelerator: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(cpu, **options)
        self._run = _run or AcceleratorFacts.latest
        run_precision = None if self._run is None else self._run.mixed_precision
        if run_precision is not None and mixed_precision is not None and mixed_precision != run_precision:
            raise ConfigError(
                f"mixed_precision={mixed_precision!r}, but the Accelerator computes in {run_precision!r}; give it to the Accelerator"
            )
        launcher_precision, _ = resolve_run_setting(
            "mixed_precision", mixed_precision or UNSET, "no", code_origin="AcceleratorState(...)"
        )
        self.mixed_precision: str = run_precision or launcher_precision

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Drop the reference to the Accelerator that was created last.

        Args:
            reset_partial_state: Whether to end the process runtime too. Default: False.
        """
        AcceleratorFacts.latest = None
        AcceleratorState._values.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def _mixed_precision(self) -> str:
        return self.mixed_precision

    @property
    def initialized(self) -> bool:
        """Whether an Accelerator has been created."""
        return self._run is not None

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """`ParallelismConfig` with the number of processes along each axis of the run's layout.

        None without an Accelerator. Also None if the script gave no ParallelismConfig, and the run uses DeepSpeed or
        each process holds a full replica of the model.
        """
        return None if self._run is None else get_parallelism_config(self._run.resolved_layout)

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """torch.compile settings of the Accelerator. If there is no Accelerator, a plugin with the backend NO."""
        return TorchDynamoPlugin() if self._run is None else self._run.dynamo_plugin

    @property
    def distributed_type(self) -> DistributedType:
        """Type of distribution, determined by world size, layout (FSDP or DEEPSPEED) and device type."""
        return find_distributed_type(self.runtime, None if self._run is None else self._run.resolved_layout)

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 shards parameters over several ranks."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """FSDP plugin of the Accelerator, or one that describes its sharding. None if parameters are not sharded."""
        if self._run is None or not self.is_fsdp2:
            return None
        return get_fsdp_plugin(self._run.resolved_layout)

    @property
    def torch_tp_plugin(self) -> TorchTensorParallelPlugin | None:
        """Tensor-parallel plugin that was passed to the Accelerator, or None."""
        return None if self._run is None else self._run.resolved_layout.plugins.get("torch_tp_plugin")

    @property
    def device_mesh(self) -> Any:
        """torch's device mesh, with the axis names of `headway.core.config.mesh`, such as "shard" and "tp".

        None without an Accelerator, or if each process holds a full replica of the model and no mesh was created.
        """
        return None if self._run is None else self._run.device_mesh

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """DeepSpeed's settings if the run uses DeepSpeed, else None."""
        return None if self._run is None else cast("DeepSpeedPlugin | None", self._run.resolved_layout.engine)

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin] | None:
        """Dict with DeepSpeed's settings under the name "default", or None if the run does not use DeepSpeed."""
        return None if self.deepspeed_plugin is None else {"default": self.deepspeed_plugin}

    megatron_lm_plugin = None

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


class GradientState:
    """State of the accumulation windows of the Accelerator that was created last.

    Without an Accelerator, the properties of this object have their initial values, those before the first micro-batch.

    Args:
        gradient_accumulation_plugin: Ignored if an Accelerator exists. Otherwise only None is allowed.

    Raises:
        UnsupportedError: If a plugin is given and there is no Accelerator.
    """

    # Scripts only check whether the dict is empty.
    _shared_state = _SharedState(lambda: {} if AcceleratorFacts.latest is None else {"sync_gradients": True})

    def __init__(self, gradient_accumulation_plugin: Any = None, *, _run: AcceleratorFacts | None = None) -> None:
        self._run = _run or AcceleratorFacts.latest
        if gradient_accumulation_plugin is not None and self._run is None:
            raise UnsupportedError(
                "GradientState(plugin) has no effect; give the plugin to Accelerator(gradient_accumulation_plugin=...)"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientState, ()

    @property
    def _windows(self) -> AccumulationWindows:
        windows = None if self._run is None else self._run.accumulation
        return AccumulationWindows(1, BatchReads()) if windows is None else windows

    @property
    def _loader(self) -> PreparedLoader | None:
        active = self._windows.reads.active_loaders
        return active[-1] if active else None

    @staticmethod
    def _reset_state() -> None:
        """Drop the reference to the Accelerator that was created last."""
        AcceleratorState._reset_state()

    @property
    def initialized(self) -> bool:
        """Whether an Accelerator has been created."""
        return self._run is not None

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its accumulation window. Can be assigned.

        Also False after a script has assigned False, until the next micro-batch begins.
        """
        return self._windows.is_step_due

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._set_sync_gradients(value)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether `optimizer.step()` and `zero_grad()` take effect. If False, both do nothing.

        False remains in effect until True is set or an accumulation window begins.
        """
        self._windows.set_steps_enabled(sync_gradients)

    @property
    def num_steps(self) -> int:
        """Number of micro-batches per update."""
        return self._windows.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count micro-batches instead of updates."""
        return self._run is not None and self._run.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a loader's last batch ends the accumulation window."""
        return self._windows.sync_with_loader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Accumulation settings by name: `num_steps`, and those other settings that differ from their defaults."""
        kwargs: dict[str, Any] = {"num_steps": self.num_steps}
        if not self.sync_with_dataloader:
            kwargs["sync_with_dataloader"] = False
        if self._windows.sync_each:
            kwargs["sync_each_batch"] = True
        return kwargs

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self._loader is not None

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """Innermost prepared loader that is being iterated, or None."""
        return self._loader

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """List of None, as in Accelerate, and all prepared loaders that are being iterated, innermost loader last."""
        return [None, *self._windows.reads.active_loaders]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        return self._loader is not None and self._loader.is_last

    @property
    def remainder(self) -> int:
        """Number of samples in the active loader's last global batch if that batch is incomplete, not counting padding.

        0 if the last global batch is complete. -1 if the number is unknown or no loader is being iterated.
        """
        loader = self._loader
        return -1 if loader is None else count_remainder(loader)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether XLA has synchronized the gradients. Always False, because Headway does not use XLA."""
        return False

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def count_remainder(loader: PreparedLoader) -> int:
    """Return the number of samples in a loader's last global batch, not counting padding, if that batch is incomplete.

    Returns:
        The number of samples. 0 if the last global batch is complete, -1 if the number is unknown.
    """
    size, counts = loader.total_batch_size, loader.valid_counts
    if not size:
        return -1
    if loader.is_last and counts is not None:
        return sum(counts) % size
    try:
        return loader.total_dataset_length % size
    except TypeError:
        return -1
