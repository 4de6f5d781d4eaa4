"""Forecasts of parallel layouts compared with real ranks: gloo processes on this machine, each under torch's memory profiler."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headway
from benchmarks.forecast.models import CASES
from benchmarks.forecast.truth import profile_peak
from benchmarks.forecast.workload import Workload
from benchmarks.timing import describe_machine
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.config.parallelism import ShardingOptions, TensorParallelOptions
from headway.core.config.torch_kwargs import AutocastKwargs, DistributedDataParallelKwargs
from headway.core.training.forecast_types import Forecast
from headway.forecasting.device.devices import MIB
from headway.forecasting.tracing.attention_masks import skip_causal_mask
from headway.forecasting.tracing.reported_tensors import list_state
from headway.forecasting.tracing.tensors import iterate_plain_tensors
from headway.layouts.whole_updates import ownership
from headway.layouts.whole_updates.transfers import PendingTransfer
from headway.planning.optimizers import list_inner_optimizers, resolve_optimizer

FOLDER = Path(__file__).parent
BATCH, RUNS = 8, 1
_TENSOR_PARALLEL_PLAN = {
    "blocks.*.q": "colwise",
    "blocks.*.k": "colwise",
    "blocks.*.v": "colwise",
    "blocks.*.out": "rowwise",
} | {
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class _Block(nn.Module):
    def __init__(self, width: int, head: int = 64) -> None:
        super().__init__()
        self.head = head
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply attention, then the perceptron."""
        samples, length, _ = x.shape
        normed = self.before(x)
        heads = [
            projection(normed).view(samples, length, -1, self.head).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, -1))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A small language model in plain PyTorch."""

    def __init__(self, width: int = 256, depth: int = 6, vocabulary: int = 2000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([_Block(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _cross_entropy(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def _compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch: keyword arguments of a transformers model, or a pair of inputs and targets."""
    loss: torch.Tensor = model(**batch).loss if isinstance(batch, dict) else _cross_entropy(model(batch[0]), batch[1])
    return loss


def _make_pairs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.ones(size, 64, dtype=torch.long)
    return tokens, tokens.clone()


