"""PartialState, AcceleratorState and GradientState: what scripts ask about this process, the run and its windows.

Each object is a view that reads the live parts: the process's runtime, and the Accelerator that was built last. Accelerate's
are singletons whose instances share one dict; here instances hold nothing that could differ.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from headway.compat.accelerate.constants import DistributedType, distributed_type
from headway.compat.accelerate.plugins import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
    fsdp_plugin_of,
    parallelism_of,
)
from headway.config.engines import TorchDynamoPlugin
from headway.config.load import UNSET, run_setting
from headway.data.loader import LoaderEvents, PreparedLoader
from headway.errors import ConfigError, UnsupportedError
from headway.runtime import process
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.ranks import RankAware
from headway.runtime.device import detect
from headway.runtime.group import engine_of
from headway.strategies.deepspeed.plugin import DeepSpeedPlugin
from headway.training.run import AcceleratorRun
from headway.training.windows import AccumulationWindows


def collectives() -> Collectives:
    """The way to the other processes: the Accelerator's, or one of its own where there is none."""
    runtime, latest = process.current(), AcceleratorRun.latest
    return latest.collectives if latest is not None and latest.collectives.runtime is runtime else Collectives(runtime)


def _started(options: Mapping[str, Any]) -> Collectives:
    """The same; a run that has ended can still be queried, but a query does not restart it."""
    latest = AcceleratorRun.latest
    if not process.is_started() and latest is not None and latest.answers_after_end and not options:
        return latest.collectives
    process.start(**options)
    return collectives()


class _Shared:
    """`_shared_state`, which scripts compare with {} to learn whether anything is initialised."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read

    def __get__(self, instance: Any, owner: Any = None) -> dict[str, Any]:
        return self._read()


def _process_facts() -> dict[str, Any]:
    if not process.is_started():
        return {}
    runtime = process.current()
    return {"device": runtime.device, "num_processes": runtime.world_size, "process_index": runtime.rank}


def _run_facts() -> dict[str, Any]:
    latest = AcceleratorRun.latest
    return {} if latest is None else {"_mixed_precision": latest.mixed_precision, **_process_facts()}


def is_initialized() -> bool:
    """Has an Accelerator been created in this process?"""
    return AcceleratorRun.latest is not None


def wait_for_everyone() -> None:
    """Wait until every process is here."""
    collectives().barrier()


class PartialState(RankAware):
    """This process among the others; creating one starts the process group if the launcher set up several processes.

    Args:
        cpu: compute on the CPU even where there is an accelerator.
        backend, init_method, timeout: as for `InitProcessGroupKwargs`.
    """

    _shared_state = _Shared(_process_facts)
    _values: ClassVar[dict[str, Any]] = {}
    debug: bool = False  # settable, and changes nothing: every exchange is checked before it moves data

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
        self.__dict__ = self._values  # all instances are one
        given = {"cpu": cpu, "backend": backend, "init_method": init_method, "timeout": timeout}
        way = _started({name: value for name, value in given.items() if value})
        super().__init__(way.runtime, way)

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        raise AttributeError(
            f"`{kind}` object has no attribute `{name}`. This happens if `{kind}._reset_state()` was called and an `Accelerator` or "
            "`PartialState` was not reinitialized."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # transformers keeps one in its TrainingArguments, which it pickles; what is read back looks at its own process.
        return type(self), ()

    def __setstate__(self, state: object) -> None:
        # From a file of the real Accelerate's, which holds values and makes no call: live ones take their place.
        self.__init__()  # type: ignore[misc]

    @staticmethod
    def _reset_state() -> None:
        """End the runtime, and the process group where Headway started it; the next state or Accelerator starts a new one."""
        process.reset()
        PartialState._values.clear()
        if AcceleratorRun.latest is not None:
            AcceleratorRun.latest.answers_after_end = False

    @property
    def initialized(self) -> bool:
        """Does this process have a runtime?"""
        return process.is_started()

    @property
    def distributed_type(self) -> DistributedType:
        """How processes share the work."""
        return distributed_type(self.runtime)

    @property
    def backend(self) -> str | None:
        """The engine that carries the device's tensors: "gloo", "nccl", ...; None on one process."""
        if self.num_processes == 1:
            return None
        return engine_of(self.device) if dist.is_initialized() else None

    @property
    def default_device(self) -> torch.device:
        """The kind of accelerator that torch finds here, or the CPU."""
        return torch.device(detect().kind)

    @property
    def fork_launched(self) -> bool:
        """False: `notebook_launcher` ends its processes itself."""
        return False

    def set_device(self) -> None:
        """The device was made current when the runtime started."""

    def destroy_process_group(self, group: Any = None) -> None:
        """End a process group; None: the runtime with it."""
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
    """The same, plus the run's settings, as in the Accelerator created last.

    Args:
        mixed_precision: only where there is no Accelerator yet; None: what the launcher says.
        cpu: compute on the CPU even where there is an accelerator.

    Raises:
        ConfigError: another precision than the Accelerator's.
    """

    _shared_state = _Shared(_run_facts)
    _values: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        *,
        _run: AcceleratorRun | None = None,
        _from_accelerator: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(cpu, **options)
        self._run = _run or AcceleratorRun.latest
        known = None if self._run is None else self._run.mixed_precision
        if known is not None and mixed_precision is not None and mixed_precision != known:
            raise ConfigError(
                f"mixed_precision={mixed_precision!r}, but the Accelerator computes in {known!r}; give it to the Accelerator"
            )
        said, _ = run_setting("mixed_precision", mixed_precision or UNSET, "no", code_origin="AcceleratorState(...)")
        self.mixed_precision: str = known or said

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the Accelerator; with `reset_partial_state` the runtime ends too."""
        AcceleratorRun.latest = None
        AcceleratorState._values.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def initialized(self) -> bool:
        """Has an Accelerator been created?"""
        return self._run is not None

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How many processes each axis takes; None where nothing was given, and each holds the whole model."""
        return None if self._run is None else parallelism_of(self._run.chosen)

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """What the Accelerator was given; else one whose backend is NO."""
        return TorchDynamoPlugin() if self._run is None else self._run.dynamo_plugin

    @property
    def distributed_type(self) -> DistributedType:
        """How processes share the work."""
        return distributed_type(self.runtime, None if self._run is None else self._run.chosen)

    @property
    def is_fsdp2(self) -> bool:
        """Are parameters sharded?"""
        return self.distributed_type == DistributedType.FSDP

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """What the Accelerator was given; one as the launcher says where parameters are sharded; else None."""
        if self._run is None or not self.is_fsdp2:
            return None
        return fsdp_plugin_of(self._run.chosen)

    @property
    def torch_tp_plugin(self) -> TorchTensorParallelPlugin | None:
        """What the Accelerator was given."""
        return None if self._run is None else self._run.chosen.plugins.get("torch_tp_plugin")

    @property
    def device_mesh(self) -> Any:
        """torch's device mesh, its axes named as in `headway.config.mesh`; None where replicas need none."""
        return None if self._run is None else self._run.device_mesh

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """DeepSpeed's settings, if it is the engine."""
        return None if self._run is None else self._run.chosen.deepspeed

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin] | None:
        """The same, under the name "default"."""
        return None if self.deepspeed_plugin is None else {"default": self.deepspeed_plugin}

    megatron_lm_plugin = None

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


