"""Forecasts of layouts beside real ranks: gloo processes on this machine, each with torch's profiler on its allocator."""

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
from benchmarks.forecast.models import CASES, Case
from benchmarks.forecast.truth import profiled
from benchmarks.timing import machine
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.config.parallelism import ShardingOptions, TensorParallelOptions
from headway.core.config.torch_kwargs import AutocastKwargs, DistributedDataParallelKwargs
from headway.core.training.forecast_types import Forecast
from headway.forecasting.device.devices import MIB
from headway.forecasting.tracing.attention_masks import skip_causal_mask
from headway.forecasting.tracing.step import list_state
from headway.forecasting.tracing.tensors import iterate_plain_tensors
from headway.layouts.whole_updates import ownership
from headway.layouts.whole_updates.transfers import PendingTransfer
from headway.planning.optimizers import list_parts, resolve_optimizer

FOLDER = Path(__file__).parent
BATCH, RUNS = 8, 1
_CUT = {"blocks.*.q": "colwise", "blocks.*.k": "colwise", "blocks.*.v": "colwise", "blocks.*.out": "rowwise"} | {
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
        """Attention, then two matrices."""
        samples, length, _ = x.shape
        normed = self.before(x)
        heads = [part(normed).view(samples, length, -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, -1))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A small language model of plain PyTorch."""

    def __init__(self, width: int = 256, depth: int = 6, vocabulary: int = 2000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([_Block(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def _compute_loss(model: nn.Module, given: Any) -> torch.Tensor:
    """Return the loss of a batch: a dict of a transformers model's arguments, or a pair of inputs and targets."""
    loss: torch.Tensor = model(**given).loss if isinstance(given, dict) else _loss(model(given[0]), given[1])
    return loss


def _pairs(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.ones(size, 64, dtype=torch.long)
    return tokens, tokens.clone()


def _mixtral() -> nn.Module:
    """With a router that spreads tokens evenly: otherwise ranks take what they are sent."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = MixtralConfig(
        vocab_size=2000, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=4, use_cache=False, **sizes
    )

    def even(_: nn.Module, __: Any, found: Any) -> Any:
        return (*found[:2], (torch.arange(found[2].numel()) % 4).view(found[2].shape))

    model: nn.Module = MixtralForCausalLM(config)
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(even)
    return model


def _tokens(size: int) -> dict[str, torch.Tensor]:
    found = torch.zeros(size, 128, dtype=torch.long)
    return {"input_ids": found, "labels": found}


MODELS: dict[str, Case] = {
    "GPT": Case(GPT, _pairs, _loss),
    "Llama": CASES["Llama"],
    "Llama, chunked loss": replace(CASES["Llama"], make=lambda: headway.chunk_loss(CASES["Llama"].make())),
    "Mixtral": Case(_mixtral, _tokens, CASES["Llama"].loss),
}


@dataclass(frozen=True)
class Setting:
    """A way to train over ranks.

    Attributes:
        strategy: as the Accelerator's.
        ranks: of the run.
        precision: "no" or "bf16".
        accumulation: micro-batches of one update.
        handlers: the Accelerator's options.
        note: what they say, in words.
        averages: how many moving averages of the weights there are.
        optimizer: name of the optimizer, as `headway.forecast` takes it.
        bucket_bytes: bytes of parameters that an owner gathers at a time, for optimizers that read whole parameters.
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

    def of(self, model: str) -> list[Any]:
        """The options for that model: ours has no plan of its own."""
        cut = (
            TensorParallelOptions(plan=_CUT, keep=("blocks.*.head",))
            if "tp" in self.strategy and model == "GPT"
            else None
        )
        return [*self.handlers, *([cut] if cut is not None else [])]

    def __str__(self) -> str:
        words = [self.strategy, f"{self.ranks} ranks", "float32" if self.precision == "no" else self.precision]
        words += [f"accumulated over {self.accumulation}"] if self.accumulation > 1 else []
        return ", ".join([*words, *([self.note] if self.note else [])])


_KEPT = ShardingOptions(reshard_after_forward=False)
_VIEWS = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
SETTINGS = (
    Setting("ddp", 2),
    Setting("ddp", 2, "bf16", 2),
    Setting("ddp", 2, handlers=(_VIEWS,), note="gradients as views"),
    Setting("fsdp", 2),
    Setting("fsdp", 2, "bf16"),
    Setting("fsdp", 2, handlers=(_KEPT,), note="kept after forward"),
    Setting("fsdp", 2, "bf16", handlers=(_KEPT,), note="kept after forward"),
    Setting("fsdp", 2, accumulation=2),
    Setting("fsdp", 2, "bf16", 2),
    Setting("hsdp=2", 4),
    Setting("hsdp=2", 4, "bf16"),
    Setting("tp", 2),
    Setting("tp", 2, "bf16"),
    Setting("fsdp+tp=2", 4),
    Setting("fsdp+tp=2", 4, "bf16"),
)
_HALF = (AutocastKwargs(half_residual=True), ActivationCheckpointing())
ROWS = (
    *((model, setting) for model in ("GPT", "Llama") for setting in SETTINGS),
    ("Llama", Setting("ddp", 2, "bf16", handlers=_HALF, note="half residual, recomputed")),
    ("Llama, chunked loss", Setting("ddp", 2)),
    ("Llama, chunked loss", Setting("fsdp", 2)),
    ("Llama, chunked loss", Setting("ddp", 2, "bf16", handlers=_HALF, note="half residual, recomputed")),
    ("Mixtral", Setting("ep", 2)),
    ("Mixtral", Setting("fsdp=2+ep=2", 4, "bf16")),
)


def forecast(model: str, setting: Setting, batch: int = BATCH) -> int:
    """Return the forecast peak bytes of tensors on the rank that needs the most memory."""
    return predict(model, setting, batch).allocated


def predict(model: str, setting: Setting, batch: int = BATCH) -> Forecast:
    """Return the forecast for the rank that needs the most memory."""
    case = MODELS[model]
    return headway.forecast(
        case.make, case.batch, batch_size=batch, loss=case.loss, device="cpu", precision=setting.precision,
        accumulation=setting.accumulation, strategy=setting.strategy, ranks=setting.ranks, kwargs_handlers=setting.of(model),
        loop="loss_function", averages=setting.averages, optimizer=setting.optimizer,
    )  # fmt: skip


def taken(model: str, setting: Setting, batch: int = BATCH) -> int:
    """Bytes of tensors that this rank takes at most in two updates; each rank calls it."""
    case = MODELS[model]
    accelerator = headway.Accelerator(
        cpu=True, strategy=setting.strategy, mixed_precision=setting.precision,
        gradient_accumulation_steps=setting.accumulation, kwargs_handlers=setting.of(model),
    )  # fmt: skip
    made = case.make()
    prepared = accelerator.prepare(skip_causal_mask(made) if hasattr(made, "set_attn_implementation") else made)
    optimizer = accelerator.prepare(torch.optim.AdamW(prepared.parameters()))
    own = _bytes(prepared.parameters()) + _bytes(prepared.buffers())
    averages = [headway.ExponentialMovingAverage(prepared, name=f"{number}") for number in range(setting.averages)]
    own += sum(_bytes(each.state_dict()["average"].values()) for each in averages)
    with torch.autograd.profiler.profile(profile_memory=True, use_cpu=True) as profile:
        for _ in range(2 * setting.accumulation):
            given: Any = case.batch(batch)
            with accelerator.accumulate(prepared):
                accelerator.backward(_compute_loss(prepared, given))
                optimizer.step()
                optimizer.zero_grad()
    in_use = most = own
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        most = max(most, in_use)
    assert all(each.num_averaged == 2 for each in averages)
    accelerator.end_training()
    return most


def measure_updates(model: str, setting: Setting, batch: int = BATCH) -> tuple[int, int]:
    """Return the peak bytes of tensors in two optimizer steps on this rank, and the bytes of its optimizer state.

    All ranks must call this function. Only the steps are profiled, because the profiler does not record the buffers that
    gloo's threads free in a backward.
    """
    ownership.BUCKET_BYTES = setting.bucket_bytes
    case = MODELS[model]
    accelerator = headway.Accelerator(cpu=True, strategy=setting.strategy, kwargs_handlers=setting.of(model))
    made = case.make()
    prepared = accelerator.prepare(skip_causal_mask(made) if hasattr(made, "set_attn_implementation") else made)
    make = resolve_optimizer(setting.optimizer)
    assert make is not None
    parts = list_parts(make(list(prepared.parameters())))
    optimizers = [accelerator.prepare(part) for part in parts]
    most = 0
    for _ in range(2):
        given: Any = case.batch(batch)
        with accelerator.accumulate(prepared):
            accelerator.backward(_compute_loss(prepared, given))
            held = [
                *prepared.parameters(),
                *prepared.buffers(),
                *(given.values() if isinstance(given, dict) else given),
            ]
            held += [each.grad for each in prepared.parameters() if each.grad is not None]
            held += [tensor for part in parts for tensor in list_state(part)]
            with _paused_transfers():
                most = max(most, profiled(lambda: [each.step() for each in optimizers], _bytes(held)))
            del held
            for each in optimizers:
                each.zero_grad()
    accelerator.end_training()
    return most, sum(tensor.nbytes for part in parts for tensor in list_state(part))


@contextmanager
def _paused_transfers() -> Iterator[None]:
    """Return a context in which gloo's threads release the buckets of owned updates before this thread does.

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


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    parts = [part for tensor in tensors for part in iterate_plain_tensors(tensor)]
    return sum({part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}.values())


def compare(model: str, setting: Setting, runs: int = RUNS) -> tuple[int, int, int]:
    """Bytes forecast, and the least and the most that a rank took in several runs.

    gloo's threads give memory back a moment late, now and then, which adds to a peak; that is why the runs differ.
    """
    from tests.distributed.ranks import run_ranks

    found = [size for _ in range(runs) for size in run_ranks(taken, setting.ranks, model, setting)]
    return forecast(model, setting), min(found), max(found)


def main() -> None:
    """Each model in each setting; writes layouts.json and layouts.md after every one."""
    rows: list[dict[str, Any]] = []
    for model, setting in ROWS:
        said, least, most = compare(model, setting)
        rows.append({"model": model, "setting": str(setting), "forecast": said, "least": least, "most": most})
        print(rows[-1], f"{said / least - 1:+.2%}", flush=True)
        _write(rows)


def _write(rows: list[dict[str, Any]]) -> None:
    result = {"date": date.today().isoformat(), "machine": machine(), "torch": torch.__version__, "rows": rows}
    (FOLDER / "layouts.json").write_text(json.dumps(result, indent=1) + "\n")
    table = ["| model | layout | forecast MiB | taken MiB | error |", "|---|---|---|---|---|"]
    table += [
        f"| {row['model']} | {row['setting']} | {row['forecast'] / MIB:.2f} | {row['least'] / MIB:.2f} to "
        f"{row['most'] / MIB:.2f} | {row['forecast'] / row['least'] - 1:+.2%} |"
        for row in rows
    ]
    (FOLDER / "layouts.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
