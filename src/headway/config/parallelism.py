"""How a model is spread: options of each kind of parallelism, and what plugins, flags and files of other libraries ask for.

Pipeline: where a model is cut into stages, and in which order micro-batches pass. Sharding (FSDP2 and HSDP): what is gathered
together, when, and in which dtype. Tensor: how a layer's matrices are split across the ranks of the `tp` axis. Context: how
sequences are split across the ranks of the `cp` axis. Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from headway.config import mesh
from headway.config.launch import ROTATIONS
from headway.config.values import known_keywords
from headway.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
"""GPipe, 1F1B, interleaved 1F1B, interleaved zero bubble, and zero bubble with V-shaped placement, as torch has them."""
_SEVERAL = ("interleaved", "zero_bubble", "zbv")


@known_keywords
@dataclass(frozen=True)
class PipelineOptions:
    """How a model is cut into stages, and how batches pass through them.

    Attributes:
        schedule: one of `SCHEDULES`. "gpipe": all forwards, then all backwards. "1f1b": the same result with fewer activations
            in memory. "interleaved", "zero_bubble" and "zbv": several stages a rank, and less idle time. All but "gpipe" need
            forward and backward in one call, `accelerator.forward_backward`.
        num_microbatches: how many parts a batch is cut into; None: twice the number of ranks along the pipeline. A batch with
            fewer rows gets one part a row.
        stages_per_rank: of the schedules that take several; None: 2. "zbv" takes 2.
        split: names of the blocks at which the second and each later stage begins; none: stages of equally many blocks.
        blocks: class names or module names of the blocks; none: what is repeated in the module tree.
        first, last: names of modules outside of the blocks that belong to the first or the last stage; a name in both is on
            both, and its gradients are summed. Others: the first where they come before the blocks in the module tree, else
            the last.
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
        if self.schedule not in _SEVERAL and wanted not in (None, 1):
            raise ConfigError(
                f"PipelineOptions(stages_per_rank={wanted}) needs a schedule of several stages a rank, not {self.schedule!r}"
            )
        if self.schedule == "zbv" and wanted not in (None, 2):
            raise ConfigError(f"PipelineOptions(stages_per_rank={wanted}): zbv has exactly 2 stages a rank")

    @property
    def num_per_rank(self) -> int:
        """Stages on each rank."""
        return (self.stages_per_rank or 2) if self.schedule in _SEVERAL else 1

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """Which rank along the pipeline has a stage: each in turn, or with "zbv" there and back."""
        lap, place = divmod(stage, num_ranks)
        return num_ranks - 1 - place if self.schedule == "zbv" and lap % 2 else place

    def wanted_microbatches(self, num_ranks: int) -> int:
        """Into how many parts a batch is cut, if it has as many rows."""
        return self.num_microbatches or 2 * num_ranks


DTYPES = ("float32", "bfloat16", "float16")


@known_keywords
@dataclass(frozen=True)
class ShardingOptions:
    """Options of sharded layouts ("fsdp", "hsdp" and their products); each has a default that is right for most models.

    Attributes:
        units: what is gathered together: classes, class names or module names; none: the blocks that are repeated in the
            module tree. What lies in no unit belongs to the root, which is one unit of its own.
        min_num_params: instead of `units`: each module with so many parameters, outside of smaller such modules.
        ignored: classes, class names or module names whose frozen parameters stay whole on every rank.
        reshard_after_forward: free a unit's whole parameters after its forward and gather them again in backward; None: all
            units but the root. False: keep them, which saves a gather and costs memory. A number: keep them cut among so many
            ranks, a divisor of the shards (the ranks of a machine, say).
        cpu_offload: parameters, gradients and the optimizer's state lie in host memory, and the optimizer steps there.
        forward_prefetch: gather so many units ahead in forward; 0: torch's own order, one ahead.
        backward_prefetch: the same in backward.
        param_dtype: of gathered parameters in blocks; None: that of mixed_precision, else their own.
        reduce_dtype: in which gradients are summed over ranks; None: float32 under mixed precision, else their own.
        output_dtype: of the model's floating-point outputs; None: as they come.
        forward_methods: names of methods of the model that use its parameters beside forward ("encode", "generate").
        find_unused_parameters: from step to step, and from rank to rank, other parameters take part in the loss.
        broadcast_buffers: all ranks get rank 0's buffers after each update's last backward.
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
            object.__setattr__(self, name, _dtype(getattr(self, name), name))
        chosen = self.reshard_after_forward
        if not isinstance(chosen, bool | int | None) or (not isinstance(chosen, bool) and chosen == 0):
            raise ConfigError(
                f"ShardingOptions(reshard_after_forward={chosen!r}); allowed: True, False, None, or a number of ranks"
            )

    def check(self, num_shards: int) -> None:
        """Do they fit so many shards?

        Raises:
            ConfigError: `reshard_after_forward` is a number that does not divide them.
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


