"""Accelerate's dataclasses for layouts: the same names, fields and checks; each says by itself what it asks for."""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from headway.common import env
from headway.common.optional import Later
from headway.compat.accelerate.fsdp_plugin import FullyShardedDataParallelPlugin
from headway.compat.accelerate.launching.layout_words import read_size
from headway.config.layout_choice import ResolvedLayout
from headway.config.layout_request import LayoutRequest, TorchContextParallelConfig
from headway.config.parallelism import ShardingOptions
from headway.errors import ConfigError

meshes = Later("torch.distributed.device_mesh")


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism by Accelerate's older name; `strategy="tp=2"` or a ParallelismConfig says the same.

    Attributes:
        tp_size: ranks that share a matrix.
        torch_device_mesh: refused by the Accelerator, which makes its own.
    """

    argument: ClassVar[str] = "torch_tp_plugin"

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.tp_size, bool) or not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise ConfigError(f"tp_size={self.tp_size!r}; give a number of processes, 1 or more")

    def request_layout(self, request: LayoutRequest) -> None:
        """Ask for the size."""
        if self.torch_device_mesh is not None:
            request.refuse("torch_tp_plugin.torch_device_mesh", "the Accelerator creates the mesh; give only sizes")
        if self.tp_size > 1:
            request.set_size("tp", self.tp_size, "torch_tp_plugin.tp_size")


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism in a ParallelismConfig; `headway.TensorParallelOptions` has more.

    Attributes:
        enable_async_tp: changes nothing, as in Accelerate.
    """

    enable_async_tp: bool = False


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's sequence parallelism, which is not served: the Accelerator refuses an sp_size above 1.

    Attributes:
        sp_seq_length, sp_seq_length_is_variable, sp_attn_implementation: kept by name.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigError("sp_seq_length_is_variable=False needs sp_seq_length; give the length")


def _is_above_one(kind: str, doc: str) -> property:
    return property(lambda config: config.sizes[kind] > 1, doc=doc)


def _axes(doc: str, *kinds: str) -> property:
    return property(lambda config: config._enabled(*kinds), doc=doc)


