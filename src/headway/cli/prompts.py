"""Prompts on a terminal, with menus if questionary is installed, else as plain lines."""

from collections.abc import Callable
from typing import Protocol

import click

from headway.common import optional


class Question(Protocol):
    """Interface of a question to the user: a text, a default answer, and a method that checks an answer."""

    @property
    def text(self) -> str:
        """Text of the question."""

    @property
    def default(self) -> str:
        """Suggested answer."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed answers. Empty if any text is allowed."""

    def find_problem(self, answer: str) -> str | None:
        """Return a description of what is wrong with an answer, or None if the answer is valid."""


def choose_prompt() -> Callable[[Question], str]:
    """Return `ask_with_menu` if questionary is installed, else `ask_with_lines`."""
    return ask_with_menu if optional.is_available("questionary") else ask_with_lines


def ask_with_menu(question: Question) -> str:
    """Ask a question with a menu or prompt of questionary, and return a valid answer.

    Raises:
        click.Abort: If the user presses Ctrl-C.
        OptionalDependencyMissing: If questionary is not installed.
    """
    questionary = optional.require("questionary", "menus need", "headway[config]")
    if question.choices:
        answer = questionary.select(question.text, choices=list(question.choices), default=question.default).ask()
    else:
        check = lambda text: question.find_problem(text) or True  # noqa: E731  (questionary wants a callable)
        answer = questionary.text(question.text, default=question.default, validate=check).ask()
    if answer is None:
        raise click.Abort
    return str(answer)


def ask_with_lines(question: Question) -> str:
    """Ask a question with plain lines, and return a valid answer.

    The user selects a choice by its number, or by its text up to the first colon. The complete choice is returned.

    Raises:
        click.Abort: If the user presses Ctrl-C, or the input ends.
    """
    if not question.choices:
        return str(
            click.prompt(question.text, default=question.default, value_proc=lambda text: _check_answer(question, text))
        )
    click.echo(question.text)
    for number, choice in enumerate(question.choices, 1):
        click.echo(f"  {number}  {choice}")
    default = str(question.choices.index(question.default) + 1)
    return str(
        click.prompt(
            "Number", default=default, value_proc=lambda text: _check_answer(question, _resolve_choice(question, text))
        )
    )


def _resolve_choice(question: Question, typed: str) -> str:
    """Return the choice whose number, or text up to the first colon, the user typed; the typed text if there is none."""
    text = typed.strip()
    if text.isdecimal() and 1 <= int(text) <= len(question.choices):
        return question.choices[int(text) - 1]
    named = [choice for choice in question.choices if text and choice.partition(":")[0] == text]
    return named[0] if named else text


def _check_answer(question: Question, answer: str) -> str:
    """Return an answer unchanged, or let click print the problem and ask again."""
    problem = question.find_problem(answer)
    if problem is not None:
        raise click.UsageError(problem)  # click prints it and asks again
    return answer