def _build_mixtral() -> nn.Module:
    """Build a Mixtral whose router spreads tokens evenly, so that all ranks receive the same number."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = MixtralConfig(
        vocab_size=2000, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=4, use_cache=False, **sizes
    )

    def route_evenly(_: nn.Module, __: Any, output: Any) -> Any:
        return (*output[:2], (torch.arange(output[2].numel()) % 4).view(output[2].shape))

    model: nn.Module = MixtralForCausalLM(config)
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(route_evenly)
    return model


def _make_tokens(size: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(size, 128, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


MODELS: dict[str, Workload] = {
    "GPT": Workload(GPT, _make_pairs, _cross_entropy),
    "Llama": CASES["Llama"],
    "Llama, chunked loss": replace(CASES["Llama"], make=lambda: headway.chunk_loss(CASES["Llama"].make())),
    "Mixtral": Workload(_build_mixtral, _make_tokens, CASES["Llama"].loss),
}


@dataclass(frozen=True)
class Setting:
    """A way to train over ranks.

    Attributes:
        strategy: Layout, as the Accelerator takes it.
        ranks: Number of ranks.
        precision: "no" or "bf16".
        accumulation: Micro-batches of one update.
        handlers: kwargs handlers of the Accelerator.
        note: Description of the handlers.
        averages: Number of moving averages of the weights.
        optimizer: Name of the optimizer, as `headway.forecast` takes it.
        bucket_bytes: Bytes of parameters that an owner gathers at a time, for optimizers that read whole parameters.
    """

    strategy: str
    ranks: int
    precision: str = "no"
    accumulation: int = 1
    handlers: tuple[Any, ...] = field(default=())
    note: str = ""
    averages: int = 0
    optimizer: str = "adamw"
    bucket_bytes: int = ownership.BUCKET_BYTES

    def list_handlers(self, model: str) -> list[Any]:
        """Return the handlers for a model. Only the plain GPT needs a tensor parallel plan; transformers models have one."""
        tensor_parallel = (
            TensorParallelOptions(plan=_TENSOR_PARALLEL_PLAN, keep=("blocks.*.head",))
            if "tp" in self.strategy and model == "GPT"
            else None
        )
        return [*self.handlers, *([tensor_parallel] if tensor_parallel is not None else [])]

    def __str__(self) -> str:
        words = [self.strategy, f"{self.ranks} ranks", "float32" if self.precision == "no" else self.precision]
        words += [f"accumulated over {self.accumulation}"] if self.accumulation > 1 else []
        return ", ".join([*words, *([self.note] if self.note else [])])


_KEEP_AFTER_FORWARD = ShardingOptions(reshard_after_forward=False)
_GRADIENTS_AS_VIEWS = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
SETTINGS = (
    Setting("ddp", 2),
    Setting("ddp", 2, "bf16", 2),
    Setting("ddp", 2, handlers=(_GRADIENTS_AS_VIEWS,), note="gradients as views"),
    Setting("fsdp", 2),
    Setting("fsdp", 2, "bf16"),
    Setting("fsdp", 2, handlers=(_KEEP_AFTER_FORWARD,), note="kept after forward"),
    Setting("fsdp", 2, "bf16", handlers=(_KEEP_AFTER_FORWARD,), note="kept after forward"),
    Setting("fsdp", 2, accumulation=2),
    Setting("fsdp", 2, "bf16", 2),
    Setting("hsdp=2", 4),
    Setting("hsdp=2", 4, "bf16"),
    Setting("tp", 2),
    Setting("tp", 2, "bf16"),
    Setting("fsdp+tp=2", 4),
    Setting("fsdp+tp=2", 4, "bf16"),
)
_HALF_RESIDUAL = (AutocastKwargs(half_residual=True), ActivationCheckpointing())
ROWS = (
    *((model, setting) for model in ("GPT", "Llama") for setting in SETTINGS),
    ("Llama", Setting("ddp", 2, "bf16", handlers=_HALF_RESIDUAL, note="half residual, recomputed")),
    ("Llama, chunked loss", Setting("ddp", 2)),
    ("Llama, chunked loss", Setting("fsdp", 2)),
    ("Llama, chunked loss", Setting("ddp", 2, "bf16", handlers=_HALF_RESIDUAL, note="half residual, recomputed")),
    ("Mixtral", Setting("ep", 2)),
    ("Mixtral", Setting("fsdp=2+ep=2", 4, "bf16")),
)


def forecast_peak(model: str, setting: Setting, batch: int = BATCH) -> int:
    """Return the forecast peak bytes of tensors on the rank that needs the most memory."""
    return predict(model, setting, batch).allocated


def predict(model: str, setting: Setting, batch: int = BATCH) -> Forecast:
    """Return the forecast for the rank that needs the most memory."""
    case = MODELS[model]
    return headway.forecast(
        case.make, case.batch, batch_size=batch, loss=case.loss, device="cpu", precision=setting.precision,
        accumulation=setting.accumulation, strategy=setting.strategy, ranks=setting.ranks,
        kwargs_handlers=setting.list_handlers(model), loop="loss_function", averages=setting.averages, optimizer=setting.optimizer,
    )  # fmt: skip


def measure_run(model: str, setting: Setting, batch: int = BATCH) -> int:
    """Return the peak bytes of tensors on this rank in two updates. All ranks must call this function."""
    case = MODELS[model]
    accelerator = headway.Accelerator(
        cpu=True, strategy=setting.strategy, mixed_precision=setting.precision,
        gradient_accumulation_steps=setting.accumulation, kwargs_handlers=setting.list_handlers(model),
    )  # fmt: skip
    prepared = accelerator.prepare(_build(case))
    optimizer = accelerator.prepare(torch.optim.AdamW(prepared.parameters()))
    own = _count_bytes(prepared.parameters()) + _count_bytes(prepared.buffers())
    averages = [headway.ExponentialMovingAverage(prepared, name=f"{number}") for number in range(setting.averages)]
    own += sum(_count_bytes(average.state_dict()["average"].values()) for average in averages)
    with torch.autograd.profiler.profile(profile_memory=True, use_cpu=True) as profile:
        for _ in range(2 * setting.accumulation):
            with accelerator.accumulate(prepared):
                accelerator.backward(_compute_loss(prepared, case.batch(batch)))
                optimizer.step()
                optimizer.zero_grad()
    in_use = peak = own
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    assert all(average.num_averaged == 2 for average in averages)
    accelerator.end_training()
    return peak


def measure_updates(model: str, setting: Setting, batch: int = BATCH) -> tuple[int, int]:
    """Return the peak bytes of tensors in two optimizer steps on this rank, and the bytes of its optimizer state.

    All ranks must call this function. Only the steps are profiled, because the profiler does not record the buffers that
    gloo's threads free in a backward.
    """
    ownership.BUCKET_BYTES = setting.bucket_bytes
    case = MODELS[model]
    accelerator = headway.Accelerator(cpu=True, strategy=setting.strategy, kwargs_handlers=setting.list_handlers(model))
    prepared = accelerator.prepare(_build(case))
    make_optimizer = resolve_optimizer(setting.optimizer)
    assert make_optimizer is not None
    optimizers = list_inner_optimizers(make_optimizer(list(prepared.parameters())))
    prepared_optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
    peak = 0
    for _ in range(2):
        inputs: Any = case.batch(batch)
        with accelerator.accumulate(prepared):
            accelerator.backward(_compute_loss(prepared, inputs))
            live_tensors = [
                *prepared.parameters(),
                *prepared.buffers(),
                *(inputs.values() if isinstance(inputs, dict) else inputs),
            ]
            live_tensors += [parameter.grad for parameter in prepared.parameters() if parameter.grad is not None]
            live_tensors += [tensor for optimizer in optimizers for tensor in list_state(optimizer)]
            with _paused_transfers():
                in_use = _count_bytes(live_tensors)
                peak = max(peak, profile_peak(lambda: [each.step() for each in prepared_optimizers], in_use))
            del live_tensors
            for optimizer in prepared_optimizers:
                optimizer.zero_grad()
    accelerator.end_training()
    return peak, sum(tensor.nbytes for optimizer in optimizers for tensor in list_state(optimizer))


def _build(case: Workload) -> nn.Module:
    model = case.make()
    return skip_causal_mask(model) if hasattr(model, "set_attn_implementation") else model


@contextmanager
def _paused_transfers() -> Iterator[None]:
    """Make gloo's threads release the buckets of owned updates before this thread does, until the block ends.

    The profiler does not record what other threads free. If gloo's thread were the last to release a bucket, the bucket
    would count forever. `PendingTransfer.wait` is replaced, because only a pause before its end gives gloo's thread time.
    """
    wait = PendingTransfer.wait

    def wait_longer(self: PendingTransfer) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            time.sleep(0.05)
        return wait(self)

    PendingTransfer.wait = wait_longer  # type: ignore[method-assign]
    try:
        yield
    finally:
        PendingTransfer.wait = wait  # type: ignore[method-assign]


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of all tensors; a shared storage counts once."""
    plain = [plain_tensor for tensor in tensors for plain_tensor in iterate_plain_tensors(tensor)]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in plain}.values())


