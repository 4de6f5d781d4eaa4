"""Accumulation windows: when gradients are synchronized, divided and used for an update."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

from tests.ecosystem.habits.material import loss_of, model, prepared, weights


def _trained(count=12, batch_size=2, epochs=1, **options):
    accelerator, net, optimizer, data, _ = prepared(count, batch_size, **options)
    syncs = []
    for _ in range(epochs):
        for batch in data:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                syncs.append(accelerator.sync_gradients)
                optimizer.step()
                optimizer.zero_grad()
    return syncs, weights(net)


def of_two():
    """Run the documented loop with windows of two batches."""
    return _trained(gradient_accumulation_steps=2)


def of_four_with_a_rest():
    """End an epoch in the middle of a window."""
    return _trained(14, gradient_accumulation_steps=4, epochs=2)


def over_the_end_of_the_epoch():
    """Continue a window in the next epoch (sync_with_dataloader=False)."""
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    return _trained(14, gradient_accumulation_plugin=plugin, epochs=2)


def in_each_batch():
    """Synchronize gradients in each batch (sync_each_batch=True)."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    return _trained(gradient_accumulation_plugin=plugin)


def two_models_in_a_batch():
    """Train two models, each in its own accumulate block. Both share one counter."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = model(), model()
    both = [torch.optim.SGD(each.parameters(), 0.1) for each in (first, second)]
    from tests.ecosystem.habits.material import loader

    first, second, *both, data = accelerator.prepare(first, second, *both, loader())
    syncs = []
    for batch in data:
        for net, optimizer in zip((first, second), both):
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                syncs.append(accelerator.sync_gradients)
                optimizer.step()
                optimizer.zero_grad()
    return syncs, weights(first), weights(second)


def two_models_at_once():
    """Train two models in one block, with accumulate(d, g)."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = model(), model()
    both = [torch.optim.SGD(each.parameters(), 0.1) for each in (first, second)]
    from tests.ecosystem.habits.material import loader

    first, second, *both, data = accelerator.prepare(first, second, *both, loader())
    for batch in data:
        with accelerator.accumulate(first, second):
            accelerator.backward(loss_of(first, batch) + loss_of(second, batch))
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
    return weights(first), weights(second)


def by_hand():
    """Use no_sync and step by the loop's own count."""
    accelerator, net, optimizer, data, _ = prepared()
    for index, batch in enumerate(data):
        if index % 2 == 0:
            with accelerator.no_sync(net):
                accelerator.backward(loss_of(net, batch))
        else:
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)


def told_to_synchronize():
    """Call _set_sync_gradients(True) inside a window."""
    accelerator, net, optimizer, data, _ = prepared(gradient_accumulation_steps=3)
    seen = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.gradient_state._set_sync_gradients(True)
            seen.append(accelerator.sync_gradients)
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(weights(net))
    return seen


def told_not_to_synchronize():
    """Call _set_sync_gradients(False), which postpones the step."""
    accelerator, net, optimizer, data, _ = prepared()
    before = weights(net)
    batch = next(iter(data))
    accelerator.gradient_state._set_sync_gradients(False)
    accelerator.backward(loss_of(net, batch))
    optimizer.step()
    optimizer.zero_grad()
    kept = weights(net) == before, net.weight.grad is not None if hasattr(net, "weight") else True
    accelerator.gradient_state._set_sync_gradients(True)
    optimizer.step()
    return kept, weights(net) == before


def setting_sync_gradients():
    """Assign accelerator.sync_gradients."""
    accelerator, *_ = prepared()
    accelerator.sync_gradients = False
    first = accelerator.sync_gradients, accelerator.gradient_state.sync_gradients
    accelerator.sync_gradients = True
    return first, accelerator.sync_gradients


def the_step_counter():
    """Read accelerator.step, which counts micro-batches."""
    accelerator, net, optimizer, data, _ = prepared(gradient_accumulation_steps=2)
    seen = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            seen.append(accelerator.step)
            optimizer.step()
            optimizer.zero_grad()
    return seen


def without_a_loader():
    """Use accumulate in a loop without a prepared loader."""
    accelerator, net, optimizer, *_ = prepared(gradient_accumulation_steps=2)
    x = torch.ones(2, 3)
    seen = []
    for _ in range(5):
        with accelerator.accumulate(net):
            accelerator.backward(net(x).sum())
            seen.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    return seen, weights(net)


def changing_the_steps():
    """Assign accelerator.gradient_accumulation_steps."""
    accelerator, net, optimizer, data, _ = prepared(gradient_accumulation_steps=2)
    accelerator.gradient_accumulation_steps = 3
    seen = [accelerator.gradient_accumulation_steps]
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            seen.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    return seen, weights(net)


def clipping_inside():
    """Clip under `if accelerator.sync_gradients`."""
    accelerator, net, optimizer, data, _ = prepared(gradient_accumulation_steps=2)
    norms = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(net)


def clipping_by_value():
    """Clip with clip_grad_value_."""
    accelerator, net, optimizer, data, _ = prepared()
    for batch in data:
        accelerator.backward(loss_of(net, batch))
        accelerator.clip_grad_value_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def a_skipped_batch():
    """Skip a batch with `continue` before backward."""
    accelerator, net, optimizer, data, _ = prepared(gradient_accumulation_steps=2)
    for index, batch in enumerate(data):
        with accelerator.accumulate(net):
            if index == 1:
                continue
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)


