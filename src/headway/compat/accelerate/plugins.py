"""Accelerate's dataclasses for layouts: the same names, fields and checks; each says by itself what it asks for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar

from headway.common import env
from headway.common.optional import Later
from headway.compat.accelerate.launching.layout_words import read_fsdp, read_size
from headway.config.layout_choice import ResolvedLayout
from headway.config.layout_request import LayoutRequest, TorchContextParallelConfig
from headway.config.parallelism import ShardingOptions
from headway.errors import ConfigError

meshes = Later("torch.distributed.device_mesh")


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of a sharded layout by Accelerate's names. Both versions of its keys are read; FSDP2 is what runs.

    A field that is None decides nothing: the launcher's flags and the config file may. `headway.ShardingOptions` has more.

    Attributes:
        fsdp_version: 1 or 2, by which the other fields are read; 2 from then on.
        sharding_strategy: version 1's "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD" or "HYBRID_SHARD_ZERO2".
        reshard_after_forward: free a block's whole parameters between forward and backward; or a word as above.
        cpu_offload: shards, gradients and optimizer state lie in host memory.
        auto_wrap_policy: "transformer_based_wrap", "size_based_wrap", "no_wrap", or one of torch's policies.
        transformer_cls_names_to_wrap: class names of the blocks.
        min_num_params: parameters from which a module is gathered on its own.
        mixed_precision_policy: "bf16", "fp16", "fp32", a dict of dtypes, or torch's MixedPrecisionPolicy.
        activation_checkpointing, activation_checkpointing_offload: compute activations of blocks again; keep their inputs in
            host memory.
        state_dict_type, state_dict_config, optim_state_dict_config: change nothing: checkpoints are sharded, `save_model`
            writes whole weights. Accelerate's `save_fsdp_model` goes by the first.
        backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params, sync_module_states,
            cpu_ram_efficient_loading: change nothing: FSDP2 and prepare() do what they ask for.
        ignored_modules, param_init_fn: refused by the Accelerator.

    Raises:
        ConfigError: a value that the field cannot have.
    """

    argument: ClassVar[str] = "fsdp_plugin"

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable[..., Any] | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[Any] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[..., Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigError("activation_checkpointing_offload=True needs activation_checkpointing=True; give both")
        word = self.reshard_after_forward
        is_second = self.fsdp_version == 2 and self.sharding_strategy is None
        if is_second and isinstance(word, str) and word.lower() not in ("true", "false"):
            raise ConfigError(
                f"reshard_after_forward={word!r} is a value of FSDP1; with fsdp_version=2 give True or False"
            )
        self._given = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) is not None and (each.name != "limit_all_gathers" or not self.limit_all_gathers)
        }
        said = self._read(type(self).__name__, LayoutRequest()).settings
        self.fsdp_version = 2
        self.state_dict_type = _word(self.state_dict_type) or "SHARDED_STATE_DICT"
        self.reshard_after_forward = bool(said.get("fsdp_reshard_after_forward", (True, ""))[0])
        self.cpu_offload = bool(said.get("fsdp_offload_params", (False, ""))[0])
        self.activation_checkpointing = bool(self.activation_checkpointing)
        self.activation_checkpointing_offload = bool(self.activation_checkpointing_offload)

    def request_layout(self, request: LayoutRequest) -> None:
        """Ask for what the fields that were given say."""
        self._read(self.argument, request)

    def _read(self, name: str, into: LayoutRequest) -> LayoutRequest:
        """What the fields that were given say, each under `name.field`."""
        into.use_shards(name)
        for each, value in self._given.items():
            read_fsdp(into, each.removeprefix("fsdp_"), value, f"{name}.{each}")
        return into

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Keep the word: checkpoints stay sharded, `save_model` and `get_state_dict` give whole weights."""
        self.state_dict_type = _word(state_dict_type) or self.state_dict_type

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Nothing to do: blocks are found when a model is prepared."""

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Say the policy, before the Accelerator is built; one that was given stays unless `override`."""
        if override or "mixed_precision_policy" not in self._given:
            self.mixed_precision_policy = self._given["mixed_precision_policy"] = mixed_precision


def _word(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "name", value)).upper()


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

    def _enabled(self, *kinds: str) -> list[str]:
        return [kind for kind in kinds if self.sizes[kind] > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes whose ranks read data of their own."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes whose ranks read the same."""
        return self._enabled("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes over which parameters are sharded."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes over which losses are averaged."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of FSDP, copies among them."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes that there are."""
        return self.dp_dim_names + self.non_dp_dim_names

    def _get_mesh(self) -> tuple[Any, ...]:
        names = self._enabled("dp_replicate", "dp_shard", "cp", "sp", "tp")
        return tuple(zip(*((name, self.sizes[name]) for name in names)))

    def build_device_mesh(self, device_type: str) -> Any:
        """torch's device mesh of these sizes; all processes call it. None where every size is 1.

        Args:
            device_type: such as "cuda".
        """
        if not (mesh := self._get_mesh()):
            return None
        names, sizes = mesh
        return meshes.init_device_mesh(device_type, sizes, mesh_dim_names=names)

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
