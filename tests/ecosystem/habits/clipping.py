"""Clipping gradients above the limit in every micro-batch: each call clips the gradients as they are at that time."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, GradScalerKwargs

from tests.ecosystem.habits.material import decaying, loader, loss_of, model, prepared, weights

LIMIT = 0.5


def _clip_each(clip, count=14, after_the_block=False, epochs=2, **options):
    """Clip in every micro-batch, without checking `sync_gradients`.

    Returns the results of the calls, the gradients after each call, and the weights.
    """
    options = options or {"gradient_accumulation_steps": 3}
    accelerator, net, optimizer, data, schedule = prepared(count, schedule=decaying, **options)
    results, left = [], []
    bare = accelerator.unwrap_model(net)

    def act():
        results.append(clip(accelerator, net))
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
    return results, left, weights(net)


def _by_norm(limit=LIMIT, **options):
    return lambda accelerator, net: float(accelerator.clip_grad_norm_(net.parameters(), limit, **options))


def _by_value(accelerator, net):
    return accelerator.clip_grad_value_(net.parameters(), 0.3)


def by_norm():
    """Clip by the norm in each micro-batch."""
    return _clip_each(_by_norm())


def by_value():
    """Clip by value in each micro-batch."""
    return _clip_each(_by_value)


def by_norm_and_value():
    """Clip by the norm, then by value."""
    return _clip_each(lambda *given: (_by_norm()(*given), _by_value(*given)))


def by_the_largest():
    """Clip with norm_type=inf."""
    return _clip_each(_by_norm(norm_type=math.inf))


def by_the_largest_as_text():
    """Clip with norm_type="inf"."""
    return _clip_each(_by_norm(norm_type="inf"))


def by_the_sum():
    """Clip with norm_type=1."""
    return _clip_each(_by_norm(norm_type=1))


def without_a_limit():
    """Read the norm with max_norm=inf."""
    return _clip_each(_by_norm(math.inf))


def to_nothing():
    """Clip with max_norm=0."""
    return _clip_each(_by_norm(0.0))


def by_torch():
    """Clip with torch.nn.utils.clip_grad_norm_ in each micro-batch."""
    return _clip_each(lambda _, net: float(torch.nn.utils.clip_grad_norm_(net.parameters(), LIMIT)))


def by_torch_then_accelerate():
    """Clip with torch's function, then with Accelerate's."""
    return _clip_each(
        lambda accelerator, net: (
            float(torch.nn.utils.clip_grad_norm_(net.parameters(), 2 * LIMIT)),
            _by_norm()(accelerator, net),
        )
    )


def behind_the_block():
    """Clip after the accumulate block, whether or not it made an update."""
    return _clip_each(_by_norm(), after_the_block=True)


def value_behind_the_block():
    """Clip by value after the accumulate block."""
    return _clip_each(_by_value, after_the_block=True)


def in_brain_floats():
    """Clip with mixed_precision="bf16"."""
    return _clip_each(_by_norm(), mixed_precision="bf16", gradient_accumulation_steps=2)


def value_in_half_floats():
    """Clip by value with mixed_precision="fp16", at a scale at which these gradients do not overflow."""
    options = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=64.0)]}
    return _clip_each(_by_value, gradient_accumulation_steps=2, **options)[2]


def when_each_is_sent():
    """Clip with sync_each_batch=True, so that partial gradients are averages over the processes."""
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    return _clip_each(_by_norm(), gradient_accumulation_plugin=plugin)


def over_the_end_of_the_epoch():
    """Clip with sync_with_dataloader=False."""
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    return _clip_each(_by_norm(), gradient_accumulation_plugin=plugin)


def one_parameter():
    """Clip a list that contains only the bias."""
    return _clip_each(
        lambda accelerator, net: float(accelerator.clip_grad_norm_([accelerator.unwrap_model(net).bias], LIMIT))
    )


def one_tensor():
    """Clip the bias itself by value."""
    return _clip_each(lambda accelerator, net: accelerator.clip_grad_value_(accelerator.unwrap_model(net).bias, LIMIT))


def a_generator_of_parameters():
    """Clip an iterator of parameters from filter()."""
    return _clip_each(
        lambda accelerator, net: float(
            accelerator.clip_grad_norm_(filter(lambda each: each.requires_grad, net.parameters()), LIMIT)
        )
    )


def without_gradients():
    """Clip before the first backward pass, outside and inside an accumulate block."""
    accelerator, net, *_ = prepared(gradient_accumulation_steps=2)
    first = accelerator.clip_grad_norm_(net.parameters(), LIMIT)
    with accelerator.accumulate(net):
        inside = accelerator.clip_grad_norm_(net.parameters(), LIMIT)
    return [[float(each), list(each.shape), str(each.dtype)] for each in (first, inside)]


def of_a_part_that_is_not_finite():
    """Clip when the first micro-batch of a window has a nan."""
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
    """Clip without a limit argument."""
    accelerator, net, *_ = prepared()
    return accelerator.clip_grad_norm_(net.parameters())


def by_keyword():
    """Pass parameters=, max_norm= and norm_type= by keyword."""
    accelerator, net, *_ = prepared()
    net(torch.ones(2, 3)).sum().mul(9).backward()
    return float(accelerator.clip_grad_norm_(parameters=net.parameters(), max_norm=LIMIT, norm_type=2))


def what_comes_back():
    """Read the type, shape, dtype and requires_grad of the norm inside a window."""
    accelerator, net, _, data, _ = prepared(gradient_accumulation_steps=2)
    with accelerator.accumulate(net):
        accelerator.backward(loss_of(net, next(iter(data))))
        norm = accelerator.clip_grad_norm_(net.parameters(), LIMIT)
    return type(norm).__name__, list(norm.shape), str(norm.dtype), norm.requires_grad


def two_models():
    """Clip two models in one block, each by its own norm."""
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
    """Clip two models by their common norm."""
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
    """Clip two models, each in its own accumulate block."""
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
    """Clip after _set_sync_gradients(False), without accumulate."""
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
    """Clip under no_sync, with steps by the loop's own count."""
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
    """Clip in a loop without a prepared loader."""
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
    """Clip with AdamW, whose update hides a constant factor, but not one that changes between micro-batches."""
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
