"""Memory forecasts compared with real runs: of tensors, the allocator and the process, and the allocator's recorded requests.

`python -m benchmarks.gpu forecast` runs only this step; with `--device cpu`, at a small size.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import headway
from benchmarks.forecast.snapshot import compare_with_model
from benchmarks.forecast.workload import Workload
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.training import FULL, SMALL, SMALLEST
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.training.forecast_types import Forecast
from headway.extras.activation_checkpointing import checkpoint_activations
from headway.forecasting.device import calibration
from headway.forecasting.device.devices import find_device, name_this_device
from headway.forecasting.tracing.recipe import StepRecipe
from headway.planning.optimizers import resolve_optimizer

TOLERANCE = 0.05
"""Largest error of a forecast that meets the target."""
LARGEST = 0
"""Batch size that stands for the largest batch that fits, found by a search."""
MAX_EVENTS = 1_000_000


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: Name of a workload of `list_workloads`.
        batch: Batch size, or LARGEST for the largest batch that fits into the budget.
        precision: "no" or "bf16".
        optimizer: Name of an optimizer, as `headway.forecast` takes it.
        recompute: Whether activations are recomputed in the backward.
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
"""All cases; at full size, only every second one runs, to stay within the step's time."""


def run(bench: Bench) -> None:
    """Compare the forecast of each case with two updates of a plain loop."""
    device, budget = "cpu", 96 << 20
    if not bench.is_cpu:
        device, budget = name_this_device(), bench.choose(24 << 30, 2 << 30, 2 << 30)
        add_overhead_row(bench, device)
    for case in CASES[:: bench.choose(2, 1, 4)]:
        with bench.attempt(str(case)):
            run_case(bench, case, device, budget)


def add_overhead_row(bench: Bench, device: str) -> None:
    """Measure the memory of a process without tensors, as `headway estimate --calibrate` does, but without saving it."""
    if bench.is_simulated:
        bench.add_row(Row("context and libraries", note="left out: a simulated device does not see other processes"))
        return
    with bench.attempt("context and libraries"):
        measured, assumed = calibration.measure_overhead(), find_device(device)
        least, likely, most = (size / 2**20 for size in assumed.overhead)
        bench.add_row(
            Row(
                "context and libraries", measured.overhead / 2**20, "MiB", likely, "assumed by forecasts",
                f"{least:.0f} to {most:.0f} MiB", least <= measured.overhead / 2**20 <= most,
                f"{measured.kept / 2**20:.0f} MiB of workspaces stay; {assumed.source}",
            )
        )  # fmt: skip