def compare_with_ranks(model: str, setting: Setting, runs: int = RUNS) -> tuple[int, int, int]:
    """Return (forecast bytes, smallest peak of a rank, largest peak of a rank) over several runs.

    gloo's threads sometimes free memory a moment late, which adds to a peak. So peaks differ between runs.
    """
    from tests.distributed.ranks import run_ranks

    peaks = [peak for _ in range(runs) for peak in run_ranks(measure_run, setting.ranks, model, setting)]
    return forecast_peak(model, setting), min(peaks), max(peaks)


def main() -> None:
    """Compare each model in each setting, and write layouts.json and layouts.md after every one."""
    rows: list[dict[str, Any]] = []
    for model, setting in ROWS:
        predicted, least, most = compare_with_ranks(model, setting)
        rows.append({"model": model, "setting": str(setting), "forecast": predicted, "least": least, "most": most})
        print(rows[-1], f"{predicted / least - 1:+.2%}", flush=True)
        _write(rows)


def _write(rows: list[dict[str, Any]]) -> None:
    result = {"date": date.today().isoformat(), "machine": describe_machine(), "torch": torch.__version__, "rows": rows}
    (FOLDER / "layouts.json").write_text(json.dumps(result, indent=1) + "\n")
    table = ["| model | layout | forecast MiB | measured MiB | error |", "|---|---|---|---|---|"]
    table += [
        f"| {row['model']} | {row['setting']} | {row['forecast'] / MIB:.2f} | {row['least'] / MIB:.2f} to "
        f"{row['most'] / MIB:.2f} | {row['forecast'] / row['least'] - 1:+.2%} |"
        for row in rows
    ]
    (FOLDER / "layouts.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