class GradientState:
    """The windows of the Accelerator created last: does this micro-batch end one, and where is its loader?

    Without an Accelerator it says what is true before the first micro-batch.
    """

    _shared_state = _Shared(lambda: {} if AcceleratorRun.latest is None else {"sync_gradients": True})

    def __init__(self, gradient_accumulation_plugin: Any = None, *, _run: AcceleratorRun | None = None) -> None:
        self._run = _run or AcceleratorRun.latest
        if gradient_accumulation_plugin is not None and self._run is None:
            raise UnsupportedError(
                "GradientState(plugin) has no effect; give the plugin to Accelerator(gradient_accumulation_plugin=...)"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientState, ()

    @property
    def _windows(self) -> AccumulationWindows:
        found = None if self._run is None else self._run.accumulation
        return AccumulationWindows(1, LoaderEvents()) if found is None else found

    @property
    def _loader(self) -> PreparedLoader | None:
        active = self._windows.active
        return active[-1] if active else None

    @staticmethod
    def _reset_state() -> None:
        """Forget the Accelerator."""
        AcceleratorState._reset_state()

    @property
    def initialized(self) -> bool:
        """Is there an Accelerator?"""
        return self._run is not None

    @property
    def sync_gradients(self) -> bool:
        """Does the current micro-batch end its window?"""
        return self._windows.is_due

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._set_sync_gradients(value)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """False: step() and zero_grad() wait until it is True again or a window opens (windows made by hand)."""
        self._windows.set_due(sync_gradients)

    @property
    def num_steps(self) -> int:
        """Micro-batches per update."""
        return self._windows.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Are schedules counted in micro-batches?"""
        return self._run is not None and self._run.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Does a loader's last batch close the window?"""
        return self._windows.sync_with_loader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The accumulation's settings that differ from their defaults."""
        kwargs: dict[str, Any] = {"num_steps": self.num_steps}
        if not self.sync_with_dataloader:
            kwargs["sync_with_dataloader"] = False
        if self._windows.sync_each:
            kwargs["sync_each_batch"] = True
        return kwargs

    @property
    def in_dataloader(self) -> bool:
        """Is a prepared loader being iterated over?"""
        return self._loader is not None

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The innermost prepared loader being iterated over."""
        return self._loader

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """None and the prepared loaders being iterated over, innermost last."""
        return [None, *self._windows.active]

    @property
    def end_of_dataloader(self) -> bool:
        """Is the batch in hand its loader's last?"""
        return self._loader is not None and self._loader.is_last

    @property
    def remainder(self) -> int:
        """Real samples of the last round over all processes where that round is incomplete, else 0; -1 where unknown."""
        loader = self._loader
        return -1 if loader is None else remainder(loader)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """False: there is no XLA here."""
        return False

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def remainder(loader: PreparedLoader) -> int:
    """Real samples of its last round over all processes where that round is incomplete, else 0; -1 where unknown."""
    size, counts = loader.total_batch_size, loader.valid_counts
    if not size:
        return -1
    if loader.is_last and counts is not None:
        return sum(counts) % size
    try:
        return loader.total_dataset_length % size
    except TypeError:
        return -1
