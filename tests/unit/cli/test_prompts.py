"""Test the plain prompts of `headway config`: accepted answers, and how a wrong answer is explained and asked again."""

import click
import pytest
from click.testing import CliRunner

from headway.cli.config import LAYOUT_DESCRIPTIONS, ConfigQuestion
from headway.cli.prompts import ask_with_lines

SPREAD = ConfigQuestion(
    "layout", "How should the model be split?", LAYOUT_DESCRIPTIONS["ddp"], tuple(LAYOUT_DESCRIPTIONS.values())
)
COUNT = ConfigQuestion("num_processes", "How many processes?", "2")


def answer_prompt(question, typed):
    """Return the answer to a question and the printed text, for lines typed at the prompt."""
    found = []
    command = click.command()(lambda: found.append(ask_with_lines(question)))
    ran = CliRunner().invoke(command, input=typed)
    return (found[0] if found else None), ran.output


@pytest.mark.parametrize("typed", ["2\n", "fsdp\n", " fsdp \n", LAYOUT_DESCRIPTIONS["fsdp"] + "\n"])
def test_choice_is_accepted_as_number_word_or_text(typed):
    chosen, shown = answer_prompt(SPREAD, typed)
    assert chosen == LAYOUT_DESCRIPTIONS["fsdp"]
    assert "  1  ddp: a replica" in shown
    assert "  6  fsdp+tp: " in shown


@pytest.mark.parametrize(("question", "default"), [(SPREAD, LAYOUT_DESCRIPTIONS["ddp"]), (COUNT, "2")])
def test_enter_selects_the_default(question, default):
    assert answer_prompt(question, "\n")[0] == default


@pytest.mark.parametrize(
    ("question", "wrong", "right", "says"),
    [
        (COUNT, "two", "3", "whole number"),
        (COUNT, "0", "3", "or more"),
        (SPREAD, "7", "1", "one of"),
        (SPREAD, "x", "ddp", "one of"),
    ],
)
def test_wrong_answer_is_explained_and_asked_again(question, wrong, right, says):
    chosen, shown = answer_prompt(question, f"{wrong}\n{right}\n")
    assert question.find_problem(chosen) is None
    assert says in shown


def test_end_of_input_ends_the_interview():
    assert answer_prompt(COUNT, "")[0] is None
