"""Options of the engines underneath: DDP, autocast, the fp16 scaler, float8, torch.compile, the process group, the profiler.

The names are those of Accelerate's `kwargs_handlers`; each may be given once.

Options of float8 training (mixed_precision="fp8"), by Headway's names and by Accelerate's. Torch-free.

Settings of torch.compile, by Accelerate's names: typed, checked, and filled in from the launch. Torch-free.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, get_args, get_type_hints

from headway.common.callsite import call_site
from headway.config.launch import MODES, DynamoBackend
from headway.config.load import UNSET, run_setting
from headway.config.parallelism import (
    PipelineOptions,
    ShardingOptions,
    TensorParallelOptions,
    TorchContextParallelConfig,
)
from headway.config.values import KwargsHandler, known_keywords
from headway.errors import ConfigError

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
Filter = Callable[[Any, str], bool]
"""From a module and its name to whether it computes in float8."""


@dataclass(frozen=True)
class Float8Options:
    """How linear layers compute in float8; needs mixed_precision="fp8".

    Attributes:
        recipe: where scales come from, by torchao's names. "tensorwise": one for each tensor, the fastest. "rowwise": one for each
            row. "rowwise_with_gw_hp": the same, and gradients of weights are computed in bfloat16, the most accurate.
        fsdp_all_gather: in layouts with shards, gather weights in float8 instead of bfloat16 (tensorwise only); None: where the
            recipe and the sharding allow it.
        pad_inner_dim: pad what is multiplied to multiples of 16, which hardware requires; without it, a batch with another number
            of tokens is an error in backward.
        emulate: compute in float32 with values rounded to float8: slow, on any device, to try what float8 does to a model.
        keeps: classes, class names or module names; linear layers in these stay in bfloat16.
        keeps_first_and_last: the model's first and last linear layers stay in bfloat16, which training is most sensitive to.
        module_filter: instead of these two: called with each linear layer and its name; False: it stays in bfloat16.
        config: torchao's Float8LinearConfig, instead of the options above it.
    """

    recipe: str = "tensorwise"
    fsdp_all_gather: bool | None = None
    pad_inner_dim: bool = True
    emulate: bool = False
    keeps: tuple[Any, ...] = ()
    keeps_first_and_last: bool = True
    module_filter: Filter | None = None
    config: Any = None

    def __post_init__(self) -> None:
        keeps = self.keeps
        object.__setattr__(self, "keeps", (keeps,) if isinstance(keeps, str | type) else tuple(keeps))
        if self.recipe not in RECIPES:
            raise ConfigError(f"Float8Options(recipe={self.recipe!r}); allowed: {', '.join(RECIPES)}")
        if self.fsdp_all_gather and self.recipe != "tensorwise":
            raise ConfigError(
                f"Float8Options(fsdp_all_gather=True, recipe={self.recipe!r}): rows are scaled by ranks on their own, so only "
                "recipe='tensorwise' can gather weights in float8; leave fsdp_all_gather out, or change the recipe"
            )
        if self.module_filter is not None and (self.keeps or not self.keeps_first_and_last):
            raise ConfigError(
                "Float8Options has a module_filter, which decides alone; leave out keeps and keeps_first_and_last"
            )
        if self.config is not None and self._has_recipe:
            raise ConfigError(
                "Float8Options has a config, which says what recipe, fsdp_all_gather, pad_inner_dim and emulate say; give one"
            )

    @property
    def _has_recipe(self) -> bool:
        default = ("tensorwise", None, True, False)
        return (self.recipe, self.fsdp_all_gather, self.pad_inner_dim, self.emulate) != default

    @property
    def is_emulated(self) -> bool:
        """Is float8 emulated, by this or by torchao's configuration?"""
        return self.emulate or bool(getattr(self.config, "emulate", False))

    @property
    def all_gather(self) -> bool | None:
        """Is float8 gathered, by this or by torchao's configuration? None: where it can be."""
        if self.config is None:
            return self.fsdp_all_gather
        return bool(getattr(self.config, "enable_fsdp_float8_all_gather", False))

    @property
    def told(self) -> str:
        """The recipe in a few words."""
        recipe = self.recipe if self.config is None else "a configuration of your own"
        return f"{recipe}, emulated" if self.is_emulated else recipe


@dataclass(frozen=True)
class AORecipeKwargs:
    """Options of float8 training by Accelerate's names; `Float8Options` has the same and more.

    Attributes:
        config: torchao's Float8LinearConfig; None: dynamic scales, one for each tensor.
        module_filter_func: called with each linear layer and its name; False: it stays in bfloat16. None: all but the first and
            the last, and those whose sizes are no multiples of 16.
        pad_inner_dim: as `Float8Options.pad_inner_dim`; None: True.
        enable_fsdp_float8_all_gather: as `Float8Options.fsdp_all_gather`.
    """

    config: Any = None
    module_filter_func: Filter | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    @property
    def options(self) -> Float8Options:
        """The same by Headway's names.

        Raises:
            ConfigError: a configuration, and besides it what that says.
        """
        pads = True if self.pad_inner_dim is None else self.pad_inner_dim
        if self.config is not None and (not pads or self.enable_fsdp_float8_all_gather is not None):
            raise ConfigError(
                "AORecipeKwargs has a config, which says what pad_inner_dim and enable_fsdp_float8_all_gather say; give one"
            )
        return Float8Options(
            fsdp_all_gather=self.enable_fsdp_float8_all_gather,
            pad_inner_dim=pads,
            module_filter=self.module_filter_func,
            config=self.config,
        )


