"""Layouts by Accelerate's names: sizes of parallelism and compilers, and one error for what is not there yet."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from headway.errors import ConfigError, UnsupportedError

_PLANNED = "It is planned; until then "
_REPLICAS = f"{_PLANNED}replicas train with DDP: leave the plugin out"
_MEMORY = ", and where memory is short use microbatching='auto' or accelerator.checkpoint_activations(model)"
_ADVICE = {
    "FSDP": f"FSDP (parameters sharded over processes) is not there yet. {_REPLICAS}{_MEMORY}",
    "Megatron-LM": f"Megatron-LM (tensor and pipeline parallelism) is not there yet. {_REPLICAS}",
    "tensor parallelism": f"tensor parallelism is not there yet. {_REPLICAS}, or its sizes at 1",
    "torch.compile by the Accelerator": (
        f"compilation at prepare() is not there yet. {_PLANNED}compile the model yourself before you prepare it: "
        "`model = torch.compile(model)`"
    ),
}


def refusal(layout: str) -> UnsupportedError:
    """The error for a layout that is not there yet."""
    return UnsupportedError(_ADVICE[layout])


class Spelled(str, Enum):
    """Members are their text: `DistributedType.NO == "NO"`, and printing one gives that text."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """All values."""
        return [str(member.value) for member in cls]


class DynamoBackend(Spelled):
    """torch.compile's backends, by Accelerate's names."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@dataclass
class TorchDynamoPlugin:
    """Settings of torch.compile by Accelerate's names; the Accelerator takes only the backend NO.

    Attributes:
        backend: a `DynamoBackend` or its name.
        mode, fullgraph, dynamic, options, disable: as for torch.compile.
        use_regional_compilation: compile repeated blocks only.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        self.backend = dynamo_backend(self.backend)
        self.mode = self.mode or "default"
        self.fullgraph = bool(self.fullgraph)


def dynamo_backend(name: DynamoBackend | str | None) -> DynamoBackend:
    """The backend called `name`, in any case; None: NO.

    Raises:
        ConfigError: an unknown name.
    """
    text = "NO" if name is None else str(name).upper()
    try:
        return DynamoBackend(text)
    except ValueError:
        allowed = ", ".join(sorted(DynamoBackend.list()))
        raise ConfigError(f"dynamo_backend={name!r} is unknown; allowed: {allowed}, in any case") from None


@dataclass
class ParallelismConfig:
    """How many processes each kind of parallelism takes; 1: none.

    Replicas (`dp_replicate_size`) are there; the other sizes are taken by name, and refused by the Accelerator where they are
    not 1.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            size = getattr(self, name)
            size = 1 if size is None else size
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}={size!r}; give a number of processes, 1 or more")
            setattr(self, name, size)
        self.cp_backend = self.cp_backend or "torch"
        self.sp_backend = self.sp_backend or "deepspeed"

    @property
    def sizes(self) -> dict[str, int]:
        """Processes by kind."""
        kinds = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
        return {kind: int(getattr(self, f"{kind}_size")) for kind in kinds}

    @property
    def total_size(self) -> int:
        """All processes together."""
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that share one replica's data."""
        return self.sizes["tp"] * self.sizes["cp"] * self.sizes["sp"]

    @property
    def data_parallel_size(self) -> int:
        """Processes that read data of their own."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Are there several replicas?"""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Are parameters sharded?"""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Is there tensor parallelism?"""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Is there context parallelism?"""
        return self.sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """Is there sequence parallelism?"""
        return self.sizes["sp"] > 1

    def check(self) -> None:
        """Refuse what is not there yet.

        Raises:
            UnsupportedError: a size other than that of replicas is not 1.
        """
        layouts = {
            "dp_shard": "sharded parameters",
            "tp": "tensor parallelism",
            "cp": "context parallelism",
            "sp": "sequence parallelism",
        }
        wanted = [f"{layouts[kind]} ({kind}_size={n})" for kind, n in self.sizes.items() if n > 1 and kind in layouts]
        if wanted:
            raise UnsupportedError(
                f"parallelism_config asks for {' and '.join(wanted)}, which is not there yet. {_PLANNED}replicas train with "
                "DDP: leave these sizes at 1, or the configuration out"
            )

    def check_world(self, num_processes: int) -> None:
        """Compare with the processes that there are.

        Raises:
            ConfigError: another number of replicas.
        """
        if self.dp_replicate_enabled and self.sizes["dp_replicate"] != num_processes:
            raise ConfigError(
                f"parallelism_config asks for dp_replicate_size={self.dp_replicate_size}, but the run has {num_processes} "
                f"processes; give {num_processes}, or leave it out"
            )


def check_layouts(
    fsdp: Any,
    tensor_parallel: Any,
    megatron: Any,
    backend: DynamoBackend | str | None,
    plugin: TorchDynamoPlugin | None,
    parallelism: ParallelismConfig | None,
) -> TorchDynamoPlugin:
    """Refuse the Accelerator's arguments that ask for what is not there yet.

    Args:
        fsdp, tensor_parallel, megatron: the plugins; None: not asked for.
        backend: the compiler by name; or a
        plugin: with its settings.
        parallelism: sizes by kind.

    Returns:
        The compiler's settings, which compile nothing.

    Raises:
        UnsupportedError: a layout that is not there yet; the message names it and says what to do today.
        ConfigError: settings that contradict each other.
    """
    given = {"FSDP": fsdp, "tensor parallelism": tensor_parallel, "Megatron-LM": megatron}
    for layout, asked in given.items():
        if asked is not None:
            raise refusal(layout)
    if backend is not None and plugin is not None:
        raise ConfigError("give dynamo_backend or dynamo_plugin, not both")
    chosen = plugin if plugin is not None else TorchDynamoPlugin(backend=backend)
    if dynamo_backend(chosen.backend) is not DynamoBackend.NO and not chosen.disable:
        raise refusal("torch.compile by the Accelerator")
    if parallelism is not None and not isinstance(parallelism, ParallelismConfig):
        raise ConfigError(
            f"parallelism_config is a {type(parallelism).__name__}; give a headway.ParallelismConfig, or leave it out"
        )
    if parallelism is not None:
        parallelism.check()
    return chosen
