"""Accelerate's dataclasses for layouts and sharding, with Accelerate's fields and checks.

The Accelerator translates each of them to one of Headway's layouts.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar

from headway.common import env
from headway.common.optional import LazyModule
from headway.compat.accelerate.launching.layout_words import read_fsdp, read_size
from headway.core.config.layout_choice import ResolvedLayout
from headway.core.config.layout_request import LayoutRequest
from headway.core.config.parallelism import ShardingOptions, TorchContextParallelConfig
from headway.errors import ConfigError

fsdp = LazyModule("torch.distributed.fsdp")
configs = LazyModule("torch.distributed.fsdp.api")
wrap = LazyModule("torch.distributed.fsdp.wrap")
torch = LazyModule("torch")

_FSDP1_ONLY_FIELDS = ("use_orig_params", "sync_module_states", "forward_prefetch")
_BOOLEAN_FIELDS = ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading")
_VARIABLE_BY_FIELD = {
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "transformer_cls_names_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
}
_POLICY_BY_FIELD = {"transformer_cls_names_to_wrap": "TRANSFORMER_BASED_WRAP", "min_num_params": "SIZE_BASED_WRAP"}
"""Wrapping policies by field. Such a field is read from the environment only if the plugin has this policy."""
_DTYPES = {"fp8": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of a sharded layout under Accelerate's names.

    Options of FSDP1 and FSDP2 are accepted, but FSDP2 is always used.

    Values of fields are converted to torch's enumerations and policies, as in Accelerate. A field that is None takes
    the value of the environment variable `FSDP_<NAME>`. The variables of two fields have other names:
    FSDP_OFFLOAD_PARAMS for `cpu_offload`, and FSDP_TRANSFORMER_CLS_TO_WRAP for `transformer_cls_names_to_wrap`.
    Variables that the FSDP version or the wrapping policy does not use are ignored. An option for which neither is set
    is determined by the launcher's flags, else by the config file, else by Headway's default.

    Attributes:
        fsdp_version: FSDP version whose rules apply to the other fields: 1 (the default) or 2. It becomes 2 when an
            Accelerator uses the plugin.
        sharding_strategy: FSDP1's "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD" or "HYBRID_SHARD_ZERO2".
        reshard_after_forward: Whether to free a block's unsharded parameters between forward and backward, or one of
            FSDP1's sharding strategies.
        cpu_offload: Whether to keep parameter shards, gradients and optimizer state in host memory.
        auto_wrap_policy: "transformer_based_wrap", "size_based_wrap", "no_wrap", or one of torch's policies.
        transformer_cls_names_to_wrap: Class names of the blocks that are sharded separately.
        min_num_params: Minimum number of parameters for a module to be sharded separately.
        mixed_precision_policy: "bf16", "fp16", "fp32", a dict of dtypes, or torch's MixedPrecisionPolicy.
        activation_checkpointing: Whether to recompute the blocks' activations in backward.
        activation_checkpointing_offload: Whether to keep the inputs of checkpointed blocks in host memory.
        state_dict_type: Format that `save_fsdp_model` writes. No effect on checkpoints, which are sharded, or on
            `save_model`, which writes full weights.
        state_dict_config, optim_state_dict_config: No effect.
        backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params, sync_module_states,
            cpu_ram_efficient_loading: No effect, because FSDP2 or prepare() always provides the requested behavior.
        ignored_modules, param_init_fn: Not supported. The Accelerator raises `UnsupportedError` if one of them is set.

    Raises:
        ConfigError: If a field has an invalid value.
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
        self._read_environment()
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigError("activation_checkpointing_offload=True needs activation_checkpointing=True; give both")
        reshard = self.reshard_after_forward
        is_fsdp2 = self.fsdp_version == 2 and self.sharding_strategy is None
        if is_fsdp2 and isinstance(reshard, str) and reshard.lower() not in ("true", "false"):
            raise ConfigError(
                f"reshard_after_forward={reshard!r} is a value of FSDP1; with fsdp_version=2 give True or False"
            )
        # Values to request from a layout. limit_all_gathers counts only if it differs from its default True.
        self._set_values = {
            name: value
            for name, value in self._collect_values().items()
            if value is not None and (name != "limit_all_gathers" or not value)
        }
        self._convert_fields(self.fsdp_version or 1)

    def _collect_values(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def _read_environment(self) -> None:
        """Set fields that are None from `FSDP_*` environment variables.

        Variables that the FSDP version or the wrapping policy does not use are ignored.
        """
        self.fsdp_version = env.get_int("FSDP_VERSION") if self.fsdp_version is None else self.fsdp_version
        unread = {"sharding_strategy", *_FSDP1_ONLY_FIELDS} if self.fsdp_version == 2 else {"reshard_after_forward"}
        unread |= {"mixed_precision_policy", "param_init_fn", "state_dict_config", "optim_state_dict_config"}
        # auto_wrap_policy precedes the two fields of a policy in this class, so it has been read before them.
        for name, value in self._collect_values().items():
            is_of_other_policy = (
                name in _POLICY_BY_FIELD and _POLICY_BY_FIELD[name] != str(self.auto_wrap_policy).upper()
            )
            if value is not None or name in unread or is_of_other_policy:
                continue
            text = env.get(_VARIABLE_BY_FIELD.get(name, f"FSDP_{name.upper()}"))
            if text:
                setattr(self, name, text)

    def request_layout(self, request: LayoutRequest) -> None:
        """Add this plugin's options to a layout request, and convert this plugin's attributes to those of FSDP2.

        Only attributes that were passed to the constructor, read from the environment or assigned later are added.

        Args:
            request: Layout request to change.
        """
        values = self._collect_values()
        self._set_values |= {name: values[name] for name in values if values[name] is not self._converted_values[name]}
        self._add_to_request(self.argument, request)
        self._convert_fields(2)

    def _add_to_request(self, name: str, request: LayoutRequest) -> LayoutRequest:
        """Add all options that are set on this plugin to a layout request, and return the request.

        Args:
            name: Name of the plugin, which precedes the field names in messages.
            request: Layout request to change.
        """
        request.use_shards(name)
        for field_name, value in self._set_values.items():
            read_fsdp(request, field_name.removeprefix("fsdp_"), value, f"{name}.{field_name}")
        return request

    def _convert_fields(self, version: int) -> None:
        """Convert the fields to torch's enumerations and policies for one FSDP version.

        Args:
            version: FSDP version, 1 or 2.
        """
        request = self._add_to_request(type(self).__name__, LayoutRequest())
        settings = {name: requested.value for name, requested in request.settings.items()}
        offloads = bool(settings.get("fsdp_offload_params", False))
        self.fsdp_version = version
        if version == 2:
            self.backward_prefetch = None
            self.use_orig_params = None
            self.sync_module_states = None
            self.forward_prefetch = None
            self.reshard_after_forward = bool(settings.get("fsdp_reshard_after_forward", True))
            self.cpu_offload = fsdp.CPUOffloadPolicy() if offloads else fsdp.OffloadPolicy()
        else:
            self.sharding_strategy = _find_member(fsdp.ShardingStrategy, self.sharding_strategy or "FULL_SHARD")
            if isinstance(self.reshard_after_forward, str):
                self.reshard_after_forward = _find_member(fsdp.ShardingStrategy, self.reshard_after_forward)
            self.backward_prefetch = _find_member(fsdp.BackwardPrefetch, self.backward_prefetch)
            self.cpu_offload = fsdp.CPUOffload(offload_params=offloads)
        boolean_fields = (*_BOOLEAN_FIELDS, *_FSDP1_ONLY_FIELDS) if version == 1 else _BOOLEAN_FIELDS
        for name in boolean_fields:
            value = getattr(self, name)
            setattr(self, name, env.parse_bool(value, name) if isinstance(value, str) else bool(value))
        self._read_policies()
        self.set_state_dict_type()
        # A field that later differs from these values has been assigned by the script.
        self._converted_values = self._collect_values()

    def _read_policies(self) -> None:
        """Convert the wrapping and the mixed-precision policy to torch's objects. Their names are already checked."""
        if isinstance(self.auto_wrap_policy, str):
            policies = {
                "TRANSFORMER_BASED_WRAP": wrap.transformer_auto_wrap_policy,
                "SIZE_BASED_WRAP": wrap.size_based_auto_wrap_policy,
                "NO_WRAP": None,
            }
            self.auto_wrap_policy = policies[self.auto_wrap_policy.upper()]
        names = self.transformer_cls_names_to_wrap
        if isinstance(names, str) and self.auto_wrap_policy is wrap.transformer_auto_wrap_policy:
            self.transformer_cls_names_to_wrap = names.split(",")
        if self.auto_wrap_policy is wrap.size_based_auto_wrap_policy:
            self.min_num_params = int(self.min_num_params or 0)
        if isinstance(self.mixed_precision_policy, str):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        elif isinstance(self.mixed_precision_policy, dict):
            dtypes = {name: _parse_dtype(value) for name, value in self.mixed_precision_policy.items()}
            self.mixed_precision_policy = self._precision_kind(**dtypes)

    @property
    def _precision_kind(self) -> Any:
        return fsdp.MixedPrecision if self.fsdp_version == 1 else fsdp.MixedPrecisionPolicy

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set the state dict type and its configs. Headway's own checkpoints stay sharded.

        Args:
            state_dict_type: Name or member of torch's `StateDictType`. None: the current type, else the default type of
                `fsdp_version`.

        Raises:
            ConfigError: If there is no such type.
        """
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        state_dict_member = _find_member(fsdp.StateDictType, state_dict_type or self.state_dict_type or default)
        self.state_dict_type = state_dict_member
        # torch's config classes are FullStateDictConfig and ShardedStateDictConfig, for the member FULL_STATE_DICT ...
        word = state_dict_member.name.title().partition("_")[0]
        options = {"offload_to_cpu": True, **({"rank0_only": True} if word == "Full" else {})}
        if self.state_dict_config is None and word != "Local":
            self.state_dict_config = getattr(configs, f"{word}StateDictConfig")(**options)
        if self.optim_state_dict_config is None and word != "Local":
            self.optim_state_dict_config = getattr(configs, f"{word}OptimStateDictConfig")(**options)

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Do nothing. Which blocks are sharded separately is determined when a model is prepared."""

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the mixed-precision policy. Call it before the Accelerator is created.

        Args:
            mixed_precision: "bf16", "fp16", "fp32" or a dtype.
            buffer_autocast: Whether buffers are float32 (FSDP1 only). Default: False.
            override: Whether to replace a policy that is already set. Default: False.
        """
        if override or self.mixed_precision_policy is None:
            dtype = _parse_dtype(mixed_precision)
            buffer_dtypes = {"buffer_dtype": torch.float32 if buffer_autocast else dtype}
            other_dtypes = buffer_dtypes if self.fsdp_version == 1 else {"output_dtype": dtype}
            self.mixed_precision_policy = self._precision_kind(param_dtype=dtype, reduce_dtype=dtype, **other_dtypes)


def _parse_dtype(dtype: Any) -> Any:
    return getattr(torch, _DTYPES.get(dtype, dtype)) if isinstance(dtype, str) else dtype


def _find_member(enumeration: Any, value: Any) -> Any:
    """Return the member of a torch enumeration with the given name or number.

    Return None for the value None, and for the backward prefetch "NO_PREFETCH", which torch's enumeration lacks.

    Raises:
        ConfigError: If there is no such member.
    """
    word = str(getattr(value, "name", value)).upper()
    if value is None or (word in ("NO_PREFETCH", "3") and enumeration is fsdp.BackwardPrefetch):
        return None
    member = next((each for each in enumeration if word in (each.name, str(each.value))), None)
    if member is None:
        raise ConfigError(
            f"{value!r} is no {enumeration.__name__}; allowed: {', '.join(each.name for each in enumeration)}"
        )
    return member


meshes = LazyModule("torch.distributed.device_mesh")


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism under Accelerate's older name. Equivalent to `strategy="tp=2"` or a ParallelismConfig.

    Attributes:
        tp_size: Number of ranks over which each weight matrix is sharded.
        torch_device_mesh: Not supported, because the Accelerator creates its own mesh. The Accelerator raises
            `UnsupportedError` if it is given.

    Raises:
        ConfigError: If `tp_size` is not a whole number, 1 or more.
    """

    argument: ClassVar[str] = "torch_tp_plugin"

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.tp_size, bool) or not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise ConfigError(f"tp_size={self.tp_size!r}; give a number of processes, 1 or more")

    def request_layout(self, request: LayoutRequest) -> None:
        """Add tensor parallelism over `tp_size` ranks to a layout request, unless `tp_size` is 1.

        Also record in the request that `torch_device_mesh` is not supported, if it is given.
        """
        if self.torch_device_mesh is not None:
            request.refuse_key("torch_tp_plugin.torch_device_mesh", "the Accelerator creates the mesh; give only sizes")
        if self.tp_size > 1:
            request.set_size("tp", self.tp_size, "torch_tp_plugin.tp_size")


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism in a ParallelismConfig. `headway.TensorParallelOptions` has more options.

    Attributes:
        enable_async_tp: No effect, as in Accelerate. True causes a warning.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "Async tensor parallelism is currently not supported, ignoring this option.", UserWarning, stacklevel=3
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's sequence parallelism, which Headway does not support.

    An Accelerator raises `UnsupportedError` if `sp_size` is above 1.

    Attributes:
        sp_seq_length: Length of the sequences. Required if `sp_seq_length_is_variable` is False.
        sp_seq_length_is_variable: Whether the length may vary between batches. Default: True.
        sp_attn_implementation: Name of the attention implementation. Stored without effect.

    Raises:
        ConfigError: If `sp_seq_length_is_variable` is False and `sp_seq_length` is None.
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
    """Return a property of a ParallelismConfig with this docstring: whether the size of a kind of parallelism is above 1."""
    return property(lambda config: config.sizes[kind] > 1, doc=doc)


