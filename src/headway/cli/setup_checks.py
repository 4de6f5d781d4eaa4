"""Checks that `headway test` runs on every rank: collectives, data order, gradients, RNG states and metrics."""

import math
import time
from collections.abc import Callable

import torch
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from headway.accelerator import Accelerator
from headway.core.config.mesh import Layout
from headway.core.config.run import DataLoaderConfiguration
from headway.core.runtime.collectives.rng import synchronize_rng_states
from headway.core.runtime.seed import set_seed

_NUM_ROWS = 37  # a prime, so that no batch size or number of ranks divides it

_BATCH_SIZE = 4


_LENGTH = 8  # of each sequence

_NUM_FEATURES = 6

_HEAD_SIZE = 4  # of attention heads

_MAX_SKIPPED_UPDATES = 30  # fp16 loss scaling skips updates until its scale is small enough


class _Experts(torch.nn.Module):
    """Experts in the form that expert parallelism supports (docs/expert_parallel.md#which-models)."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = torch.nn.Parameter(torch.randn(num_experts, width, 2 * width) / width**0.5)
        self.down = torch.nn.Parameter(torch.randn(num_experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        outputs = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            weights = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            outputs = outputs + weights * (torch.tanh(hidden_states @ self.up[expert]) @ self.down[expert])
        return outputs


class _MixtureOfExperts(torch.nn.Module):
    """Router and experts; each token goes to two of them."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = torch.nn.Linear(width, num_experts, bias=False)
        self.experts = _Experts(width, num_experts)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        outputs: torch.Tensor = self.experts(tokens, chosen, weights)
        return outputs.view_as(hidden_states)


