"""What `headway config` asks: only what this machine leaves open, each question with its default and its check."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.config.launch import PRECISIONS, SETTINGS, LaunchConfig
from headway.config.values import from_text
from headway.errors import ConfigError

ALL, SOME, NONE = "all of them", "some of them", "none: the CPU"


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        name: the setting it decides; "devices" decides two.
        text: the question.
        default: the answer that is offered.
        choices: the answers to choose from; empty where anything may be typed.
    """

    name: str
    text: str
    default: str
    choices: tuple[str, ...] = ()

    def problem(self, answer: str) -> str | None:
        """What is wrong with an answer; None where nothing is."""
        if self.choices:
            return None if answer in self.choices else f"one of {', '.join(self.choices)}"
        try:
            from_text(SETTINGS[self.name], answer, "your answer")
        except ConfigError as error:
            return str(error)
        return None


Ask = Callable[[Question], str]


def interview(ask: Ask, accelerator: str | None, num_devices: int, device_ids: tuple[str, ...] = ()) -> LaunchConfig:
    """Ask what is open and return what was decided.

    Args:
        ask: puts one question and returns a valid answer.
        accelerator: what this machine computes on; None for the CPU.
        num_devices: how many of them are visible.
        device_ids: their names.
    """
    answers: dict[str, str] = {}

    def put(name: str, text: str, default: str, choices: tuple[str, ...] = ()) -> str:
        answers[name] = ask(Question(name, text, default, choices))
        return answers[name]

    num_machines = int(put("num_machines", "How many machines take part in a run?", "1"))
    if num_machines > 1:
        put("machine_rank", "Which of them is this one, counted from 0?", "0")
        put("main_process_ip", "At which address do the others reach machine 0?", "10.0.0.1")
        put("main_process_port", "On which free port of machine 0 do they meet?", "29400")
    devices = NONE
    if accelerator is not None:
        devices = put(
            "devices", f"This machine has {num_devices} x {accelerator}. Which are used?", ALL, (ALL, SOME, NONE)
        )
    if devices == SOME:
        put("gpu_ids", f"Which, separated by commas? There are {', '.join(device_ids)}.", device_ids[0])
    if devices == NONE:
        per_run = "How many processes are started on the CPU, over all machines?"
        put("num_processes", per_run, str(num_machines))
    put("mixed_precision", "Which precision has the forward pass?", "no", PRECISIONS)
    put("gradient_accumulation_steps", "How many micro-batches make an update?", "1")
    return _decided(answers, has_accelerator=accelerator is not None)


def _decided(answers: Mapping[str, str], has_accelerator: bool) -> LaunchConfig:
    """The answers as settings; what equals a launch's own default stays open, so that a script may decide it."""
    decided: dict[str, Any] = {
        name: from_text(SETTINGS[name], answer, "your answer")
        for name, answer in answers.items()
        if name in SETTINGS and not _is_default(name, answer)
    }
    if has_accelerator and answers.get("devices") == NONE:
        decided["cpu"] = True
    return LaunchConfig(**decided)


def _is_default(name: str, answer: str) -> bool:
    return (name, answer) in (("num_machines", "1"), ("gradient_accumulation_steps", "1"))
