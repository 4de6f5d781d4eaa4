"""Several models trained in turn, such as a generator and a discriminator, compared with plain PyTorch on one process.

Each loop runs in plain PyTorch over whole batches or micro-batches, and with the Accelerator on one and two processes in
each layout.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.errors import PrepareError, StateError
from tests.devices import ON_CPU
from tests.distributed.ranks import run_ranks
from tests.distributed.scenarios import run_scenarios

pytestmark = pytest.mark.on_device

BATCH, UPDATES, WIDTH = 8, 4, 4


class Pair:
    """A generator and a discriminator with their optimizers. With `shares`, both contain the same layer."""

    def __init__(self, shares: bool = False) -> None:
        torch.manual_seed(0)
        shared = nn.Linear(WIDTH, WIDTH)
        self.g: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), shared)
        self.d: Any = nn.Sequential(shared if shares else nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.opt_g: Any = torch.optim.Adam(self.g.parameters(), lr=0.01)
        self.opt_d: Any = torch.optim.SGD(self.d.parameters(), lr=0.1, momentum=0.9)

    def weights(self) -> torch.Tensor:
        tensors = [p.detach() for model in (self.g, self.d) for p in model.parameters()]
        return torch.cat([getattr(t, "full_tensor", lambda t=t: t)().flatten().cpu() for t in tensors])


def compute_d_loss(pair: Pair, real: torch.Tensor, noise: torch.Tensor, penalty: bool) -> torch.Tensor:
    fake = pair.g(noise).detach()
    loss = pair.d(fake).mean() - pair.d(real).mean()
    if penalty:
        mixed = (0.5 * (real + fake)).requires_grad_()
        (slope,) = torch.autograd.grad(pair.d(mixed).sum(), mixed, create_graph=True)
        loss = loss + (slope.norm(dim=1) - 1).square().mean()
    return loss


def compute_g_loss(pair: Pair, noise: torch.Tensor) -> torch.Tensor:
    return -pair.d(pair.g(noise)).mean()


def make_data(updates: int = UPDATES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, updates * BATCH, WIDTH, generator=generator).unbind()


Blocks = Callable[..., Any]
Backward = Callable[[torch.Tensor], None]


# ---------------------------------------------------------------- the loops, for plain PyTorch and for an Accelerator


def train_in_turn(
    pair: Pair, batches: Any, block: Blocks, backward: Backward, ends: Callable[[], bool], penalty: bool
) -> None:
    """Train D and then G on each batch, in separate blocks. Each steps at the end of its own window."""
    for real, noise in batches:
        with block(pair.d):
            backward(compute_d_loss(pair, real, noise, penalty))
            if ends():
                pair.opt_d.step()
                pair.opt_d.zero_grad()
        with block(pair.g):
            backward(compute_g_loss(pair, noise))
            if ends():
                pair.opt_g.step()
                pair.opt_g.zero_grad()


def train_at_once(
    pair: Pair, batches: Any, block: Blocks, backward: Backward, ends: Callable[[], bool], penalty: bool
) -> None:
    """Compute both losses with the weights from before, then make both steps."""
    for real, noise in batches:
        with block(pair.d):
            backward(compute_d_loss(pair, real, noise, penalty))
        with block(pair.g):
            backward(compute_g_loss(pair, noise))
        if ends():
            pair.opt_d.step()
            pair.opt_g.step()
            pair.opt_d.zero_grad()
            pair.opt_g.zero_grad()


def alternate_updates(
    pair: Pair, batches: Any, block: Blocks, backward: Backward, ends: Callable[[], bool], penalty: bool
) -> None:
    """Run all micro-batches of one update of D, then those of one update of G."""
    is_ds_turn = True
    for real, noise in batches:
        with block(pair.d if is_ds_turn else pair.g):
            backward(compute_d_loss(pair, real, noise, penalty) if is_ds_turn else compute_g_loss(pair, noise))
            if ends():
                optimizer = pair.opt_d if is_ds_turn else pair.opt_g
                optimizer.step()
                optimizer.zero_grad()
                is_ds_turn = not is_ds_turn


# The result must not depend on the number of micro-batches, except in turn: there, later micro-batches of G use an
# updated D.
LOOPS: dict[str, Callable[..., None]] = {
    "in turn": train_in_turn,
    "at once": train_at_once,
    "update by update": alternate_updates,
}


def train_by_hand(loop: Callable[..., None], steps: int, penalty: bool, shares: bool) -> torch.Tensor:
    """Train in plain PyTorch on one process. A batch has `steps` micro-batches, and a loss has gradients for one model only."""
    pair, (real, noise) = Pair(shares), make_data()
    num_done, turn = 0, pair.d
    kept: dict[Any, list[Any]] = {}

    def block(model: Any) -> Any:
        nonlocal turn
        turn = model
        return nullcontext()

    def backward(loss: torch.Tensor) -> None:
        """Add the gradients of the current model to those kept until its step."""
        parameters = list(turn.parameters())
        found = torch.autograd.grad(loss / steps, parameters, allow_unused=True)
        before = kept.get(turn) or [None] * len(found)
        kept[turn] = [b if f is None else f if b is None else b + f for b, f in zip(before, found)]

    def ends() -> bool:
        nonlocal num_done
        num_done += loop is not train_in_turn or turn is pair.d
        return num_done % steps == 0

    class OwnGradientsOptimizer:
        """Optimizer that steps with the kept gradients of its model."""

        def __init__(self, optimizer: Any, model: Any) -> None:
            self.optimizer, self.model = optimizer, model

        def step(self) -> None:
            for p, grad in zip(self.model.parameters(), kept.pop(self.model)):
                p.grad = grad
            self.optimizer.step()
            for each in (*pair.d.parameters(), *pair.g.parameters()):
                each.grad = None

        def zero_grad(self) -> None:
            pass

    pair.opt_d, pair.opt_g = OwnGradientsOptimizer(pair.opt_d, pair.d), OwnGradientsOptimizer(pair.opt_g, pair.g)
    size = BATCH // steps
    loop(pair, zip(real.split(size), noise.split(size)), block, backward, ends, penalty)
    return pair.weights()


def prepare_pair(accelerator: Accelerator, pair: Pair, rows: tuple[torch.Tensor, ...], size: int) -> Any:
    pair.d, pair.g, pair.opt_d, pair.opt_g, loader = accelerator.prepare(
        pair.d, pair.g, pair.opt_d, pair.opt_g, DataLoader(TensorDataset(*rows), batch_size=size)
    )
    return loader


def train_with_headway(
    loop: Callable[..., None], steps: int, penalty: bool, shares: bool, **options: Any
) -> torch.Tensor:
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=steps, **options)
    pair = Pair(shares)
    count = accelerator.strategy.data_shard.count
    loader = prepare_pair(accelerator, pair, make_data(), BATCH // steps // count)
    # Scripts call step() and zero_grad() in every micro-batch. Only the alternating loop needs to know the window's
    # end.
    ends = (lambda: accelerator.sync_gradients) if loop is alternate_updates else lambda: True
    loop(pair, loader, accelerator.accumulate, accelerator.backward, ends, penalty)
    found = pair.weights()
    everywhere = accelerator.gather(found[None])
    assert all(torch.equal(row, everywhere[0]) for row in everywhere), "weights differ between ranks"
    return found


def compare_loops(loop: Callable[..., None], penalty: bool, shares: bool, **options: Any) -> None:
    for steps in (1, 2, 4):
        # If the loop allows it, the result must equal that of whole batches.
        expected = (
            train_by_hand(loop, steps if loop is train_in_turn else 1, penalty, shares)
            if loop is not alternate_updates
            else None
        )
        if expected is None:
            expected = train_by_hand(loop, steps, penalty, shares)
        found = train_with_headway(loop, steps, penalty, shares, **options)
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{steps} micro-batches: {text}"
        )


def results_do_not_depend_on_micro_batches() -> None:
    """With both steps at once and with alternating updates, 1, 2 and 4 micro-batches give the same weights."""
    for loop in (train_at_once, alternate_updates):
        found = []
        for steps in (1, 2, 4):
            rows = make_data()
            if loop is alternate_updates:  # each update's rows come twice: once for D, once for G
                rows = tuple(t.view(UPDATES, 1, BATCH, WIDTH).expand(-1, 2, -1, -1).reshape(-1, WIDTH) for t in rows)
            accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=steps)
            pair = Pair()
            loader = prepare_pair(accelerator, pair, rows, BATCH // steps // accelerator.num_processes)
            ends = (lambda a=accelerator: a.sync_gradients) if loop is alternate_updates else lambda: True
            loop(pair, loader, accelerator.accumulate, accelerator.backward, ends, False)
            found.append(pair.weights())
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- one block for both models


def train_in_one_block(pair: Pair, batches: Any, block: Blocks, backward: Backward) -> None:
    for real, noise in batches:
        with block(pair.d, pair.g):
            pair.opt_d.zero_grad()
            backward(compute_d_loss(pair, real, noise, False))
            pair.opt_d.step()
            pair.opt_d.zero_grad()
            backward(compute_g_loss(pair, noise))
            pair.opt_g.step()
            pair.opt_g.zero_grad()
            pair.opt_d.zero_grad()


def one_block_is_exact_without_accumulation() -> None:
    plain, (real, noise) = Pair(), make_data()
    train_in_one_block(
        plain, zip(real.split(BATCH), noise.split(BATCH)), lambda *_: nullcontext(), torch.Tensor.backward
    )
    accelerator = Accelerator(cpu=ON_CPU)
    pair = Pair()
    loader = prepare_pair(accelerator, pair, make_data(), BATCH // accelerator.num_processes)
    train_in_one_block(pair, loader, accelerator.accumulate, accelerator.backward)
    torch.testing.assert_close(pair.weights(), plain.weights(), rtol=1e-5, atol=1e-6)


def one_block_with_accumulation_is_an_error() -> None:
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=2)
    pair = Pair()
    loader = prepare_pair(accelerator, pair, make_data(), BATCH // 2 // accelerator.num_processes)
    before = pair.weights()
    with pytest.raises(StateError, match=r"block of its own.*docs/several_models\.md"):
        train_in_one_block(pair, loader, accelerator.accumulate, accelerator.backward)
    assert torch.equal(pair.weights(), before)


def zero_grad_between_two_losses_is_an_error() -> None:
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=2)
    pair = Pair()
    loader = prepare_pair(accelerator, pair, make_data(), BATCH // 2 // accelerator.num_processes)
    real, noise = next(iter(loader))
    with accelerator.accumulate():
        accelerator.backward(compute_g_loss(pair, noise))
        pair.opt_d.zero_grad()
        with pytest.raises(StateError, match=r"block of its own"):
            accelerator.backward(compute_d_loss(pair, real, noise, False))


def optimizer_of_unnamed_model_is_an_error() -> None:
    """If a loss trains two models, `accumulate` must name both."""
    for steps in (1, 2):
        accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=steps)
        pair = Pair()
        loader = prepare_pair(accelerator, pair, make_data(), BATCH // steps // accelerator.num_processes)
        _, noise = next(iter(loader))
        with accelerator.accumulate(pair.g):
            accelerator.backward(compute_g_loss(pair, noise))
            pair.opt_g.step()
            with pytest.raises(StateError, match=r"no accumulate\(\) block has named Sequential"):
                pair.opt_d.step()


def one_optimizer_for_two_models() -> None:
    """`accumulate(unet)` also trains the text encoder if one optimizer has the parameters of both."""
    plain, (_, noise) = Pair(), make_data()
    optimizer = torch.optim.SGD([*plain.g.parameters(), *plain.d.parameters()], lr=0.1)
    for part in noise.split(BATCH):
        optimizer.zero_grad()
        compute_g_loss(plain, part).backward()
        optimizer.step()
    for steps in (1, 2):
        accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=steps)
        pair, other = Pair(), nn.Linear(2, 1)
        joint = torch.optim.SGD([*pair.g.parameters(), *pair.d.parameters()], lr=0.1)
        beside = torch.optim.SGD(other.parameters(), lr=0.1)
        size = BATCH // steps // accelerator.num_processes
        pair.g, pair.d, other, joint, beside, loader = accelerator.prepare(
            pair.g, pair.d, other, joint, beside, DataLoader(TensorDataset(noise), batch_size=size)
        )
        for (part,) in loader:
            with accelerator.accumulate(pair.g):
                accelerator.backward(compute_g_loss(pair, part))
                joint.step()
                joint.zero_grad()
        torch.testing.assert_close(pair.weights(), plain.weights(), rtol=1e-5, atol=1e-6)


def overlapping_windows() -> None:
    """Alternate accumulate(d) and accumulate(d, g). Gradients of d must not move from one window to the other."""
    rows = make_data(2)
    bare = Pair()
    steps = 2
    accelerator = Accelerator(cpu=ON_CPU, gradient_accumulation_steps=steps)
    pair = copy.deepcopy(bare)
    loader = prepare_pair(accelerator, pair, rows, BATCH // steps // accelerator.num_processes)
    found: list[list[torch.Tensor]] = []
    for index, (real, noise) in enumerate(loader):
        if index == steps:
            break
        with accelerator.accumulate(pair.d):
            accelerator.backward(compute_d_loss(pair, real, noise, False))
            if accelerator.sync_gradients:
                found.append([p.grad.clone() for p in pair.d.parameters()])
        with accelerator.accumulate(pair.d, pair.g):
            accelerator.backward(compute_g_loss(pair, noise))
            if accelerator.sync_gradients:
                found.append([p.grad.clone() for p in pair.d.parameters()])
    real, noise = (t[:BATCH] for t in rows)
    first = torch.autograd.grad(compute_d_loss(bare, real, noise, False), list(bare.d.parameters()))
    second = torch.autograd.grad(compute_g_loss(bare, noise), list(bare.d.parameters()))
    torch.testing.assert_close(found[0], list(first), check_device=False)
    torch.testing.assert_close(found[1], list(second), check_device=False)


class LimitedLinear(nn.Linear):
    """Linear layer that runs out of memory for more rows than `limit`."""

    limit = 1 << 30

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.limit:
            raise torch.OutOfMemoryError(f"{len(x)} rows")
        return super().forward(x)


def train_in_pieces(limit: int) -> None:
    """Train with automatic micro-batching and one loop over the pieces for each model. Running out of memory changes nothing."""
    expected = train_by_hand(train_in_turn, 1, False, False)
    accelerator = Accelerator(cpu=ON_CPU, microbatching="auto")
    pair = Pair()
    pair.d[0].__class__ = LimitedLinear
    pair.d[0].limit = limit
    loader = prepare_pair(accelerator, pair, make_data(), BATCH // accelerator.num_processes)
    for batch in loader:
        for real, noise in accelerator.microbatches(batch):
            with accelerator.accumulate(pair.d):
                accelerator.backward(compute_d_loss(pair, real, noise, False))
                pair.opt_d.step()
                pair.opt_d.zero_grad()
        for _, noise in accelerator.microbatches(batch):
            with accelerator.accumulate(pair.g):
                accelerator.backward(compute_g_loss(pair, noise))
                pair.opt_g.step()
                pair.opt_g.zero_grad()
    torch.testing.assert_close(pair.weights(), expected, rtol=1e-5, atol=1e-6)


def in_one_piece() -> None:
    train_in_pieces(1 << 30)


def in_pieces_of_two() -> None:
    train_in_pieces(2)


def one_loop_over_pieces_for_two_models_is_an_error() -> None:
    accelerator = Accelerator(cpu=ON_CPU, microbatching="auto")
    pair = Pair()
    (batch,) = list(prepare_pair(accelerator, pair, make_data(1), BATCH))[:1]
    pieces = accelerator.microbatches(batch)
    real, noise = next(pieces)
    with accelerator.accumulate(pair.d):
        accelerator.backward(compute_d_loss(pair, real, noise, False))
    with pytest.raises(StateError, match=r"once for each \(docs/several_models\.md\)"), accelerator.accumulate(pair.g):
        pass
    pieces.close()


SCENARIOS = [
    *[
        partial(compare_loops, loop, penalty, shares)
        for loop in LOOPS.values()
        for penalty, shares in ((False, False), (True, False), (False, True))
    ],
    results_do_not_depend_on_micro_batches, one_block_is_exact_without_accumulation, one_block_with_accumulation_is_an_error,
    in_one_piece, in_pieces_of_two, one_loop_over_pieces_for_two_models_is_an_error, zero_grad_between_two_losses_is_an_error,
    optimizer_of_unnamed_model_is_an_error, one_optimizer_for_two_models, overlapping_windows,
]  # fmt: skip


def name_scenarios(scenarios: list[Any]) -> Iterator[Callable[[], None]]:
    for each in scenarios:
        if isinstance(each, partial):
            loop, penalty, shares = each.args
            each.__name__ = f"{loop.__name__}{' with penalty' * penalty}{' with a shared part' * shares}"  # type: ignore[attr-defined]
        yield each


def run_all(options: dict[str, Any]) -> dict[str, str]:
    return run_scenarios([bind_options(each, options) for each in name_scenarios(SCENARIOS)])


def bind_options(each: Any, options: dict[str, Any]) -> Callable[[], None]:
    made = partial(each, **options)
    made.__name__ = each.__name__  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_several_models_under_ddp(num_ranks: int) -> None:
    for found in run_ranks(run_all, num_ranks, {}, timeout=240):
        assert not found, "\n".join(found.values())


def run_loops(options: dict[str, Any]) -> dict[str, str]:
    """Run the loops that take options, in one pair of processes. Models that share a layer cannot be sharded."""
    loops = [
        bind_options(each, options)
        for each in name_scenarios(SCENARIOS)
        if isinstance(each, partial) and not each.args[2]
    ]
    return run_scenarios([*loops, bind_options(models_that_share_a_layer, options)])


def models_that_share_a_layer(**options: Any) -> None:
    with pytest.raises(PrepareError, match=r"are already sharded: the model shares them"):
        prepare_pair(Accelerator(cpu=ON_CPU, **options), Pair(shares=True), make_data(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp=2"])
def test_several_models_under_fsdp(strategy: str) -> None:
    for found in run_ranks(run_loops, 2, {"strategy": strategy}):
        assert not found, "\n".join(found.values())
