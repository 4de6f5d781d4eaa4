"""A published training beside its plan and forecast: Llama 3.1 8B on eight H100 by torchtitan (its table of December 2024).

`python -m benchmarks.plan.published`. FSDP, two sequences of 8,192 tokens a GPU, selective checkpointing of every second matrix
product, without compiling: 5,762 tokens a second and GPU, 82.4 GiB reserved. The model is transformers' Llama of the same sizes.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import headway
from headway import ActivationCheckpointing, ShardingOptions
from headway.forecasting.tracing.tensors import unmasked
from headway.planning.costs import ClusterRates, cost

TOKENS_PER_SECOND, RESERVED = 5762, 82.4
GIB = 1 << 30
_KEPT = tuple(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default for name in ("flash", "efficient", "cudnn")
)


def model() -> nn.Module:
    """Llama 3.1 8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
    return unmasked(LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)))


def batch(size: int) -> dict[str, torch.Tensor]:
    """Tokens, with themselves as labels."""
    tokens = torch.zeros(size, 8192, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


class EverySecondProduct:
    """Keeps attention, and every second matrix product, of forward and of what is computed again alike."""

    def __init__(self) -> None:
        self._counts = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """torch's policy for an operation."""
        if operation is torch.ops.aten.mm.default:
            self._counts[context.is_recompute] += 1
            is_kept = self._counts[context.is_recompute] % 2 == 1
        else:
            is_kept = operation in _KEPT
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def main() -> None:
    """Print the row."""
    options = [
        ShardingOptions(param_dtype="bf16", reduce_dtype="float32"),
        ActivationCheckpointing(policy=EverySecondProduct()),
    ]
    found = headway.forecast(
        model, batch, batch_size=2, device="h100", strategy="fsdp", ranks=8, largest=False, loop="loss_function",
        kwargs_handlers=options,
    )  # fmt: skip
    planned = headway.plan(
        model, "fsdp", 8, step=lambda made: made(**batch(2)).loss, tokens=2 * 8192, kwargs_handlers=options
    )
    spent = cost(planned, ClusterRates())
    assert spent is not None
    speed = spent.tokens_per_second / 8
    print(f"reserved: {found.reserved / GIB:.1f} GiB, published {RESERVED}: {found.reserved / GIB / RESERVED - 1:+.1%}")
    print(
        f"tokens a second and GPU at 400 TFLOP/s: {speed:,.0f}, published {TOKENS_PER_SECOND:,}: {speed / TOKENS_PER_SECOND - 1:+.1%}"
    )
    print(f"tensors at the peak: {found.allocated / GIB:.1f} GiB; by the plan {planned.peak / GIB:.1f} GiB")


if __name__ == "__main__":
    main()
