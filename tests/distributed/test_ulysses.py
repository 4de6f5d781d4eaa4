"""Context parallelism by heads (Ulysses) compared with plain PyTorch on one process; the choice of style; and errors."""

from typing import Any

import pytest
import torch

from headway import Accelerator, ActivationCheckpointing, TorchContextParallelConfig
from headway.errors import ConfigError, PrepareError
from headway.planning.plan import plan
from tests.devices import ON_CPU
from tests.distributed import cut_models, layouts
from tests.distributed.layouts import Curve, Task, measure_differences, train_by_hand, train_prepared
from tests.distributed.ranks import run_ranks
from tests.distributed.test_plan import compute_loss, sgd

CLOSE = 4e-6
"""Losses are about 4, so this is a relative tolerance of 1e-6."""
ULYSSES = TorchContextParallelConfig(cp_style="ulysses")


def llama(heads: int = 4, keys: int = 4) -> torch.nn.Module:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": keys}
    return cut_models.llama(vocab_size=layouts.VOCABULARY, use_cache=False, **sizes)


layouts.MODELS.update(
    {"four heads": llama, "two heads of keys": lambda: llama(4, 2), "one head of keys": lambda: llama(4, 1)}
)


def _make_task(model: str, *more: Any, **options: Any) -> Task:
    return Task(model, "sgd", updates=5, handlers=(ULYSSES, *more), **options)


TABLE: dict[str, tuple[str, int, Task]] = {
    "a GPT": ("cp", 2, _make_task("gpt")),
    "joined after its blocks": ("cp", 2, _make_task("gpt2")),
    "computed again": ("cp", 2, _make_task("gpt", ActivationCheckpointing())),
    "heads of keys that are repeated": ("cp", 2, _make_task("one head of keys")),
    "windows of attention, in masks": ("cp", 2, _make_task("gemma")),
    "as many keys as ranks": ("cp", 4, _make_task("two heads of keys", window=8)),
    "shards": ("fsdp=2+cp=2", 4, _make_task("two heads of keys")),
    "matrices cut too": ("cp=2+tp=2", 4, _make_task("four heads")),
}


def _train_tasks(num_ranks: int) -> dict[str, Curve]:
    return {name: train_prepared(task, layout) for name, (layout, count, task) in TABLE.items() if count == num_ranks}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training_matches_the_hand_written_loop(num_ranks):
    for curves in run_ranks(_train_tasks, num_ranks, num_ranks, timeout=300):
        for name, curve in curves.items():
            found = measure_differences(train_by_hand(TABLE[name][2]), curve)
            assert max(found.values()) < CLOSE, (name, found)


# ---------------------------------------------------------------- masks


def _compare_with_mask(style: str) -> tuple[float, float, list[str]]:
    """Return the differences of a loss and a gradient with left padding, between a whole and a split sequence."""
    torch.manual_seed(0)
    whole = llama()
    ids = torch.randint(0, layouts.VOCABULARY, (3, 11))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :1] = 0, 0
    labels = ids.masked_fill(mask == 0, layouts.PADDING)
    expected = whole(input_ids=ids, attention_mask=mask, labels=labels).loss
    expected.backward()
    expected_grad = whole.model.layers[0].self_attn.q_proj.weight.grad.clone()
    whole.zero_grad()
    accelerator = Accelerator(cpu=ON_CPU, strategy="cp", kwargs_handlers=[TorchContextParallelConfig(cp_style=style)])
    model = accelerator.prepare(whole)
    found = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    accelerator.backward(found)
    grad: Any = model.model.layers[0].self_attn.q_proj.weight.grad
    apart = float((grad.full_tensor() - expected_grad).abs().max())
    return abs(found.item() - expected.item()), apart, []


@pytest.mark.parametrize("style", ["ring", "ulysses"])
def test_attention_masks_are_applied_in_both_styles(style):
    for loss_apart, grad_apart, _ in run_ranks(_compare_with_mask, 2, style):
        assert loss_apart < CLOSE
        assert grad_apart < CLOSE


# ---------------------------------------------------------------- communication volume


def _sum_volumes(kinds: dict[Any, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for exchange, volume in kinds.items():
        found[exchange.kind] = found.get(exchange.kind, 0) + volume.num_bytes
    return found


def test_plan_counts_the_communication_of_each_style():
    by_style = {}
    for style in ("ring", "ulysses"):
        handlers = [TorchContextParallelConfig(cp_style=style)]
        by_style[style] = plan(llama, "cp", 2, step=compute_loss, optimizer=sgd, kwargs_handlers=handlers)
    sent = {style: _sum_volumes(planned.exchanges) for style, planned in by_style.items()}
    assert "all_to_all" not in sent["ring"]
    assert sent["ulysses"]["all_to_all"] > 0


# ---------------------------------------------------------------- choice of style


def _get_error(heads: int, keys: int, style: str) -> str:
    accelerator = Accelerator(cpu=ON_CPU, strategy="cp", kwargs_handlers=[TorchContextParallelConfig(cp_style=style)])
    model = accelerator.prepare(llama(heads, keys))
    try:
        model(layouts.make_tokens(rows=2))
    except PrepareError as error:
        return str(error)
    return ""


def test_indivisible_heads_are_an_error():
    for message in run_ranks(_get_error, 3, 4, 2, "ulysses"):
        assert (
            'cp_style="ulysses" gives each of the 3 ranks as many heads, and attention has 4, with 2 heads of keys'
            in message
        )
    assert run_ranks(_get_error, 3, 4, 2, "auto") == ["", "", ""]


def test_unknown_style_is_an_error():
    with pytest.raises(ConfigError, match=r"cp_style='heads'; allowed: ring, ulysses, auto"):
        TorchContextParallelConfig(cp_style="heads")
