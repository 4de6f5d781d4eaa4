"""Options of pipeline, sharded, tensor and context parallelism.

This module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.config.launch import CP_EXCHANGES
from headway.core.config.values import report_unknown_keywords
from headway.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
"""Names of pipeline schedules that torch implements.

They stand for GPipe, 1F1B, interleaved 1F1B, interleaved zero bubble, and zero bubble with V-shaped placement.
"""
_MULTI_STAGE_SCHEDULES = ("interleaved", "zero_bubble", "zbv")
DTYPES = ("float32", "bfloat16", "float16")
STYLES = (
    "colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep",
    "embedding_rowwise", "embedding_colwise", "packed_colwise", "packed_qkv_colwise", "packed_rowwise", "sequence_parallel",
    "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "moe_tp_experts", "moe_identity_expert",
    "local_params", "replicate",
)  # fmt: skip
"""Names of styles that a tensor-parallel plan may contain.

These are the styles of transformers 5.23, plus `packed_qkv_colwise` for query, key and value in one matrix.
"""
CP_STYLES = ("ring", "ulysses", "auto")
"""Ways to divide attention between ranks under context parallelism.

"ring": each rank has the queries of its sequence shard. "ulysses": each rank computes some heads. "auto": whichever of
the two sends less data.
"""


@report_unknown_keywords
@dataclass(frozen=True)
class PipelineOptions:
    """Options of pipeline parallelism, for `kwargs_handlers` with a strategy such as "pp" or "fsdp=2+pp=2".

    The model's blocks are divided into stages, and each pipeline rank holds one or more of them. Every batch is split
    into micro-batches, which pass through the stages.

    Attributes:
        schedule: Order of the micro-batches' forwards and backwards, in upper or lower case. "gpipe" (the default): all forwards,
            then all backwards (Huang et al. 2018). "1f1b": equal results with fewer activations in memory.
            "interleaved" (Narayanan et al. 2021), "zero_bubble" and "zbv" (Qi et al. 2023): several stages per rank and
            less idle time. All but "gpipe" need forward and backward in one call, `accelerator.forward_backward`.
        num_microbatches: Number of micro-batches per batch, at least 1. It is independent of
            `gradient_accumulation_steps`. None (the default): twice the number of pipeline ranks. A batch with fewer
            rows is split into single rows.
        stages_per_rank: Number of stages on each rank, for schedules that allow more than one. None (the default): 2 for
            these schedules, else 1. "zbv" always has 2.
        split: Names of the blocks with which the second and each later stage start. Empty: stages with equal numbers of
            blocks.
        blocks: Class names or module names of the blocks. Empty: the repeated blocks of the model.
        first, last: Names of modules outside the blocks that belong to the first or last stage. A module in both is on
            both stages, and its gradients are summed. Other modules go to the first stage if they precede the blocks in
            the module tree, else to the last. Default: none.

    Raises:
        ConfigError: If the schedule is unknown, or a number is out of range or does not fit the schedule.

    Example::

        options = PipelineOptions(schedule="1f1b", num_microbatches=8)
        accelerator = Accelerator(strategy="pp", kwargs_handlers=[options])
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


