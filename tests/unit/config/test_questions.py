"""The interview asks only what a machine leaves open."""

from headway.config.launch import LaunchConfig
from headway.config.questions import NONE, SOME, Question, interview


def answer_with(**given):
    asked = []

    def ask(question):
        asked.append(question.name)
        text = given.get(question.name, question.default)
        assert question.problem(text) is None
        return text

    return ask, asked


def test_a_cpu_machine():
    ask, asked = answer_with(num_processes="2")
    assert interview(ask, None, 0) == LaunchConfig(num_processes=2, mixed_precision="no")
    assert asked == ["num_machines", "num_processes", "mixed_precision", "gradient_accumulation_steps"]


def test_every_accelerator_leaves_the_number_open():
    ask, asked = answer_with(mixed_precision="bf16", gradient_accumulation_steps="4")
    made = interview(ask, "cuda", 2, ("0", "1"))
    assert made == LaunchConfig(mixed_precision="bf16", gradient_accumulation_steps=4)
    assert "num_processes" not in asked


def test_some_accelerators():
    ask, _ = answer_with(devices=SOME, gpu_ids="0,1")
    assert interview(ask, "cuda", 4, ("0", "1", "2", "3")).gpu_ids == "0,1"


def test_the_cpu_of_a_machine_with_accelerators():
    ask, _ = answer_with(devices=NONE)
    made = interview(ask, "cuda", 4, ("0", "1", "2", "3"))
    assert (made.cpu, made.num_processes) == (True, 1)


def test_several_machines():
    ask, _ = answer_with(num_machines="2", machine_rank="1", main_process_ip="h", main_process_port="5")
    made = interview(ask, None, 0)
    assert (made.num_machines, made.machine_rank, made.main_process_ip, made.main_process_port) == (2, 1, "h", 5)
    assert made.num_processes == 2


def test_answers_are_checked():
    assert "whole number" in Question("num_processes", "?", "1").problem("two")
    assert Question("mixed_precision", "?", "no", ("no", "bf16")).problem("fp8") == "one of no, bf16"
    assert Question("num_processes", "?", "1").problem("2") is None
