"""Test activation checkpointing on one process: equal gradients, less memory, unchanged names and classes."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from headway import Accelerator, ActivationCheckpointing
from headway.core.strategies.blocks import find_blocks
from headway.errors import ConfigError, HeadwayError, StateError
from headway.extras.activation_checkpointing import CheckpointedBlock


class Block(torch.nn.Module):
    """Residual block with dropout that counts its calls."""

    def __init__(self, width=16):
        super().__init__()
        self.wide, self.narrow, self.drop = (
            torch.nn.Linear(width, 64),
            torch.nn.Linear(64, width),
            torch.nn.Dropout(0.3),
        )
        self.num_calls = 0

    def forward(self, x, *, scale=1.0):
        self.num_calls += 1
        return x + scale * self.drop(self.narrow(torch.relu(self.wide(x))))


class Net(torch.nn.Module):
    """Input layer, `depth` blocks and output layer."""

    def __init__(self, depth=4):
        super().__init__()
        self.start = torch.nn.Linear(8, 16)
        self.layers = torch.nn.ModuleList(Block() for _ in range(depth))
        self.end = torch.nn.Linear(16, 1)

    def forward(self, x):
        x = self.start(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.end(x)


def train(prepare=lambda accelerator, model: None, precision="no", steps=2, handlers=None, make=Net, compiled=False):
    """Make two updates with accumulation.

    Returns:
        Gradients of the last window, parameters, and the model.
    """
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps, kwargs_handlers=handlers
    )
    torch.manual_seed(0)
    model = make()
    prepare(accelerator, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if compiled:
        model.compile(backend="aot_eager")
    torch.manual_seed(1)
    grads = []
    for _ in range(2 * steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 8)).square().mean(), weight=4)
            grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return grads, [parameter.detach().clone() for parameter in model.parameters()], model


def are_equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def keep_products(context, operation, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE if operation == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE
    )


KINDS = [{}, {"every": 2}, {"every": 9}, {"policy": "keep_matmul"}, {"policy": "keep_attention"},
         {"policy": keep_products}, {"blocks": [Block]}, {"blocks": ["Block"]}, {"blocks": ["layers.1", "layers.2"]}]  # fmt: skip


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", KINDS, ids=[str(number) for number in range(len(KINDS))])
def test_gradients_and_weights_are_equal_bit_for_bit(kind, precision):
    grads, weights, bare = train(precision=precision)
    ours, our_weights, model = train(lambda a, m: a.checkpoint_activations(m, **kind), precision)
    assert are_equal(grads, ours)
    assert are_equal(weights, our_weights)
    assert list(model.state_dict()) == list(bare.state_dict())
    computed = sum(block.num_calls for block in model.layers)
    num_blocks = {"{}": 4, "{'every': 2}": 2, "{'every': 9}": 1, "{'blocks': ['layers.1', 'layers.2']}": 2}.get(
        str(kind), 4
    )
    assert computed == 4 * (4 + num_blocks)  # four micro-batches; each checkpointed block runs twice


def test_comparison_detects_different_gradients():
    grads, _, _ = train()
    torch.manual_seed(5)
    ours, _, _ = train(make=lambda: Net(3))
    assert not are_equal(grads, ours)


def test_setting_of_the_accelerator_applies_at_prepare():
    grads, weights, _ = train()
    ours, our_weights, model = train(handlers=[ActivationCheckpointing(every=2)])
    assert are_equal(grads, ours)
    assert are_equal(weights, our_weights)
    assert [isinstance(block, CheckpointedBlock) for block in model.layers] == [True, False, True, False]


def test_checkpointing_can_be_undone():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    assert accelerator.checkpoint_activations(model) is model
    accelerator.checkpoint_activations(model, every=2)  # the second call replaces the first
    assert sum(isinstance(block, CheckpointedBlock) for block in model.layers) == 2
    assert accelerator.keep_activations(model) is model
    assert {type(block) for block in model.layers} == {Block}
    assert not any(name.startswith("_headway") for block in model.layers for name in vars(block))
    model(torch.ones(2, 8)).sum().backward()
    assert [block.num_calls for block in model.layers] == [1] * 4


def count_saved_bytes(model):
    """Return the bytes that autograd keeps for backward, without parameters."""
    kept = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.ones(256, 8)).sum()
    del loss
    return sum(kept.values())


def test_checkpointing_keeps_fewer_activations():
    accelerator, model = Accelerator(cpu=True), Net(8)
    everything = count_saved_bytes(model)
    kept = {}
    for name, kind in {"all": {}, "second": {"every": 2}}.items():
        kept[name] = count_saved_bytes(accelerator.checkpoint_activations(model, **kind))
    assert kept["all"] < everything / 4
    assert kept["all"] < kept["second"] < everything


def test_blocks_run_once_in_evaluation_without_gradients():
    accelerator = Accelerator(cpu=True)
    model = accelerator.checkpoint_activations(accelerator.prepare(Net()))
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert [block.num_calls for block in model.layers] == [1] * 4
    model(torch.ones(2, 8)).sum().backward()  # with gradients, blocks are checkpointed in eval mode too
    assert [block.num_calls for block in model.layers] == [3] * 4


def test_hooks_on_a_block_run_once():
    accelerator, calls = Accelerator(cpu=True), Counter()
    model = accelerator.checkpoint_activations(Net())
    for block in model.layers:
        block.register_forward_hook(lambda module, args, output: calls.update(["forward"]))
        block.register_full_backward_hook(lambda module, given, made: calls.update(["backward"]))
    model(torch.ones(2, 8)).sum().backward()
    assert calls == {"forward": 4, "backward": 4}


def test_block_used_twice_is_checkpointed_once():
    def make():
        net = Net()
        net.layers[3] = net.layers[0]
        return net

    grads, weights, _ = train(make=make)
    ours, our_weights, model = train(lambda a, m: a.checkpoint_activations(m), make=make)
    assert are_equal(grads, ours)
    assert are_equal(weights, our_weights)
    assert len(find_blocks(model)) == 3
    Accelerator(cpu=True).keep_activations(model)
    assert type(model.layers[0]) is Block


class Uncounted(Block):
    """Block without a counter. The counter would be a side effect, which a compiled checkpoint does not support."""

    def forward(self, x, *, scale=1.0):
        return x + scale * self.drop(self.narrow(torch.relu(self.wide(x))))


def build_uncounted_net():
    net = Net(2)
    net.layers = torch.nn.ModuleList(Uncounted() for _ in range(2))
    return net


@pytest.mark.slow
def test_compiled_model_with_dropout_is_equal_bit_for_bit():
    torch._dynamo.reset()
    grads, weights, _ = train(compiled=True, make=build_uncounted_net)
    for kind in ({}, {"policy": "keep_matmul"}):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        ours, our_weights, _ = train(
            lambda a, m: a.checkpoint_activations(m, **kind), compiled=True, make=build_uncounted_net
        )
        assert not torch._dynamo.utils.counters["graph_break"]
        assert are_equal(grads, ours)
        assert are_equal(weights, our_weights)


def test_copies_and_pickles_have_the_original_class():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(accelerator.checkpoint_activations(Net()))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {type(block) for block in other.layers} == {Block}
        assert not any(name.startswith("_headway") for block in other.layers for name in vars(block))
        assert are_equal(list(model.parameters()), list(other.parameters()))
    assert all(isinstance(block, CheckpointedBlock) for block in model.layers)


class Stage(torch.nn.Sequential):
    """Sequence of blocks."""


class Pyramid(torch.nn.Module):
    """Model with stages of blocks as attributes, and a head that is not a block."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Sequential(Block(), Block())
        self.second = torch.nn.Sequential(Block())
        self.head = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def test_blocks_are_found_in_the_module_tree():
    net = Pyramid()
    assert find_blocks(net) == [net.first[0], net.first[1], net.second[0]]
    assert find_blocks(net, ("first",)) == [net.first]
    stages = torch.nn.Sequential(Stage(Block(), Block()), Stage(Block()))
    assert find_blocks(stages) == list(stages)  # the outermost modules that repeat
    assert find_blocks(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))) == []
    named = torch.nn.ModuleDict({"a": Block(), "b": Block()})
    assert find_blocks(named) == [named["a"], named["b"]]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"every": 0}, "every=0"), ({"every": True}, "every=True"), ({"policy": "half"}, "keep_matmul"),
        ({"policy": "keep_all"}, "offload=True"), ({"blocks": ["Attention"]}, "'Attention', which Net does not contain"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused(kind, words):
    with pytest.raises(ConfigError, match=words):
        Accelerator(cpu=True).checkpoint_activations(Net(), **kind)


def test_models_without_blocks_and_patched_blocks_are_refused():
    accelerator, net = Accelerator(cpu=True), Net()
    with pytest.raises(ConfigError, match="no repeated blocks were found in Linear"):
        accelerator.checkpoint_activations(torch.nn.Linear(2, 2))
    net.layers[0].forward = net.layers[0].forward
    with pytest.raises(ConfigError, match="has its own forward"):
        accelerator.checkpoint_activations(net)


def test_undoing_below_a_separately_prepared_block_is_refused():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.checkpoint_activations(Net())
    accelerator.prepare(model.layers[0])
    with pytest.raises(StateError, match="free_memory"):
        accelerator.keep_activations(model)
    accelerator.free_memory()
    accelerator.keep_activations(model)
    assert type(model.layers[0]) is Block
    assert issubclass(StateError, HeadwayError)


def test_offloading_on_a_cpu_causes_a_warning(caplog):
    accelerator, net = Accelerator(cpu=True), Net()
    with caplog.at_level("WARNING", logger="headway"):
        accelerator.checkpoint_activations(net, policy="keep_all", offload=True)
    assert "in host memory already" in caplog.text
    assert {type(block) for block in net.layers} == {Block}
    accelerator.checkpoint_activations(net, offload=True)  # blocks are checkpointed, without offloading
    assert all(isinstance(block, CheckpointedBlock) for block in net.layers)