@report_unknown_keywords
@dataclass(frozen=True)
class ShardingOptions:
    """Options of sharded layouts ("fsdp", "hsdp" and combinations), for `kwargs_handlers`. The defaults suit most models.

    The layouts use torch's fully_shard (FSDP2): each rank keeps a shard of every parameter, gradient and optimizer
    state. The parameters of a unit are gathered for its forward and its backward, and freed afterward.

    Attributes:
        units: Classes, class names or module names whose parameters are gathered together. Empty (the default): the
            repeated blocks of the model. Parameters outside all units belong to the root unit.
        min_num_params: Alternative to `units`: each module with at least this many parameters outside smaller units is
            a unit. 0 (the default): use `units`.
        ignored: Classes, class names or module names whose frozen parameters are replicated instead of sharded.
            Default: none.
        reshard_after_forward: Whether to free a unit's gathered parameters after its forward and gather them again in
            backward. None (the default): True for all units except the root. False: keep them, which saves an
            all-gather and costs memory. An integer: reshard them over that many ranks, such as the ranks of a machine.
            The integer must divide the number of shards.
        cpu_offload: Whether to keep parameters, gradients and optimizer state in host memory and step the optimizer
            there. Default: False.
        forward_prefetch: Number of units to gather ahead in forward. 0 (the default): torch's own choice, one.
        backward_prefetch: Number of units to gather ahead in backward. 0 (the default): torch's own choice, one.
        param_dtype: Dtype of gathered parameters: "float32", "bfloat16" or "float16", a short form such as "bf16", or a
            torch.dtype. None (the default): the dtype of mixed_precision if it is used, else unchanged.
        reduce_dtype: Dtype in which gradients are reduced. None (the default): float32 with mixed precision, else
            unchanged.
        output_dtype: Dtype of the model's floating-point outputs. None (the default): unchanged.
        forward_methods: Names of methods besides forward that use the model's parameters ("encode", "generate").
            Default: none.
        find_unused_parameters: Whether the set of parameters that take part in the loss may differ between steps and
            ranks. Default: False.
        broadcast_buffers: Whether all ranks receive rank 0's buffers after the last backward of each update. Default:
            True.
        whole_updates: Whether optimizers step on full parameters. Each parameter is then updated by one rank, for all
            ranks. None (the default): only if an optimizer cannot step on shards. False: never, so that such an
            optimizer raises an error.

    Raises:
        ConfigError: If a value is not allowed, or `units` and `min_num_params` are both given.

    Example::

        options = ShardingOptions(units=["Block"], reshard_after_forward=False)
        accelerator = Accelerator(strategy="fsdp", kwargs_handlers=[options])
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
                f"give {allowed}True (all of them) or False (keep parameters unsharded)"
            )


def _parse_dtype(value: Any, name: str) -> str | None:
    """Return torch's name of a dtype, such as "bfloat16" for "bf16" or `torch.bfloat16`. None stays None.

    Args:
        value: Dtype, its name, or its short name.
        name: Name of the argument, for messages.

    Raises:
        ConfigError: If the dtype is not one of `DTYPES`.
    """
    if value is None:
        return None
    text = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(str(value), str(value).removeprefix("torch."))
    if text not in DTYPES:
        raise ConfigError(f"ShardingOptions({name}={value!r}); allowed: {', '.join(DTYPES)}")
    return text


@report_unknown_keywords
@dataclass(frozen=True)
class TensorParallelOptions:
    """Options of tensor parallelism, for `kwargs_handlers` with a strategy such as "tp" or "fsdp+tp=2".

    The weight matrices of each layer are split over the ranks of a tensor-parallel group. These ranks read equal batches.

    Attributes:
        plan: Mapping from names of modules or parameters to styles. A style is a name such as "colwise" (split output
            features), "rowwise" (split input features) or "sequence_parallel" (docs/tensor_parallel.md lists all), or a
            torch `ParallelStyle` object. `*` matches one component of a name. None (the default): the model's own plan,
            which transformers' models have, else a plan that is derived from its attention layers and MLPs. With several
            models in one `prepare()` call, a name may belong to only one of them.
        sequence_parallel: Whether each rank computes only its sequence shard in the layers between split matrices.
            Default: False.
        loss_parallel: Whether logits and cross entropy stay sharded along the vocabulary. Default: False.
        divide: Names of integer attributes that must count only the share of one rank, such as
            "blocks.*.attn.num_heads". The value of each is divided by the number of ranks. Default: none.
        keep: Names of integer attributes whose values must not be divided, because forward does not use them or needs
            the total. Default: none.

    Raises:
        ConfigError: If the plan is empty or names an unknown style, or `divide` or `keep` is a string.

    Example::

        options = TensorParallelOptions(plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
        accelerator = Accelerator(strategy="tp", kwargs_handlers=[options])
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


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism, for `kwargs_handlers` with a strategy such as "cp", or for a ParallelismConfig.

    Every sequence is split over the ranks of a context-parallel group, which read equal batches.

    Attributes:
        cp_comm_strategy: How torch's ring attention exchanges keys and values: "allgather" or "alltoall". None: the
            default, "allgather".
        labels: Names of those model arguments that contain labels, of shape (rows, tokens). They are needed if the
            model itself computes the loss. Default: "labels", "shift_labels", "targets" and "target".
        blocks: Classes, class names or module names of the blocks that sequences pass through. Empty (the default): the
            repeated blocks of the model.
        ignore_index: Label that the loss ignores. None (the default): the value that the model passes to torch's cross
            entropy, or -100.
        cp_style: "ring" (the default): each rank keeps the queries of its sequence shard, and keys and values are
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
