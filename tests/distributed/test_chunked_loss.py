"""Language model with chunked loss on real ranks, compared with plain PyTorch and whole logits."""

import pytest
import torch

from headway import Accelerator, ShardingOptions, chunk_loss
from headway.errors import UnsupportedError
from headway.extras.chunked_loss import is_loss_chunked, restore_loss
from tests.distributed.ranks import run_ranks

pytest.importorskip("transformers")
if not hasattr(torch.nn.functional, "linear_cross_entropy"):
    pytest.skip("needs torch 2.13 with linear_cross_entropy", allow_module_level=True)


def build_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=101, use_cache=False)).train()


def make_tokens(step, rank):
    return torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(10 * step + rank))


def train(strategy):
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = chunk_loss(build_model())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for step in range(4):
        ids = make_tokens(step, accelerator.process_index)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, accelerator.get_state_dict(model)


def train_by_hand():
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(4):
        loss = (
            sum(model(input_ids=make_tokens(step, rank), labels=make_tokens(step, rank)).loss for rank in range(2)) / 2
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.matrix), "fsdp"])
def test_ranks_match_one_process_with_whole_logits(strategy):
    expected, weights = train_by_hand()
    for losses, state in run_ranks(train, 2, strategy)[:1]:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert state.keys() == weights.keys()
        for name, value in state.items():
            assert torch.allclose(value, weights[name], rtol=1e-4, atol=1e-5), name


def repeat_on_sharded_head(units):
    """Chunk the loss twice and undo it twice. Return the loss and the head's gradient of each call, and the head's classes."""
    accelerator = Accelerator(cpu=True, strategy="fsdp", kwargs_handlers=[ShardingOptions(units=units)])
    model, head = build_model(), None
    ids = make_tokens(0, accelerator.process_index)
    found, classes = [], []
    for _ in range(2):
        chunk_loss(model)
        assert is_loss_chunked(model)
        assert head in (None, model.lm_head)
        head = model.lm_head
        accelerator.prepare(model)
        for has_logits in (False, True):
            outputs = model(input_ids=ids, labels=ids)
            assert (outputs.logits is not None) == has_logits
            accelerator.backward(outputs.loss)
            found.append((accelerator.reduce(outputs.loss.detach(), "mean"), head.weight.grad.full_tensor()))
            model.zero_grad()
            if not has_logits:
                accelerator.free_memory()
                restore_loss(model)
                assert not is_loss_chunked(model)
                classes.append([each.__name__ for each in type(head).__mro__])
    return found, classes


@pytest.mark.parametrize(
    ("units", "head_classes"),
    [((), ["Linear"]), (("LlamaDecoderLayer", "lm_head"), ["FSDPLinear", "FSDPModule", "Linear"])],
)
def test_sharded_head_is_chunked_again_after_the_undo(units, head_classes):
    model = build_model()
    loss = sum(model(input_ids=make_tokens(0, rank), labels=make_tokens(0, rank)).loss for rank in range(2)) / 2
    loss.backward()
    for found, classes in run_ranks(repeat_on_sharded_head, 2, units):
        assert classes == [[*head_classes, "Module", "object"]] * 2
        for found_loss, gradient in found:
            assert found_loss.item() == pytest.approx(loss.item(), rel=1e-5)
            assert torch.allclose(gradient, model.lm_head.weight.grad, rtol=1e-4, atol=1e-6)


def check_split_head():
    accelerator = Accelerator(cpu=True, strategy="tp")
    model = accelerator.prepare(chunk_loss(build_model()))
    with pytest.raises(UnsupportedError, match="leave chunk_loss out"):
        model(input_ids=make_tokens(0, 0), labels=make_tokens(0, 0))


def test_split_head_is_an_error():
    run_ranks(check_split_head, 2)