def run_case(bench: Bench, case: Case, device: str, budget: int) -> None:
    """Add the rows of one case."""
    workload = list_workloads(bench)[case.model]
    size = case.batch if case.batch == LARGEST else max(1, case.batch // bench.choose(1, 2, 8))
    forecast_workload = partial(
        headway.forecast, workload.make, workload.batch, loss=workload.loss, device=device, budget=budget,
        precision=case.precision, optimizer=case.optimizer, recompute=case.recompute, loop="loss_function",
    )  # fmt: skip
    if size == LARGEST:
        size = forecast_workload().largest_batch or 1
    forecast = forecast_workload(batch_size=size, largest=False)
    allocated, device_use = measure_run(bench, case, workload, size)
    add_comparison(
        bench, f"{case}: tensors", allocated, forecast.allocated, note=f"batch {size}; peak in {forecast.peak}"
    )
    if device_use is not None:
        add_device_rows(bench, str(case), forecast, device_use)
    if case.batch == LARGEST:
        in_use = allocated if device_use is None else device_use.in_use
        bench.add_row(
            Row(
                f"{case}: in use", in_use / 2**20, "MiB", budget / 2**20, "budget", "within the budget", in_use <= budget,
                f"batch {size}",
            )
        )  # fmt: skip


@dataclass(frozen=True)
class DeviceUse:
    """Memory of a run on a GPU, besides its tensors.

    Attributes:
        reserved: Peak bytes that the allocator reserved.
        in_use: Bytes that all processes together used on the device at the end.
        snapshot: The allocator's own record of its requests.
    """

    reserved: int
    in_use: int
    snapshot: Any


def add_device_rows(bench: Bench, name: str, forecast: Forecast, use: DeviceUse) -> None:
    """Add the rows that only a run on a GPU has."""
    add_comparison(bench, f"{name}: allocator", use.reserved, forecast.reserved)
    in_use, least, most = (size / 2**20 for size in (use.in_use, forecast.least, forecast.most))
    if not bench.is_simulated:  # the size of a simulated context is a setting
        bench.add_row(
            Row(
                f"{name}: in use", in_use, "MiB", forecast.total / 2**20, "forecast", f"{least:,.0f} to {most:,.0f} MiB",
                least <= in_use <= most, "all processes, as the driver reports it",
            )
        )  # fmt: skip
    replayed = compare_with_model(use.snapshot)
    add_comparison(
        bench, f"{name}: recorded requests, replayed", replayed.reserved, replayed.model_reserved,
        f"{replayed.num_events} events; {replayed.unknown} of memory from before the record",
    )  # fmt: skip


def add_comparison(bench: Bench, name: str, measured: int, forecast: int, note: str = "") -> None:
    """Add a row that compares measured bytes with forecast bytes."""
    error = forecast / measured - 1
    bench.add_row(
        Row(
            name, measured / 2**20, "MiB", forecast / 2**20, "forecast", f"within {TOLERANCE:.0%}", abs(error) <= TOLERANCE,
            f"{error:+.2%}{'; ' * bool(note)}{note}",
        )
    )  # fmt: skip


# ---------------------------------------------------------------- real runs


def measure_run(bench: Bench, case: Case, workload: Workload, size: int) -> tuple[int, DeviceUse | None]:
    """Run two updates of a batch size, and return (peak bytes of tensors, other memory on a GPU or None on a CPU)."""
    bench.release()
    torch.manual_seed(0)
    if bench.is_cpu:
        from benchmarks.forecast.truth import measure_peak

        return measure_peak(
            build_model(bench, case, workload),
            StepRecipe(resolve_optimizer(case.optimizer), workload.loss, case.precision, loop="loss_function"),
            partial(workload.batch, size),
        ), None
    reserved = torch.cuda.memory_reserved()
    if reserved:
        raise RuntimeError(f"{reserved} bytes are reserved before the run, so its record would be incomplete")
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python", context=None)
    try:
        train(bench, case, build_model(bench, case, workload), workload, size)
        bench.synchronize()
        allocated = torch.cuda.max_memory_allocated()
        use = DeviceUse(torch.cuda.max_memory_reserved(), _get_used_memory(bench.device), torch.cuda.memory._snapshot())
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return allocated, use


def _get_used_memory(device: torch.device) -> int:
    """Return the bytes that all processes use on the device, without the driver's own memory."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def build_model(bench: Bench, case: Case, workload: Workload) -> nn.Module:
    """Build the model on the device, in training mode, with recomputation if the case has it."""
    model = workload.make().to(bench.device).train()
    if case.recompute:
        checkpoint_activations(model, ActivationCheckpointing(), bench.device)
    return model


def train(bench: Bench, case: Case, model: nn.Module, workload: Workload, size: int) -> None:
    """Run two updates of a plain loop that keeps no reference to the outputs."""
    make_optimizer = resolve_optimizer(case.optimizer)
    assert make_optimizer is not None
    optimizer = make_optimizer(model.parameters())
    for _ in range(2):
        with bench.device:
            batch = workload.batch(size)
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=case.precision == "bf16"):
            if workload.loss is None:
                loss = model(**batch).loss
            else:
                loss = workload.loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss


# ---------------------------------------------------------------- models


class Layer(nn.Module):
    """Residual perceptron block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs plus the block's output."""
        return inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))


def list_workloads(bench: Bench) -> dict[str, Workload]:
    """Return the workloads by name, in the size of this run."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = bench.choose(FULL, SMALL, SMALLEST)
    length, width, vocabulary = sizes["n_positions"], sizes["n_embd"], sizes["vocab_size"]
    depth, heads = sizes["n_layer"], sizes["n_head"]

    def make_tokens(size: int, num_tokens: int = length) -> dict[str, torch.Tensor]:
        ids = torch.zeros(size, num_tokens, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

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
        "gpt2": Workload(
            lambda: GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)), make_tokens
        ),
        "bert": Workload(lambda: BertForMaskedLM(bert), lambda size: make_tokens(size, min(512, length))),
        "llama": Workload(lambda: LlamaForCausalLM(llama), make_tokens),
        "mlp": Workload(
            lambda: nn.Sequential(*[Layer(wide) for _ in range(8)]),
            lambda size: (torch.zeros(size, length, wide), torch.zeros(size, length, wide)),
            nn.functional.mse_loss,
        ),
    }
