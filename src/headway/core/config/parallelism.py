"""Options of pipeline, sharded, tensor and context parallelism, and a collector of what plugins and files request.

This module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from headway.core.config import mesh
from headway.core.config.launch import CP_EXCHANGES
from headway.core.config.values import report_unknown_keywords
from headway.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
"""Names of pipeline schedules that torch implements.

They stand for GPipe, 1F1B, interleaved 1F1B, interleaved zero bubble, and zero bubble with V-shaped placement.
"""
_MULTI_STAGE_SCHEDULES = ("interleaved", "zero_bubble", "zbv")


@report_unknown_keywords
@dataclass(frozen=True)
class PipelineOptions:
    """Options of pipeline parallelism.

    Attributes:
        schedule: One of `SCHEDULES`. "gpipe": all forwards, then all backwards. "1f1b": same result with fewer
            activations in memory. "interleaved", "zero_bubble" and "zbv": several stages per rank and less idle time.
            All but "gpipe" need forward and backward in one call, `accelerator.forward_backward`.
        num_microbatches: Number of micro-batches per batch. None: twice the number of pipeline ranks. A batch with
            fewer rows is split into single rows.
        stages_per_rank: Number of stages on each rank, for schedules that allow more than one. None: 2. "zbv" always
            has 2.
        split: Names of the blocks with which the second and each later stage start. Empty: stages with equal numbers of
            blocks.
        blocks: Class names or module names of the blocks. Empty: the repeated blocks of the model.
        first, last: Names of modules outside the blocks that belong to the first or last stage. A module in both is on
            both stages, and its gradients are summed. Other modules go to the first stage if they precede the blocks in
            the module tree, else to the last.

    Raises:
        ConfigError: If the schedule is unknown, or a number is out of range or does not fit the schedule.
    """

    schedule: str = "gpipe"
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    split: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("split", "blocks", "first", "last"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        object.__setattr__(self, "schedule", str(self.schedule).lower())
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"PipelineOptions(schedule={self.schedule!r}); allowed: {', '.join(SCHEDULES)}")
        for name in ("num_microbatches", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"PipelineOptions({name}={value!r}); give a whole number, 1 or more, or None")
        wanted = self.stages_per_rank
        if self.schedule not in _MULTI_STAGE_SCHEDULES and wanted not in (None, 1):
            raise ConfigError(
                f"PipelineOptions(stages_per_rank={wanted}) needs a schedule with several stages per rank, not {self.schedule!r}"
            )
        if self.schedule == "zbv" and wanted not in (None, 2):
            raise ConfigError(f"PipelineOptions(stages_per_rank={wanted}): zbv has exactly 2 stages per rank")

    @property
    def num_per_rank(self) -> int:
        """Number of stages on each rank."""
        return (self.stages_per_rank or 2) if self.schedule in _MULTI_STAGE_SCHEDULES else 1

    def find_rank(self, stage: int, num_ranks: int) -> int:
        """Return the pipeline rank that holds a stage.

        Stages are assigned round-robin. With the "zbv" schedule, every second round assigns them in reverse order,
        so that stages form a V.

        Args:
            stage: Index of the stage.
            num_ranks: Number of pipeline ranks.
        """
        round_number, position = divmod(stage, num_ranks)
        is_reversed = self.schedule == "zbv" and round_number % 2 == 1
        return num_ranks - 1 - position if is_reversed else position

    def choose_num_microbatches(self, num_ranks: int) -> int:
        """Return the number of micro-batches into which a batch is split.

        A batch with fewer rows than this number is split into single rows.

        Args:
            num_ranks: Number of pipeline ranks.
        """
        return self.num_microbatches or 2 * num_ranks


DTYPES = ("float32", "bfloat16", "float16")


@report_unknown_keywords
@dataclass(frozen=True)
class ShardingOptions:
    """Options of sharded layouts ("fsdp", "hsdp" and combinations). The defaults suit most models.

    Attributes:
        units: Classes, class names or module names whose parameters are gathered together. Empty: the repeated blocks
            of the model. Parameters outside all units belong to the root unit.
        min_num_params: Alternative to `units`: each module with at least this many parameters outside smaller units is
            a unit.
        ignored: Classes, class names or module names whose frozen parameters are replicated instead of sharded.
        reshard_after_forward: Whether to free a unit's gathered parameters after its forward and gather them again in
            backward. None: yes for all units except the root. False: keep them, which saves an all-gather and costs
            memory. An integer: reshard them over that many ranks, such as the ranks of a machine. The integer must
            divide the number of shards.
        cpu_offload: Whether to keep parameters, gradients and optimizer state in host memory and step the optimizer
            there.
        forward_prefetch: Number of units to gather ahead in forward. 0: torch's default, one.
        backward_prefetch: Number of units to gather ahead in backward. 0: torch's default, one.
        param_dtype: Dtype of gathered parameters. None: the dtype of mixed_precision if it is used, else unchanged.
        reduce_dtype: Dtype in which gradients are reduced. None: float32 with mixed precision, else unchanged.
        output_dtype: Dtype of the model's floating-point outputs. None: unchanged.
        forward_methods: Names of methods besides forward that use the model's parameters ("encode", "generate").
        find_unused_parameters: Whether the set of parameters that take part in the loss may differ between steps and
            ranks.
        broadcast_buffers: Whether all ranks receive rank 0's buffers after the last backward of each update.
        whole_updates: Whether optimizers step on full parameters. Each parameter is then updated by one rank, for all
            ranks. None: only if an optimizer cannot step on shards. False: never, so that such an optimizer raises an
            error.

    Raises:
        ConfigError: If a value is not allowed, or `units` and `min_num_params` are both given.
    """

    units: tuple[Any, ...] = ()
    min_num_params: int = 0
    ignored: tuple[Any, ...] = ()
    reshard_after_forward: bool | int | None = None
    cpu_offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    forward_methods: tuple[str, ...] = ()
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    whole_updates: bool | None = None

    def __post_init__(self) -> None:
        for name in ("units", "ignored", "forward_methods"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | type) else tuple(value))
        for name in ("min_num_params", "forward_prefetch", "backward_prefetch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"ShardingOptions({name}={value!r}); give a whole number, 0 or more")
        if self.units and self.min_num_params:
            raise ConfigError("ShardingOptions has both units and min_num_params; give one of them")
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            object.__setattr__(self, name, _parse_dtype(getattr(self, name), name))
        chosen = self.reshard_after_forward
        if not isinstance(chosen, bool | int | None) or (not isinstance(chosen, bool) and chosen == 0):
            raise ConfigError(
                f"ShardingOptions(reshard_after_forward={chosen!r}); allowed: True, False, None, or a number of ranks"
            )

    def check(self, num_shards: int) -> None:
        """Raise `ConfigError` if `reshard_after_forward` is a number of ranks that does not fit the number of shards.

        Args:
            num_shards: Number of ranks over which each parameter is sharded.

        Raises:
            ConfigError: If the number is less than 2, not less than `num_shards`, or does not divide it.
        """
        chosen = self.reshard_after_forward
        if isinstance(chosen, bool) or chosen is None:
            return
        if not 1 < chosen < num_shards or num_shards % chosen:
            fitting = [n for n in range(2, num_shards) if num_shards % n == 0]
            allowed = f"one of {', '.join(map(str, fitting))}, " if fitting else ""
            raise ConfigError(
                f"ShardingOptions(reshard_after_forward={chosen}) does not divide {num_shards} shards; "
                f"give {allowed}True (all of them) or False (keep parameters whole)"
            )


def _parse_dtype(value: Any, name: str) -> str | None:
    if value is None:
        return None
    text = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(str(value), str(value).removeprefix("torch."))
    if text not in DTYPES:
        raise ConfigError(f"ShardingOptions({name}={value!r}); allowed: {', '.join(DTYPES)}")
    return text


STYLES = (
    "colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep",
    "embedding_rowwise", "embedding_colwise", "packed_colwise", "packed_qkv_colwise", "packed_rowwise", "sequence_parallel",
    "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "moe_tp_experts", "moe_identity_expert",
    "local_params", "replicate",
)  # fmt: skip
"""Names of styles that a tensor-parallel plan may contain.

