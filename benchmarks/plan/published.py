"""Published trainings of Llama 3.1 on H100s by torchtitan (December 2024 and June 2025), compared with plans and a forecast.

`python -m benchmarks.plan.published` takes three minutes on one CPU. The models are
transformers' Llama of the same sizes. Rates are a plan's defaults: 400 TFLOP/s, 300 GB/s within a machine and 40 GB/s per GPU
between machines. A plan takes neither the compiler nor float8 into account; some published runs used them, as their notes say. Batch
sizes and activation checkpointing are those of torchtitan's tables; a "?" in the note marks those that the tables do not state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import headway
from headway import ActivationCheckpointing, ShardingOptions, TensorParallelOptions
from headway.forecasting.tracing.attention_masks import skip_causal_mask
from headway.planning.cluster import ClusterRates
from headway.planning.costs import compute_cost

RESERVED = 82.4
"""Published reserved memory of the first row, in GiB."""
GIB = 1 << 30
_KEPT_OPERATIONS = tuple(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default for name in ("flash", "efficient", "cudnn")
)
_SIZES = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64)}


def build_model(size: str, length: int) -> nn.Module:
    """Build Llama 3.1 of a size, for sequences of up to `length` tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes: dict[str, Any] = dict(zip(names, _SIZES[size])) | {"num_key_value_heads": 8, "vocab_size": 128256}
    return skip_causal_mask(LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=length, use_cache=False)))


def make_batch(length: int, size: int) -> dict[str, torch.Tensor]:
    """Return a batch of tokens, with the tokens themselves as labels."""
    tokens = torch.zeros(size, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


class EverySecondProduct:
    """Checkpoint policy that keeps attention and every second matrix product, counted separately in forward and recomputation."""

    def __init__(self) -> None:
        self._counts = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return torch's policy for an operation."""
        if operation is torch.ops.aten.mm.default:
            self._counts[context.is_recompute] += 1
            is_kept = self._counts[context.is_recompute] % 2 == 1
        else:
            is_kept = operation in _KEPT_OPERATIONS
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def make_selective_checkpointing() -> ActivationCheckpointing:
    """Return torchtitan's selective activation checkpointing."""
    return ActivationCheckpointing(policy=EverySecondProduct())


@dataclass(frozen=True)
class Row:
    """A published training.

    Attributes:
        size: Size of the model.
        strategy: Layout, as the Accelerator takes it.
        ranks: Number of GPUs.
        batch: Samples of each data shard.
        length: Tokens of a sample.
        checkpointing: Function that returns the options of activation checkpointing.
        speed: Published tokens per second and GPU.
        note: What the published run used, but the plan does not model; "?" if the source does not state it.
    """

    size: str
    strategy: str
    ranks: int
    batch: int
    length: int
    checkpointing: Callable[[], ActivationCheckpointing]
    speed: float
    note: str = ""

    def options(self) -> list[Any]:
        """Return the Accelerator's kwargs handlers."""
        handlers = [ShardingOptions(param_dtype="bf16", reduce_dtype="float32"), self.checkpointing()]
        if "tp" in self.strategy:
            handlers.append(TensorParallelOptions(sequence_parallel=True, loss_parallel=True))
        return handlers


ROWS = (
    Row("8B", "fsdp", 8, 2, 8192, make_selective_checkpointing, 5762),
    Row("8B", "fsdp", 128, 2, 8192, make_selective_checkpointing, 5605),
    Row("70B", "fsdp+tp=8", 256, 16, 8192, ActivationCheckpointing, 597.3, "compiled; batch and checkpointing ?"),
    Row("8B", "fsdp", 8, 1, 32768, ActivationCheckpointing, 3890, "compiled, float8; batch and checkpointing ?"),
    Row("8B", "fsdp+cp=2", 8, 1, 65536, ActivationCheckpointing, 2540, "compiled, float8; batch and checkpointing ?"),
    Row("8B", "fsdp+cp=4", 8, 1, 131072, ActivationCheckpointing, 1071, "compiled, float8; batch and checkpointing ?"),
    Row("8B", "cp", 8, 1, 262144, ActivationCheckpointing, 548, "compiled, float8; batch and checkpointing ?"),
)


def main() -> None:
    """Print the forecast of the first row, then the table of plans."""
    first = ROWS[0]
    forecast = headway.forecast(
        partial(build_model, first.size, first.length), partial(make_batch, first.length), batch_size=first.batch, device="h100",
        strategy=first.strategy, ranks=first.ranks, largest=False, loop="loss_function", kwargs_handlers=first.options(),
    )  # fmt: skip
    print(
        f"8B on 8, reserved: {forecast.reserved / GIB:.1f} GiB, published {RESERVED}: {forecast.reserved / GIB / RESERVED - 1:+.1%}; "
        f"allocated {forecast.allocated / GIB:.1f} GiB\n"
    )
    print(
        "| model | layout | GPUs | batch x tokens | planned | published | difference | used in the run, but not planned | "
        "planned peak, GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in ROWS:

        def step(model: nn.Module, row: Row = row) -> torch.Tensor:
            loss: torch.Tensor = model(**make_batch(row.length, row.batch)).loss
            return loss

        planned = headway.plan(
            partial(build_model, row.size, row.length), row.strategy, row.ranks, step=step, tokens=row.batch * row.length,
            kwargs_handlers=row.options(),
        )  # fmt: skip
        cost = compute_cost(planned, ClusterRates())
        assert cost is not None
        assert planned.peak is not None
        speed = cost.tokens_per_second / row.ranks
        print(
            f"| {row.size} | `{row.strategy}` | {row.ranks} | {row.batch} x {row.length:,} | {speed:,.0f} | {row.speed:,} | "
            f"{speed / row.speed - 1:+.0%} | {row.note} | {planned.peak / GIB:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
