"""Compare the optimizers of `pytorch_optimizer` in each layout with plain PyTorch. Produces the rows of a generated page."""

import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from headway import Accelerator, TensorParallelOptions
from tests.distributed.layouts import GPT, build_seeded, make_tokens, mean_square
from tests.distributed.ranks import RankFailed, run_ranks

UPDATES = 20
LAYOUTS = {"ddp": 2, "fsdp": 2, "fsdp+tp=2": 4}
"""Number of ranks of each layout."""
CHANGED = "changed"
CLOSURES = ("alig", "bsam", "lbfgs")
GRAPHS = ("adahessian", "sophiah")
MUONS = ("adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon")
"""Optimizers that need `use_muon` in each group."""
OPTIONS: dict[str, dict[str, Any]] = {"bsam": {"num_data": 100}, "ranger21": {"num_iterations": UPDATES}}
EQUAL, CLOSE = 1e-5, 5e-2
ROUNDING = 20
"""Allowed difference, as a multiple of the difference that changing the weights' last bits makes on one process."""
_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def list_names() -> list[str]:
    import pytorch_optimizer

    return sorted(pytorch_optimizer.get_supported_optimizers())


def make_optimizer(name: str, model: torch.nn.Module) -> Any:
    import pytorch_optimizer

    kind: Any = pytorch_optimizer.load_optimizer(name)
    if name in ("adalomo", "adammini", "lomo"):
        # With its default learning rate of 1.0, Adam-mini diverges on this model, which amplifies rounding without
        # limit.
        return kind(model, **({"lr": 1e-3} if name == "adammini" else {}))
    if name == "magma":
        return kind(torch.optim.AdamW(model.parameters(), lr=1e-3))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    if name in MUONS:
        rest = [p for p in model.parameters() if p.ndim < 2]
        return kind([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])
    if name == "spectralsphere":
        return kind(matrices)
    return kind(list(model.parameters()), **OPTIONS.get(name, {}))


def _call_if_present(optimizer: Any, name: str) -> None:
    if hasattr(optimizer, name):
        getattr(optimizer, name)()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Compute attention in a form that can be differentiated twice. torch's CPU attention cannot."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def _train(
    name: str, model: torch.nn.Module, optimizer: Any, backward: Callable[..., Any], enter: Callable[[], Any]
) -> list[float]:
    losses: list[float] = []
    if name in GRAPHS:
        torch.nn.functional.scaled_dot_product_attention = _attend  # safe, because this process runs only these rows
    _call_if_present(optimizer, "train")
    for number in range(UPDATES):

        @torch.enable_grad()  # type: ignore[untyped-decorator]
        def closure(ids: torch.Tensor = make_tokens(number)) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_square(model, ids)
            backward(loss, **({"create_graph": True} if name in GRAPHS else {}))
            return loss

        with enter():
            losses.append(closure().item())
            optimizer.step(closure) if name in CLOSURES else optimizer.step()
            optimizer.zero_grad()
    _call_if_present(optimizer, "eval")
    losses.append(mean_square(model, make_tokens()).item())
    return losses


def build_model() -> GPT:
    return GPT(num_blocks=1)


def _change_last_bits(model: torch.nn.Module) -> None:
    """Multiply each weight by 1 or by 1 + 1.2e-7, which changes it by at most one unit in the last place."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1.2e-7 * torch.randint(0, 2, parameter.shape, generator=generator))


def run_rows(names: Sequence[str], layout: str | None, log: str) -> None:
    """Append each optimizer's losses, or the text of its error, as a line of JSON to a file.

    Without a layout, and for "changed", the loops are plain PyTorch. "changed" starts from weights whose last bits differ.
    """
    warnings.simplefilter("ignore")
    for name in names:
        model = build_seeded(0, build_model)
        if layout == CHANGED:
            _change_last_bits(model)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        found: Any
        try:
            if layout in (None, CHANGED):
                make = make_optimizer(name, model)
                losses = _train(name, model, make, lambda loss, **kw: loss.backward(**kw), nullcontext)
                found = losses, not torch.equal(before, torch.get_rng_state())
            else:
                found = _train_prepared(name, model, str(layout))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if os.environ.get("RANK", "0") == "0":
            with Path(log).open("a") as file:
                file.write(json.dumps([name, found]) + "\n")
        if isinstance(found, str) and layout not in (None, CHANGED):
            return  # ranks may be out of step, so the next rows need new processes


def _train_prepared(name: str, model: torch.nn.Module, layout: str) -> list[float]:
    handlers = [TensorParallelOptions(plan=_PLAN, keep=("blocks.*.heads",))] if "tp" in layout else []
    accelerator = Accelerator(cpu=True, strategy=layout, kwargs_handlers=handlers)
    try:
        ready, optimizer = accelerator.prepare(model, make_optimizer(name, model))
        return _train(name, ready, optimizer, accelerator.backward, lambda: accelerator.accumulate(ready))
    finally:
        accelerator.free_memory()


def run_layout(names: Sequence[str], layout: str | None, log: Path) -> dict[str, Any]:
    """Run the rows on real ranks, and continue with new ranks after a row that breaks the process group.

    Args:
        names: Optimizers to run, except those already in the file.
        layout: Strategy of the Accelerator, or None or "changed" for plain PyTorch (see `run_rows`).
        log: File that receives one line per row.
    """
    log.touch()
    while rest := [name for name in names if name not in read_rows(log)]:
        done = len(read_rows(log))
        try:
            run_ranks(run_rows, LAYOUTS.get(layout or "", 1), rest, layout, str(log), timeout=60 + 6 * len(rest))
        except RankFailed as error:
            missing = [name for name in rest if name not in read_rows(log)]
            if missing and len(read_rows(log)) >= done:
                with log.open("a") as file:
                    file.write(json.dumps([missing[0], f"RankFailed: {error}"]) + "\n")
    return read_rows(log)


def read_rows(log: Path) -> dict[str, Any]:
    return dict(json.loads(line) for line in log.read_text().splitlines())


def measure_difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """Return the largest relative difference between two series of losses. Updates with a non-finite expected loss are skipped."""
    return max(abs(a - b) / max(abs(a), 1e-12) if math.isfinite(a) else 0.0 for a, b in zip(expected, found))


def judge(expected: Any, changed: Any, found: Any) -> str:
    """Return the table's cell for an optimizer in a layout.

    Args:
        expected: Losses of plain PyTorch and whether the optimizer drew random numbers, or the text of an error.
        changed: The same for weights whose last bits differ. Newton-Schulz in bf16, signs and eigenvectors amplify rounding by
            amounts that differ between machines. The tolerance is therefore derived from this run.
        found: Losses in the layout, or the text of an error.
    """
    if isinstance(expected, str):
        return "needs a loop of its own"
    losses, is_random = expected
    if isinstance(found, str):
        return "error"
    worst = measure_difference(losses, found)
    if worst <= EQUAL:
        return "equal"
    if is_random:
        return "draws random numbers"
    if not isinstance(changed, str) and worst <= ROUNDING * measure_difference(losses, changed[0]):
        return "equal up to rounding"
    if worst <= CLOSE:
        return f"within {10 ** math.ceil(math.log10(worst)):.0e}".replace("e-0", "e-")
    return "different"


def is_as_good(found: str, page: str) -> bool:
    """Whether a cell measured on this machine agrees with the page's cell, which another machine may have measured."""
    agreeing = {"equal", "equal up to rounding", "draws random numbers"}
    if page.startswith("within"):
        return found in agreeing or (found.startswith("within") and float(found[7:]) <= 10 * float(page[7:]))
    return found in agreeing if page in agreeing else found == page
