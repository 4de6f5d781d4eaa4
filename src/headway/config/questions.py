"""What `headway config` asks: only what this machine leaves open, each question with its default and its check."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.config import mesh
from headway.config.launch import PRECISIONS, SETTINGS, LaunchConfig
from headway.config.values import from_text
from headway.errors import ConfigError

ALL, SOME, NONE = "all of them", "some of them", "none: the CPU"
SPREADS = {
    "ddp": "ddp: a replica of the model on every process; fastest if the model fits",
    "fsdp": "fsdp: weights, gradients and optimizer state sharded across all processes",
    "hsdp": "hsdp: sharded within groups of processes, with a replica in each group; for several machines",
    "tp": "tp: every matrix split across all processes; for large layers, few processes and fast links",
    "fsdp+cp": "fsdp+cp: sequences cut within groups, parameters sharded across all; for long sequences",
    "fsdp+tp": "fsdp+tp: matrices split within groups, parameters sharded across the groups; for the largest models",
}
"""The layouts that are offered, each with what is cut."""
_SIZED = {"hsdp": "hsdp={}", "fsdp+tp": "fsdp+tp={}", "fsdp+cp": "fsdp+cp={}"}
_SHARED = {"fsdp+tp": "matrix", "fsdp+cp": "sequence"}
"""What a group of these layouts shares."""


@dataclass(frozen=True)
class ConfigQuestion:
    """One question.

    Attributes:
        name: the setting it decides; "devices" decides two, "spread" and "group" decide the strategy.
        text: the question.
        default: the answer that is offered.
        choices: the answers to choose from; empty where anything may be typed.
        written: the setting's value with the answer in the place of {}; empty where it is the answer itself.
        num_processes: what the layout must fit; None: not known yet.
    """

    name: str
    text: str
    default: str
    choices: tuple[str, ...] = ()
    written: str = ""
    num_processes: int | None = None

    def problem(self, answer: str) -> str | None:
        """What is wrong with an answer; None where nothing is."""
        if self.choices:
            return None if answer in self.choices else f"one of {', '.join(self.choices)}"
        try:
            if self.written:
                _check_group(self.written.format(answer.strip()), self.num_processes)
            else:
                from_text(SETTINGS[self.name], answer, "your answer")
        except ConfigError as error:
            return str(error)
        return None


def _check_group(text: str, num_processes: int | None) -> None:
    asked = mesh.parse(text)
    if num_processes is not None:
        asked.resolve(num_processes)


Ask = Callable[[ConfigQuestion], str]


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
        answers[name] = ask(ConfigQuestion(name, text, default, choices))
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
    per_machine = (
        num_devices if devices == ALL else len(answers.get("gpu_ids", "").split(",")) if devices == SOME else 0
    )
    num_processes = int(answers["num_processes"]) if "num_processes" in answers else num_machines * per_machine
    if num_processes > 1:
        _ask_spread(ask, answers, num_processes, num_processes // num_machines)
    put("mixed_precision", "Which precision has the forward pass?", "no", PRECISIONS)
    put("gradient_accumulation_steps", "How many micro-batches make an update?", "1")
    return _decided(answers, has_accelerator=accelerator is not None)


def _ask_spread(ask: Ask, answers: dict[str, str], num_processes: int, per_machine: int) -> None:
    """The layout: what is cut, and over how many processes where that is a choice."""
    text = ask(ConfigQuestion("spread", "How should the model be split?", SPREADS["ddp"], tuple(SPREADS.values())))
    kind = text.partition(":")[0]
    if kind in _SIZED:
        shared = _SHARED.get(kind)
        over = (
            f"How many processes share a {shared}?" if shared else "Across how many processes is each replica sharded?"
        )
        groups = [n for n in range(2, num_processes) if num_processes % n == 0 and (shared or n <= per_machine)] or [2]
        offered = str(groups[0] if shared else groups[-1])
        size = ask(ConfigQuestion("group", over, offered, written=_SIZED[kind], num_processes=num_processes))
        kind = _SIZED[kind].format(size.strip())
    if kind != "ddp":
        answers["strategy"] = kind


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
