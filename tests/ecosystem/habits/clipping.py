"""Clipping of gradients that are above the limit, in every micro-batch: each call clips what is in the gradients then."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, GradScalerKwargs

from tests.ecosystem.habits.material import decaying, loader, loss_of, model, prepared, weights

LIMIT = 0.5


def _clip_each(clip, count=14, after_the_block=False, epochs=2, **options):
    """A loop that never asks `sync_gradients`: what each call returned, what it left in `.grad`, and the weights."""
    options = options or {"gradient_accumulation_steps": 3}
    accelerator, net, optimizer, data, schedule = prepared(count, schedule=decaying, **options)
    told, left = [], []
    bare = accelerator.unwrap_model(net)

    def act():
        told.append(clip(accelerator, net))
        left.append([None if each.grad is None else each.grad.tolist() for each in bare.parameters()])

    for _ in range(epochs):
        for batch in data:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                if not after_the_block:
                    act()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if after_the_block:
                act()
    return told, left, weights(net)


def _by_norm(limit=LIMIT, **options):
    return lambda accelerator, net: float(accelerator.clip_grad_norm_(net.parameters(), limit, **options))


def _by_value(accelerator, net):
    return accelerator.clip_grad_value_(net.parameters(), 0.3)


def by_norm():
    """clip_grad_norm_ in each micro-batch."""
    return _clip_each(_by_norm())


def by_value():
    """clip_grad_value_ in each micro-batch."""
    return _clip_each(_by_value)


def by_norm_and_value():
    """One after the other."""
    return _clip_each(lambda *given: (_by_norm()(*given), _by_value(*given)))


def by_the_largest():
    """norm_type=inf."""
    return _clip_each(_by_norm(norm_type=math.inf))


def by_the_largest_as_text():
    """norm_type="inf"."""
    return _clip_each(_by_norm(norm_type="inf"))


def by_the_sum():
    """norm_type=1."""
    return _clip_each(_by_norm(norm_type=1))


def without_a_limit():
    """max_norm=inf, to read the norm."""
    return _clip_each(_by_norm(math.inf))


def to_nothing():
    """max_norm=0."""
    return _clip_each(_by_norm(0.0))


def by_torch():
    """torch.nn.utils.clip_grad_norm_ in each micro-batch."""
    return _clip_each(lambda _, net: float(torch.nn.utils.clip_grad_norm_(net.parameters(), LIMIT)))


def by_torch_then_accelerate():
    """Both."""
    return _clip_each(
        lambda accelerator, net: (
            float(torch.nn.utils.clip_grad_norm_(net.parameters(), 2 * LIMIT)),
            _by_norm()(accelerator, net),
        )
    )


def behind_the_block():
    """After the accumulate block, whether an update came of it or not."""
    return _clip_each(_by_norm(), after_the_block=True)


def value_behind_the_block():
    """clip_grad_value_ there."""
    return _clip_each(_by_value, after_the_block=True)


def in_brain_floats():
    """mixed_precision="bf16"."""
    return _clip_each(_by_norm(), mixed_precision="bf16", gradient_accumulation_steps=2)


def value_in_half_floats():
    """clip_grad_value_ with mixed_precision="fp16", at a scale that these gradients fit into."""
    options = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=64.0)]}
    return _clip_each(_by_value, gradient_accumulation_steps=2, **options)[2]


def when_each_is_sent():
    """sync_each_batch=True: partial gradients are averages over the processes."""
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    return _clip_each(_by_norm(), gradient_accumulation_plugin=plugin)


def over_the_end_of_the_epoch():
    """sync_with_dataloader=False."""
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    return _clip_each(_by_norm(), gradient_accumulation_plugin=plugin)


def one_parameter():
    """A list with the bias."""
    return _clip_each(
        lambda accelerator, net: float(accelerator.clip_grad_norm_([accelerator.unwrap_model(net).bias], LIMIT))
    )


def one_tensor():
    """The bias itself, by value."""
    return _clip_each(lambda accelerator, net: accelerator.clip_grad_value_(accelerator.unwrap_model(net).bias, LIMIT))


def a_generator_of_parameters():
    """What filter() gives."""
    return _clip_each(
        lambda accelerator, net: float(
            accelerator.clip_grad_norm_(filter(lambda each: each.requires_grad, net.parameters()), LIMIT)
        )
    )


def without_gradients():
    """Before the first backward, and after zero_grad."""
    accelerator, net, *_ = prepared(gradient_accumulation_steps=2)
    first = accelerator.clip_grad_norm_(net.parameters(), LIMIT)
    with accelerator.accumulate(net):
        inside = accelerator.clip_grad_norm_(net.parameters(), LIMIT)
    return [[float(each), list(each.shape), str(each.dtype)] for each in (first, inside)]


def of_a_part_that_is_not_finite():
    """A nan in the first micro-batch of a window."""
    accelerator, net, optimizer, data, _ = prepared(8, gradient_accumulation_steps=2)
    norms = []
    for index, batch in enumerate(data):
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch) * (math.nan if index == 2 else 1.0))
            norms.append(float(accelerator.clip_grad_norm_(net.parameters(), LIMIT)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(net)


def with_a_missing_argument():
    """No limit."""
    accelerator, net, *_ = prepared()
    return accelerator.clip_grad_norm_(net.parameters())


def by_keyword():
    """parameters=, max_norm=, norm_type=."""
    accelerator, net, *_ = prepared()
    net(torch.ones(2, 3)).sum().mul(9).backward()
    return float(accelerator.clip_grad_norm_(parameters=net.parameters(), max_norm=LIMIT, norm_type=2))


def what_comes_back():
    """Shape, dtype and history of the norm inside a window."""
    accelerator, net, _, data, _ = prepared(gradient_accumulation_steps=2)
    with accelerator.accumulate(net):
        accelerator.backward(loss_of(net, next(iter(data))))
        norm = accelerator.clip_grad_norm_(net.parameters(), LIMIT)
    return type(norm).__name__, list(norm.shape), str(norm.dtype), norm.requires_grad


def two_models():
    """Each clipped by its own norm, in one block."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = model(), model()
    both = [torch.optim.SGD(each.parameters(), 0.1) for each in (first, second)]
    first, second, *both, data = accelerator.prepare(first, second, *both, loader())
    norms = []
    for batch in data:
        with accelerator.accumulate(first, second):
            accelerator.backward(loss_of(first, batch) + 2 * loss_of(second, batch))
            norms += [float(accelerator.clip_grad_norm_(each.parameters(), LIMIT)) for each in (first, second)]
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
    return norms, weights(first), weights(second)


