"""Activation checkpointing under DDP and with transformers models: gradients are exactly equal on every rank."""

import pytest
import torch

from headway import Accelerator, ActivationCheckpointing, DistributedDataParallelKwargs
from tests.distributed.ranks import run_ranks


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.drop = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16), torch.nn.Dropout(0.3)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x):
        return x + self.drop(self.narrow(torch.relu(self.wide(self.norm(x)))))


def make_stack():
    return torch.nn.Sequential(torch.nn.Sequential(*[Block() for _ in range(4)]), torch.nn.Linear(16, 1))


def train(make, batch, kind=None, ddp=None, precision="no", handlers=()):
    """Train two windows of three micro-batches, and return the gradients of both and the weights."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=3, mixed_precision=precision,
        kwargs_handlers=[DistributedDataParallelKwargs(**(ddp or {})), *handlers],
    )  # fmt: skip
    torch.manual_seed(0)
    model = make()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if kind is not None:  # after DDP has wrapped the model; `handlers` apply it before
        accelerator.checkpoint_activations(model, **kind)
    torch.manual_seed(1 + accelerator.process_index)
    found = []
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(batch(model), weight=2)
            if accelerator.sync_gradients:
                found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    found += [p.detach().clone() for p in model.parameters()]
    accelerator.free_memory()
    return found


def compute_row_loss(model):
    return model(torch.randn(4, 16)).square().mean()


def are_equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.1,
    ))  # fmt: skip


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
    return BertForSequenceClassification(config)


def compute_token_loss(model):
    ids = torch.randint(0, 64, (2, 12))
    labels = ids if type(model).__name__.startswith("Llama") else ids[:, 0] % 2
    return model(input_ids=ids, labels=labels).loss


TABLE = {
    "all blocks": (make_stack, compute_row_loss, {"kind": {}}),
    "every second": (make_stack, compute_row_loss, {"kind": {"every": 2}}),
    "keep_matmul": (make_stack, compute_row_loss, {"kind": {"policy": "keep_matmul"}}),
    "before DDP": (make_stack, compute_row_loss, {"handlers": (ActivationCheckpointing(),)}),
    "bf16": (make_stack, compute_row_loss, {"kind": {}, "precision": "bf16"}),
    "static graph": (make_stack, compute_row_loss, {"kind": {}, "ddp": {"static_graph": True}}),
    "find unused": (make_stack, compute_row_loss, {"kind": {}, "ddp": {"find_unused_parameters": True}}),
    "llama": (llama, compute_token_loss, {"kind": {}}),
    "llama, every second, keep_attention": (
        llama,
        compute_token_loss,
        {"kind": {"every": 2, "policy": "keep_attention"}},
    ),
    "llama, its layers by name": (llama, compute_token_loss, {"kind": {"blocks": ["LlamaDecoderLayer"]}}),
    "bert before DDP, keep_matmul": (
        bert,
        compute_token_loss,
        {"handlers": (ActivationCheckpointing(policy="keep_matmul"),)},
    ),
    "bert in bf16": (bert, compute_token_loss, {"kind": {}, "precision": "bf16"}),
}


def compare_all():
    """Return for each row of `TABLE` whether gradients and weights equal those without checkpointing.

    "can fail" is a control: whether the comparison notices a loss that is twice as large.
    """
    torch.use_deterministic_algorithms(True)
    plain, found = {}, {}
    for name, (make, batch, options) in TABLE.items():
        bare = {key: value for key, value in options.items() if key in ("ddp", "precision")}
        key = (make, str(bare))
        if key not in plain:
            plain[key] = train(make, batch, **bare)
        found[name] = are_equal(plain[key], train(make, batch, **options))
    other = train(make_stack, lambda model: compute_row_loss(model) * 2, {})
    found["can fail"] = not are_equal(plain[make_stack, "{}"], other)
    return found


@pytest.fixture(scope="module")
def results():
    return run_ranks(compare_all, 2)


@pytest.mark.parametrize("name", [*TABLE, "can fail"])
def test_checkpointing_leaves_gradients_and_weights_equal_bit_for_bit(results, name):
    assert [rank[name] for rank in results] == [True, True]


def toggle_on_shards():
    """Turn checkpointing of sharded blocks off and on. Return the number of forwards per block, gradients and class names."""
    accelerator = Accelerator(cpu=True, strategy="fsdp", kwargs_handlers=[ActivationCheckpointing()])
    torch.manual_seed(0)
    model = accelerator.prepare(make_stack().eval())
    batch = torch.randn(4, 16)
    count = 0

    def count_call(*_):
        nonlocal count
        count += 1

    for block in model[0]:
        block.wide.register_forward_hook(count_call)
    found = []
    for is_enabled in (True, False, True):
        if found:
            toggle = accelerator.checkpoint_activations if is_enabled else accelerator.keep_activations
            toggle(model)
        count = 0
        accelerator.backward(model(batch).square().mean())
        gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
        found.append((count / len(model[0]), gradients, {type(block).__name__ for block in model[0]}))
        model.zero_grad()
    return found


def test_checkpointing_of_sharded_blocks_is_turned_off_and_on():
    torch.manual_seed(0)
    model = make_stack().eval()
    model(torch.randn(4, 16)).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for found in run_ranks(toggle_on_shards, 2):
        assert [calls for calls, _, _ in found] == [2, 1, 2]
        assert [names for _, _, names in found] == [{"FSDPBlock"}] * 3
        for _, gradients, _ in found:
            for gradient, wanted in zip(gradients, expected, strict=True):
                assert torch.allclose(gradient, wanted, atol=1e-6)


def read_transformers_flags():
    """Return transformers' `gradient_checkpointing` flags with `every`, with offloading on a CPU, and after `keep_activations`."""
    accelerator = Accelerator(cpu=True)
    model = llama()
    layers = model.model.layers
    flags = []
    for kind in ({}, {"every": 2}, {"policy": "keep_all", "offload": True}):
        accelerator.checkpoint_activations(model, **kind)
        flags.append([layer.gradient_checkpointing for layer in layers])
    accelerator.checkpoint_activations(model)
    accelerator.keep_activations(model)
    flags.append([layer.gradient_checkpointing for layer in layers])
    holder = torch.nn.ModuleDict({"text": llama(), "image": torch.nn.Sequential(Block(), Block())})
    accelerator.checkpoint_activations(holder)
    flags.append([layer.gradient_checkpointing for layer in holder["text"].model.layers])
    flags.append([type(block).__mro__[1].__name__ for block in holder["image"]])
    return flags


def test_transformers_own_flag_is_used():
    (flags,) = run_ranks(read_transformers_flags, 1)
    assert flags == [
        [True] * 3, [True, False, True], [False] * 3, [False] * 3, [True] * 3, ["CheckpointedBlock"] * 2,
    ]  # fmt: skip
