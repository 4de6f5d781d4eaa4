"""One loop in every layout, compared with plain PyTorch on one process: the largest differences of losses and gradient norms.

`python -m tests.sweep.parity` prints the table of docs/layouts.md, with one row per layout and one column per model or
setting. Each cell trains for six updates (three if compiled). Windows have ragged micro-batches that are weighted by
their tokens, gradients are clipped, and AdamW has two parameter groups.

`--models` prints thirty models in each layout instead (`model_table.py`), and `--write` writes that table to
docs/parity.md.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway import ActivationCheckpointing, TensorParallelOptions
from tests.distributed import cut_models, layouts
from tests.distributed.cut_models import GPT_PLAN
from tests.distributed.layouts import Curve, Task, train_by_hand, train_prepared
from tests.distributed.ranks import RankFailed, run_ranks
from tests.sweep import model_table
from tests.sweep.tables import format_columns

CLOSE, CLOSE_IN_BF16 = 5e-6, 3e-2
"""Largest allowed differences, relative to the largest loss or norm. Sums in another order cause differences of this size."""

UPDATES = 6


@dataclass(frozen=True)
class Row:
    """A layout on a given number of ranks.

    Attributes:
        layout: Value of `strategy`.
        num_ranks: Total number of ranks.
        tensor: Options that split matrices, or None.
        without: Columns that this layout refuses. Its documentation page gives the reasons.
    """

    layout: str
    num_ranks: int
    tensor: TensorParallelOptions | None = None
    without: frozenset[str] = frozenset()

    def __str__(self) -> str:
        sequences = " + sequence parallel" if self.tensor is not None and self.tensor.sequence_parallel else ""
        return f"{self.layout}{sequences}, {self.num_ranks} ranks"


SPLIT = TensorParallelOptions()
SEQUENCE_PARALLEL = TensorParallelOptions(sequence_parallel=True)
NOT_COMPILED = frozenset({"compiled"})
ROWS = (
    Row("ddp", 2),
    Row("fsdp", 2),
    Row("fsdp", 4),
    Row("hsdp=2", 4),
    Row("tp", 2, SPLIT),
    Row("tp", 2, SEQUENCE_PARALLEL),
    Row("fsdp+tp=2", 4, SPLIT),
    Row("cp", 2, None, NOT_COMPILED),
    Row("fsdp+cp=2", 4, None, NOT_COMPILED),
    Row("pp", 2, None, NOT_COMPILED),
    Row("ddp=2+pp=2", 4, None, NOT_COMPILED),
    Row("pp=2+fsdp", 4, None, NOT_COMPILED),
    Row("pp=2+tp", 4, SPLIT, NOT_COMPILED),
    Row("pp=2+cp", 4, None, NOT_COMPILED),
    Row("pp=2+fsdp=2+tp=2", 8, SPLIT, NOT_COMPILED),
)
ENGINES = tuple(Row(f"zero{stage}", 2, None, NOT_COMPILED) for stage in (1, 2, 3))
"""Layouts of DeepSpeed, if it is installed."""

COLUMNS: dict[str, Task] = {
    "GPT, tied": Task("gpt, whole", updates=UPDATES),
    "GPT, part frozen": Task("gpt, part frozen", updates=UPDATES),
    "Llama": Task("llama, cut", updates=UPDATES),
    "GPT-2": Task("gpt2", updates=UPDATES),
    "recomputed": Task("gpt, whole", updates=UPDATES, handlers=(ActivationCheckpointing(),)),
    "4 micro-batches": Task("gpt, whole", updates=UPDATES, steps=2, window=16),
    "compiled": Task("gpt, whole", updates=3, options={"dynamo_backend": "aot_eager"}),
    "bf16": Task("llama, cut", updates=UPDATES, precision="bf16"),
}


def _build_part_frozen_gpt() -> torch.nn.Module:
    model = cut_models.GPT(layouts.VOCABULARY, num_blocks=3)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)  # type: ignore[union-attr]
    return model


MODELS: dict[str, Any] = {
    "gpt, whole": lambda: cut_models.GPT(layouts.VOCABULARY),
    "gpt, part frozen": _build_part_frozen_gpt,
    "llama, cut": lambda: cut_models.llama(vocab_size=layouts.VOCABULARY, use_cache=False, num_key_value_heads=4),
}


def _make_task(name: str, row: Row) -> Task:
    task = COLUMNS[name]
    if row.tensor is None:
        return task
    tensor = replace(row.tensor, plan=GPT_PLAN) if task.model.startswith("gpt, ") else row.tensor
    return replace(task, handlers=(*task.handlers, tensor))


def _train_all(tasks: dict[str, Task], layout: str) -> dict[str, Curve | str]:
    layouts.MODELS.update(MODELS)
    found: dict[str, Curve | str] = {}
    for name, task in tasks.items():
        try:
            curve = train_prepared(task, layout)
            found[name] = {kind: curve[kind] for kind in ("losses", "norms")}
        except Exception as error:  # ranks may be out of step now, so the remaining tasks cannot run
            found[name] = f"{error!r}\n{traceback.format_exc(limit=-4)}"
            break
    return found


def measure(row: Row, columns: Sequence[str], timeout: float = 300) -> dict[str, float | str]:
    """Return, for each column, the largest relative difference over all ranks, or a description of the failure."""
    layouts.MODELS.update(MODELS)
    tasks = {name: _make_task(name, row) for name in columns if name not in row.without}
    # DeepSpeed keeps its first process group permanently, so each of its runs needs new processes.
    groups = [{name: task} for name, task in tasks.items()] if row in ENGINES else [tasks]
    found: dict[str, float | str] = {}
    for group in groups:
        try:
            by_rank = run_ranks(_train_all, row.num_ranks, group, row.layout, timeout=timeout)
        except RankFailed as error:
            found |= dict.fromkeys(group, str(error))
            continue
        for name in group:
            found[name] = _compare(COLUMNS[name], [curves.get(name, "not reached") for curves in by_rank])
    return found


def _compare(task: Task, curves: Sequence[Curve | str]) -> float | str:
    expected, largest = train_by_hand(task), 0.0
    for curve in curves:
        if isinstance(curve, str):
            return curve
        for kind in ("losses", "norms"):
            difference = max(abs(a - b) for a, b in zip(expected[kind], curve[kind], strict=True))
            largest = max(largest, difference / max(map(abs, expected[kind])))
    return largest


def is_good(name: str, found: float | str) -> bool:
    """Whether the difference is within the tolerance of the column."""
    return not isinstance(found, str) and found < (CLOSE_IN_BF16 if name == "bf16" else CLOSE)


def main() -> int:
    """Print the table, and return 1 if any cell is outside its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zero", action="store_true", help="include DeepSpeed's stages")
    parser.add_argument("--only", nargs="*", help="layouts such as fsdp and tp")
    parser.add_argument("--models", nargs="*", help="compare thirty models, or only these, instead of the settings")
    parser.add_argument("--at_once", type=int, default=2, help="number of model cells to run in parallel")
    parser.add_argument("--write", action="store_true", help="with --models: write docs/parity.md")
    args = parser.parse_args()
    if args.models is not None:
        return print_models(args)
    rows = [row for row in (*ROWS, *(ENGINES if args.zero else ())) if not args.only or row.layout in args.only]
    began, bad = time.monotonic(), []
    table = [["largest difference", *COLUMNS]]
    for row in rows:
        found = measure(row, list(COLUMNS))
        bad += [f"{row}, {name}: {cell}" for name, cell in found.items() if not is_good(name, cell)]
        cells = [found.get(name, "-") for name in COLUMNS]
        table.append(
            [
                str(row),
                *(cell if cell == "-" else "FAILS" if isinstance(cell, str) else f"{cell:.0e}" for cell in cells),
            ]
        )
        print(f"{row}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{format_columns(table)}\n{len(bad)} not as promised; {time.monotonic() - began:.0f} s")
    for each in bad:
        print(each)
    return bool(bad)


def print_models(args: argparse.Namespace) -> int:
    """Print the table of models, and write it to docs/parity.md if requested.

    Returns 1 if a cell is neither equal nor refused.
    """
    torch.set_num_threads(1)
    found = model_table.measure_all(args.models or (), args.only or (), args.at_once)
    print(f"\n{format_columns(model_table.format_rows(found))}")
    if args.write:
        model_table.write_page(found)
    bad = [f"{name}, {layout}: {cell}" for (name, layout), cell in found.items() if not cell.is_good]
    print(*bad, f"{len(bad)} of {len(found)} neither equal nor refused", sep="\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