These are the styles of transformers 5.23, plus `packed_qkv_colwise` for query, key and value in one matrix.
"""


@report_unknown_keywords
@dataclass(frozen=True)
class TensorParallelOptions:
    """Options of tensor parallelism.

    Attributes:
        plan: Mapping from names of modules or parameters to styles. A style is one of `STYLES` or a torch
            `ParallelStyle` object. `*` matches one component of a name. None: the model's own plan, which transformers'
            models have.
        sequence_parallel: Whether each rank computes only its sequence shard in the layers between split matrices.
        loss_parallel: Whether logits and cross entropy stay sharded along the vocabulary.
        divide: Names of integer attributes that must count only the share of one rank, such as
            "blocks.*.attn.num_heads". The value of each is divided by the number of ranks.
        keep: Names of integer attributes whose values must not be divided, because forward does not use them or needs
            the total.

    Raises:
        ConfigError: If the plan is empty or names an unknown style, or `divide` or `keep` is a string.
    """

    plan: Mapping[str, Any] | None = None
    sequence_parallel: bool = False
    loss_parallel: bool = False
    divide: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.plan is not None and not self.plan:
            raise ConfigError(
                "the tensor-parallel plan is empty, so nothing would be split; name modules and styles, as in "
                '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, or leave it out to use the model\'s own plan'
            )
        for name, style in (self.plan or {}).items():
            if isinstance(style, str) and style not in STYLES:
                raise ConfigError(describe_unknown_style(name, style))
        for name in ("divide", "keep"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} takes names in a tuple, not {getattr(self, name)!r}")


def describe_unknown_style(name: str, style: str) -> str:
    """Return the error message for a tensor-parallel plan with an unsupported style.

    Args:
        name: Name of the module or parameter in the plan.
        style: Style that the plan gives to it.
    """
    is_of_experts = style in ("grouped_gemm", "ep_dispatch_experts", "ep_router")
    why = ": expert parallelism is the layout ep, which needs no plan" if is_of_experts else ""
    return (
        f"the tensor-parallel plan gives {name!r} the style {style!r}, which is not supported{why}; allowed: "
        f"{', '.join(STYLES)}, or a ParallelStyle object of torch.distributed.tensor.parallel"
    )


CP_STYLES = ("ring", "ulysses", "auto")
"""Ways to divide attention between ranks under context parallelism.

