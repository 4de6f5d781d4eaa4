"""What tells a save that it is alone: everything that the other ranks may go on to, and what they may have been through before."""

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


def nothing_in_between(training, folder):
    """The others come to another save at once: it is taken for the same."""
    if training.accelerator.is_main_process:
        training.accelerator.save_state(f"{folder}/one")
    training.accelerator.save_state(f"{folder}/two")
    training.accelerator.wait_for_everyone()


def a_barrier_of_torch(training, folder):
    if training.accelerator.is_main_process:
        training.accelerator.save_state(f"{folder}/one")
    dist.barrier()


def first_the_main_process(training, folder):
    with training.accelerator.main_process_first():
        if training.accelerator.is_main_process:
            training.accelerator.save_state(f"{folder}/one")


def a_random_condition(training, folder):
    """Nothing in the source tells that it is false elsewhere."""
    if Path(folder, "is_first").exists() == training.accelerator.is_main_process:
        training.accelerator.save_state(f"{folder}/one")
    training.train(4)


def at_the_end_of_the_script(training, folder):
    training.train(4)
    if training.accelerator.is_main_process:
        training.accelerator.save_state(f"{folder}/one")


WAYS = [nothing_in_between, a_barrier_of_torch, first_the_main_process, a_random_condition, at_the_end_of_the_script]


def go_past(root):
    """Each way on its own, the end of the script last; what was said, and what can be loaded."""
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


def test_a_rank_that_goes_past_says_so(tmp_path):
    (first, losses), (_, others) = run_ranks(go_past, 2, str(tmp_path))
    assert first == ["one", "two", "one", "one", "one", "one"]
    assert len(losses) == len(others) > 4


def from_another_line():
    """Nothing makes rank 0 wait in its forward: it has gone on when rank 1 comes to it, at a line where it was never before."""
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


def test_a_forward_from_another_line_is_the_same_forward():
    assert run_ranks(from_another_line, 2) == [True, True]


def after_a_failed_attempt(root):
    """One rank has begun an exchange that the other never came to."""
    training = Training()

    @find_executable_batch_size(starting_batch_size=2)
    def attempt(batch_size):
        if batch_size == 2 and training.accelerator.is_main_process:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return training.accelerator.reduce(torch.ones(1)).item()

    assert attempt() == 2
    return "saved_by" in verify_checkpoint(training.accelerator.save_state(f"{root}/all")).about


def test_ranks_that_have_left_an_exchange_still_save_together(tmp_path):
    assert run_ranks(after_a_failed_attempt, 2, str(tmp_path)) == [False, False]


UNSEEN = """
import time
from headway import Accelerator
accelerator = Accelerator(cpu=True)
if accelerator.is_main_process:
    accelerator.save_state("there")
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_where_the_others_say_nothing(tmp_path):
    ran = launch(tmp_path, UNSEEN, "-n", "2", "--cpu", "--timeout", "4")
    assert ran.returncode != 0
    assert "save_state was called on rank 0 only, at train.py:6: call it on every rank" in ran.stderr
    assert "this run hangs: rank 1 of 2 is missing from save_state" in ran.stderr
