"""Writer of run logs with chosen times, for tests of the report."""

import json
import math
import random
from pathlib import Path

BEGAN = 1_790_000_000.0


class Log:
    """Writer of a run log whose clock advances with each line."""

    def __init__(self, folder: Path, pace: float = 0.25) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        self.time = BEGAN
        self.pace = pace
        self.lines: list[str] = []

    def line(self, kind: str, **content) -> None:
        self.lines.append(json.dumps({"kind": kind, "time": self.time, **content}))
        self.time += self.pace

    def run(self, project="digits", config=None, attempt=1, **more) -> None:
        about = {"world_size": 2, "device": "cuda", "versions": {"headway": "0.1.0", "torch": "2.13.0"}}
        self.line("run", format=1, project=project, config=config or {}, attempt=attempt, **{**about, **more})

    def values(self, step, **values) -> None:
        told = {
            name: value if isinstance(value, str) or math.isfinite(value) else str(value)
            for name, value in values.items()
        }
        self.line("values", step=step, values=told)

    def event(self, event, step=None, **details) -> None:
        self.line("event", step=step, event=event, details=details)

    def write(self, tail="") -> Path:
        self.path.write_text("\n".join(self.lines) + "\n" + tail)
        return self.path.parent


def write_realistic_log(folder: Path, seed=0, steps=2000, lr=3e-4, has_trouble=True, is_ended=True, every=1) -> Path:
    """Write the log of a realistic run and return its folder.

    The log has noise, memory phases, evaluations, checkpoints, an out-of-memory error, and a restart.
    """
    random.seed(seed)
    log = Log(folder)
    config = {"model": "gpt-small", "optimizer": {"name": "adamw", "lr": lr, "betas": [0.9, 0.95]}, "batch_size": 64,
              "mixed_precision": "bf16", "gradient_accumulation_steps": 4, "seed": seed}  # fmt: skip
    log.run("language-model", config)
    speed = 500 * (1 + 0.3 * seed)
    piece = 1.0
    for step in range(1, steps + 1, every):
        share = step / steps
        loss = 2.1 + 6.5 * math.exp(-9 * share) + lr * 400 * math.exp(-2 * share) + random.gauss(0, 0.09)
        warm = min(1.0, share / 0.05)
        values = {"loss": loss, "learning_rate": lr * warm * 0.5 * (1 + math.cos(math.pi * share)),
                  "grad_norm": abs(random.lognormvariate(-0.2 - share, 0.25)), "epoch": share * 3}  # fmt: skip
        if has_trouble and abs(share - 0.31) < 1 / steps:
            values["grad_norm"] = 180.0
        if has_trouble and 0.62 < share < 0.625:
            values["loss"] = math.nan
        pace = speed * (0.8 if piece < 1 else 1)
        values |= {"samples_per_second": pace * random.gauss(1, 0.03), "tokens_per_second": 1024 * pace * random.gauss(1, 0.03),
                   "mfu": 0.38 * random.gauss(1, 0.02), "data_wait": max(0, random.gauss(0.04, 0.015))}  # fmt: skip
        base = 21e9 * piece
        values |= {"memory": 14e9, "memory_peak": 1.35 * base, "memory/forward": base * random.gauss(1, 0.01),
                   "memory/backward": 1.35 * base, "memory/optimizer": 17e9}  # fmt: skip
        log.values(step, **values)
        if step % max(1, steps // 10) < every:
            better = 2.2 + 6 * math.exp(-8 * share) + lr * 300 * math.exp(-2 * share)
            log.values(step, eval_loss=better, eval_accuracy=0.62 * (1 - math.exp(-5 * share)) - lr * 20)
            log.event("checkpoint", step, path=f"checkpoints/checkpoint_{step}", seconds=1.4)
        if has_trouble and abs(share - 0.2) < every / steps / 1.5:
            log.event("out_of_memory", step, micro_batch=64, replayed_in=32, free_bytes=310_000_000)
            piece = 0.62
        if has_trouble and abs(share - 0.72) < every / steps / 1.5:
            log.event("preempted", step, signal="SIGTERM")
            log.time += 40
            log.run("language-model", config, attempt=2)
            log.event("resumed", step, checkpoint=f"checkpoint_{step}")
    if is_ended:
        log.line(
            "end",
            summary={
                "train_runtime": 3721.5,
                "train_loss": 2.17,
                "train_samples_per_second": 512.3,
                "peak_memory_bytes": 28_350_000_000,
            },
        )
    return log.write("" if is_ended else '{"kind":"values","time":17900')
