"""Forecasts beside real runs: what tensors, the allocator and the process took, and the recorded requests replayed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import headway
from benchmarks.forecast.snapshot import compare
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.training import FULL, SMALL, SMALLEST
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.training.forecast_types import Forecast
from headway.extras.activation_checkpointing import checkpoint_activations
from headway.forecasting.device import calibration
from headway.forecasting.device.devices import find_device, name_this_device
from headway.forecasting.tracing.step import StepRecipe
from headway.planning.optimizers import resolve_optimizer

WITHIN = 0.05
LARGEST = 0
"""In place of a batch: the largest that fits, by search."""
MAX_EVENTS = 1_000_000


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: of `MODELS`.
        batch: samples; LARGEST: as many as fit into the budget.
        precision: "no" or "bf16".
        optimizer: a name that a forecast knows.
        recompute: activations are computed again in backward.
    """

    model: str
    batch: int
    precision: str
    optimizer: str
    recompute: bool = False

    def __str__(self) -> str:
        batch = "largest batch" if self.batch == LARGEST else f"batch {self.batch}"
        return f"{self.model}, {batch}, {self.precision}, {self.optimizer}{', recomputed' * self.recompute}"


CASES = (
    Case("gpt2", 16, "bf16", "adamw"),
    Case("gpt2", 8, "no", "adamw"),
    Case("gpt2", 32, "bf16", "adamw", recompute=True),
    Case("bert", 1, "no", "adamw"),
    Case("gpt2", LARGEST, "bf16", "adamw"),
    Case("bert", 8, "no", "adamw"),
    Case("bert", 8, "no", "adamw", recompute=True),
    Case("bert", 16, "bf16", "momentum"),
    Case("llama", 8, "bf16", "adamw", recompute=True),
    Case("llama", 4, "bf16", "adafactor"),
    Case("mlp", LARGEST, "no", "sgd", recompute=True),
    Case("mlp", 64, "no", "adam"),
)
"""At full size every second one, as many as the step's time is enough for."""


def run(bench: Bench) -> None:
    """Each case: its forecast, and two updates of a plain loop."""
    device, budget = "cpu", 96 << 20
    if not bench.is_cpu:
        device, budget = name_this_device(), bench.choose(24 << 30, 2 << 30, 2 << 30)
        overhead(bench, device)
    for case in CASES[:: bench.choose(2, 1, 4)]:
        with bench.attempt(str(case)):
            one(bench, case, device, budget)


def overhead(bench: Bench, device: str) -> None:
    """What a process takes beside tensors, measured by `headway estimate --calibrate`'s own code; it is not kept."""
    if bench.is_simulated:
        bench.row(Row("context and libraries", note="left out: a simulated device does not see other processes"))
        return
    with bench.attempt("beside tensors"):
        record, assumed = calibration.measure_overhead(), find_device(device)
        least, likely, most = (size / 2**20 for size in assumed.overhead)
        bench.row(
            Row(
                "context and libraries", record.overhead / 2**20, "MiB", likely, "in the forecast's table",
                f"{least:.0f} to {most:.0f} MiB", least <= record.overhead / 2**20 <= most,
                f"{record.kept / 2**20:.0f} MiB of workspaces stay; {assumed.source}",
            )
        )  # fmt: skip


