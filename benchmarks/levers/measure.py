"""Memory that each lever saves of a training step's peak, and what it costs in time: a 27-million-parameter Llama on the CPU.

Every variant runs in separate processes. Memory is the highest sum of all live tensors, counted from the allocator's events, so
it includes neither the program nor freed heap pages. Time is CPU time, on one thread, of the second update of the same global
batch of 8 x 256 tokens.

Run it with `python -m benchmarks.levers.measure`.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.run import replace_block
from benchmarks.timing import FOLDER, describe_machine, get_num_repeats, save_result

BATCH, LENGTH, VOCABULARY = 8, 256, 8000
TOKENS = f"an update sees {BATCH} sequences of {LENGTH} tokens"


@dataclass(frozen=True)
class Variant:
    """How a row's step differs from the base (fp32, AdamW, the whole batch at once, all activations kept)."""

    micro_batch: int = BATCH
    precision: str = "no"
    optimizer: str = "adamw"
    checkpointing: tuple[tuple[str, Any], ...] | None = None


VARIANTS = {
    "base: fp32, AdamW, batch 8": Variant(),
    "base again (A/A)": Variant(),
    "micro-batch 4, accumulation 2": Variant(micro_batch=4),
    "micro-batch 1, accumulation 8": Variant(micro_batch=1),
    "bf16 autocast": Variant(precision="bf16"),
    "checkpoint_activations": Variant(checkpointing=()),
    "checkpoint_activations, every=2": Variant(checkpointing=(("every", 2),)),
    "checkpoint_activations, keep_matmul": Variant(checkpointing=(("policy", "keep_matmul"),)),
    "checkpoint_activations, keep_attention": Variant(checkpointing=(("policy", "keep_attention"),)),
    "AdamW, foreach=True": Variant(optimizer="foreach"),
    "AdamW, fused=True": Variant(optimizer="fused"),
    "Adafactor": Variant(optimizer="adafactor"),
    "SGD with momentum": Variant(optimizer="momentum"),
    "SGD": Variant(optimizer="sgd"),
    "micro-batch 1, checkpointing, Adafactor": Variant(micro_batch=1, optimizer="adafactor", checkpointing=()),
}


def build_update(variant: Variant) -> Any:
    """Return a function that makes one update of a variant."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from headway import Accelerator

    accelerator = Accelerator(
        cpu=True, mixed_precision=variant.precision, gradient_accumulation_steps=BATCH // variant.micro_batch
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.train()
    optimizers = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), foreach=False),
        "foreach": lambda: torch.optim.AdamW(model.parameters(), foreach=True),
        "fused": lambda: torch.optim.AdamW(model.parameters(), fused=True),
        "adafactor": lambda: torch.optim.Adafactor(model.parameters(), foreach=False),
        "momentum": lambda: torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False),
        "sgd": lambda: torch.optim.SGD(model.parameters(), foreach=False),
    }
    model, optimizer = accelerator.prepare(model, optimizers[variant.optimizer]())
    if variant.checkpointing is not None:
        accelerator.checkpoint_activations(model, **dict(variant.checkpointing))
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))

    def update() -> None:
        for piece in tokens.split(variant.micro_batch):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=piece, labels=piece).loss, weight=len(piece))
                optimizer.step()
                optimizer.zero_grad()

    return update


def measure_variant(name: str) -> None:
    """Measure one variant in this process, and print the result as JSON."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        update = build_update(VARIANTS[name])
        update()
        cpu, wall = time.process_time(), time.perf_counter()
        update()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    in_use = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    sys.stdout.write(json.dumps({"peak": peak, "cpu": cpu, "wall": wall}) + "\n")


def make_table(result: dict[str, Any]) -> str:
    """Return the levers as a Markdown table for the documentation."""
    base = next(iter(result["rows"].values()))
    lines = [
        "| setting | peak of all tensors | memory saved | CPU time per update | time added |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        saved, added = 1 - row["peak"] / base["peak"], row["cpu"] / base["cpu"] - 1
        lines.append(f"| {name} | {row['peak'] / 2**20:.0f} MiB | {saved:.0%} | {row['cpu']:.2f} s | {added:+.0%} |")
    machine = result["machine"]
    lines += [
        "",
        f"Measured on a CPU: {machine['cores']} {machine['cpu']} cores, torch {machine['torch']}, {result['date']}, "
        f"load average {machine['load_average']}; {result['how']}; {result['tokens']}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure all variants in turn, starting with a different one in each round, and update the documentation's table."""
    repeats, names = get_num_repeats(3), list(VARIANTS)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for repeat in range(repeats):
        shift = repeat * 5 % len(names)
        for name in names[shift:] + names[:shift]:
            command = [sys.executable, "-m", "benchmarks.levers.measure", "--one", name]
            finished = subprocess.run(command, check=True, capture_output=True, text=True, cwd=FOLDER.parent)
            results[name].append(json.loads(finished.stdout.splitlines()[-1]))
            sys.stderr.write(f"{name}: {results[name][-1]}\n")
    rows = {
        name: {key: statistics.median(run[key] for run in runs) for key in ("peak", "cpu", "wall")}
        for name, runs in results.items()
    }  # fmt: skip
    note = "peak: bytes; cpu and wall: seconds per update; medians over processes"
    save_result("levers", "s", rows, note)
    path = FOLDER / "levers" / "result.json"
    result = {
        **json.loads(path.read_text()),
        "how": f"medians of {repeats} processes each",
        "tokens": TOKENS,
        "machine": describe_machine(),
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    replace_block(FOLDER.parent / "docs" / "activation_checkpointing.md", "levers", make_table(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure_variant(sys.argv[2])
    else:
        main()
