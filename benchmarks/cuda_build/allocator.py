"""What torch's own allocator takes for a training step, beside what headway.forecast says.

`python -m benchmarks.cuda_build.allocator`, on the simulated runtime (`make cuda` sets it up), without values: nothing is
computed, so models of full size take seconds. Each case runs in a process of its own, with the device it is for.
"""

import json
import os
import subprocess
import sys
from typing import Any

import torch

CASES = [  # model, batch, tokens, precision, recomputed, device
    ("gpt2", 8, 1024, "no", False, "a100-80gb"),
    ("gpt2", 8, 1024, "bf16", False, "a100-80gb"),
    ("gpt2", 8, 1024, "bf16", True, "a100-80gb"),
    ("gpt2", 8, 1024, "no", False, "h100"),
    ("gpt2", 8, 1024, "bf16", False, "h100"),
    ("gpt2", 4, 1024, "no", False, "t4"),
    ("gpt2", 2, 1024, "bf16", False, "t4"),
    ("bert", 16, 512, "no", False, "a100-80gb"),
    ("llama", 2, 1024, "bf16", False, "a100-80gb"),
    ("llama", 2, 1024, "bf16", True, "h100"),
]


def build(kind: str) -> Any:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config())
    if kind == "bert":
        return BertForMaskedLM(BertConfig())
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000}
    return LlamaForCausalLM(LlamaConfig(**wide, num_attention_heads=32, num_key_value_heads=8))


def real(kind: str, batch: int, tokens: int, precision: str, recompute: bool) -> tuple[int, int]:
    with torch.device("cuda"):
        model = build(kind)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        ids = torch.zeros(batch, tokens, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def forecast(kind: str, batch: int, tokens: int, precision: str, recompute: bool, device: str) -> tuple[int, int]:
    import headway

    def batch_of(size: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, tokens, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    found = headway.forecast(
        model_fn=lambda: build(kind), batch_fn=batch_of, optimizer="adamw", batch_size=batch, device=device,
        precision=precision, recompute=recompute, largest=False,
    )  # fmt: skip
    return int(found.allocated), int(found.reserved)


def main() -> None:
    if len(sys.argv) > 1:
        what, case = sys.argv[1], json.loads(sys.argv[2])
        print(json.dumps(real(*case[:-1]) if what == "real" else forecast(*case)))
        return
    print(
        "| model | batch x tokens | precision | recomputed | device | allocated | forecast | | reserved | forecast | |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        told = []
        for what in ("real", "forecast"):
            environment = {**os.environ, "SIMULATED_CUDA": case[-1], "SIMULATED_CUDA_VALUES": "0"}
            ran = subprocess.run(
                [sys.executable, __file__, what, json.dumps(case)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
            )
            told.append(
                json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else sys.exit(ran.stderr[-2000:])
            )
        cells = [f"{a:,} | {b:,} | {b / a - 1:+.2%}" for a, b in zip(*told)]
        model, batch, tokens, precision, recompute, device = case
        named = [model, f"{batch} x {tokens}", precision, "yes" if recompute else "no", device]
        print("|", " | ".join([*named, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
