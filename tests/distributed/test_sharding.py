"""Sharded models in training loops: mistakes that plain torch ignores silently, several models, losses and micro-batches."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from headway import GradientAccumulationPlugin, ShardingOptions
from headway.core.strategies.fully_sharded import fsdp_state
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.weights.pieces import is_dtensor
from headway.errors import StateError
from tests.distributed.layouts import (
    GPT,
    LENGTH,
    build_seeded,
    gather_weights,
    make_tokens,
    mean_square,
    measure_norm,
    run_each,
    start_fsdp,
)
from tests.distributed.ranks import run_ranks

# ---------------------------------------------------------------- silent mistakes


def trap_old_optimizer() -> None:
    """An optimizer and a parameter list made before `prepare` continue with the shards."""
    accelerator = start_fsdp()
    model = build_seeded(0, GPT)
    listed = list(model.parameters())
    optimizer = torch.optim.SGD(listed, lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = gather_weights(model)
    with accelerator.accumulate(model):
        accelerator.backward(mean_square(model, make_tokens()))
        assert float(accelerator.clip_grad_norm_(listed, 1e9)) == measure_norm(accelerator, model) > 0
        optimizer.step()
    after = gather_weights(model)
    assert all(not torch.equal(before[name], after[name]) for name in ("tokens.weight", "blocks.0.up.weight"))
    accelerator.free_memory()


def trap_not_finite_on_one_rank() -> None:
    """A non-finite value in one rank's shard makes the total norm non-finite on all ranks."""
    accelerator = start_fsdp(on_non_finite="skip")
    model, optimizer = accelerator.prepare(model := build_seeded(0, GPT), torch.optim.SGD(model.parameters(), lr=0.1))
    for bad in (float("inf"), float("nan")):
        accelerator.backward(mean_square(model, make_tokens()))
        if accelerator.process_index == 1:
            get_local_shard(dict(model.named_parameters())["blocks.0.up.weight"].grad).fill_(bad)  # type: ignore[arg-type]
        for norm_type in (2.0, 1.0, float("inf")):
            assert not torch.isfinite(accelerator.strategy.compute_total_norm(list(model.parameters()), norm_type))
        optimizer.step()
        assert optimizer.step_was_skipped
        optimizer.zero_grad()
    accelerator.backward(mean_square(model, make_tokens()))
    plain = build_seeded(0, GPT)
    mean_square(plain, make_tokens()).backward()
    for norm_type in (2.0, 1.0, float("inf")):
        found = accelerator.strategy.compute_total_norm(list(model.parameters()), norm_type)
        expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)  # type: ignore[misc]
        assert not is_dtensor(found)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    accelerator.free_memory()


def trap_weightless_nan() -> None:
    """A loss of 0/0 with weight 0 leaves the gradients finite on every rank."""
    accelerator = start_fsdp()
    model, optimizer = accelerator.prepare(model := build_seeded(0, GPT), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        with accelerator.accumulate(model):
            weights = torch.ones(2, LENGTH) * (accelerator.process_index == 0)
            loss = (model(make_tokens()).square().mean(-1) * weights).sum() / weights.sum()
            accelerator.backward(loss, weight=float(weights.sum()))
            assert 0 < measure_norm(accelerator, model) < float("inf")
            optimizer.step()
            optimizer.zero_grad()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in gather_weights(model).values())
    accelerator.free_memory()


def trap_failed_window() -> None:
    """Gradients of a failed window do not leak into the next window."""
    norms = []
    for fails in (False, True):
        accelerator = start_fsdp(gradient_accumulation_steps=2)
        model = accelerator.prepare(build_seeded(0, GPT))
        if fails:
            with pytest.raises(KeyError, match="the script's own"), accelerator.accumulate(model):
                raise KeyError("the script's own")  # before anything is gathered
            with accelerator.accumulate(model):
                accelerator.backward(mean_square(model, make_tokens(5)))
            assert any(fsdp_state.get_gathered_parameter(r).grad is not None for r in fsdp_state.iterate_records(model))  # type: ignore[union-attr]
            with contextlib.suppress(KeyError), accelerator.accumulate(model):
                mean_square(model, make_tokens(6))  # a forward pass without its backward pass
                raise KeyError
        for seed in (1, 2):
            with accelerator.accumulate(model):
                accelerator.backward(mean_square(model, make_tokens(seed)))
        norms.append(measure_norm(accelerator, model))
        accelerator.free_memory()
    assert norms[1] == norms[0]


