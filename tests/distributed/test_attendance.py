"""A save called on one rank only: what the other ranks may do next, and how Headway recognizes that they do not take part."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway import Accelerator, find_executable_batch_size
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.runtime import process
from headway.core.runtime.control_plane.conditional_calls import RankConditionalCallCheck
from tests.distributed.ranks import run_ranks
from tests.distributed.test_launch import launch
from tests.distributed.test_saves_of_one_rank import Training


def call_next_save_at_once(training, folder):
    """Make two saves on rank 0, but only the second on rank 1, where it counts as the first."""
    if training.accelerator.is_main_process:
        training.accelerator.save_state(f"{folder}/one")
    training.accelerator.save_state(f"{folder}/two")
    training.accelerator.wait_for_everyone()


def wait_at_torch_barrier(training, folder):
    if training.accelerator.is_main_process:
        training.accelerator.save_state(f"{folder}/one")
    dist.barrier()


def use_main_process_first(training, folder):
    with training.accelerator.main_process_first():
        if training.accelerator.is_main_process:
            training.accelerator.save_state(f"{folder}/one")


def use_opaque_condition(training, folder):
    """Call the save under a condition whose source does not show that it differs between ranks."""
    if Path(folder, "is_first").exists() == training.accelerator.is_main_process:
        training.accelerator.save_state(f"{folder}/one")
    training.train(4)


def save_at_end_of_script(training, folder):
    training.train(4)
    if training.accelerator.is_main_process:
        training.accelerator.save_state(f"{folder}/one")


WAYS = [
    call_next_save_at_once,
    wait_at_torch_barrier,
    use_main_process_first,
    use_opaque_condition,
    save_at_end_of_script,
]


def run_all_ways(root):
    """Call each function in WAYS, and return (names of valid checkpoints, losses)."""
    training, saved = Training(), []
    for way in WAYS:
        folder = Path(root, way.__name__)
        folder.mkdir(exist_ok=True)
        (folder / "is_first").touch()
        training.accelerator.wait_for_everyone()
        way(training, folder)
        saved += [
            verify_checkpoint(path).about["name"]
            for path in sorted(folder.iterdir())
            if path.is_dir() and path.name != "latest"
        ]
    return saved, training.losses


def test_save_on_one_rank_completes_when_others_go_on(tmp_path):
    (first, losses), (_, others) = run_ranks(run_all_ways, 2, str(tmp_path))
    assert first == ["one", "two", "one", "one", "one", "one"]
    assert len(losses) == len(others) > 4


def check_forward_at_different_lines():
    """Check a forward three times on two ranks. Rank 1's second check is at another line, 0.5 s after rank 0 has gone on."""
    accelerator = Accelerator(cpu=True)
    check = RankConditionalCallCheck(process.current(), "deepspeed")
    for number in range(3):
        if accelerator.process_index and number == 1:
            time.sleep(0.5)
            check.check("the model is called", "a forward")
        else:
            check.check("the model is called", "a forward")
        if number:
            accelerator.wait_for_everyone()
    return True


def test_forward_at_another_line_counts_as_the_same_forward():
    assert run_ranks(check_forward_at_different_lines, 2) == [True, True]


def save_after_failed_attempt(root):
    """Save after one rank has begun a collective that the other never reached."""
    training = Training()

    @find_executable_batch_size(starting_batch_size=2)
    def attempt(batch_size):
        if batch_size == 2 and training.accelerator.is_main_process:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return training.accelerator.reduce(torch.ones(1)).item()

    assert attempt() == 2
    return "saved_by" in verify_checkpoint(training.accelerator.save_state(f"{root}/all")).about


def test_ranks_save_together_after_an_abandoned_collective(tmp_path):
    assert run_ranks(save_after_failed_attempt, 2, str(tmp_path)) == [False, False]


SCRIPT = """
import time
from headway import Accelerator
accelerator = Accelerator(cpu=True)
if accelerator.is_main_process:
    accelerator.save_state("there")
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_save_on_one_rank_is_reported_if_other_ranks_never_reach_a_call(tmp_path):
    result = launch(tmp_path, SCRIPT, "-n", "2", "--cpu", "--timeout", "4")
    assert result.returncode != 0
    assert "save_state was called on rank 0 only, at train.py:6: call it on every rank" in result.stderr
    assert "this run hangs: rank 1 of 2 is missing from save_state" in result.stderr
