"""Plans of a model of the shape of Llama 3.1 405B on 512 GPUs; no published figures exist to compare them with.

`python -m benchmarks.plan.large` (90 seconds on one CPU) prints the table of docs/plan.md: one sequence of 4,096 tokens for
each data shard, parameters gathered in bfloat16, and sequence and loss parallelism under `tp`.
"""

from typing import Any

from transformers import LlamaConfig

import headway
from headway import ActivationCheckpointing, ShardingOptions, TensorParallelOptions
from headway.planning.cluster import ClusterRates
from headway.planning.costs import compute_cost
from headway.planning.sources import make_config_source

RANKS, GIB = 512, 1 << 30
SHAPE = {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096,
}  # fmt: skip


def main() -> None:
    """Print the table."""
    config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])
    source = make_config_source(config, "Llama 3.1 405B")
    print("| layout | activation checkpointing | peak, GiB | tokens/s per GPU | bottleneck |\n|---|---|---|---|---|")
    for strategy in ("fsdp", "fsdp+tp=8", "hsdp=8+tp=8"):
        for is_checkpointed in (False, True):
            options: list[Any] = [ShardingOptions(param_dtype="bf16", reduce_dtype="float32")]
            options += [TensorParallelOptions(sequence_parallel=True, loss_parallel=True)] if "tp" in strategy else []
            options += [ActivationCheckpointing()] if is_checkpointed else []
            planned = headway.plan(
                source.make, strategy, RANKS, step=source.step, tokens=source.tokens, kwargs_handlers=options
            )
            cost = compute_cost(planned, ClusterRates())
            assert cost is not None
            assert planned.peak is not None
            print(
                f"| `{strategy}` | {'yes' if is_checkpointed else 'no'} | {planned.peak / GIB:.1f} | "
                f"{cost.tokens_per_second / RANKS:.0f} | {cost.bottleneck} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
