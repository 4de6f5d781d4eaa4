"""The non-finite guard: what is bad is noticed before the update, named, and leaves nothing behind."""

import math

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, GradScalerKwargs, NonFinitePolicy
from headway.core.runtime import events
from headway.core.strategies.base import Capabilities, SingleStrategy
from headway.core.training.checks import finite
from headway.errors import ConfigError, NonFiniteError

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr(finite.log, "warning", lambda text, *args: lines.append(text % args))
    return lines


def build(action="skip", *models, **options):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, on_non_finite=action, **options)
    models = models or (nn.Linear(3, 1),)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    return accelerator, *accelerator.prepare(*models, *optimizers)


def update(accelerator, model, optimizer, *rows):
    for row in rows:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([row])).mean())
            optimizer.step()
            optimizer.zero_grad()


def values(model, optimizer):
    state = [entry for each in optimizer.state.values() for entry in each.values()]
    return [value.clone() for value in [*model.parameters(), *state]]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


GOOD = [1.0, 2.0, 3.0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_skipped_update_leaves_nothing_behind(bad, told):
    accelerator, model, optimizer = build()
    update(accelerator, model, optimizer, GOOD)
    before = values(model, optimizer)
    update(accelerator, model, optimizer, [bad, 1.0, 1.0])
    assert same(before, values(model, optimizer))
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.num_updates == 1
    assert model.weight.grad is None
    update(accelerator, model, optimizer, GOOD)

    other, its_model, its_optimizer = build()
    update(other, its_model, its_optimizer, GOOD)
    update(other, its_model, its_optimizer, GOOD)
    assert same(values(model, optimizer), values(its_model, its_optimizer))
    assert told == [accelerator.non_finite.report]
    assert told[0].startswith("update 2: the loss of micro-batch 1 was ")
    assert "(1 in a row, 1 in all)" in told[0]
    assert accelerator.non_finite.num_in_row == 0
    assert other.non_finite.report == ""


def test_without_it_the_weights_are_lost():
    accelerator, model, optimizer = build(None)
    update(accelerator, model, optimizer, [NAN, 1.0, 1.0])
    assert accelerator.non_finite is None
    assert model.weight.isnan().any()


def test_a_loss_that_does_not_show_in_its_gradient(told):
    accelerator, model, optimizer = build()
    before = values(model, optimizer)
    loss = model(torch.ones(1, 3)).mean() + torch.tensor(INF)
    accelerator.backward(loss)
    optimizer.step()
    assert same(before, values(model, optimizer))
    assert "the loss of micro-batch 1 was inf" in told[0]


def test_a_gradient_behind_a_finite_loss_is_named(told):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    accelerator, model, optimizer = build("skip", model)
    with torch.no_grad():
        model[1].bias.zero_()
    hidden = model[0](torch.ones(1, 2)).sum() + model[1].bias.sqrt().sum()  # the slope of sqrt at 0 is infinite
    accelerator.backward(hidden)
    optimizer.step()
    assert "the losses were finite, but gradients of 1 of 3 parameters are not (1.bias)" in told[0]


def test_the_culprit_is_named_also_after_clipping(told):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    accelerator, model, optimizer = build("skip", model)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    model[1].weight.grad[0, 0] = NAN
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert model[0].weight.grad.isnan().all()  # one nan in the norm is a nan in all
    optimizer.step()
    assert "1 of 3 parameters are not (1.weight)" in told[0]


class Passes(TorchDispatchMode):
    """Counts readings of all gradients."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func.overloadpacket is torch.ops.aten._foreach_norm
        return func(*args, **(kwargs or {}))


def test_gradients_are_read_once_for_the_guard_and_clipping():
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.ones(1, 3)).mean())
    with Passes() as passes:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert passes.num == 1
    assert accelerator.num_updates == 1


@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_clipping_is_bit_for_bit_that_of_torch(dtype, norm_type):
    found = []
    for action in (None, "skip"):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, on_non_finite=action)
        model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1)).to(dtype)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.randn(4, 3).to(dtype)).square().mean() * 100)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5, norm_type)
        found.append([norm, *(parameter.grad for parameter in model.parameters())])
        optimizer.step()
        assert accelerator.num_updates == 1
    assert same(*found)


def spoil(model):
    model.weight.grad[0, 0] = NAN


@pytest.mark.parametrize("clips", [0, 1, 2])
def test_gradients_changed_after_a_clipping_are_read_again(clips, told):
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.ones(1, 3)).mean())
    for _ in range(clips):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    spoil(model)
    optimizer.step()
    assert accelerator.num_updates == 0
    assert torch.isfinite(model.weight).all()


def test_gradients_that_were_not_clipped_are_read(told):
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.ones(1, 3)).mean())
    spoil(model)
    accelerator.clip_grad_norm_([model.bias], 1.0)
    optimizer.step()
    assert accelerator.num_updates == 0
    assert "weight" in told[0]


def test_a_norm_from_the_previous_window_is_not_reused(told):
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.ones(1, 3)).mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()  # no update was made
    accelerator.backward(model(torch.ones(1, 3)).mean())
    spoil(model)
    optimizer.step()
    assert accelerator.num_updates == 0


def test_finite_gradients_whose_norm_overflows_are_no_alarm(told):
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.ones(1, 3)).sum() * 1e30)
    assert torch.linalg.vector_norm(model.weight.grad) == INF
    optimizer.step()
    assert told == []
    assert accelerator.num_updates == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_any_type(dtype, told):
    accelerator, model, optimizer = build("skip", nn.Linear(300, 1).to(dtype))
    accelerator.backward(model(torch.ones(1, 300, dtype=dtype)).sum() * 6e4)
    optimizer.step()
    assert (told, accelerator.num_updates) == ([], 1)
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 300, dtype=dtype)).sum())
    model.weight.grad[0, 7] = INF
    optimizer.step()
    assert accelerator.num_updates == 1
    assert "(weight)" in told[0]


def test_sparse_and_empty_gradients(told):
    model = nn.ModuleList([nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1)])
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    accelerator = Accelerator(cpu=True, on_non_finite="skip")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for factor in (1.0, NAN):
        out = model[1](model[0](torch.tensor([1, 1]))).sum()
        accelerator.backward(out + model.empty.sum())
        if factor != 1.0:
            model[0].weight.grad = model[0].weight.grad * factor
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.num_updates == 1
    assert "1 of 4 parameters are not (0.weight)" in told[0]


def test_the_micro_batch_is_named(told):
    accelerator, model, optimizer = build(gradient_accumulation_steps=3)
    update(accelerator, model, optimizer, GOOD, [NAN, 0.0, 0.0], GOOD)
    assert "the loss of micro-batch 2 was nan" in told[0]
    update(accelerator, model, optimizer, GOOD, GOOD, GOOD)
    assert accelerator.num_updates == 1
    update(accelerator, model, optimizer, [INF, 0.0, 0.0], GOOD, [NAN, 0.0, 0.0])
    assert "update 2: the loss of micro-batch 1 was" in told[1]
    assert "(and 1 more there)" in told[1]


def test_what_weighs_nothing_is_no_alarm(told):
    """A mean over no items is 0/0."""
    accelerator, model, optimizer = build(gradient_accumulation_steps=2)
    for rows, weight in ((torch.ones(2, 3), 2), (torch.empty(0, 3), 0)):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).mean(), weight=weight)
            optimizer.step()
    assert (told, accelerator.num_updates) == ([], 1)


def test_several_backwards_without_accumulate(told):
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.tensor([[NAN, 0.0, 0.0]])).mean())
    accelerator.backward(model(torch.ones(1, 3)).mean())
    optimizer.step()
    assert "the loss of micro-batch 1 was nan" in told[0]


def test_two_optimizers_of_a_window_skip_together(told):
    accelerator, one, two, first, second = build("skip", nn.Linear(3, 3), nn.Linear(3, 1))
    before = values(one, first), values(two, second)
    with accelerator.accumulate(one, two):
        accelerator.backward(two(one(torch.ones(1, 3))).mean())
        two.weight.grad.fill_(NAN)
        first.step()
        second.step()
    assert same(before[0], values(one, first))
    assert same(before[1], values(two, second))
    assert (len(told), accelerator.non_finite.num_skipped) == (1, 1)
    assert "Linear 1: weight" in told[0]


def test_a_second_loss_of_a_window_is_looked_at_again(told):
    accelerator, one, two, first, second = build("skip", nn.Linear(3, 1), nn.Linear(3, 1))
    with accelerator.accumulate(one, two):
        accelerator.backward(one(torch.ones(1, 3)).mean())
        first.step()
        first.zero_grad()
        accelerator.backward(two(torch.full((1, 3), NAN)).mean())
        second.step()
    assert first.num_updates == 1
    assert second.num_updates == 0
    assert len(told) == 1


def test_raise():
    accelerator, model, optimizer = build("raise")
    before = values(model, optimizer)
    with pytest.raises(
        NonFiniteError, match=r"update 1: the loss of micro-batch 1 was nan on rank 0: no update was made"
    ):
        update(accelerator, model, optimizer, [NAN, 1.0, 1.0])
    assert same(before, values(model, optimizer))


def test_too_many_in_a_row_raise():
    accelerator, model, optimizer = build(NonFinitePolicy("skip", max_in_row=2))
    bad = [NAN, 1.0, 1.0]
    update(accelerator, model, optimizer, bad, bad, GOOD, bad, bad)
    with pytest.raises(NonFiniteError, match="3 in a row are more than max_in_row=2"):
        update(accelerator, model, optimizer, bad)
    assert accelerator.num_updates == 1


def test_stop_ends_the_loader_and_the_epochs(told):
    accelerator, model, optimizer = build("stop")
    rows = torch.ones(8, 3)
    rows[4] = NAN
    loader, evaluation = accelerator.prepare(
        DataLoader(TensorDataset(rows), batch_size=2), DataLoader(TensorDataset(rows), batch_size=4)
    )
    num_batches, num_evaluated = 0, 0
    for _ in accelerator.epochs(3):
        for (x,) in loader:
            num_batches += 1
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        num_evaluated += sum(1 for _ in evaluation)
    assert num_batches == 3
    assert num_evaluated == 2  # once, after the pass that was ended
    assert accelerator.non_finite.has_stopped
    assert "training stops" in told[0]
    assert list(loader) == []
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 6)
    loader.load_state_dict(state)
    assert len(list(loader)) == 1


def test_fp16_reports_losses_and_leaves_overflows_to_the_scaler(told):
    accelerator, model, optimizer = build(
        "skip", mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**40)]
    )
    loss = nn.functional.mse_loss
    before = values(model, optimizer)
    accelerator.backward(loss(model(torch.full((1, 3), 1e3)).float(), torch.full((1, 1), 1e4)))
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert told == []
    optimizer.zero_grad()
    accelerator.backward(model(torch.tensor([[NAN, 0.0, 0.0]])).float().mean())
    optimizer.step()
    assert same(before, values(model, optimizer))
    assert "update 1: the loss of micro-batch 1 was nan" in told[0]
    assert accelerator.non_finite.num_skipped == 1


def test_overflows_are_left_to_an_engine_that_scales_losses_itself(told, monkeypatch):
    monkeypatch.setattr(SingleStrategy, "capabilities", Capabilities(scales_losses=True))
    accelerator, model, optimizer = build(
        "raise", mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)]
    )
    accelerator.backward(model(torch.ones(1, 3)).float().mean())
    model.weight.grad.fill_(INF)
    optimizer.step()  # the engine would not
    assert accelerator.num_updates == 1
    assert told == []


def test_buffers_that_no_skip_takes_back_are_named(told):
    accelerator, model, optimizer = build("skip", nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    accelerator.backward(model(torch.tensor([GOOD, [NAN, 1.0, 1.0]])).mean())
    optimizer.step()
    assert "Buffers are not finite either (1.running_mean, 1.running_var)" in told[0]


def test_batches_in_pieces(told):
    accelerator, model, optimizer = build(microbatching="auto")
    rows = torch.ones(8, 3)
    rows[1, 1] = NAN
    before = values(model, optimizer)
    for batch, num_updates in ((rows, 0), (torch.ones(8, 3), 1)):
        accelerator.forward_backward(batch, lambda x: model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
        assert accelerator.num_updates == num_updates
        assert same(before, values(model, optimizer)) == (num_updates == 0)
    for piece in accelerator.microbatches(rows):
        with accelerator.accumulate(model):
            accelerator.backward(model(piece).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.num_updates == 1
    assert len(told) == 2


def test_the_event(told):
    class Ear(list):
        def hear(self, happening):
            self.append(happening)

    ear = Ear()
    accelerator, model, optimizer = build()
    events.subscribe(ear.hear)
    update(accelerator, model, optimizer, [NAN, 1.0, 1.0])
    (happening,) = ear
    assert (happening.name, happening.source) == ("non_finite", accelerator.clock)
    assert happening.details == {
        "update": 1, "action": "skip", "parameters": [], "losses": {"0": "nan in micro-batch 1"},
    }  # fmt: skip


def test_the_multiplication_used_on_accelerators_gives_the_same_verdict():
    """On a device the loss is not read: its gradient is multiplied by 1 or nan."""
    for value in (2.0, NAN, INF, -INF):
        leaf = torch.tensor(value, requires_grad=True)
        plain = leaf.detach()
        (leaf * (plain - plain + 1)).backward()
        assert leaf.grad.item() == 1.0 if math.isfinite(value) else leaf.grad.isnan()


@pytest.mark.parametrize("wrong", ["ignore", NonFinitePolicy])
def test_unknown_actions_are_refused(wrong):
    with pytest.raises(
        ConfigError, match="on_non_finite='ignore' is unknown; allowed: 'skip', 'stop', 'raise', 'explain' or None"
    ):
        Accelerator(cpu=True, on_non_finite=wrong if isinstance(wrong, str) else wrong("ignore"))
    with pytest.raises(ConfigError, match="max_in_row=0"):
        NonFinitePolicy(max_in_row=0)


@pytest.mark.parametrize("action", ["skip", "stop"])
def test_going_back_to_a_checkpoint_starts_over(action, told, tmp_path):
    accelerator, model, optimizer = build(action)
    update(accelerator, model, optimizer, GOOD)
    accelerator.save_state(tmp_path / "saved")
    update(accelerator, model, optimizer, [NAN, 1.0, 1.0])
    assert accelerator.num_updates == 1
    accelerator.load_state(tmp_path / "saved")
    assert not accelerator.non_finite.has_stopped
    update(accelerator, model, optimizer, GOOD)  # in a window of the same number
    assert accelerator.num_updates == 2
    accelerator.load_state(tmp_path / "saved")
    update(accelerator, model, optimizer, [NAN, 1.0, 1.0])
    assert accelerator.num_updates == 1
    assert accelerator.non_finite.num_skipped == 2


@pytest.mark.parametrize("steps", [True, False])
def test_clipped_gradients_are_given_up_by_zero_grad(steps):
    """A second optimizer's too, which is clipped after the verdict; the next forward would want their memory."""
    accelerator, first, second, *optimizers = build("skip", nn.Linear(3, 1), nn.Linear(3, 1))
    accelerator.backward((first(torch.tensor([GOOD])) + second(torch.tensor([GOOD]))).mean())
    held = [StorageWeakRef(p.grad.untyped_storage()) for model in (first, second) for p in model.parameters()]
    for model, optimizer in zip((first, second), optimizers):
        accelerator.clip_grad_norm_(model.parameters(), 0.01)
        if steps:
            optimizer.step()
        optimizer.zero_grad()
    assert [each.expired() for each in held] == [True] * 4
