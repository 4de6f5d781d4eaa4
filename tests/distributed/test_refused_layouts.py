"""What layouts refuse they refuse on all ranks alike, and before anybody waits; and what is near to that works."""

from typing import Any

import pytest
import torch

from headway import Accelerator, TorchDynamoPlugin
from headway.core.runtime import process
from headway.errors import DataError, HeadwayError, PrepareError, StateError, UnsupportedError
from tests.distributed.cut_losses import Other, compare_gradients
from tests.distributed.layouts import GPT, each, gpt, seeded, text
from tests.distributed.ranks import run_ranks


def refused(accelerator: Accelerator, kind: type[HeadwayError], part: str, act: Any) -> None:
    """The same error on all ranks, which can go on together."""
    with pytest.raises(kind) as caught:
        act()
    told = accelerator.collectives.gather_objects(str(caught.value))
    assert all(each == told[0] for each in told), told
    assert part in told[0], told


def stages_that_freeze_differently() -> None:
    accelerator, model = Accelerator(cpu=True, strategy="pp"), GPT(num_blocks=2)
    if accelerator.process_index:
        model.tokens.requires_grad_(False)
    refused(
        accelerator, PrepareError, "tokens.weight of GPT is (50, 16) in torch.float32 on rank 0 and",
        lambda: accelerator.prepare(model),
    )  # fmt: skip
    model.tokens.requires_grad_(False)
    accelerator.prepare(model)
    accelerator.end_training()


def compiled_and_cut() -> None:
    """A model that the user has compiled is cut as any other; one that Headway would compile is refused before its first update."""
    accelerator, plain, ids = Accelerator(cpu=True, strategy="cp"), seeded(0, gpt), text(9)
    model = accelerator.prepare(torch.compile(seeded(0, gpt), backend="eager"))
    wanted, mine = plain(ids).square().mean(), model(ids).square().mean()
    assert abs(mine.item() - wanted.item()) < 1e-5 * wanted.item()
    wanted.backward()
    accelerator.backward(mine)
    compare_gradients(accelerator.unwrap_model(model, keep_torch_compile=False), plain, 1e-4)
    accelerator.end_training()
    accelerator = Accelerator(
        cpu=True, strategy="cp", dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    )
    refused(
        accelerator, UnsupportedError, "is compiled, which context parallelism does not support",
        lambda: accelerator.prepare(seeded(0, gpt))(ids),
    )  # fmt: skip
    accelerator.end_training()


def groups_that_have_ended() -> None:
    """As after an attempt of find_executable_batch_size in which memory ran out."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    accelerator.prepare(seeded(0, gpt))
    process.leave_group()
    process.join_group()
    refused(
        accelerator,
        StateError,
        "Create the Accelerator inside its function",
        lambda: accelerator.prepare(seeded(0, gpt)),
    )
    again = Accelerator(cpu=True, strategy="fsdp")
    assert torch.isfinite(again.prepare(seeded(0, gpt))(text()).sum())
    again.end_training()


def on_two() -> list[str]:
    return each([stages_that_freeze_differently, compiled_and_cut, groups_that_have_ended])


def labels_of_one_sequence() -> list[str]:
    """Only the first pair of ranks has labels of -1, which padding would turn into labels that count."""
    accelerator = Accelerator(cpu=True, strategy="fsdp=2+cp=2")
    model = accelerator.prepare(seeded(0, lambda: Other("by hand", -1)))
    ids, targets = text(2, rows=3)[:, :10], text(3, rows=3)[:, :10].clamp(min=1)
    if accelerator.process_index < 2:
        targets[1, :4] = -1
    with pytest.raises(DataError) as caught:
        model(ids, targets)
    told = accelerator.collectives.gather_objects(str(caught.value))
    accelerator.end_training()
    return told


@pytest.mark.slow
def test_two_ranks():
    for failed in run_ranks(on_two, 2):
        assert not failed, "\n".join(failed)


def test_labels_that_one_sequence_cannot_pad_are_an_error_on_all_ranks():
    for told in run_ranks(labels_of_one_sequence, 4):
        assert all("name the label that the loss of Other ignores" in each for each in told[:2]), told
        assert all("the batch of ranks 0, 1 has labels that cannot be padded" in each for each in told[2:]), told
