"""Test that `headway config` asks only for settings that the machine does not determine."""

import pytest

from headway.cli.config import LAYOUT_DESCRIPTIONS, NO_DEVICES, SOME_DEVICES, ConfigQuestion, ask_questions
from headway.core.config.launch import LaunchConfig
from headway.core.config.mesh import parse_layout


def make_answers(**given):
    """Return a function that answers questions, by `given` or the default, and the list of questions asked."""
    asked = []

    def answer_question(question):
        asked.append(question.name)
        text = given.get(question.name, question.default)
        assert question.find_problem(text) is None
        return text

    return answer_question, asked


def test_cpu_machine_is_asked_for_processes():
    ask, asked = make_answers(num_processes="2")
    assert ask_questions(ask, None, 0) == LaunchConfig(num_processes=2, mixed_precision="no")
    assert asked == ["num_machines", "num_processes", "layout", "mixed_precision", "gradient_accumulation_steps"]


def test_all_accelerators_leave_num_processes_unset():
    ask, asked = make_answers(mixed_precision="bf16", gradient_accumulation_steps="4")
    made = ask_questions(ask, "cuda", 2, ("0", "1"))
    assert made == LaunchConfig(mixed_precision="bf16", gradient_accumulation_steps=4)
    assert "num_processes" not in asked


def test_some_accelerators_set_gpu_ids():
    ask, _ = make_answers(devices=SOME_DEVICES, gpu_ids="0,1")
    assert ask_questions(ask, "cuda", 4, ("0", "1", "2", "3")).gpu_ids == "0,1"


def test_choosing_the_cpu_on_a_machine_with_accelerators_gives_one_process():
    ask, _ = make_answers(devices=NO_DEVICES)
    made = ask_questions(ask, "cuda", 4, ("0", "1", "2", "3"))
    assert (made.cpu, made.num_processes) == (True, 1)


def test_several_machines_are_asked_for_rank_and_address():
    ask, _ = make_answers(num_machines="2", machine_rank="1", main_process_ip="h", main_process_port="5")
    made = ask_questions(ask, None, 0)
    assert (made.num_machines, made.machine_rank, made.main_process_ip, made.main_process_port) == (2, 1, "h", 5)
    assert made.num_processes == 2


def test_answers_are_checked():
    assert "whole number" in ConfigQuestion("num_processes", "?", "1").find_problem("two")
    assert ConfigQuestion("mixed_precision", "?", "no", ("no", "bf16")).find_problem("fp8") == "one of no, bf16"
    assert ConfigQuestion("num_processes", "?", "1").find_problem("2") is None


@pytest.mark.parametrize(
    ("layout", "group", "strategy"),
    [("fsdp", None, "fsdp"), ("tp", None, "tp"), ("hsdp", None, "hsdp=4"), ("hsdp", "2", "hsdp=2"), ("fsdp+tp", None, "fsdp+tp=2"),
     ("fsdp+cp", None, "fsdp+cp=2"),
     ("fsdp+tp", " 4", "fsdp+tp=4")],
)  # fmt: skip
def test_answers_give_the_strategy(layout, group, strategy):
    given = {"layout": LAYOUT_DESCRIPTIONS[layout], "num_machines": "2"} | ({"group": group} if group else {})
    ask, asked = make_answers(**given)
    assert ask_questions(ask, "cuda", 4, ("0", "1", "2", "3")).strategy == strategy
    assert ("group" in asked) is ("=" in strategy)


def test_single_process_is_not_asked_for_a_layout():
    ask, asked = make_answers(num_processes="1")
    assert not ask_questions(ask, None, 0).is_set("strategy")
    assert "layout" not in asked


def test_group_size_must_fit():
    question = ConfigQuestion("group", "?", "2", layout_format="fsdp+tp={}", num_processes=8)
    assert "the nearest that fit 8: fsdp+tp=2, fsdp+tp=4" in question.find_problem("3")
    assert "needs a number of ranks" in question.find_problem("two")
    assert question.find_problem("4") is None


def test_each_layout_is_explained_in_one_line():
    for name, text in LAYOUT_DESCRIPTIONS.items():
        parse_layout(f"{name}=2" if name == "hsdp" else name.replace("+tp", "+tp=2").replace("+cp", "+cp=2"))
        assert text.startswith(f"{name}: ")
        assert len(text) < 100