def trap_after_evaluation() -> None:
    """An evaluation forward does not change parameter names and parameters."""
    accelerator = start_fsdp()
    model, _optimizer = accelerator.prepare(model := build_seeded(0, GPT), torch.optim.SGD(model.parameters(), lr=0.1))
    parts = [id(p) for p in model.parameters()]
    model.eval()
    with torch.no_grad():
        model(make_tokens())
    assert [id(p) for p in model.parameters()] == parts
    assert [id(accelerator.strategy.find_current(p)) for p in model.parameters()] == parts
    accelerator.strategy.free_gathered(model)
    assert [id(p) for p in model.parameters()] == parts
    model(make_tokens())
    exported = dict(accelerator.strategy.export_state(model))
    assert all(is_dtensor(tensor) for tensor in exported.values())
    assert list(exported) == list(build_seeded(0, GPT).state_dict())
    accelerator.free_memory()


class TiedBlocks(nn.Module):
    """Model in which two of three blocks share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def trap_ties() -> None:
    """Tied weights stay tied in the root and across blocks, and their gradient is the sum over all uses."""
    accelerator = start_fsdp()
    model = accelerator.prepare(build_seeded(0, GPT))
    mean_square(model, make_tokens())
    accelerator.strategy.free_gathered(model)
    assert model.tokens.weight is model.head.weight
    x, plain = torch.randn(3, 4, generator=torch.Generator().manual_seed(2)), build_seeded(1, TiedBlocks)
    model = accelerator.prepare(build_seeded(1, TiedBlocks))
    assert model.blocks[0][0].weight is model.blocks[2][0].weight
    assert (
        len(list(fsdp_state.iterate_sharded_modules(model))) == 4
    )  # the root, blocks.1, and the unshared layer of each of the two tied blocks
    accelerator.backward(model(x).square().sum())
    plain(x).square().sum().backward()
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)
    accelerator.free_memory()


def trap_seeds() -> None:
    """Models built from different seeds start with rank 0's values and buffers on all ranks."""
    accelerator = start_fsdp()
    made = build_seeded(accelerator.process_index, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    made[1].running_mean.fill_(accelerator.process_index)
    expected = {**build_seeded(0, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).state_dict()}
    found = gather_weights(accelerator.prepare(made))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    accelerator.free_memory()


class OptionalLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        return self.second(self.first(x)) if uses_second else self.first(x)


def trap_unused_parameters() -> None:
    """A parameter used on one rank gets the sum over the ranks. One used nowhere gets no gradient and no weight decay."""
    accelerator = start_fsdp()
    torch.manual_seed(0)
    model = OptionalLayers()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    by_hand = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    for users in ([0], [], [0, 1], [1]):
        with accelerator.accumulate(model):
            accelerator.backward(model(x, accelerator.process_index in users).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        sum(plain(x, rank in users).square().mean() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        by_hand.step()
        by_hand.zero_grad()
        found = gather_weights(model)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    accelerator.free_memory()
    # If the first update used everything, ranks do not compare usage again, unless find_unused_parameters is set.
    for asks in (False, True):
        accelerator = start_fsdp(kwargs_handlers=[ShardingOptions(find_unused_parameters=asks)])
        model = accelerator.prepare(nn.Sequential(first := nn.Linear(4, 4), second := nn.Linear(4, 4)))
        accelerator.backward(model(x).sum())
        accelerator.strategy.drop_gradients(list(model.parameters()))
        hidden = model.register_forward_hook(
            lambda m, args, out: out * 0 + first.bias.sum() if False else out.detach() + m[0].bias.sum()
        )
        if asks:
            accelerator.backward(model(x).sum())
            assert second.weight.grad is None
            assert first.bias.grad is not None
        else:
            with pytest.raises(StateError, match=r"3 on rank 0 .*; 3 on rank 1 .*find_unused_parameters"):
                accelerator.backward(model(x).sum())
        hidden.remove()
        accelerator.free_memory()


# ---------------------------------------------------------------- several models, losses, micro-batches


def second_loss_and_retained_graph() -> None:
    accelerator = start_fsdp()
    model = accelerator.prepare(build_seeded(0, GPT))
    with accelerator.accumulate(model):
        out = model(make_tokens())
        accelerator.backward(out.square().mean(), retain_graph=True)
        once = measure_norm(accelerator, model)
        accelerator.backward(out.square().mean())
        assert measure_norm(accelerator, model) == pytest.approx(2 * once, rel=1e-6)
    accelerator.free_memory()


def gradients_of_each_batch() -> None:
    """Reducing once per window or in each micro-batch gives the same gradients, also with no_sync and forward_backward."""
    norms = []
    for is_each in (False, True):
        plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=is_each)
        accelerator = start_fsdp(gradient_accumulation_plugin=plugin)
        model = accelerator.prepare(build_seeded(0, GPT))
        for seed in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(mean_square(model, make_tokens(seed + 7 * accelerator.process_index)))
            is_last = seed == 2
            assert (model.tokens.weight.grad is None) == (not is_each and not is_last)
        norms.append(measure_norm(accelerator, model))
        accelerator.free_memory()
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    accelerator = start_fsdp()
    model = accelerator.prepare(build_seeded(0, GPT))
    with model.no_sync():
        accelerator.backward(mean_square(model, make_tokens(0 + 7 * accelerator.process_index)) / 3)
    assert model.tokens.weight.grad is None
    for seed in (1, 2):
        accelerator.backward(mean_square(model, make_tokens(seed + 7 * accelerator.process_index)) / 3)
    assert measure_norm(accelerator, model) == pytest.approx(norms[0], rel=1e-6)
    accelerator.strategy.drop_gradients(list(model.parameters()))
    loss = accelerator.forward_backward(make_tokens(rows=4), lambda ids: mean_square(model, ids))
    assert float(loss) == pytest.approx(mean_square(build_seeded(0, GPT), make_tokens(rows=4)).item(), rel=1e-6)
    accelerator.free_memory()


class MovableGPT(GPT):
    """GPT that records the device to which it is moved."""

    device: object = None

    def to(self, device: object) -> "MovableGPT":
        self.device = device
        return super().to(device)


def several_models() -> None:
    """Two models train in turn, and a third one only evaluates."""
    accelerator = start_fsdp()
    one, other, teacher = build_seeded(0, GPT), build_seeded(1, GPT), build_seeded(2, MovableGPT)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, other))
    expected = []
    for seed in range(3):
        plain = build_seeded(seed, GPT)
        if seed < 2:
            (mean_square(plain, make_tokens()) / (1 + 0 * seed)).backward()
            torch.optim.SGD(plain.parameters(), lr=0.1).step()
        expected.append(plain.state_dict())
    one, other, first, second = accelerator.prepare(one, other, first, second)
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    assert teacher.device == accelerator.device
    for model, optimizer in ((one, first), (other, second)):
        with accelerator.accumulate(model):
            accelerator.backward(mean_square(model, make_tokens()))
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.process_index == 0:  # an evaluation model is whole, and can run on one rank alone
        teacher(make_tokens())
    for model, values in zip((one, other, teacher), expected):
        for name, value in gather_weights(model).items():
            torch.testing.assert_close(value, values[name])
    accelerator.free_memory()


def buffers_follow_rank_0() -> None:
    accelerator = start_fsdp()
    model = accelerator.prepare(
        build_seeded(0, lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    )
    with accelerator.accumulate(model):
        generator = torch.Generator().manual_seed(accelerator.process_index)
        accelerator.backward(model(torch.randn(4, 4, generator=generator)).mean())
    plain = build_seeded(0, lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    plain(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)
    accelerator.free_memory()


GROUPS = {
    "traps": (trap_old_optimizer, trap_not_finite_on_one_rank, trap_weightless_nan, trap_failed_window, trap_after_evaluation,
              trap_ties, trap_seeds, trap_unused_parameters),
    "loops": (second_loss_and_retained_graph, gradients_of_each_batch, several_models, buffers_follow_rank_0),
}  # fmt: skip


def run_group(group: str, only: str = "") -> list[str]:
    return run_each(GROUPS[group], only)


@pytest.mark.parametrize("group", GROUPS)
def test_sharded_loop_scenarios(group):
    for failed in run_ranks(run_group, 2, group):
        assert not failed, failed[0]
