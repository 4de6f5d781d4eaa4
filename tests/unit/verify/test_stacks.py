"""Test the report about ranks without progress, from stacks in the format of Python's faulthandler."""

from pathlib import Path

import pytest

from headway.verify.stacks import describe_stuck, get_stack_file, is_any_stuck, read_stacks, write_stack

WATCHING = """Thread 0x00007f1 [python] (most recent call first):
  File "/env/lib/python3.12/site-packages/headway/verify/recorder.py", line 520 in _watch_progress

"""
MAIN = "Current thread 0x00007f2 [python] (most recent call first):\n"
IN_COLLECTIVE = (
    '  File "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
)


IN_BACKWARD = '  File "/env/lib/python3.12/site-packages/torch/autograd/graph.py", line 9 in _engine_run_backward\n'


def write(folder: Path, rank: int, frames: str) -> None:
    get_stack_file(folder, rank).write_text(WATCHING + MAIN + frames)


@pytest.mark.parametrize("waiting", [IN_COLLECTIVE, IN_BACKWARD])
def test_rank_outside_a_collective_is_named(tmp_path: Path, waiting: str) -> None:
    write(tmp_path, 0, waiting + '  File "/srv/demo/train.py", line 30 in main\n')
    write(tmp_path, 1, '  File "/srv/demo/train.py", line 28 in wait\n  File "/srv/demo/train.py", line 41 in main\n')
    found = describe_stuck(read_stacks(tmp_path, 2))
    assert found == "the other ranks waited for rank 1: rank 0 at train.py:30 in main, rank 1 at train.py:28 in wait"


@pytest.mark.parametrize("frames", ["", IN_COLLECTIVE])
def test_ranks_in_different_collectives_are_listed(tmp_path: Path, frames: str) -> None:
    for rank in range(2):
        write(tmp_path, rank, f'{frames}  File "/srv/demo/train.py", line {rank} in main\n')
    assert describe_stuck(read_stacks(tmp_path, 2)) == "rank 0 at train.py:0 in main, rank 1 at train.py:1 in main"


def test_single_process_has_no_rank(tmp_path: Path) -> None:
    write(tmp_path, 0, '  File "/srv/demo/train.py", line 3 in main\n')
    assert describe_stuck(read_stacks(tmp_path, 1)) == "it was at train.py:3 in main"


@pytest.mark.parametrize("folder", ["/srv/headway/examples", "/srv/lib/python/projects"])
def test_scripts_in_folders_that_are_named_like_libraries_are_the_users(tmp_path: Path, folder: str) -> None:
    write(tmp_path, 0, f'  File "{folder}/train.py", line 3 in main\n')
    assert describe_stuck(read_stacks(tmp_path, 1)) == "it was at train.py:3 in main"


def test_without_stacks_nothing_is_reported(tmp_path: Path) -> None:
    get_stack_file(tmp_path, 0).touch()
    assert not is_any_stuck(tmp_path)
    assert describe_stuck(read_stacks(tmp_path, 2)) == ""


def test_process_writes_its_own_stack(tmp_path: Path) -> None:
    write_stack(tmp_path, 0)
    assert is_any_stuck(tmp_path)
    (found,) = read_stacks(tmp_path, 1)
    assert "test_stacks.py" in found.line
    assert "test_process_writes_its_own_stack" in found.line
