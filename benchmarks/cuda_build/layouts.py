"""Memory that torch's allocator takes on NCCL ranks, compared with forecasts and plans; and what one more layer adds.

`python -m benchmarks.cuda_build.layouts [LAYOUT ...]` runs on the simulated runtime without values. It trains a Llama in float32 with
AdamW in plain PyTorch: DDP, `fully_shard`, `parallelize_module` and `loss_parallel` are torch's, and no Headway code runs on the
ranks.
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
    """Build a small Llama with `layers` layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headway.forecasting.tracing.attention_masks import skip_causal_mask

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
    return skip_causal_mask(
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=16000, use_cache=False))
    )


def get_strategy(layout: str) -> tuple[str, list[Any]]:
    """Return Headway's strategy and kwargs handlers for a layout."""
    from headway import TensorParallelOptions

    return ("tp", [TensorParallelOptions(loss_parallel=True)]) if layout == "loss parallel" else (layout, [])


def parallelize(model: Any, layout: str) -> Any:
    """Split or replicate the model over the ranks with torch alone."""
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
        plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], plan)
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


def measure_rank(layout: str, layers: int) -> tuple[int, int]:
    """Train on this rank, and return the allocator's peaks: (allocated bytes, reserved bytes)."""
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import loss_parallel

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with torch.device("cuda"):
        model = parallelize(build(layers), layout)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # One parameter group per mesh: torch's foreach update needs tensors of one kind in a group.
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": parameters} for parameters in groups.values()])
    for _ in range(3):
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.long, device="cuda")
        with loss_parallel() if layout == "loss parallel" else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def predict(layout: str, ranks: int, layers: int) -> tuple[int, int, int]:
    """Return (the forecast's allocated bytes, its reserved bytes, the plan's peak bytes)."""
    import headway

    def make_batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, TOKENS, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    strategy, options = get_strategy(layout)
    handlers: dict[str, Any] = {"kwargs_handlers": options}
    forecast = headway.forecast(
        lambda: build(layers), make_batch, batch_size=BATCH, device="h100", largest=False, loop="loss_function",
        strategy=strategy, ranks=ranks, **handlers,
    )  # fmt: skip
    planned = headway.plan(
        lambda: build(layers), strategy, ranks, step=lambda model: model(**make_batch(BATCH)).loss, **handlers
    )
    return int(forecast.allocated), int(forecast.reserved), int(planned.peak)


def run_command(command: list[str], ranks: int) -> list[Any]:
    """Run a command on the simulated runtime, and return the result that each process prints."""
    environment = os.environ | {
        "SIMULATED_CUDA": "h100",
        "SIMULATED_CUDA_VALUES": "0",
        "SIMULATED_CUDA_DEVICES": str(ranks),
    }
    finished = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)
    results = [json.loads(line[7:]) for line in finished.stdout.splitlines() if line.startswith("result ")]
    return results or sys.exit(finished.stderr[-3000:])


def main() -> None:
    """Print the tables, or one result if the arguments start with "real" or "predicted"."""
    if sys.argv[1:2] in (["real"], ["predicted"]):
        layout, ranks, layers = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
        result = measure_rank(layout, layers) if sys.argv[1] == "real" else predict(layout, ranks, layers)
        # One write, because several ranks share a pipe.
        sys.stdout.write(f"result {json.dumps(result)}\n")
        sys.stdout.flush()
        return
    print("| layout | ranks | layers | allocated | forecast | error | reserved | forecast | error | plan's peak |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    slope_rows = []
    for layout, ranks in (case for case in LAYOUTS if not sys.argv[1:] or case[0] in sys.argv[1:]):
        rows = []
        for layers in LAYERS:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            module, arguments = ["-m", "benchmarks.cuda_build.layouts"], [layout, str(ranks), str(layers)]
            rank_results = run_command([*launch, *module, "real", *arguments], ranks)
            allocated, reserved = (max(result[index] for result in rank_results) for index in (0, 1))
            ((forecast_allocated, forecast_reserved, peak),) = run_command([*module, "predicted", *arguments], 1)
            pairs = ((allocated, forecast_allocated), (reserved, forecast_reserved))
            cells = " | ".join(f"{a:,} | {b:,} | {b / a - 1:+.2%}" for a, b in pairs)
            print(f"| {layout} | {ranks} | {layers} | {cells} | {peak:,} |", flush=True)
            rows.append((allocated, forecast_allocated, peak))
        per_layer = [(after - before) // (LAYERS[1] - LAYERS[0]) for before, after in zip(*rows)]
        slope_rows.append(f"| {layout} | {ranks} | " + " | ".join(f"{size:,}" for size in per_layer) + " |")
    print("\n| bytes of one more layer | ranks | real ranks | forecast | plan |\n|---|---|---|---|---|")
    print("\n".join(slope_rows))


if __name__ == "__main__":
    main()