"ring": each rank has the queries of its sequence shard. "ulysses": each rank computes some heads. "auto": whichever of
the two sends less data.
"""


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism, for a ParallelismConfig or `kwargs_handlers`.

    Attributes:
        cp_comm_strategy: How torch's ring attention exchanges keys and values: "allgather" (default) or "alltoall".
        labels: Names of those model arguments that contain labels, of shape (rows, tokens). They are needed if the
            model itself computes the loss.
        blocks: Classes, class names or module names of the blocks that sequences pass through. Empty: the repeated
            blocks of the model.
        ignore_index: Label that the loss ignores. None: the value that the model passes to torch's cross entropy, or
            -100.
        cp_style: "ring" (default): each rank keeps the queries of its sequence shard, and keys and values are
            exchanged. "ulysses": each rank computes some heads for full sequences (Jacobs et al., 2023, arXiv
            2309.14509). The number of heads must then be a multiple of the number of ranks. "auto": the style that
            sends less data.

    Raises:
        ConfigError: If a value is not allowed.
    """

    cp_comm_strategy: str | None = None
    labels: tuple[str, ...] = ("labels", "shift_labels", "targets", "target")
    blocks: tuple[Any, ...] = ()
    ignore_index: int | None = None
    cp_style: str = "ring"

    def __post_init__(self) -> None:
        for name in ("labels", "blocks"):
            value = getattr(self, name)
            setattr(self, name, (value,) if isinstance(value, str | type) else tuple(value))
        self.cp_comm_strategy = self.cp_comm_strategy or "allgather"
        if self.cp_comm_strategy not in CP_EXCHANGES:
            raise ConfigError(f"cp_comm_strategy={self.cp_comm_strategy!r}; allowed: {', '.join(CP_EXCHANGES)}")
        if self.cp_style not in CP_STYLES:
            raise ConfigError(f"cp_style={self.cp_style!r}; allowed: {', '.join(CP_STYLES)}")


