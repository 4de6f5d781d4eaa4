"""What torch's own allocator takes on NCCL ranks, beside forecasts and plans; and what one more layer adds.

`python -m benchmarks.cuda_build.layouts`, on the simulated runtime, without values. A Llama in float32 with AdamW, on each rank a
loop by hand: DDP, `fully_shard`, `parallelize_module` and `loss_parallel` are torch's, and nothing of Headway runs on these ranks.
Names of layouts as arguments choose among them.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

LAYOUTS = (("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("tp", 2), ("fsdp+tp=2", 4), ("loss parallel", 2))
LAYERS = (2, 4)
BATCH, TOKENS = 4, 512


def build(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    from headway.forecasting.tracing.attention_masks import skip_causal_mask

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
    return skip_causal_mask(
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=16000, use_cache=False))
    )


def strategy_of(layout: str) -> tuple[str, list[Any]]:
    from headway import TensorParallelOptions

    return ("tp", [TensorParallelOptions(loss_parallel=True)]) if layout == "loss parallel" else (layout, [])


def spread(model: Any, layout: str) -> Any:
    """By torch alone."""
    if layout == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tp = 1 if layout == "fsdp" else 2
    mesh = init_device_mesh("cuda", (dist.get_world_size() // tp, tp), mesh_dim_names=("shard", "tp"))
    if tp > 1:
        cut: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        cut |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        cut |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], cut)
        head = (
            ColwiseParallel(use_local_output=False)
            if layout == "loss parallel"
            else ColwiseParallel(output_layouts=Replicate())
        )
        parallelize_module(
            model, mesh["tp"], {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": head}
        )
    if layout.startswith("fsdp"):
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh["shard"])
    return model


def real(layout: str, layers: int) -> tuple[int, int]:
    """On one of the ranks: allocated and reserved."""
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import loss_parallel

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with torch.device("cuda"):
        model = spread(build(layers), layout)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # What is cut, and along which mesh: torch updates a group's tensors at once, which must be of one kind.
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": alike} for alike in kinds.values()])
    for _ in range(3):
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.long, device="cuda")
        with loss_parallel() if layout == "loss parallel" else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def predicted(layout: str, ranks: int, layers: int) -> tuple[int, int, int]:
    """The forecast's allocated and reserved, and the plan's peak."""
    import headway

    def batch_of(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, TOKENS, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    strategy, options = strategy_of(layout)
    given: dict[str, Any] = {"kwargs_handlers": options}
    found = headway.forecast(
        lambda: build(layers), batch_of, batch_size=BATCH, device="h100", largest=False, loop="loss_function",
        strategy=strategy, ranks=ranks, **given,
    )  # fmt: skip
    planned = headway.plan(
        lambda: build(layers), strategy, ranks, step=lambda model: model(**batch_of(BATCH)).loss, **given
    )
    return int(found.allocated), int(found.reserved), int(planned.peak)


def run(command: list[str], ranks: int) -> list[Any]:
    """What each process prints last."""
    environment = os.environ | {
        "SIMULATED_CUDA": "h100",
        "SIMULATED_CUDA_VALUES": "0",
        "SIMULATED_CUDA_DEVICES": str(ranks),
    }
    ran = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)
    found = [json.loads(line[6:]) for line in ran.stdout.splitlines() if line.startswith("found ")]
    return found or sys.exit(ran.stderr[-3000:])


def main() -> None:
    """Print the tables."""
    if sys.argv[1:2] in (["real"], ["predicted"]):
        layout, ranks, layers = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
        told = real(layout, layers) if sys.argv[1] == "real" else predicted(layout, ranks, layers)
        # One write: several ranks share a pipe.
        sys.stdout.write(f"found {json.dumps(told)}\n")
        sys.stdout.flush()
        return
    print("| layout | ranks | layers | allocated | forecast | | reserved | forecast | | plan's peak |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    slopes = []
    for layout, ranks in (each for each in LAYOUTS if not sys.argv[1:] or each[0] in sys.argv[1:]):
        rows = []
        for layers in LAYERS:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            module, asked = ["-m", "benchmarks.cuda_build.layouts"], [layout, str(ranks), str(layers)]
            told = run([*launch, *module, "real", *asked], ranks)
            allocated, reserved = (max(each[index] for each in told) for index in (0, 1))
            ((wanted, held, peak),) = run([*module, "predicted", *asked], 1)
            cells = " | ".join(f"{a:,} | {b:,} | {b / a - 1:+.2%}" for a, b in ((allocated, wanted), (reserved, held)))
            print(f"| {layout} | {ranks} | {layers} | {cells} | {peak:,} |", flush=True)
            rows.append((allocated, wanted, peak))
        per_layer = [(after - before) // (LAYERS[1] - LAYERS[0]) for before, after in zip(*rows)]
        slopes.append(f"| {layout} | {ranks} | " + " | ".join(f"{size:,}" for size in per_layer) + " |")
    print("\n| one more layer | ranks | real ranks | forecast | plan |\n|---|---|---|---|---|")
    print("\n".join(slopes))


if __name__ == "__main__":
    main()