def one(bench: Bench, case: Case, device: str, budget: int) -> None:
    """The rows of one case."""
    make, batch_of, loss = models(bench)[case.model]
    size = case.batch if case.batch == LARGEST else max(1, case.batch // bench.choose(1, 2, 8))
    said = partial(
        headway.forecast, make, batch_of, loss=loss, device=device, budget=budget, precision=case.precision,
        optimizer=case.optimizer, recompute=case.recompute, loop="loss_function",
    )  # fmt: skip
    if size == LARGEST:
        size = said().largest_batch or 1
    forecast = said(batch_size=size, largest=False)
    allocated, others = measured(bench, case, make, batch_of, loss, size)
    row(bench, f"{case}: tensors", allocated, forecast.allocated, note=f"batch {size}; the peak in {forecast.peak}")
    if others is not None:
        beyond(bench, str(case), forecast, others)
    if case.batch == LARGEST:
        taken = allocated if others is None else others.in_use
        bench.row(
            Row(
                f"{case}: in use", taken / 2**20, "MiB", budget / 2**20, "the budget", "within the budget", taken <= budget,
                f"batch {size}",
            )
        )  # fmt: skip


@dataclass(frozen=True)
class OfTheDevice:
    """What a run on a card showed beside its tensors.

    Attributes:
        reserved: bytes that the allocator took.
        in_use: bytes that all processes together held on the device at the end.
        snapshot: the allocator's own record.
    """

    reserved: int
    in_use: int
    snapshot: Any


def beyond(bench: Bench, name: str, forecast: Forecast, found: OfTheDevice) -> None:
    """What only a card shows."""
    row(bench, f"{name}: allocator", found.reserved, forecast.reserved)
    in_use, least, most = (size / 2**20 for size in (found.in_use, forecast.least, forecast.most))
    if not bench.is_simulated:  # whose context is as large as it is told
        bench.row(
            Row(
                f"{name}: in use", in_use, "MiB", forecast.total / 2**20, "forecast", f"{least:,.0f} to {most:,.0f} MiB",
                least <= in_use <= most, "of all processes, as the driver shows it",
            )
        )  # fmt: skip
    replayed = compare(found.snapshot)
    row(bench, f"{name}: recorded requests, replayed", replayed.reserved, replayed.model_reserved,
        f"{replayed.num_events} events; {replayed.unknown} of memory from before the record")  # fmt: skip


def row(bench: Bench, what: str, taken: int, forecast: int, note: str = "") -> None:
    """Bytes of a run beside a forecast's."""
    error = forecast / taken - 1
    bench.row(
        Row(
            what, taken / 2**20, "MiB", forecast / 2**20, "forecast", f"within {WITHIN:.0%}", abs(error) <= WITHIN,
            f"{error:+.2%}{'; ' * bool(note)}{note}",
        )
    )  # fmt: skip


# ---------------------------------------------------------------- real runs


def measured(
    bench: Bench, case: Case, make: Callable[[], nn.Module], batch_of: Callable[[int], Any], loss: Any, size: int
) -> tuple[int, OfTheDevice | None]:
    """(the most bytes that tensors held in two updates, what a card showed besides)."""
    bench.release()
    torch.manual_seed(0)
    if bench.is_cpu:
        from benchmarks.forecast.truth import peak

        return peak(
            prepared(bench, case, make),
            StepRecipe(resolve_optimizer(case.optimizer), loss, case.precision, loop="loss_function"),
            partial(batch_of, size),
        ), None
    held = torch.cuda.memory_reserved()
    if held:
        raise RuntimeError(f"{held} bytes are reserved before the run, so a record of it would not be whole")
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python", context=None)
    try:
        train(bench, case, prepared(bench, case, make), batch_of, loss, size)
        bench.synchronize()
        taken = torch.cuda.max_memory_allocated()
        found = OfTheDevice(torch.cuda.max_memory_reserved(), _occupied(bench.device), torch.cuda.memory._snapshot())
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return taken, found


def _occupied(device: torch.device) -> int:
    """What all processes hold, of the memory that the driver does not keep for itself."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def prepared(bench: Bench, case: Case, make: Callable[[], nn.Module]) -> nn.Module:
    """The model on the device, as it trains."""
    model = make().to(bench.device).train()
    if case.recompute:
        checkpoint_activations(model, ActivationCheckpointing(), bench.device)
    return model


def train(bench: Bench, case: Case, model: nn.Module, batch_of: Callable[[int], Any], loss: Any, size: int) -> None:
    """Two updates, as one writes them by hand; no name keeps the outputs."""
    make = resolve_optimizer(case.optimizer)
    assert make is not None
    optimizer = make(model.parameters())
    for _ in range(2):
        with bench.device:
            batch = batch_of(size)
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=case.precision == "bf16"):
            found = loss(model(batch[0]), batch[1]) if loss is not None else model(**batch).loss
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        del found


# ---------------------------------------------------------------- models


class Layer(nn.Module):
    """Widens, and narrows again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Its inputs, and what it adds."""
        return inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))


def models(bench: Bench) -> dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Any]]:
    """By name: what makes it, its batches, and its loss where it does not return one."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = bench.choose(FULL, SMALL, SMALLEST)
    length, width, vocabulary = sizes["n_positions"], sizes["n_embd"], sizes["vocab_size"]
    depth, heads = sizes["n_layer"], sizes["n_head"]

    def tokens(size: int, num: int = length) -> dict[str, torch.Tensor]:
        found = torch.zeros(size, num, dtype=torch.long)
        return {"input_ids": found, "labels": found.clone()}

    bert = BertConfig(
        hidden_size=bench.choose(1024, width, width), num_hidden_layers=bench.choose(24, depth, depth),
        num_attention_heads=bench.choose(16, heads, heads), intermediate_size=bench.choose(4096, 4 * width, 4 * width),
        vocab_size=bench.choose(30522, vocabulary, vocabulary),
    )  # fmt: skip
    llama = LlamaConfig(
        hidden_size=2 * width, intermediate_size=5 * width, num_hidden_layers=depth, num_attention_heads=heads,
        num_key_value_heads=heads // 2, vocab_size=vocabulary, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    wide = bench.choose(2048, width, width)
    return {
        "gpt2": (
            lambda: GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)),
            tokens,
            None,
        ),
        "bert": (lambda: BertForMaskedLM(bert), lambda size: tokens(size, min(512, length)), None),
        "llama": (lambda: LlamaForCausalLM(llama), tokens, None),
        "mlp": (
            lambda: nn.Sequential(*[Layer(wide) for _ in range(8)]),
            lambda size: (torch.zeros(size, length, wide), torch.zeros(size, length, wide)),
            nn.functional.mse_loss,
        ),
    }