def _make_axes_property(doc: str, *kinds: str) -> property:
    return property(lambda config: config._list_enabled(*kinds), doc=doc)


@dataclass
class ParallelismConfig:
    """Number of processes for each kind of parallelism; 1 disables a kind. The short form is `strategy="fsdp=4+tp=2"`.

    A size that is None takes the value of its environment variable, such as PARALLELISM_CONFIG_TP_SIZE, else 1.

    Attributes:
        dp_replicate_size: Number of replicas of the model.
        dp_shard_size: Number of processes over which a replica's parameters are sharded.
        tp_size: Number of processes over which each weight matrix is sharded.
        cp_size: Number of processes over which each sequence is split.
        sp_size: Size of DeepSpeed's sequence parallelism. The Accelerator raises `UnsupportedError` for a value above
            1.
        cp_backend: Backend of context parallelism. Only "torch" is allowed.
        sp_backend: Backend of sequence parallelism. Only "deepspeed" is allowed.
        tp_handler, cp_handler, sp_handler: Options of tensor, context and sequence parallelism. None: the default
            options if the size is above 1.

    Raises:
        ConfigError: If a size is not a number of processes, if two sizes cannot be combined, or if a backend or a
            handler is not an allowed one.
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
            if size is None:
                size = env.get_int(f"PARALLELISM_CONFIG_{name.upper()}") or 1
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}={size!r}; give a number of processes, 1 or more")
            setattr(self, name, size)
        for name, allowed in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            backend = getattr(self, name) or allowed
            if backend != allowed:
                raise ConfigError(f"{name}={backend!r}; allowed: {allowed!r}")
            setattr(self, name, allowed)
        if self.cp_enabled and self.sp_enabled:
            raise ConfigError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both shard sequences; leave one of them at 1"
            )
        self._make_handlers()
        self._mesh: Any = None

    def _make_handlers(self) -> None:
        """Check the class of each axis's options, and create default options for axes that have a size and no options.

        Raises:
            ConfigError: If options have a wrong class.
        """
        handler_classes = {
            "tp": TorchTensorParallelConfig,
            "cp": TorchContextParallelConfig,
            "sp": DeepSpeedSequenceParallelConfig,
        }
        for axis, handler_class in handler_classes.items():
            handler = getattr(self, f"{axis}_handler")
            if handler is not None and not isinstance(handler, handler_class):
                raise ConfigError(
                    f"{axis}_handler is a {type(handler).__name__}; give a headway.{handler_class.__name__}"
                )
            if handler is None and self.sizes[axis] > 1:
                setattr(self, f"{axis}_handler", handler_class())

    @property
    def sizes(self) -> dict[str, int]:
        """Dict from kinds of parallelism, such as "tp" or "dp_shard", to their numbers of processes."""
        return {kind: int(getattr(self, f"{kind}_size")) for kind in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}

    def request_layout(self, request: LayoutRequest) -> None:
        """Add the sizes of this config that are above 1, such as `tp_size`, and `cp_handler` to a layout request."""
        for name, size in self.sizes.items():
            if size > 1:
                read_size(request, f"{name}_size", size, f"parallelism_config.{name}_size")
        request.context = self.cp_handler

    @property
    def total_size(self) -> int:
        """Total number of processes, which is the product of all sizes."""
        return prod(self.sizes.values())

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that read equal data, because they compute on the same batches together.

        It is the product of the sizes of tensor, context and sequence parallelism.
        """
        return self.sizes["tp"] * self.sizes["cp"] * self.sizes["sp"]

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel processes, which read different data: `dp_replicate_size` times `dp_shard_size`."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    dp_replicate_enabled = _is_above_one("dp_replicate", "Whether there are several replicas.")
    dp_shard_enabled = _is_above_one("dp_shard", "Whether parameters are sharded.")
    tp_enabled = _is_above_one("tp", "Whether tensor parallelism is used.")
    cp_enabled = _is_above_one("cp", "Whether context parallelism is used.")
    sp_enabled = _is_above_one("sp", "Whether sequence parallelism is used.")

    def _list_enabled(self, *kinds: str) -> list[str]:
        return [kind for kind in kinds if self.sizes[kind] > 1]

    dp_dim_names = _make_axes_property("Names of the axes whose ranks read different data.", "dp_replicate", "dp_shard")
    non_dp_dim_names = _make_axes_property("Names of the axes whose ranks read the same data.", "tp", "cp", "sp")
    dp_shard_cp_dim_names = _make_axes_property(
        "Names of the axes over which parameters are sharded.", "dp_shard", "cp"
    )
    dp_cp_dim_names = _make_axes_property(
        "Names of the axes over which losses are averaged.", "dp_replicate", "dp_shard", "cp"
    )

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Names of the mesh axes over which FSDP replicates or shards parameters."""
        return [*self._list_enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of all mesh axes with more than one process."""
        return [*self.dp_dim_names, *self.non_dp_dim_names]

    def _get_mesh(self) -> tuple[Any, ...]:
        names = self._list_enabled("dp_replicate", "dp_shard", "cp", "sp", "tp")
        return tuple(zip(*((name, self.sizes[name]) for name in names)))

    def build_device_mesh(self, device_type: str) -> Any:
        """Return a new device mesh with the sizes of this config. All processes must call it.

        Groups of data-parallel axes are flattened to additional axes, such as "dp_shard_cp".

        Args:
            device_type: Device type, such as "cuda".

        Returns:
            The mesh, or None if every size is 1.
        """
        if not (mesh := self._get_mesh()):
            return None
        names, sizes = mesh
        device_mesh = meshes.init_device_mesh(device_type, sizes, mesh_dim_names=names)
        for flattened in ("dp", "dp_shard_cp", "dp_cp"):
            if axes := getattr(self, f"{flattened}_dim_names"):
                device_mesh[tuple(axes)]._flatten(flattened)
        return device_mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the device mesh of this config. Create it if it does not exist yet. None if every size is 1.

        Creating the mesh is a collective operation, so all processes must make the first call.

        Args:
            device_type: Device type, such as "cuda". None (the default) is allowed only if the mesh already exists.

        Raises:
            ConfigError: If `device_type` is None and there is no mesh, or if the mesh was created for another device type.
        """
        if self._mesh is None and device_type is None:
            raise ConfigError(
                "get_device_mesh() creates the mesh, so the first call needs a device type, such as get_device_mesh('cuda')"
            )
        if self._mesh is None:
            self._mesh = self.build_device_mesh(str(device_type))
        if device_type is not None and self._mesh is not None and self._mesh.device_type != device_type:
            raise ConfigError(
                f"the device mesh was created for {self._mesh.device_type}, but {device_type} was requested; use one device type"
            )
        return self._mesh

    @property
    def device_mesh(self) -> Any:
        """Device mesh that `get_device_mesh` created, or None."""
        return self._mesh


# -------------------------------------------------------------------- plugins that describe a run


def get_parallelism_config(run: ResolvedLayout) -> ParallelismConfig | None:
    """Return a ParallelismConfig with the sizes of the run's layout.

    It is the object that the script passed, whose sizes are overwritten. If the script passed none, a new one is
    created and stored with the run. But if the run then uses DeepSpeed or a full replica on each rank, return None.
    """
    passed = run.plugins.get(ParallelismConfig.argument)
    if passed is None and (run.layout.is_replicas_only or run.is_deepspeed):
        return None
    config: ParallelismConfig = run.plugins.setdefault(ParallelismConfig.argument, passed or ParallelismConfig())
    layout = run.layout
    config.dp_replicate_size, config.dp_shard_size = layout.replicate, layout.shard
    config.tp_size, config.cp_size = layout.tp, layout.cp
    return config


def get_fsdp_plugin(run: ResolvedLayout) -> FullyShardedDataParallelPlugin:
    """Return the FSDP plugin that the script passed. If it passed none, create and store one for the run's sharding."""
    sharding, checkpointing = run.options.sharding or ShardingOptions(), run.options.checkpointing
    if FullyShardedDataParallelPlugin.argument not in run.plugins:
        run.plugins[FullyShardedDataParallelPlugin.argument] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=sharding.reshard_after_forward is not False,
            cpu_offload=sharding.cpu_offload,
            activation_checkpointing=checkpointing is not None,
            activation_checkpointing_offload=checkpointing is not None and checkpointing.offload,
        )
    plugin: FullyShardedDataParallelPlugin = run.plugins[FullyShardedDataParallelPlugin.argument]
    return plugin
