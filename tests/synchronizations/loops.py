"""Training loops with one feature each, for counts of synchronizations on the fake device and on real devices.

Each loop makes `NUM_UPDATES` updates and calls `at_update()` after each of them.
"""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, DataLoaderConfiguration, GradScalerKwargs, MemoryMonitor, Preemption, track

NUM_UPDATES = 8
ROWS = 8
AtUpdate = Callable[[], None]
Loop = Callable[[AtUpdate], None]
LOOPS: dict[str, Loop] = {}
mse = torch.nn.functional.mse_loss


def register_loop(name: str) -> Callable[[Loop], Loop]:
    """Register a training loop in `LOOPS` under the name of its feature."""

    def register(function: Loop) -> Loop:
        LOOPS[name] = function
        return function

    return register


def move_to_device(module: torch.nn.Module) -> torch.nn.Module:
    """Move the module to the device before optimizers are created, because the fake device cannot move parameters in place."""
    return module.to(torch.accelerator.current_accelerator())


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return move_to_device(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))


def make_loader(num_batches: int = NUM_UPDATES, pin_memory: bool = False) -> DataLoader[Any]:
    inputs = torch.randn(num_batches * ROWS, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=ROWS, pin_memory=pin_memory)


def prepare_training(num_batches: int = NUM_UPDATES, fused: bool = False, **options: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(**options)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    return accelerator, *accelerator.prepare(model, optimizer, make_loader(num_batches), scheduler)


def train(at_update: AtUpdate, clip: bool = False, num_steps: int = 1, **options: Any) -> None:
    accelerator, model, optimizer, loader, scheduler = prepare_training(
        NUM_UPDATES * num_steps, gradient_accumulation_steps=num_steps, **options
    )
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = mse(model(inputs), targets)
            accelerator.backward(loss)
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            at_update()


@register_loop("a loop by hand, pinned and non-blocking")
def train_by_hand(at_update: AtUpdate) -> None:
    device = Accelerator().device
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in make_loader(pin_memory=True):
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
        mse(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        at_update()


@register_loop("a prepared loop")
def plain(at_update: AtUpdate) -> None:
    train(at_update)


@register_loop("a prepared loop, non_blocking=False")
def blocking(at_update: AtUpdate) -> None:
    train(at_update, dataloader_config=DataLoaderConfiguration(non_blocking=False))


@register_loop("accumulation over 2 batches, clipping")
def accumulation(at_update: AtUpdate) -> None:
    train(at_update, clip=True, num_steps=2)


@register_loop("the guard")
def guard(at_update: AtUpdate) -> None:
    train(at_update, on_non_finite="skip")


@register_loop("the guard and clipping")
def guard_and_clip(at_update: AtUpdate) -> None:
    train(at_update, clip=True, on_non_finite="skip")


@register_loop("bf16")
def bf16(at_update: AtUpdate) -> None:
    train(at_update, mixed_precision="bf16")


@register_loop("fp16")
def fp16(at_update: AtUpdate) -> None:
    train(at_update, mixed_precision="fp16")


@register_loop("fp16 with a fused optimizer")
def fp16_fused(at_update: AtUpdate) -> None:
    train(at_update, mixed_precision="fp16", fused=True)


@register_loop("fp16, clipping at each of 2 batches")
def fp16_clip(at_update: AtUpdate) -> None:
    train(at_update, clip=True, num_steps=2, mixed_precision="fp16")


@register_loop("fp16 and the guard")
def fp16_guard(at_update: AtUpdate) -> None:
    # A small scale avoids overflows. After an overflow, the guard reads the losses, which is another wait.
    scaler = GradScalerKwargs(init_scale=256.0)
    train(at_update, mixed_precision="fp16", on_non_finite="skip", kwargs_handlers=[scaler])


@register_loop("a weight that is a tensor on the device")
def tensor_weight(at_update: AtUpdate) -> None:
    accelerator, model, optimizer, loader, _ = prepare_training()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse(model(inputs), targets), weight=(targets < 1e9).sum())
            optimizer.step()
            optimizer.zero_grad()
        at_update()


@register_loop("a weight counted on the host")
def host_weight(at_update: AtUpdate) -> None:
    accelerator, model, optimizer, loader, _ = prepare_training()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse(model(inputs), targets), weight=targets.numel())
            optimizer.step()
            optimizer.zero_grad()
        at_update()


def make_token_loader(num_batches: int) -> DataLoader[Any]:
    ids = torch.randint(0, 50, (num_batches * ROWS, 6), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(ids, ids), batch_size=ROWS)