def gradients_between():
    """Read .grad in each micro-batch that synchronizes."""
    accelerator, net, optimizer, data, _ = prepared(gradient_accumulation_steps=2)
    seen = []
    bare = accelerator.unwrap_model(net)
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            if accelerator.sync_gradients:
                seen.append(bare.weight.grad.tolist())
            optimizer.step()
            optimizer.zero_grad()
    return seen


def torch_keywords_of_backward():
    """Call backward with retain_graph=True."""
    accelerator, net, _optimizer, data, _ = prepared()
    batch = next(iter(data))
    loss = loss_of(net, batch)
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    return accelerator.unwrap_model(net).weight.grad.tolist()


def gradient_of_a_vector():
    """Call backward on a vector, with gradient=ones."""
    accelerator, net, _optimizer, data, _ = prepared()
    batch = next(iter(data))
    each = (net(batch[0]) - batch[1]) ** 2
    accelerator.backward(each, gradient=torch.ones_like(each))
    return accelerator.unwrap_model(net).weight.grad.tolist()


def gradient_of_a_scalar():
    """Call backward on a scalar, with gradient=2."""
    accelerator, net, _optimizer, data, _ = prepared(gradient_accumulation_steps=2)
    batch = next(iter(data))
    with accelerator.accumulate(net):
        accelerator.backward(loss_of(net, batch), gradient=torch.tensor(2.0))
    return accelerator.unwrap_model(net).weight.grad.tolist() if accelerator.num_processes == 1 else None


def inputs_of_backward():
    """Call backward with inputs=[bias]."""
    accelerator = Accelerator(cpu=True)
    net = model()
    loss = net(torch.ones(2, 3)).sum()
    accelerator.backward(loss, inputs=[net.bias])
    return net.weight.grad is None, net.bias.grad.tolist()


def loss_backward_itself():
    """Call loss.backward() instead of accelerator.backward()."""
    _accelerator, net, optimizer, data, _ = prepared()
    for batch in data:
        loss_of(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def an_optimizer_of_something_else():
    """Prepare an optimizer of a parameter that belongs to no prepared model."""
    accelerator = Accelerator(cpu=True)
    extra = torch.nn.Parameter(torch.ones(2))
    optimizer = accelerator.prepare(torch.optim.SGD([extra], 0.1))
    accelerator.backward((extra * extra).sum())
    optimizer.step()
    optimizer.zero_grad()
    return extra.tolist()


def an_optimizer_with_more():
    """Prepare an optimizer of a model's parameters and one more parameter."""
    accelerator = Accelerator(cpu=True)
    net, extra = model(), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*net.parameters(), extra], 0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    accelerator.backward((net(torch.ones(2, 3)) * extra).sum())
    optimizer.step()
    return extra.tolist(), weights(net)


def in_mixed_precision():
    """Train in bf16. Outputs are float32."""
    accelerator, net, optimizer, data, _ = prepared(mixed_precision="bf16")
    kinds = []
    for batch in data:
        output = net(batch[0])
        kinds.append(str(output.dtype))
        accelerator.backward(torch.nn.functional.mse_loss(output, batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    return kinds, weights(net)


def gradient_state_facts():
    """Read the attributes of the gradient state that callbacks use."""
    accelerator, net, optimizer, data, _ = prepared(14, 2, gradient_accumulation_steps=2)
    state = accelerator.gradient_state
    seen = [
        state.num_steps,
        state.sync_gradients,
        state.in_dataloader,
        state.end_of_dataloader,
        state.remainder,
        dict(state.plugin_kwargs),
    ]
    for batch in data:
        with accelerator.accumulate(net):
            seen.append([state.end_of_dataloader, state.remainder, state.in_dataloader, state.sync_gradients])
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, state.in_dataloader, state.end_of_dataloader, state.active_dataloader is None]


def local_sgd():
    """Average parameters every two steps with LocalSGD."""
    from accelerate.local_sgd import LocalSGD

    accelerator, net, optimizer, data, _ = prepared(16)
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=2, enabled=True) as local:
        for batch in data:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    return weights(net)


def tokens_weighed():
    """Divide summed losses by the number of rows in the whole window, as in Accelerate's guide."""
    accelerator, net, optimizer, data, _ = prepared(gradient_accumulation_steps=1)
    batches = iter(data)
    for _ in range(3):
        window = [each for each in (next(batches, None) for _ in range(2)) if each is not None]
        if not window:
            break
        count = sum(len(each[0]) for each in window)
        count = accelerator.gather(torch.tensor([count])).sum().item()
        for index, batch in enumerate(window):
            is_last = index == len(window) - 1
            context = accelerator.no_sync(net) if not is_last and accelerator.num_processes > 1 else torch.enable_grad()
            with context:
                loss = torch.nn.functional.mse_loss(net(batch[0]), batch[1], reduction="sum")
                accelerator.backward(loss * accelerator.num_processes / count)
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def trigger_sync():
    """Use trigger_sync_in_backward after two forward passes in no_sync."""
    accelerator, net, optimizer, data, _ = prepared()
    batch = next(iter(data))
    with accelerator.no_sync(net):
        first, second = loss_of(net, batch), loss_of(net, batch)
    accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(net):
        accelerator.backward(second)
    optimizer.step()
    return weights(net)


def gradients_cleared_midway():
    """Call model.zero_grad() in each micro-batch, like skorch."""
    accelerator, net, optimizer, data, _ = prepared(gradient_accumulation_steps=2)
    for batch in data:
        with accelerator.accumulate(net):
            net.zero_grad()
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)
