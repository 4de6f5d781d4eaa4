"""Options of tensor parallelism: how a layer's matrices are split across the ranks of the `tp` axis. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.config.values import known_keywords
from headway.errors import ConfigError

STYLES = (
    "colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep",
    "embedding_rowwise", "embedding_colwise", "packed_colwise", "packed_rowwise", "sequence_parallel",
    "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "moe_tp_experts", "moe_identity_expert",
    "local_params", "replicate",
)  # fmt: skip
"""The styles that a plan may name: those of transformers 5.23."""


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
    expert = style in ("grouped_gemm", "ep_dispatch_experts", "ep_router")
    return (
        f"the tensor-parallel plan gives {name!r} the style {style!r}"
        + (", which belongs to expert parallelism, which is not supported" if expert else ", which is not supported")
        + f"; allowed: {', '.join(STYLES)}, or a ParallelStyle object of torch.distributed.tensor.parallel"
    )