@dataclass
class ParallelismConfig:
    """How many processes each kind of parallelism takes; 1: none. `strategy="fsdp=4+tp=2"` says the same in a word.

    Attributes:
        dp_replicate_size: copies of the model; None, here and below: what PARALLELISM_CONFIG_DP_REPLICATE_SIZE says.
        dp_shard_size: processes over which a copy's parameters are sharded.
        tp_size: processes that share each matrix.
        cp_size: processes that share each sequence.
        sp_size: DeepSpeed's sequence parallelism, which the Accelerator refuses.
        cp_backend, sp_backend: "torch" and "deepspeed", the only ones.
        tp_handler, cp_handler, sp_handler: options, by Accelerate's names.

    Raises:
        ConfigError: a size that is not a number of processes, or sizes that exclude each other.
    """

    argument: ClassVar[str] = "parallelism_config"

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            size = getattr(self, name)
            size = env.get_int(f"PARALLELISM_CONFIG_{name.upper()}") or 1 if size is None else size
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}={size!r}; give a number of processes, 1 or more")
            setattr(self, name, size)
        self.cp_backend = self._backend("cp_backend", "torch")
        self.sp_backend = self._backend("sp_backend", "deepspeed")
        if self.cp_enabled and self.sp_enabled:
            raise ConfigError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both cut sequences; leave one of them at 1"
            )
        self._make_handlers()
        self._mesh: Any = None

    def _backend(self, name: str, only: str) -> str:
        given = getattr(self, name) or only
        if given != only:
            raise ConfigError(f"{name}={given!r}; allowed: {only!r}")
        return only

    def _make_handlers(self) -> None:
        kinds = {
            "tp": TorchTensorParallelConfig,
            "cp": TorchContextParallelConfig,
            "sp": DeepSpeedSequenceParallelConfig,
        }
        for axis, kind in kinds.items():
            given = getattr(self, f"{axis}_handler")
            if given is not None and not isinstance(given, kind):
                raise ConfigError(f"{axis}_handler is a {type(given).__name__}; give a headway.{kind.__name__}")
            if given is None and self.sizes[axis] > 1:
                setattr(self, f"{axis}_handler", kind())

    @property
    def sizes(self) -> dict[str, int]:
        """Processes by kind."""
        return {kind: int(getattr(self, f"{kind}_size")) for kind in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}

    def request_layout(self, request: LayoutRequest) -> None:
        """Ask for the sizes."""
        for name, size in self.sizes.items():
            if size > 1:
                read_size(request, f"{name}_size", size, f"parallelism_config.{name}_size")
        request.context = self.cp_handler

    @property
    def total_size(self) -> int:
        """All processes together."""
        return prod(self.sizes.values())

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that share one replica's data."""
        return self.sizes["tp"] * self.sizes["cp"] * self.sizes["sp"]

    @property
    def data_parallel_size(self) -> int:
        """Processes that read data of their own."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    dp_replicate_enabled = _is_above_one("dp_replicate", "Are there several replicas?")
    dp_shard_enabled = _is_above_one("dp_shard", "Are parameters sharded?")
    tp_enabled = _is_above_one("tp", "Is there tensor parallelism?")
    cp_enabled = _is_above_one("cp", "Is there context parallelism?")
    sp_enabled = _is_above_one("sp", "Is there sequence parallelism?")

    def _enabled(self, *kinds: str) -> list[str]:
        return [kind for kind in kinds if self.sizes[kind] > 1]

    dp_dim_names = _axes("The axes whose ranks read data of their own.", "dp_replicate", "dp_shard")
    non_dp_dim_names = _axes("The axes whose ranks read the same.", "tp", "cp", "sp")
    dp_shard_cp_dim_names = _axes("The axes over which parameters are sharded.", "dp_shard", "cp")
    dp_cp_dim_names = _axes("The axes over which losses are averaged.", "dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of FSDP, copies among them."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes that there are."""
        return [*self.dp_dim_names, *self.non_dp_dim_names]

    def _get_mesh(self) -> tuple[Any, ...]:
        names = self._enabled("dp_replicate", "dp_shard", "cp", "sp", "tp")
        return tuple(zip(*((name, self.sizes[name]) for name in names)))

    def build_device_mesh(self, device_type: str) -> Any:
        """torch's device mesh of these sizes, with its joint axes; all processes call it. None where every size is 1.

        Args:
            device_type: such as "cuda".
        """
        if not (mesh := self._get_mesh()):
            return None
        names, sizes = mesh
        made = meshes.init_device_mesh(device_type, sizes, mesh_dim_names=names)
        for joint in ("dp", "dp_shard_cp", "dp_cp"):
            if axes := getattr(self, f"{joint}_dim_names"):
                made[tuple(axes)]._flatten(joint)
        return made

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """The same, made once.

        Raises:
            ConfigError: it is there for another kind of device, or has to be made and none is named.
        """
        if self._mesh is None and device_type is None:
            raise ConfigError(
                "get_device_mesh() makes the mesh: say for which devices, such as get_device_mesh('cuda')"
            )
        if self._mesh is None:
            self._mesh = self.build_device_mesh(str(device_type))
        if device_type is not None and self._mesh is not None and self._mesh.device_type != device_type:
            raise ConfigError(
                f"the device mesh is there for {self._mesh.device_type}, but {device_type} is asked for; give one kind of device"
            )
        return self._mesh

    @property
    def device_mesh(self) -> Any:
        """The mesh that `get_device_mesh` has made; else None."""
        return self._mesh


# -------------------------------------------------------------------- what a run has, as plugins


def parallelism_of(run: ResolvedLayout) -> ParallelismConfig | None:
    """What was given, with the sizes that the run has; None where nothing was, and ranks are replicas."""
    given = run.plugins.get(ParallelismConfig.argument)
    if given is None and (run.layout.is_replicas_only or run.is_deepspeed):
        return None
    found: ParallelismConfig = run.plugins.setdefault(ParallelismConfig.argument, given or ParallelismConfig())
    has = run.layout
    found.dp_replicate_size, found.dp_shard_size = has.replicate, has.shard
    found.tp_size, found.cp_size = has.tp, has.cp
    return found


def fsdp_plugin_of(run: ResolvedLayout) -> FullyShardedDataParallelPlugin:
    """What was given, or one that says what the run does."""
    sharding, checkpointing = run.options.sharding or ShardingOptions(), run.options.checkpointing
    if FullyShardedDataParallelPlugin.argument not in run.plugins:
        run.plugins[FullyShardedDataParallelPlugin.argument] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=sharding.reshard_after_forward is not False,
            cpu_offload=sharding.cpu_offload,
            activation_checkpointing=checkpointing is not None,
            activation_checkpointing_offload=checkpointing is not None and checkpointing.offload,
        )
    found: FullyShardedDataParallelPlugin = run.plugins[FullyShardedDataParallelPlugin.argument]
    return found