def two_models_together():
    """One norm over both."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = model(), model()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    first, second, optimizer, data = accelerator.prepare(first, second, optimizer, loader())
    norms = []
    for batch in data:
        with accelerator.accumulate(first, second):
            accelerator.backward(loss_of(first, batch) + 2 * loss_of(second, batch))
            every = [*first.parameters(), *second.parameters()]
            norms.append(float(accelerator.clip_grad_norm_(every, LIMIT)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(first), weights(second)


def models_in_turn():
    """accumulate(d), then accumulate(g), each with its clipping."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = model(), model()
    both = [torch.optim.SGD(each.parameters(), 0.1) for each in (first, second)]
    first, second, *both, data = accelerator.prepare(first, second, *both, loader())
    norms = []
    for batch in data:
        for net, optimizer in zip((first, second), both):
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), LIMIT)))
                optimizer.step()
                optimizer.zero_grad()
    return norms, weights(first), weights(second)


def told_not_to_synchronize():
    """Under _set_sync_gradients(False), without accumulate."""
    accelerator, net, optimizer, data, _ = prepared(8)
    norms = []
    for index, batch in enumerate(data):
        accelerator.gradient_state._set_sync_gradients(index % 2 == 1)
        accelerator.backward(loss_of(net, batch))
        norms.append(float(accelerator.clip_grad_norm_(net.parameters(), LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, weights(net)


def without_synchronizing():
    """Under no_sync, with steps by the loop's own count."""
    accelerator, net, optimizer, data, _ = prepared(16)
    norms = []
    for index, batch in enumerate(data):
        if index % 2 == 0:
            with accelerator.no_sync(net):
                accelerator.backward(loss_of(net, batch))
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), LIMIT)))
        else:
            accelerator.backward(loss_of(net, batch))
            norms.append(float(accelerator.clip_grad_norm_(net.parameters(), LIMIT)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(net)


def in_a_loop_of_its_own():
    """accumulate without a prepared loader."""
    accelerator, net, optimizer, *_ = prepared(gradient_accumulation_steps=3)
    norms = []
    for index in range(7):
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.full((2, 3), index + 1.0)).sum())
            norms.append(float(accelerator.clip_grad_norm_(net.parameters(), LIMIT)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(net)


def with_clipping_by_the_optimizer():
    """An optimizer of Adam's kind, whose update hides a constant factor but not one that changes by micro-batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    net = model()
    net, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.1), loader(14))
    norms = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            norms.append(float(accelerator.clip_grad_norm_(net.parameters(), LIMIT)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(net)
