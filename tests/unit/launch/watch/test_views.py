"""Test what is read from the stacks of ranks: conditions, loops, activities and places."""

import sysconfig

import pytest

from headway.common.callsite import Frame, is_user_file
from headway.launch.watch import stacks, views

SITE, STDLIB = sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")

SCRIPT = """
def train(accelerator, rank):
    for step in range(5):                              # 3
        if accelerator.is_main_process:                # 4
            accelerator.gather(step)                   # 5
        elif step == 3:                                # 6
            accelerator.reduce(step)                   # 7
        else:
            accelerator.wait_for_everyone()            # 9
    accelerator.gather(rank)                           # 10


@accelerator.on_main_process
def report():
    accelerator.gather(1)                              # 15


while get_rank() == 0: work()                          # 18
train(1, 2)                                            # 19
finish()                                               # 20
"""


@pytest.fixture
def script(tmp_path):
    """Path of a script whose line numbers the tests use."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (5, (4, "if accelerator.is_main_process:")),
        (7, (4, "else of if accelerator.is_main_process:")),
        (9, (4, "else of if accelerator.is_main_process:")),
        (15, (13, "@accelerator.on_main_process")),
        (18, (18, "while get_rank() == 0:")),
        (10, None),
        (4, None),
        (19, None),
    ],
)
def test_condition_that_not_every_rank_passes(script, line, told):
    found = stacks.find_condition([Frame(script, line, "train")])
    assert (None if found is None else (found[0].line, found[1])) == told


def test_condition_around_the_call_is_found_in_the_caller(script):
    inner = Frame(__file__, 1, "helper")
    found = stacks.find_condition([inner, Frame(script, 5, "train")])
    assert found is not None
    assert found[0] == Frame(script, 4, "train")


@pytest.mark.parametrize("text", ["def (", "\0"])
def test_file_that_is_not_python_is_ignored(tmp_path, text):
    (tmp_path / "x.py").write_text(text)
    assert stacks.find_condition([Frame(str(tmp_path / "x.py"), 1, "f"), Frame("/nowhere/y.py", 3, "g")]) is None


def test_loop_that_a_rank_has_left(script):
    waiting = [Frame(script, 5, "train"), Frame(script, 19, "<module>")]
    outside = [Frame("/elsewhere.py", 3, "finish"), Frame(script, 20, "<module>")]
    assert stacks.find_left_loop(outside, waiting) == Frame(script, 3, "train")
    past = [Frame(script, 10, "train"), Frame(script, 19, "<module>")]
    assert stacks.find_left_loop(past, waiting) == Frame(script, 3, "train")
    same = [Frame(script, 9, "train"), Frame(script, 19, "<module>")]
    assert stacks.find_left_loop(same, waiting) is None
    assert stacks.find_left_loop(waiting, past) is None
    assert stacks.find_left_loop([], waiting) is None


def test_main_thread_of_a_dump_is_parsed():
    text = (
        'Thread 0x01 (most recent call first):\n  File "/lib/threading.py", line 3 in wait\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/elsewhere/a b.py", line 12 in <lambda>\n'
        '  File "/elsewhere/train.py", line 40 in <module>\n'
    )
    assert stacks.parse_main_stack(text) == [
        Frame("/elsewhere/a b.py", 12, "<lambda>"),
        Frame("/elsewhere/train.py", 40, "<module>"),
    ]
    assert stacks.parse_main_stack("") == []
    assert stacks.parse_main_stack("Thread 0x01 (most recent call first):\n...\n") == []


def test_activities_are_read_from_a_stack():
    user = Frame("/elsewhere/train.py", 3, "main")
    assert stacks.is_in_debugger([Frame(STDLIB + "/pdb.py", 5, "cmdloop"), user])
    assert stacks.is_saving([Frame(SITE + "/torch/serialization.py", 5, "save"), user])
    inside = [Frame(SITE + "/torch/utils/data/dataloader.py", 5, "_try_get_data"), user]
    outside = [user, Frame(SITE + "/torch/utils/data/_utils/fetch.py", 5, "fetch"), user]
    assert stacks.is_loading_data(inside)
    assert not stacks.is_in_dataset(inside)
    assert stacks.is_in_dataset(outside)
    meeting = [
        Frame(SITE + "/torch/distributed/distributed_c10d.py", 9, "init_process_group"),
        Frame(SITE + "/torch/distributed/c10d_logger.py", 9, "wrapper"),
        user,
    ]
    assert stacks.is_meeting(meeting)
    assert stacks.find_meeting_call(meeting) == "init_process_group"
    assert not stacks.is_meeting([user])
    mine = Frame("/elsewhere/headway/core/checkpoint/torch/utils/data/pdb.py", 3, "main")
    assert not any(
        check([mine])
        for check in (stacks.is_in_debugger, stacks.is_saving, stacks.is_loading_data, stacks.is_in_backward)
    )


def test_place_is_formatted_for_people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("\n  step()  \n")
    place = Frame(str(tmp_path / "train.py"), 2, "<module>")
    assert str(place) == "train.py:2"
    assert place.source == "step()"
    assert str(Frame("/other/train.py", 2, "main")) == "/other/train.py:2 in main"
    assert is_user_file(place.file)
    assert not is_user_file(views.__file__)
    assert not is_user_file("<frozen runpy>")
