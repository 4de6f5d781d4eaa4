"""Test the non-finite guard: non-finite values are noticed before the update, named, and change nothing."""

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
def warnings(monkeypatch):
    """List of the warnings that are logged."""
    lines = []
    monkeypatch.setattr(finite.log, "warning", lambda text, *args: lines.append(text % args))
    return lines


def build(action="skip", *models, **options):
    """Return an Accelerator with this action, and prepared models with an AdamW optimizer each."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, on_non_finite=action, **options)
    models = models or (nn.Linear(3, 1),)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    return accelerator, *accelerator.prepare(*models, *optimizers)


def train_window(accelerator, model, optimizer, *rows):
    for row in rows:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([row])).mean())
            optimizer.step()
            optimizer.zero_grad()


def copy_values(model, optimizer):
    state = [entry for each in optimizer.state.values() for entry in each.values()]
    return [value.clone() for value in [*model.parameters(), *state]]


def are_equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


GOOD = [1.0, 2.0, 3.0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_skipped_update_changes_nothing(bad, warnings):
    accelerator, model, optimizer = build()
    train_window(accelerator, model, optimizer, GOOD)
    before = copy_values(model, optimizer)
    train_window(accelerator, model, optimizer, [bad, 1.0, 1.0])
    assert are_equal(before, copy_values(model, optimizer))
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.num_updates == 1
    assert model.weight.grad is None
    train_window(accelerator, model, optimizer, GOOD)

    other, its_model, its_optimizer = build()
    train_window(other, its_model, its_optimizer, GOOD)
    train_window(other, its_model, its_optimizer, GOOD)
    assert are_equal(copy_values(model, optimizer), copy_values(its_model, its_optimizer))
    assert warnings == [accelerator.non_finite.report]
    assert warnings[0].startswith("update 2: the loss of micro-batch 1 was ")
    assert "(1 in a row, 1 in all)" in warnings[0]
    assert accelerator.non_finite.num_in_row == 0
    assert other.non_finite.report == ""


def test_without_the_guard_the_weights_are_lost():
    accelerator, model, optimizer = build(None)
    train_window(accelerator, model, optimizer, [NAN, 1.0, 1.0])
    assert accelerator.non_finite is None
    assert model.weight.isnan().any()


def test_infinite_loss_with_a_finite_gradient_is_noticed(warnings):
    accelerator, model, optimizer = build()
    before = copy_values(model, optimizer)
    loss = model(torch.ones(1, 3)).mean() + torch.tensor(INF)
    accelerator.backward(loss)
    optimizer.step()
    assert are_equal(before, copy_values(model, optimizer))
    assert "the loss of micro-batch 1 was inf" in warnings[0]


def test_infinite_gradient_of_a_finite_loss_is_named(warnings):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    accelerator, model, optimizer = build("skip", model)
    with torch.no_grad():
        model[1].bias.zero_()
    hidden = model[0](torch.ones(1, 2)).sum() + model[1].bias.sqrt().sum()  # the slope of sqrt at 0 is infinite
    accelerator.backward(hidden)
    optimizer.step()
    assert "the losses were finite, but gradients of 1 of 3 parameters are not (1.bias)" in warnings[0]


def test_parameter_is_named_even_after_clipping(warnings):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    accelerator, model, optimizer = build("skip", model)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    model[1].weight.grad[0, 0] = NAN
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert model[0].weight.grad.isnan().all()  # a NaN norm makes all gradients NaN
    optimizer.step()
    assert "1 of 3 parameters are not (1.weight)" in warnings[0]


class Passes(TorchDispatchMode):
    """Mode that counts how often all gradients are read."""

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
def test_clipping_equals_that_of_torch_bit_for_bit(dtype, norm_type):
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
    assert are_equal(*found)


def spoil_gradient(model):
    model.weight.grad[0, 0] = NAN


@pytest.mark.parametrize("clips", [0, 1, 2])
def test_gradients_changed_after_clipping_are_read_again(clips, warnings):
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.ones(1, 3)).mean())
    for _ in range(clips):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    spoil_gradient(model)
    optimizer.step()
    assert accelerator.num_updates == 0
    assert torch.isfinite(model.weight).all()


def test_gradients_that_were_not_clipped_are_read(warnings):
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.ones(1, 3)).mean())
    spoil_gradient(model)
    accelerator.clip_grad_norm_([model.bias], 1.0)
    optimizer.step()
    assert accelerator.num_updates == 0
    assert "weight" in warnings[0]


def test_norm_from_the_previous_window_is_not_reused(warnings):
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.ones(1, 3)).mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()  # no update was made
    accelerator.backward(model(torch.ones(1, 3)).mean())
    spoil_gradient(model)
    optimizer.step()
    assert accelerator.num_updates == 0


def test_finite_gradients_with_an_infinite_norm_are_accepted(warnings):
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.ones(1, 3)).sum() * 1e30)
    assert torch.linalg.vector_norm(model.weight.grad) == INF
    optimizer.step()
    assert warnings == []
    assert accelerator.num_updates == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_any_dtype_are_checked(dtype, warnings):
    accelerator, model, optimizer = build("skip", nn.Linear(300, 1).to(dtype))
    accelerator.backward(model(torch.ones(1, 300, dtype=dtype)).sum() * 6e4)
    optimizer.step()
    assert (warnings, accelerator.num_updates) == ([], 1)
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 300, dtype=dtype)).sum())
    model.weight.grad[0, 7] = INF
    optimizer.step()
    assert accelerator.num_updates == 1
    assert "(weight)" in warnings[0]


def test_sparse_and_empty_gradients_are_checked(warnings):
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
    assert "1 of 4 parameters are not (0.weight)" in warnings[0]


def test_micro_batch_is_named(warnings):
    accelerator, model, optimizer = build(gradient_accumulation_steps=3)
    train_window(accelerator, model, optimizer, GOOD, [NAN, 0.0, 0.0], GOOD)
    assert "the loss of micro-batch 2 was nan" in warnings[0]
    train_window(accelerator, model, optimizer, GOOD, GOOD, GOOD)
    assert accelerator.num_updates == 1
    train_window(accelerator, model, optimizer, [INF, 0.0, 0.0], GOOD, [NAN, 0.0, 0.0])
    assert "update 2: the loss of micro-batch 1 was" in warnings[1]
    assert "(and 1 more there)" in warnings[1]


def test_micro_batch_of_weight_0_may_be_nan(warnings):
    """A mean over no items is 0/0."""
    accelerator, model, optimizer = build(gradient_accumulation_steps=2)
    for rows, weight in ((torch.ones(2, 3), 2), (torch.empty(0, 3), 0)):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).mean(), weight=weight)
            optimizer.step()
    assert (warnings, accelerator.num_updates) == ([], 1)


def test_several_backwards_without_accumulate_are_checked(warnings):
    accelerator, model, optimizer = build()
    accelerator.backward(model(torch.tensor([[NAN, 0.0, 0.0]])).mean())
    accelerator.backward(model(torch.ones(1, 3)).mean())
    optimizer.step()
    assert "the loss of micro-batch 1 was nan" in warnings[0]


def test_two_optimizers_of_a_window_skip_together(warnings):
    accelerator, one, two, first, second = build("skip", nn.Linear(3, 3), nn.Linear(3, 1))
    before = copy_values(one, first), copy_values(two, second)
    with accelerator.accumulate(one, two):
        accelerator.backward(two(one(torch.ones(1, 3))).mean())
        two.weight.grad.fill_(NAN)
        first.step()
        second.step()
    assert are_equal(before[0], copy_values(one, first))
    assert are_equal(before[1], copy_values(two, second))
    assert (len(warnings), accelerator.non_finite.num_skipped) == (1, 1)
    assert "Linear 1: weight" in warnings[0]


@pytest.mark.parametrize("bad", ["loss", "gradient", "clipped"])
@pytest.mark.parametrize("steps", [1, 2])
def test_each_update_of_two_models_is_checked(bad, steps, warnings):
    """Both models run backward before either optimizer steps, as docs/several_models.md shows."""
    accelerator, one, two, first, second = build(
        "skip", nn.Linear(3, 1), nn.Linear(3, 1), gradient_accumulation_steps=steps
    )
    before, other_before = copy_values(one, first), copy_values(two, second)
    for is_last in [False] * (steps - 1) + [True]:
        is_bad = is_last or bad == "loss"
        with accelerator.accumulate(one):
            accelerator.backward(one(torch.ones(1, 3)).mean() * (INF if is_bad and bad == "loss" else 1))
            if is_bad and bad != "loss":
                one.weight.grad.fill_(NAN)
        with accelerator.accumulate(two):
            accelerator.backward(two(torch.ones(1, 3)).mean())
        if bad == "clipped":
            accelerator.clip_grad_norm_(one.parameters(), 1.0)
            accelerator.clip_grad_norm_(two.parameters(), 1.0)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert are_equal(before, copy_values(one, first))
    assert not are_equal(other_before, copy_values(two, second))
    assert (first.num_updates, second.num_updates, accelerator.non_finite.num_skipped) == (0, 1, 1)
    assert (
        "the loss of micro-batch 1 was -inf" if bad == "loss" else "1 of 2 parameters are not (Linear 0: weight)"
    ) in (warnings[0])


def test_second_loss_of_a_window_is_checked(warnings):
    accelerator, one, two, first, second = build("skip", nn.Linear(3, 1), nn.Linear(3, 1))
    with accelerator.accumulate(one, two):
        accelerator.backward(one(torch.ones(1, 3)).mean())
        first.step()
        first.zero_grad()
        accelerator.backward(two(torch.full((1, 3), NAN)).mean())
        second.step()
    assert first.num_updates == 1
    assert second.num_updates == 0
    assert len(warnings) == 1


def test_raise_action_raises_an_error():
    accelerator, model, optimizer = build("raise")
    before = copy_values(model, optimizer)
    with pytest.raises(
        NonFiniteError, match=r"update 1: the loss of micro-batch 1 was nan on rank 0: no update was made"
    ):
        train_window(accelerator, model, optimizer, [NAN, 1.0, 1.0])
    assert are_equal(before, copy_values(model, optimizer))


def test_too_many_skips_in_a_row_raise_an_error():
    accelerator, model, optimizer = build(NonFinitePolicy("skip", max_in_row=2))
    bad = [NAN, 1.0, 1.0]
    train_window(accelerator, model, optimizer, bad, bad, GOOD, bad, bad)
    with pytest.raises(NonFiniteError, match="3 in a row are more than max_in_row=2"):
        train_window(accelerator, model, optimizer, bad)
    assert accelerator.num_updates == 1


def test_stop_ends_the_loader_and_the_epochs(warnings):
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
    assert num_evaluated == 2  # one evaluation, after the pass that was stopped
    assert accelerator.non_finite.has_stopped
    assert "training stops" in warnings[0]
    assert list(loader) == []
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 6)
    loader.load_state_dict(state)
    assert len(list(loader)) == 1


def test_fp16_reports_losses_and_leaves_overflows_to_the_scaler(warnings):
    accelerator, model, optimizer = build(
        "skip", mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**40)]
    )
    loss = nn.functional.mse_loss
    before = copy_values(model, optimizer)
    accelerator.backward(loss(model(torch.full((1, 3), 1e3)).float(), torch.full((1, 1), 1e4)))
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    assert warnings == []
    optimizer.zero_grad()
    accelerator.backward(model(torch.tensor([[NAN, 0.0, 0.0]])).float().mean())
    optimizer.step()
    assert are_equal(before, copy_values(model, optimizer))
    assert "update 1: the loss of micro-batch 1 was nan" in warnings[0]
    assert accelerator.non_finite.num_skipped == 1


def test_overflows_are_left_to_an_engine_that_scales_losses(warnings, monkeypatch):
    monkeypatch.setattr(SingleStrategy, "capabilities", Capabilities(scales_losses=True))
    accelerator, model, optimizer = build(
        "raise", mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)]
    )
    accelerator.backward(model(torch.ones(1, 3)).float().mean())
    model.weight.grad.fill_(INF)
    optimizer.step()  # the engine would skip this step
    assert accelerator.num_updates == 1
    assert warnings == []


def test_changed_buffers_are_named(warnings):
    accelerator, model, optimizer = build("skip", nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    accelerator.backward(model(torch.tensor([GOOD, [NAN, 1.0, 1.0]])).mean())
    optimizer.step()
    assert "Buffers are not finite either (1.running_mean, 1.running_var)" in warnings[0]


def test_float8_buffers_do_not_prevent_the_report(warnings):
    accelerator, model, optimizer = build("skip", nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    model.register_buffer("codes", torch.zeros(3).to(torch.float8_e4m3fn))  # torch has no isfinite() for these dtypes
    model.register_buffer("packed", torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    accelerator.backward(model(torch.tensor([GOOD, [NAN, 1.0, 1.0]])).mean())
    optimizer.step()
    assert "Buffers are not finite either (1.running_mean, 1.running_var)" in warnings[0]


def test_batches_in_pieces_are_checked(warnings):
    accelerator, model, optimizer = build(microbatching="auto")
    rows = torch.ones(8, 3)
    rows[1, 1] = NAN
    before = copy_values(model, optimizer)
    for batch, num_updates in ((rows, 0), (torch.ones(8, 3), 1)):
        accelerator.forward_backward(batch, lambda x: model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
        assert accelerator.num_updates == num_updates
        assert are_equal(before, copy_values(model, optimizer)) == (num_updates == 0)
    for piece in accelerator.microbatches(rows):
        with accelerator.accumulate(model):
            accelerator.backward(model(piece).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.num_updates == 1
    assert len(warnings) == 2


def test_event_describes_the_non_finite_update(warnings):
    class Ear(list):
        def hear(self, happening):
            self.append(happening)

    ear = Ear()
    accelerator, model, optimizer = build()
    events.subscribe(ear.hear)
    train_window(accelerator, model, optimizer, [NAN, 1.0, 1.0])
    (happening,) = ear
    assert (happening.name, happening.source) == ("non_finite", accelerator.clock)
    assert happening.details == {
        "update": 1, "action": "skip", "parameters": [], "losses": {"0": "nan in micro-batch 1"},
    }  # fmt: skip


def test_multiplication_used_on_accelerators_gives_the_same_verdict():
    """On a device the loss is not read. Its gradient is multiplied by 1 or NaN instead."""
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
def test_loading_a_checkpoint_resets_the_guard(action, warnings, tmp_path):
    accelerator, model, optimizer = build(action)
    train_window(accelerator, model, optimizer, GOOD)
    accelerator.save_state(tmp_path / "saved")
    train_window(accelerator, model, optimizer, [NAN, 1.0, 1.0])
    assert accelerator.num_updates == 1
    accelerator.load_state(tmp_path / "saved")
    assert not accelerator.non_finite.has_stopped
    train_window(accelerator, model, optimizer, GOOD)  # a window with the same number
    assert accelerator.num_updates == 2
    accelerator.load_state(tmp_path / "saved")
    train_window(accelerator, model, optimizer, [NAN, 1.0, 1.0])
    assert accelerator.num_updates == 1
    assert accelerator.non_finite.num_skipped == 2


@pytest.mark.parametrize("steps", [True, False])
def test_zero_grad_frees_clipped_gradients(steps):
    """This includes gradients of a second optimizer, clipped after the verdict. The next forward needs their memory."""
    accelerator, first, second, *optimizers = build("skip", nn.Linear(3, 1), nn.Linear(3, 1))
    accelerator.backward((first(torch.tensor([GOOD])) + second(torch.tensor([GOOD]))).mean())
    held = [StorageWeakRef(p.grad.untyped_storage()) for model in (first, second) for p in model.parameters()]
    for model, optimizer in zip((first, second), optimizers):
        accelerator.clip_grad_norm_(model.parameters(), 0.01)
        if steps:
            optimizer.step()
        optimizer.zero_grad()
    assert [each.expired() for each in held] == [True] * 4