class DDPCommunicationHookType(str, Enum):
    """How DDP compresses gradients on their way."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@known_keywords
@dataclass(unsafe_hash=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of torch's DistributedDataParallel, by its own names and defaults.

    Attributes:
        check_reduction: accepted for the name's sake: torch ignores it too.
        comm_hook: how gradients are compressed; `comm_wrapper` (NO, FP16 or BF16) casts around a PowerSGD hook.
        comm_state_option: keyword arguments of PowerSGD's state.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook, self.comm_wrapper = _hook(self.comm_hook, "comm_hook"), _hook(self.comm_wrapper, "comm_wrapper")
        if self.comm_wrapper.value not in ("no", "fp16", "bf16"):
            raise ConfigError(f"comm_wrapper={self.comm_wrapper.value!r}; allowed: no, fp16, bf16")


def _hook(value: DDPCommunicationHookType | str, name: str) -> DDPCommunicationHookType:
    try:
        return DDPCommunicationHookType(value)
    except ValueError:
        raise ConfigError(
            f"{name}={value!r}; allowed: {', '.join(h.value for h in DDPCommunicationHookType)}"
        ) from None


@dataclass(unsafe_hash=True)
class AutocastKwargs(KwargsHandler):
    """Options of torch.autocast.

    Attributes:
        enabled, cache_enabled: torch's.
        half_residual: the outputs of embeddings are cast to half precision, so that the sums between a model's blocks stay in it
            and take half the memory; norms still compute in float32. For models that normalise before a block and not after it.
    """

    enabled: bool = True
    cache_enabled: bool | None = None
    half_residual: bool = False


@known_keywords
@dataclass(unsafe_hash=True)
class GradScalerKwargs(KwargsHandler):
    """Options of the fp16 gradient scaler, by torch's names and defaults."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@known_keywords