class _DecoderBlock(torch.nn.Module):
    """Decoder block with causal attention, which context parallelism can split."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (torch.nn.Linear(width, width) for _ in range(4))
        self.feed_forward = (
            _MixtureOfExperts(width, num_experts)
            if num_experts
            else torch.nn.Sequential(
                torch.nn.Linear(width, 2 * width), torch.nn.Tanh(), torch.nn.Linear(2 * width, width)
            )
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self.first_norm(hidden_states)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, _HEAD_SIZE)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        hidden_states = hidden_states + self.output(attended)
        outputs: torch.Tensor = hidden_states + self.feed_forward(self.second_norm(hidden_states))
        return outputs


class _Decoder(torch.nn.Module):
    """Small decoder that every built-in layout can split."""

    def __init__(self, width: int, num_blocks: int, num_experts: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(_NUM_FEATURES, width)
        self.blocks = torch.nn.ModuleList(_DecoderBlock(width, num_experts) for _ in range(num_blocks))
        self.head = torch.nn.Linear(width, 1)
        if num_experts:  # no plan follows from the structure of experts: ep with tp splits only the attention
            self._tp_plan = {
                **dict.fromkeys(("blocks.*.query", "blocks.*.key", "blocks.*.value"), "colwise"),
                "blocks.*.output": "rowwise",
            }

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden_states = self.first(inputs)
        for block in self.blocks:
            hidden_states = block(hidden_states)
        outputs: torch.Tensor = self.head(hidden_states)
        return outputs


def _make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (rows, tokens, features) and targets of the checks, which are equal on all ranks."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(_NUM_ROWS, _LENGTH, _NUM_FEATURES, generator=generator)
    return inputs, inputs.sum(-1, keepdim=True)


def _make_model(layout: Layout) -> torch.nn.Module:
    """Return a model that the layout can split, with equal weights on all ranks. The RNG state is not changed."""
    num_heads = 2 * layout.tp
    num_experts = 2 * layout.ep if layout.ep > 1 else 0
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(2)  # torch.manual_seed would also seed the accelerators
        return _Decoder(_HEAD_SIZE * num_heads, max(2, layout.pp), num_experts)


def _require_true(is_true: bool, message: str) -> None:
    if not is_true:
        raise AssertionError(message)


def _format_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def check_collectives(accelerator: Accelerator) -> str:
    """Raise AssertionError if a collective of the Accelerator returns a wrong result.

    The checked methods are gather, reduce, pad_across_processes and gather_objects. Every rank must call it.

    Returns:
        Description of the successful check, for the report.
    """
    rank, count = accelerator.process_index, accelerator.num_processes
    rows = torch.full((rank + 1,), rank, device=accelerator.device)
    expected = [r for r in range(count) for _ in range(r + 1)]
    _require_true(accelerator.gather(rows).tolist() == expected, "gather lost or reordered rows")
    _require_true(
        accelerator.pad_across_processes(rows).shape[0] == count, "pad_across_processes missed the longest rank"
    )
    total = accelerator.reduce(torch.tensor([float(rank)], device=accelerator.device), "sum").item()
    _require_true(total == count * (count - 1) / 2, "reduce added up wrongly")
    _require_true(
        accelerator.collectives.gather_objects(f"rank {rank}")[-1] == f"rank {count - 1}", "objects were mixed up"
    )
    return f"gather, pad, reduce and objects over {_format_ranks(count)}"


def check_data(accelerator: Accelerator) -> str:
    """Raise AssertionError if an epoch misses or repeats a sample, or if two epochs have the same sample order.

    Every rank must call it.

    Returns:
        Description of the successful check, for the report.
    """
    loader = DataLoader(TensorDataset(torch.arange(_NUM_ROWS)), batch_size=_BATCH_SIZE, shuffle=True)
    prepared = accelerator.prepare_data_loader(loader)
    epochs = []
    for _ in range(2):
        rows = [accelerator.gather_for_metrics(batch[0]).tolist() for batch in prepared]
        epochs.append([row for step in rows for row in step])
    _require_true(all(sorted(epoch) == list(range(_NUM_ROWS)) for epoch in epochs), "samples were lost or repeated")
    _require_true(epochs[0] != epochs[1], "two epochs had the same order")
    return f"{_NUM_ROWS} samples exactly once in each of 2 epochs"


def check_gradient(accelerator: Accelerator) -> str:
    """Raise AssertionError if an accumulation window with micro-batches of different sizes has a wrong gradient.

    The gradient must equal that of a single batch with all data, which rank 0 computes with plain PyTorch. It is the
    change of the weights in an update with SGD and a learning rate of 1, because some layouts leave no gradients in
    the parameters. The tolerance is 1e-5, or 5e-2 with mixed precision. Every rank must call this function.

    Returns:
        Description of the successful check, for the report.
    """
    inputs, targets = _make_data()
    layout = accelerator._facts.resolved_layout.layout
    reference_model = _make_model(layout)
    torch.autograd.backward(mse_loss(reference_model(inputs), targets))
    num_batches = math.ceil(_NUM_ROWS / (_BATCH_SIZE * accelerator.strategy.data_shard.count))
    accelerator.gradient_accumulation_steps = num_batches
    model = _make_model(layout)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        DataLoader(TensorDataset(inputs, targets), batch_size=_BATCH_SIZE),
    )
    loader.even_batches = False  # otherwise repeated rows would count in the loss
    for _ in range(_MAX_SKIPPED_UPDATES):
        for batch, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(batch), target))
                optimizer.step()
                optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:
            break
    _require_true(accelerator.num_updates == 1, f"{accelerator.num_updates} updates were made instead of 1")
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        _compare_update(reference_model, weights, 1e-5 if accelerator.mixed_precision == "no" else 5e-2)
    ranks = _format_ranks(accelerator.num_processes)
    return f"a window of {num_batches} micro-batches on {ranks} = one batch of {_NUM_ROWS}"


def _compare_update(reference_model: torch.nn.Module, weights: dict[str, torch.Tensor], tolerance: float) -> None:
    """Raise AssertionError unless the weights are those of the model after a step of SGD with a learning rate of 1.

    Args:
        reference_model: Model with the weights before the update, and with the correct gradients.
        weights: Full tensors after the update, by name.
        tolerance: Largest absolute difference that is allowed.
    """
    parameters = dict(reference_model.named_parameters())
    _require_true(parameters.keys() == weights.keys(), f"get_state_dict returned {sorted(weights)}")
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        gradient = parameter.detach() - weights[name].cpu().float()
        error = (gradient - parameter.grad).abs().max().item()
        _require_true(error <= tolerance, f"the gradient of {name} is off by {error:.2g}")


def check_random_streams(accelerator: Accelerator) -> str:
    """Raise AssertionError if ranks that read different data draw equal random numbers with device-specific seeds.

    `set_seed(..., device_specific=True)` sets these seeds. Ranks that read the same data must draw equal numbers. After
    `synchronize_rng_states`, all ranks must. Every rank must call this function.

    Returns:
        Description of the successful check, for the report.
    """
    set_seed(3, device_specific=True)
    numbers = accelerator.collectives.gather_objects(torch.rand(1).item())
    num_streams = accelerator.strategy.data_shard.count  # ranks that read the same data must draw equal numbers
    _require_true(len(set(numbers)) == num_streams, "device_specific seeds gave two ranks one stream")
    synchronize_rng_states(["torch"])
    _require_true(
        len(set(accelerator.collectives.gather_objects(torch.rand(1).item()))) == 1, "streams stayed different"
    )
    return "ranks differ with device_specific, agree after synchronization"


def check_metrics(accelerator: Accelerator) -> str:
    """Raise AssertionError unless `gather_for_metrics` returns all rows of the dataset once and in order.

    The last batch is incomplete, so that ranks repeat samples to fill it. Every rank must call this function.

    Returns:
        Description of the successful check, for the report.
    """
    inputs, _ = _make_data()
    prepared = accelerator.prepare_data_loader(DataLoader(TensorDataset(inputs), batch_size=_BATCH_SIZE))
    gathered = [accelerator.gather_for_metrics(batch[0]) for batch in prepared]
    _require_true(torch.equal(torch.cat(gathered).cpu(), inputs), "gathered rows differ from the data")
    return f"{_NUM_ROWS} rows back in the data's order"


_CHECKS: list[Callable[[Accelerator], str]] = [
    check_collectives,
    check_data,
    check_gradient,
    check_random_streams,
    check_metrics,
]


def check_setup() -> bool:
    """Run all checks of `headway test` on all ranks and print the results. Return True if none failed on any rank.

    A check fails by an AssertionError. Any other error ends the run. Every rank must call this function.
    """
    started = time.monotonic()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(data_seed=0))
    set_seed(0)  # ranks that read the same data must draw the same random numbers
    count = accelerator.num_processes
    accelerator.print(
        f"{count} {'process' if count == 1 else 'processes'}, {accelerator.device.type}, "
        f"precision {accelerator.mixed_precision}"
    )
    num_failed = 0
    for check in _CHECKS:
        check_started, problem, result = time.monotonic(), "", ""
        try:
            result = check(accelerator)
        except AssertionError as error:
            problem = f"rank {accelerator.process_index}: {error}"
        accelerator.free_memory()
        problems = [text for text in accelerator.collectives.gather_objects(problem) if text]
        num_failed += bool(problems)
        name = check.__name__.removeprefix("check_").replace("_", " ")
        verdict = "FAILED " + "; ".join(problems) if problems else f"ok     {result}"
        accelerator.print(f"  {name:15} {verdict} ({time.monotonic() - check_started:.2f} s)")
    word = "all checks passed" if not num_failed else f"{num_failed} of {len(_CHECKS)} checks failed"
    accelerator.print(f"{word} in {time.monotonic() - started:.1f} s")
    accelerator.end_training()
    return not num_failed