def prepare_micro_batched_training() -> tuple[Any, ...]:
    accelerator = Accelerator(microbatching="auto")
    model = move_to_device(torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accelerator, *accelerator.prepare(model, optimizer, make_token_loader(NUM_UPDATES))


def cross_entropy(model: torch.nn.Module, piece: Any) -> torch.Tensor:
    ids, labels = piece
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


@register_loop('microbatching="auto"')
def microbatches(at_update: AtUpdate) -> None:
    accelerator, model, optimizer, loader = prepare_micro_batched_training()
    for batch in loader:
        for piece in accelerator.microbatches(batch):
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model, piece))
                optimizer.step()
                optimizer.zero_grad()
        at_update()


@register_loop("forward_backward")
def forward_backward(at_update: AtUpdate) -> None:
    accelerator, model, optimizer, loader = prepare_micro_batched_training()
    for batch in loader:
        accelerator.forward_backward(batch, lambda piece: cross_entropy(model, piece))
        optimizer.step()
        optimizer.zero_grad()
        at_update()


@register_loop("forward_backward with weight= on the device")
def weigher(at_update: AtUpdate) -> None:
    accelerator, model, optimizer, loader = prepare_micro_batched_training()
    for batch in loader:
        accelerator.forward_backward(
            batch, lambda piece: cross_entropy(model, piece), weight=lambda piece: (piece[1] >= 0).sum()
        )
        optimizer.step()
        optimizer.zero_grad()
        at_update()


@register_loop("a bar that is drawn after each batch, with the throughput's figures and the loss")
def bar(at_update: AtUpdate) -> None:
    accelerator, model, optimizer, loader, _ = prepare_training()
    throughput = accelerator.throughput
    throughput.show_in_bars()
    shown = track(loader, interval=0.0, file=_DiscardedOutput())
    for inputs, targets in shown:
        loss = mse(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        throughput.add(tokens=(targets < 1e9).sum())
        shown.show(loss=loss)
        at_update()


@register_loop("a run's log, the loss as a tensor at each update")
def logged(at_update: AtUpdate) -> None:
    with tempfile.TemporaryDirectory() as folder:
        accelerator, model, optimizer, loader, _ = prepare_training(project_dir=folder)
        accelerator.init_trackers("run")
        for inputs, targets in loader:
            loss = mse(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss})
            at_update()
        accelerator.end_training()


@register_loop("preemption, memory by phases and the throughput, watched")
def watched(at_update: AtUpdate) -> None:
    with tempfile.TemporaryDirectory() as folder:
        accelerator, model, optimizer, loader, scheduler = prepare_training(
            project_dir=folder, preemption=Preemption(exits=False)
        )
        assert accelerator.throughput.seconds == 0
        with MemoryMonitor():
            for _ in accelerator.epochs(1):
                for inputs, targets in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(mse(model(inputs), targets))
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    at_update()
        accelerator.end_training()


class _DiscardedOutput:
    """A text file that discards its content and is not a terminal."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Do nothing."""

    def isatty(self) -> bool:
        return False


class Regression(torch.nn.Module):
    """A regression model with the interface that the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": mse(self.inner(inputs), labels)}


def run_trainer(
    at_update: AtUpdate, rows: list[dict[str, torch.Tensor]], model: torch.nn.Module, **options: Any
) -> None:
    from headway import Trainer, TrainerCallback, TrainingArguments

    class Mark(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            at_update()

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=NUM_UPDATES, per_device_train_batch_size=ROWS, save_strategy="no",
            disable_tqdm=True, report_to="none", **{"logging_strategy": "no", **options},
        )  # fmt: skip
        Trainer(model=model, args=args, train_dataset=rows, callbacks=[Mark()]).train()


def make_regression_rows() -> Iterator[dict[str, torch.Tensor]]:
    for inputs, targets in make_loader():
        yield from ({"inputs": one, "labels": other} for one, other in zip(inputs, targets))


@register_loop("the Trainer")
def trainer(at_update: AtUpdate) -> None:
    run_trainer(at_update, list(make_regression_rows()), move_to_device(Regression()))


@register_loop("the Trainer, logging at each update")
def trainer_logging(at_update: AtUpdate) -> None:
    run_trainer(
        at_update, list(make_regression_rows()), move_to_device(Regression()), logging_strategy="steps", logging_steps=1
    )


class LanguageModel(torch.nn.Module):
    """A language model whose loss is a mean over labels. It runs out of memory with more than half a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(input_ids) > ROWS // 2:
            raise torch.OutOfMemoryError("simulated: only half a batch fits")
        logits = self.inner(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@register_loop("the Trainer, labels counted, batches in pieces")
def trainer_in_pieces(at_update: AtUpdate) -> None:
    rows = [{"input_ids": one, "labels": one} for ids, _ in make_token_loader(NUM_UPDATES) for one in ids]
    run_trainer(at_update, rows, move_to_device(LanguageModel()), auto_find_batch_size=True)
