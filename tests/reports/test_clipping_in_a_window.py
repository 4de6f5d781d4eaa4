"""Tests of clipping in accumulation windows. Accelerate's API clips in each micro-batch, Headway's only at the window's end."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from headway import Accelerator, GradientAccumulationPlugin
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.plugins import FullyShardedDataParallelPlugin
from headway.core.config.torch_kwargs import GradScalerKwargs
from tests.distributed.ranks import run_ranks

STEPS = 3
LIMIT = 0.5


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def make_batches(rank=0, world_size=1):
    """Return one rank's batches of 2 rows. The norms of their gradients are far above LIMIT."""
    x, y = torch.arange(96.0).reshape(24, 4) / 10, torch.arange(24.0).reshape(24, 1)
    return [(x[i : i + 2], y[i : i + 2]) for i in range(0, 24, 2)][rank::world_size]


def get_full_tensor(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train_by_hand(layout, sends_each):
    """Train in plain PyTorch with clipping in each micro-batch. Return the norms and the weights."""
    if layout is not None and not dist.is_initialized():
        dist.init_process_group("gloo")  # the Accelerator uses this group
    rank, world_size = (0, 1) if layout is None else (dist.get_rank(), dist.get_world_size())
    model = make_model()
    if layout == "fsdp":
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    net = DistributedDataParallel(model) if layout == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []
    for index, (x, y) in enumerate(make_batches(rank, world_size)):
        is_last = (index + 1) % STEPS == 0
        if layout == "fsdp":
            model.set_requires_gradient_sync(is_last or sends_each)
        with net.no_sync() if layout == "ddp" and not (is_last or sends_each) else nullcontext():
            (torch.nn.functional.mse_loss(net(x), y) / STEPS).backward()
        norms.append(float(get_full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT))))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return norms, [get_full_tensor(each) for each in model.parameters()]


def train(kind, sends_each, **options):
    """Train with an Accelerator of this class. Return the norms and the weights."""
    plugin = GradientAccumulationPlugin(num_steps=STEPS, sync_each_batch=sends_each)
    accelerator = kind(cpu=True, gradient_accumulation_plugin=plugin, **options)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    norms = []
    for x, y in make_batches(accelerator.process_index, accelerator.num_processes):
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), LIMIT)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, [get_full_tensor(each) for each in model.parameters()]


def train_both_ways(layout):
    """Return (by hand, with Accelerate's API) for synchronization at the window's end and in each micro-batch."""
    results = []
    for sends_each in (False, True):
        by_hand = train_by_hand(layout, sends_each)
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=1)
        options = {"fsdp_plugin": plugin} if layout == "fsdp" else {}
        results.append((by_hand, train(AccelerateAccelerator, sends_each, **options)))
    return results


def assert_same_training(by_hand, ours):
    assert max(by_hand[0]) > 10 * LIMIT
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(by_hand[0]), rtol=1e-5, atol=1e-6)
    for one, other in zip(ours[1], by_hand[1]):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_one_process_clips_like_plain_pytorch():
    for by_hand, ours in train_both_ways(None):
        assert_same_training(by_hand, ours)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_processes_clip_like_plain_pytorch(layout):
    for rank in run_ranks(train_both_ways, 2, layout):
        for by_hand, ours in rank:
            assert_same_training(by_hand, ours)


def test_native_api_clips_only_at_the_end_of_a_window():
    model, norms = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for index, (x, y) in enumerate(make_batches()):
        (torch.nn.functional.mse_loss(model(x), y) / STEPS).backward()
        is_last = (index + 1) % STEPS == 0
        limit = LIMIT if is_last else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_training((norms, list(model.parameters())), train(Accelerator, False))


def step_in_half_precision(clip, *, overflows=False):
    """Train for one window of two micro-batches in fp16 at a scale of 1024. Return the weights and whether the step was skipped."""
    accelerator = AccelerateAccelerator(
        cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
    )  # fmt: skip
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    for factor in (1e30 if overflows else 4.0, 2.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum() * factor)
            clip(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach().flatten().tolist(), optimizer.step_was_skipped


def test_a_scaled_partial_gradient_is_clipped_by_its_true_norm():
    """(6, 8) is clipped to (0.3, 0.4). Adding (3, 4) gives (3.3, 4.4), which is clipped to (0.3, 0.4)."""
    norms = []
    clip = lambda accelerator, model: norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))  # noqa: E731
    weights, _ = step_in_half_precision(clip)
    assert norms == pytest.approx([10.0, 5.5], rel=1e-3)
    assert weights == pytest.approx([0.7, 0.6], rel=1e-3)


def test_a_scaled_partial_gradient_is_clamped_by_its_true_values():
    """(6, 8) is clamped to (5, 5). Adding (3, 4) gives (8, 9), which is clamped to (5, 5)."""
    weights, was_skipped = step_in_half_precision(lambda run, model: run.clip_grad_value_(model.parameters(), 5.0))
    assert weights == pytest.approx([-4.0, -4.0], rel=1e-3)
    assert not was_skipped


@pytest.mark.parametrize(
    "clip",
    [
        lambda run, model: run.clip_grad_norm_(model.parameters(), 0.5),
        lambda run, model: run.clip_grad_value_(model.parameters(), 0.5),
    ],
    ids=["norm", "value"],
)
def test_overflow_in_a_clipped_micro_batch_skips_the_update(clip):
    assert step_in_half_precision(clip, overflows=True) == ([1.0, 1.0], True)


def accumulate_by_hand(kind, act):
    """Call backward twice in fp16 without accumulate(), with `act` after each call, then step."""
    accelerator = kind(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    model = torch.nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    for _ in range(2):
        accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
        act(accelerator, model, optimizer)
    optimizer.step()


@pytest.mark.parametrize("kind", [Accelerator, AccelerateAccelerator])
@pytest.mark.parametrize(
    "act",
    [
        lambda run, model, _: run.clip_grad_norm_(model.parameters(), 0.5),
        lambda run, model, _: run.clip_grad_value_(model.parameters(), 0.5),
        lambda run, *_: run.unscale_gradients(),
        lambda run, _, optimizer: run.unscale_gradients(optimizer),
    ],
    ids=["norm", "value", "unscale", "unscale_one"],
)
def test_scaled_gradients_are_not_added_to_unscaled_ones(kind, act):
    """torch's scaler raises an error here, and so does Accelerate on a GPU."""
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since the last"):
        accumulate_by_hand(kind, act)


def test_gradients_may_be_unscaled_again_if_none_are_added():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    model = torch.nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    for is_dropped in (True, False, True, False):
        accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
        norms = [float(accelerator.clip_grad_norm_(model.parameters(), 0.5)) for _ in range(2)]
        assert norms == pytest.approx([5.0, 0.5], rel=1e-3)
        if not is_dropped:
            optimizer.step()
        optimizer.zero_grad()