def _dtype(value: Any, name: str) -> str | None:
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
"""The styles that a plan may name: those of transformers 5.23, and `packed_qkv_colwise` for three matrices in one."""


@known_keywords
@dataclass(frozen=True)
class TensorParallelOptions:
    """How a model is cut.

    Attributes:
        plan: from the names of modules (or of parameters) to styles, one of `STYLES` or a `ParallelStyle` object of
            torch's; `*` stands for one part of a name. None: the model's own, as transformers' models have one.
        sequence_parallel: between the blocks' matrices, each rank computes its part of the sequence.
        loss_parallel: the head's logits stay cut along the vocabulary, and so does the cross entropy over them.
        divide: names of integer attributes, like "blocks.*.attn.num_heads", that count what a rank has: each is divided
            by the number of ranks.
        keep: names of such attributes that forward does not use, or uses for the whole.
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
                raise ConfigError(unknown_style(name, style))
        for name in ("divide", "keep"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} takes names in a tuple, not {getattr(self, name)!r}")


def unknown_style(name: str, style: str) -> str:
    """The message of a plan that names a style that is not served."""
    is_of_experts = style in ("grouped_gemm", "ep_dispatch_experts", "ep_router")
    why = ": expert parallelism is the layout ep, which needs no plan" if is_of_experts else ""
    return (
        f"the tensor-parallel plan gives {name!r} the style {style!r}, which is not supported{why}; allowed: "
        f"{', '.join(STYLES)}, or a ParallelStyle object of torch.distributed.tensor.parallel"
    )


CP_STYLES = ("ring", "ulysses", "auto")
"""What each rank computes attention of: queries of its part, or some heads of all tokens."""


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism, in a ParallelismConfig or in `kwargs_handlers`.

    Attributes:
        cp_comm_strategy: "allgather" (default) or "alltoall": how keys and values travel in torch's ring attention.
        labels: arguments of the model, of the shape (rows, tokens), from which it computes a loss over tokens itself.
        blocks: classes, class names or names of the modules through which sequences go; none: what is repeated in the model.
        ignore_index: the label that the loss ignores; None (default): what the model passes to torch's cross entropy, or -100.
        cp_style: "ring" (default): each rank keeps the queries of its part, and keys and values are passed around. "ulysses": each
            rank computes some of the heads for whole sequences (Jacobs et al., 2023, arXiv 2309.14509); the number of heads must be
            a multiple of the number of ranks. "auto": the one that sends less.
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
        if self.cp_comm_strategy not in ROTATIONS:
            raise ConfigError(f"cp_comm_strategy={self.cp_comm_strategy!r}; allowed: {', '.join(ROTATIONS)}")
        if self.cp_style not in CP_STYLES:
            raise ConfigError(f"cp_style={self.cp_style!r}; allowed: {', '.join(CP_STYLES)}")


# -------------------------------------------------------------------- what is asked for, in Headway's settings


@dataclass
class LayoutRequest:
    """Collects what is asked for, each time with the key that asks for it.

    Attributes:
        settings: setting -> (value, key).
        lines: for each key, (key, what it became).
        refused: keys that cannot be served, and what to do.
        dtypes: of FSDP's policy of precision, by the fields of ShardingOptions.
        context: options of context parallelism.
    """

    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    context: TorchContextParallelConfig | None = None
    _sizes: dict[str, tuple[int, str]] = field(default_factory=dict)
    _sharding: dict[str, str] = field(default_factory=dict)
    _engines: dict[str, str] = field(default_factory=dict)

    def take(self, setting: str, value: Any, key: str) -> None:
        """Let `key` decide a setting.

        Raises:
            ConfigError: another key says something else.
        """
        before, other = self.settings.get(setting, (value, key))
        if before != value:
            raise ConfigError(f"{other} says {setting}={before!r}, but {key} says {value!r}; keep one")
        self.settings[setting] = (value, key)
        self.lines.append((key, f"{setting}: {value!r}"))

    def ignore(self, key: str, reason: str) -> None:
        """Note that `key` changes nothing, and why."""
        self.lines.append((key, f"not needed: {reason}"))

    def refuse(self, key: str, reason: str) -> None:
        """Note that `key` cannot be served, and what to do."""
        self.refused[key] = reason

    def use_shards(self, key: str, layout: str = "fsdp") -> None:
        """Ask for shards of whatever sizes ("fsdp"), for "hsdp", or for none ("ddp")."""
        if layout != "fsdp" or key not in self._sharding:
            self._sharding[key] = layout

    def use_deepspeed(self, key: str, stage: str = "deepspeed") -> None:
        """Ask for DeepSpeed's engine."""
        if stage != "deepspeed" or key not in self._engines:
            self._engines[key] = stage

    def set_size(self, axis: str, size: int, key: str) -> None:
        """Ask for so many processes along an axis.

        Raises:
            ConfigError: another key asks for another number.
        """
        before, other = self._sizes.get(axis, (1, key))
        if before > 1 and size not in (1, before):
            raise ConfigError(f"{other}={before} contradicts {key}={size}; keep one of them")
        self._sizes[axis] = (size, key) if size > 1 else (before, other)
        self.lines.append((key, "size 1: nothing is split along it" if size == 1 else f"strategy: {axis} = {size}"))

    @property
    def ignored(self) -> list[str]:
        """Keys that change nothing, each with its reason."""
        return [
            f"{key} ({text.removeprefix('not needed: ')})" for key, text in self.lines if text.startswith("not needed")
        ]

    @property
    def has_sizes(self) -> bool:
        """Are there sizes of several processes?"""
        return any(size > 1 for size, _ in self._sizes.values())

    def strategy(self) -> tuple[str, str] | None:
        """The layout and the keys that ask for it; None where nothing asks for one.

        Raises:
            ConfigError: the keys contradict each other.
        """
        sized_by = [key for size, key in self._sizes.values() if size > 1]
        if self._engines and (self._sharding or sized_by):
            raise ConfigError(
                f"DeepSpeed ({', '.join(self._engines)}) and torch's own engine ({', '.join([*self._sharding, *sized_by])}) are both "
                "requested; keep one"
            )
        if self._engines:
            stages = sorted(set(self._engines.values()) - {"deepspeed"}) or ["deepspeed"]
            return stages[0], ", ".join(self._engines)
        kinds = set(self._sharding.values()) - {"fsdp"}
        if len(kinds) > 1:
            raise ConfigError(f"{' and '.join(self._sharding)} ask for different layouts; keep one")
        if sized_by:
            return self._written_sizes(kinds, ", ".join(sized_by)), ", ".join(sized_by)
        if not self._sharding:
            return None
        return (kinds.pop() if kinds else "fsdp"), ", ".join(self._sharding)

    def _written_sizes(self, kinds: set[str], by: str) -> str:
        sizes = {axis: size for axis, (size, _) in self._sizes.items()}
        if kinds == {"ddp"} and sizes.get("shard", 1) > 1:
            raise ConfigError(f"{' and '.join(self._sharding)} ask for whole models, but {by} for shards; keep one")
        asks_for_shards = bool(self._sharding) and kinds != {"ddp"}
        if asks_for_shards and not any(sizes.get(axis, 1) != 1 for axis in ("shard", "ep", "cp")):
            raise ConfigError(
                f"{next(iter(self._sharding))} asks for a sharded model, but with {by} no processes are left to shard across; give "
                "dp_shard_size, or remove FSDP"
            )
        return mesh.written(sizes)


class LayoutPlugin(Protocol):
    """An object of another library's kind that the Accelerator takes by the name `argument`."""

    argument: ClassVar[str]

    def request_layout(self, request: LayoutRequest) -> None:
        """Add what it asks for."""