@dataclass(unsafe_hash=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of torch's init_process_group; None: Headway's choice (see `headway.runtime.process.start`)."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@known_keywords
@dataclass(unsafe_hash=True)
class ProfileKwargs(KwargsHandler):
    """Options of torch.profiler.profile.

    Attributes:
        activities: any of torch's, "cpu", "cuda", "xpu" and their like by the device's name; None: torch's choice.
        schedule_option: keyword arguments of torch.profiler.schedule (wait, warmup, active, repeat, skip_first).
        on_trace_ready: called with the profiler when a trace is ready.
        output_trace_dir: where each rank writes `profile_<rank>.json`, and a table of the operations that took longest in
            `profile_<rank>.txt`, also where the profiled block raises.
    """

    activities: list[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@known_keywords
@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which blocks of a model drop their activations, and what they keep.

    Attributes:
        every: every n-th block; 1: all of them.
        policy: "recompute": keep only a block's inputs. "keep_matmul": also the outputs of matrix products, convolutions
            and fused attention; "keep_attention": also those of fused attention. "keep_all": compute nothing again (for
            `offload`). A callable is a policy of your own, as for torch's create_selective_checkpoint_contexts.
        offload: what is kept for backward lies in host memory meanwhile.
        blocks: classes, class names or module names; none: what is repeated in the module tree.
    """

    every: int = 1
    policy: str | Callable[..., Any] = "recompute"
    offload: bool = False
    blocks: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"every={self.every!r}; give 1 to checkpoint all blocks, n for every n-th")
        allowed = ("recompute", "keep_matmul", "keep_attention", "keep_all")
        if not callable(self.policy) and self.policy not in allowed:
            raise ConfigError(f"policy={self.policy!r}; allowed: {', '.join(allowed)}, or a callable")
        if self.policy == "keep_all" and not self.offload:
            raise ConfigError("policy='keep_all' changes nothing without offload=True; give both, or another policy")


@dataclass(frozen=True)
class EngineOptions:
    """One of each kind of option."""

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    process_group: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)
    checkpointing: ActivationCheckpointing | None = None
    sharding: ShardingOptions | None = None
    tensor: TensorParallelOptions | None = None
    pipeline: PipelineOptions | None = None
    context: TorchContextParallelConfig | None = None
    float8: Float8Options | None = None


def collect_options(handlers: list[Any] | None) -> EngineOptions:
    """Sort `kwargs_handlers` by what they are for; a subclass counts as its parent.

    Raises:
        ConfigError: an object that is not a handler, or two of one kind.
    """
    kinds: dict[str, type] = {name: (*get_args(hint), hint)[0] for name, hint in get_type_hints(EngineOptions).items()}
    chosen: dict[str, Any] = {}
    usual = {name: kind().taken() for name, kind in kinds.items() if issubclass(kind, KwargsHandler)}
    for given in handlers or []:
        handler = given.options if isinstance(given, AORecipeKwargs) else given
        name = next((name for name, kind in kinds.items() if isinstance(handler, kind)), None)
        if name is None:
            allowed = ", ".join(kind.__name__ for kind in kinds.values())
            raise ConfigError(f"kwargs_handlers holds a {type(handler).__name__}; allowed: {allowed}")
        if name in chosen:
            raise ConfigError(f"kwargs_handlers holds two {kinds[name].__name__}; give one")
        chosen[name] = handler.taken() if isinstance(handler, KwargsHandler) else handler
    return EngineOptions(**usual | chosen)


Backend = DynamoBackend | str | Callable[..., Any]


@dataclass
class TorchDynamoPlugin:
    """How prepare() compiles models with torch.compile; what is None here is what the launch says (`--dynamo_...`).

    Attributes:
        backend: a `DynamoBackend`, its name in any case, or a callable as torch.compile takes it; "no": nothing is compiled.
        mode: what inductor optimises for: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
        fullgraph: what the compiler cannot take in is an error; False: it runs uncompiled, between two graphs.
        dynamic: True: for all sizes from the start; False: anew for each size; None: the second size that comes makes it for
            all sizes.
        options: of the backend; not together with a mode.
        disable: compile nothing.
        use_regional_compilation: compile the model's repeated blocks, once for all of them; False: the whole model.

    Raises:
        ConfigError: an unknown backend or mode, or settings that contradict each other.
    """

    backend: Backend | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        given: Any = self.backend
        named = given if given is None or _is_function(given) else dynamo_backend(given).lower()
        backend = _launched("dynamo_backend", named, "no", "backend")
        self.backend = backend if _is_function(backend) else dynamo_backend(backend)
        self.mode = _launched("dynamo_mode", self.mode, "default", "mode")
        self.fullgraph = bool(_launched("dynamo_use_fullgraph", self.fullgraph, False, "fullgraph"))
        self.dynamic = _launched("dynamo_use_dynamic", self.dynamic, None, "dynamic")
        regional = _launched(
            "dynamo_use_regional_compilation", self.use_regional_compilation, False, "use_regional_compilation"
        )
        self.use_regional_compilation = bool(regional)
        self._check()

    def _check(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r} of torch.compile is unknown; allowed: {', '.join(MODES)}")
        if self.mode == "default":
            return
        if self.options:
            raise ConfigError(f"give torch.compile mode={self.mode!r} or options={self.options!r}, not both")
        if self.compiles and self.backend is not DynamoBackend.INDUCTOR:
            raise ConfigError(
                f"mode={self.mode!r} only works with the backend inductor; leave it out with {self.name}, or choose inductor"
            )

    @property
    def compiles(self) -> bool:
        """Is anything to be compiled?"""
        return self.backend is not DynamoBackend.NO and not self.disable

    @property
    def has_cuda_graphs(self) -> bool:
        """Does compiled code run as CUDA graphs, in memory that the next run overwrites?"""
        return (
            self.mode in ("reduce-overhead", "max-autotune")
            or self.backend is DynamoBackend.CUDAGRAPHS
            or bool((self.options or {}).get("triton.cudagraphs"))
        )

    @property
    def name(self) -> str:
        """The backend's, as torch knows it."""
        if _is_function(self.backend):
            return str(getattr(self.backend, "__name__", type(self.backend).__name__))
        return str(self.backend).lower()

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return {**self.to_kwargs(), "use_regional_compilation": self.use_regional_compilation}

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of torch.compile."""
        given: dict[str, Any] = {"backend": self.backend if _is_function(self.backend) else self.name}
        if self.options:
            given["options"] = dict(self.options)
        else:
            given["mode"] = self.mode
        return {**given, "fullgraph": self.fullgraph, "dynamic": self.dynamic, "disable": self.disable}


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
        raise ConfigError(
            f"dynamo_backend={name!r} is unknown; allowed: {allowed} in upper or lower case, or a callable as in torch.compile"
        ) from None


def compiler(backend: Backend | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """The compiler's settings, from the two arguments of the Accelerator that say so and from the launch.

    Raises:
        ConfigError: both arguments, something else than a plugin, or settings that contradict each other.
    """
    if backend is not None and plugin is not None:
        raise ConfigError("give dynamo_backend or dynamo_plugin, not both")
    if plugin is not None and not isinstance(plugin, TorchDynamoPlugin):
        raise ConfigError(
            f"dynamo_plugin is a {type(plugin).__name__}; give a headway.TorchDynamoPlugin, or leave it out"
        )
    return plugin if plugin is not None else TorchDynamoPlugin(backend=backend)


def _is_function(backend: Any) -> bool:
    return callable(backend) and not isinstance(backend, str)


def _launched(name: str, given: Any, default: Any, argument: str) -> Any:
    origin = f"TorchDynamoPlugin({argument}={given!r}) at {call_site()}"
    return run_setting(name, UNSET if given is None else given, default, code_origin=origin)[0]