# -------------------------------------------------------------------- requests of plugins and files


@dataclass
class LayoutRequest:
    """Collector of the layout settings that plugins and config files request.

    Each setting is recorded with its key: the argument of a plugin, or the key of a config file, that requested it.

    Attributes:
        settings: Pairs of (value, key that requested it), by setting.
        lines: Pairs of (key, text that describes the effect of the key), in the order of the requests.
        refused: Mapping from each unsupported key to advice for the user.
        dtypes: Dtypes of FSDP's mixed precision policy, by field of ShardingOptions.
        context: Options of context parallelism; None if none were requested.
    """

    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    context: TorchContextParallelConfig | None = None
    _ignored: list[tuple[str, str]] = field(default_factory=list)  # (key, reason)
    _sizes: dict[str, tuple[int, str]] = field(default_factory=dict)  # (number of ranks, key), by axis
    _sharding: dict[str, str] = field(default_factory=dict)  # "fsdp", "hsdp" or "ddp", by key
    _engines: dict[str, str] = field(default_factory=dict)  # "deepspeed" or a layout with a ZeRO stage, by key

    def request_setting(self, setting: str, value: Any, key: str) -> None:
        """Record that `key` requests a value for a setting.

        Args:
            setting: Name of Headway's setting.
            value: Requested value.
            key: Argument of a plugin, or key of a config file, that requests the value. It is shown in messages.

        Raises:
            ConfigError: If another key requested a different value.
        """
        earlier_value, earlier_key = self.settings.get(setting, (value, key))
        if earlier_value != value:
            raise ConfigError(f"{earlier_key} says {setting}={earlier_value!r}, but {key} says {value!r}; keep one")
        self.settings[setting] = (value, key)
        self.lines.append((key, f"{setting}: {value!r}"))

    def ignore_key(self, key: str, reason: str) -> None:
        """Record that `key` has no effect, with the reason.

        Args:
            key: Argument of a plugin, or key of a config file.
            reason: Explanation for the user.
        """
        self._ignored.append((key, reason))
        self.lines.append((key, f"not needed: {reason}"))

    def refuse_key(self, key: str, reason: str) -> None:
        """Record that `key` is not supported, with advice for the user.

        Args:
            key: Argument of a plugin, or key of a config file.
            reason: Explanation and advice for the user.
        """
        self.refused[key] = reason

    def use_shards(self, key: str, layout: str = "fsdp") -> None:
        """Request a sharded layout ("fsdp" or "hsdp") without sizes, or replicas ("ddp").

        Args:
            key: Argument of a plugin, or key of a config file, that requests the layout.
            layout: "fsdp", "hsdp" or "ddp". Default: "fsdp".
        """
        if layout != "fsdp" or key not in self._sharding:
            self._sharding[key] = layout

    def use_deepspeed(self, key: str, stage: str = "deepspeed") -> None:
        """Request DeepSpeed's engine.

        Args:
            key: Argument of a plugin, or key of a config file, that requests the engine.
            stage: Layout that selects a ZeRO stage, such as "zero3". Default: "deepspeed", without a stage.
        """
        if stage != "deepspeed" or key not in self._engines:
            self._engines[key] = stage

    def set_size(self, axis: str, size: int, key: str) -> None:
        """Request a number of ranks along an axis.

        Args:
            axis: Name of the axis, such as "tp".
            size: Number of ranks.
            key: Argument of a plugin, or key of a config file, that requests the number.

        Raises:
            ConfigError: If two keys request different numbers larger than 1.
        """
        earlier_size, earlier_key = self._sizes.get(axis, (1, key))
        if earlier_size > 1 and size not in (1, earlier_size):
            raise ConfigError(f"{earlier_key}={earlier_size} contradicts {key}={size}; keep one of them")
        self._sizes[axis] = (size, key) if size > 1 else (earlier_size, earlier_key)
        self.lines.append((key, "size 1: nothing is split along it" if size == 1 else f"strategy: {axis} = {size}"))

    @property
    def ignored(self) -> list[str]:
        """Keys of plugins and config files that have no effect, each with the reason."""
        return [f"{key} ({reason})" for key, reason in self._ignored]

    @property
    def has_sizes(self) -> bool:
        """Whether a size larger than 1 was requested for an axis."""
        return any(size > 1 for size, _ in self._sizes.values())

    def find_strategy(self) -> tuple[str, str] | None:
        """Return the requested layout and the keys that request it, or None if no layout was requested.

        The keys are arguments of plugins or keys of config files.

        Raises:
            ConfigError: If the requests contradict each other.
        """
        size_keys = [key for size, key in self._sizes.values() if size > 1]
        if self._engines and (self._sharding or size_keys):
            sharding_keys = ", ".join([*self._sharding, *size_keys])
            raise ConfigError(
                f"DeepSpeed ({', '.join(self._engines)}) and torch's own engine ({sharding_keys}) are both "
                "requested; keep one"
            )
        if self._engines:
            stages = sorted(set(self._engines.values()) - {"deepspeed"}) or ["deepspeed"]
            return stages[0], ", ".join(self._engines)
        kinds = set(self._sharding.values()) - {"fsdp"}
        if len(kinds) > 1:
            raise ConfigError(f"{' and '.join(self._sharding)} ask for different layouts; keep one")
        if size_keys:
            keys = ", ".join(size_keys)
            return self._format_requested_sizes(kinds, keys), keys
        if not self._sharding:
            return None
        return (kinds.pop() if kinds else "fsdp"), ", ".join(self._sharding)

    def _format_requested_sizes(self, kinds: set[str], keys: str) -> str:
        """Return the requested sizes as the text of a layout.

        Args:
            kinds: Layouts without sizes that were requested, other than "fsdp".
            keys: Keys that request the sizes, for error messages.

        Raises:
            ConfigError: If a sharded layout and sizes without shards are requested, or replicas and shards.
        """
        sizes = {axis: size for axis, (size, _) in self._sizes.items()}
        if kinds == {"ddp"} and sizes.get("shard", 1) > 1:
            raise ConfigError(
                f"{' and '.join(self._sharding)} request whole models, but {keys} requests shards; keep one"
            )
        asks_for_shards = bool(self._sharding) and kinds != {"ddp"}
        if asks_for_shards and not any(sizes.get(axis, 1) != 1 for axis in ("shard", "ep", "cp")):
            raise ConfigError(
                f"{next(iter(self._sharding))} asks for a sharded model, but with {keys} no processes are left to shard across; give "
                "dp_shard_size, or remove FSDP"
            )
        return mesh.format_sizes(sizes)


class LayoutPlugin(Protocol):
    """Interface of plugin classes that request a layout. Their arguments are those of another library's plugins.

    Attributes:
        argument: Name of the Accelerator's argument that accepts this plugin.
    """

    argument: ClassVar[str]

    def request_layout(self, request: LayoutRequest) -> None:
        """Record in `request` the layout settings that this plugin requests."""
