"""Time and memory that a plan needs, by number of ranks: Llama 8B and 70B, each case in a separate process.

Run it with `python -m benchmarks.plan.measure`.
"""

import json
import os
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import date
from pathlib import Path

from benchmarks.timing import describe_machine

FOLDER = Path(__file__).parent
LLAMAS = {
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    },
}  # fmt: skip
CASES = [
    ("8B", "fsdp", 64),
    ("8B", "fsdp", 1024),
    ("8B", "fsdp", 16384),
    ("8B", "hsdp=8", 16384),
    ("8B", "fsdp+tp=8", 16384),
    ("70B", "fsdp", 16384),
    ("70B", "fsdp+tp=8", 16384),
    ("8B", "fsdp, split as torch does", 1024),
]


def measure_case(size: str, strategy: str, num_ranks: int) -> None:
    """Plan one layout, and print the time and memory that it took as JSON."""
    start = time.perf_counter()
    from transformers import LlamaConfig

    from headway.planning.dry_run import fake_group
    from headway.planning.plan import plan
    from headway.planning.sources import make_config_source

    if "," in strategy:  # the last case plans without Headway's shared chunks, as torch does
        fake_group.SharedChunks = nullcontext  # type: ignore[misc, assignment]
    source = make_config_source(LlamaConfig(**LLAMAS[size], architectures=["LlamaForCausalLM"]), size)
    planned = plan(
        source.make, strategy.partition(",")[0], num_ranks, step=source.step, precision="bf16", tokens=source.tokens
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    measured = {
        "model": size,
        "strategy": strategy,
        "ranks": num_ranks,
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "wall_s": round(time.perf_counter() - start, 1),
        "peak_mib": used.ru_maxrss // 1024,
        "bytes_a_rank": planned.rank0.num_bytes,
        "empty_ranks": planned.shares.num_empty,
    }
    print(json.dumps(measured))


def main() -> None:
    """Run each case in a separate process, and write result.json and result.md after every one."""
    rows = []
    for case in CASES:
        command = [sys.executable, "-W", "ignore", __file__, *map(str, case)]
        finished = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        rows.append(json.loads(finished.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
        result = {"date": date.today().isoformat(), "machine": describe_machine(), "rows": rows}
        (FOLDER / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        (FOLDER / "result.md").write_text(make_table(rows, result["date"]))


def make_table(rows: list[dict[str, object]], day: str) -> str:
    """Return the rows as a Markdown table."""
    header = "| model | strategy | ranks | CPU s | wall s | peak memory, MiB | empty ranks |\n|---|---|---|---|---|---|---|\n"
    lines = [
        f"| {row['model']} | {row['strategy']} | {row['ranks']:,} | {row['cpu_s']} | {row['wall_s']} | {row['peak_mib']} | "
        f"{row['empty_ranks']:,} |\n"
        for row in rows
    ]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{header}{''.join(lines)}\n{day}, `python -m benchmarks.plan.measure`; load average at the end {load}.\n"


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure_case(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
