"""Uses that layouts reject raise the same error on all ranks before any rank waits, and similar uses work."""

from typing import Any

import pytest
import torch

from headway import Accelerator, TorchDynamoPlugin
from headway.core.runtime import process
from headway.errors import DataError, HeadwayError, PrepareError, StateError, UnsupportedError
from tests.distributed.cut_losses import CustomLossGPT, compare_gradients
from tests.distributed.layouts import GPT, build_seeded, gpt, make_tokens, run_each
from tests.distributed.ranks import run_ranks


def assert_same_error(accelerator: Accelerator, kind: type[HeadwayError], part: str, act: Any) -> None:
    """Assert that `act` raises the same error on all ranks, and that training can continue."""
    with pytest.raises(kind) as exc_info:
        act()
    messages = accelerator.collectives.gather_objects(str(exc_info.value))
    assert all(each == messages[0] for each in messages), messages
    assert part in messages[0], messages


def freeze_on_one_stage() -> None:
    accelerator, model = Accelerator(cpu=True, strategy="pp"), GPT(num_blocks=2)
    if accelerator.process_index:
        model.tokens.requires_grad_(False)
    assert_same_error(
        accelerator, PrepareError, "tokens.weight of GPT is (50, 16) in torch.float32 on rank 0 and",
        lambda: accelerator.prepare(model),
    )  # fmt: skip
    model.tokens.requires_grad_(False)
    accelerator.prepare(model)
    accelerator.end_training()


def compile_with_context_parallelism() -> None:
    """Check that a model compiled by the user can be split, and that compilation by Headway is rejected."""
    accelerator, plain, ids = Accelerator(cpu=True, strategy="cp"), build_seeded(0, gpt), make_tokens(9)
    model = accelerator.prepare(torch.compile(build_seeded(0, gpt), backend="eager"))
    expected, mine = plain(ids).square().mean(), model(ids).square().mean()
    assert abs(mine.item() - expected.item()) < 1e-5 * expected.item()
    expected.backward()
    accelerator.backward(mine)
    compare_gradients(accelerator.unwrap_model(model, keep_torch_compile=False), plain, 1e-4)
    accelerator.end_training()
    accelerator = Accelerator(
        cpu=True, strategy="cp", dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    )
    assert_same_error(
        accelerator, UnsupportedError, "is compiled, which context parallelism does not support",
        lambda: accelerator.prepare(build_seeded(0, gpt))(ids),
    )  # fmt: skip
    accelerator.end_training()


def use_ended_group() -> None:
    """Use an ended group, as after an attempt of `find_executable_batch_size` that ran out of memory."""
    accelerator = Accelerator(cpu=True, strategy="fsdp")
    accelerator.prepare(build_seeded(0, gpt))
    process.leave_group()
    process.join_group()
    assert_same_error(
        accelerator,
        StateError,
        "Create the Accelerator inside its function",
        lambda: accelerator.prepare(build_seeded(0, gpt)),
    )
    again = Accelerator(cpu=True, strategy="fsdp")
    assert torch.isfinite(again.prepare(build_seeded(0, gpt))(make_tokens()).sum())
    again.end_training()


def run_on_two() -> list[str]:
    return run_each([freeze_on_one_stage, compile_with_context_parallelism, use_ended_group])


def use_labels_that_cannot_be_padded() -> list[str]:
    """Use labels of -1 on the first pair of ranks only. Padding would turn these into labels that count."""
    accelerator = Accelerator(cpu=True, strategy="fsdp=2+cp=2")
    model = accelerator.prepare(build_seeded(0, lambda: CustomLossGPT("by hand", -1)))
    ids, targets = make_tokens(2, rows=3)[:, :10], make_tokens(3, rows=3)[:, :10].clamp(min=1)
    if accelerator.process_index < 2:
        targets[1, :4] = -1
    with pytest.raises(DataError) as exc_info:
        model(ids, targets)
    messages = accelerator.collectives.gather_objects(str(exc_info.value))
    accelerator.end_training()
    return messages


@pytest.mark.slow
def test_errors_on_two_ranks():
    for failed in run_ranks(run_on_two, 2):
        assert not failed, "\n".join(failed)


def test_labels_that_cannot_be_padded_are_an_error_on_all_ranks():
    for messages in run_ranks(use_labels_that_cannot_be_padded, 4):
        assert all("name the label that the loss of CustomLossGPT ignores" in each for each in messages[:2]), messages
        assert all("the batch of ranks 0, 1 has labels that cannot be padded" in each for each in messages[2:]), (
            messages
        )
