"""The steps in their order, and the seconds that each is promised of the ten minutes that a lent machine gives to a command."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

TOTAL = 540.0
"""Seconds for all steps; the rest of the ten minutes is for looking for the accelerator, which imports torch for the first time."""

ON_CPU = 1800.0
"""The same on a CPU, which nobody lends, and which other work may share."""

SIZES = ("full", "small", "smallest")
"""On an accelerator, on a CPU, and in tests."""


@dataclass(frozen=True)
class Step:
    """One question.

    Attributes:
        name: on the command line.
        question: what it answers.
        seconds: what it may take at least, whatever the steps before it did; what those leave is its own too.
        module: where its `run` is.
        needs: packages beside Headway's own; without one of them it is left out.
    """

    name: str
    question: str
    seconds: float
    module: str = ""
    needs: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The module that is imported."""
        return self.module or f"benchmarks.gpu.steps.{self.name}"


MODELS = ("transformers",)
"""Where a step has its models from."""

STEPS = (
    Step("synchronizations", "How often does an update wait for the device, compared with a hand-written loop?", 35),
    Step(
        "gpt2",
        "How fast is GPT-2 124M in bf16 in a hand-written loop, with Headway and with Accelerate?",
        50,
        needs=MODELS,
    ),
    Step(
        "float8",
        "How much faster than bf16 are wide layers in float8, and how far do the losses part?",
        45,
        needs=MODELS,
    ),
    Step("out_of_memory", "Does a first step that runs out of memory give the same bits when it is repeated?", 30),
    Step("microbatching", "Which size does automatic micro-batching find, compared with bisection?", 35, needs=MODELS),
    Step(
        "notebook",
        "How much memory do the notebook's four configurations need here, and how fast are they?",
        40,
        needs=MODELS,
    ),
    Step("weights", "How close do weights streamed from host memory come to the link's bandwidth?", 35, needs=MODELS),
    Step(
        "activations",
        "What does keeping activations in host memory cost, compared with recomputing them?",
        35,
        needs=MODELS,
    ),
    Step(
        "saves",
        "How long does a background save stall GPT-2 XL with AdamW, compared with dcp.async_save?",
        50,
        needs=MODELS,
    ),
    Step("disk", "How close do blocking saves and loads of a device's state come to the disk?", 45),
    Step("ranks", "Do two ranks on one device train the same model as one process?", 30),
    Step(
        "forecast",
        "How close do forecasts of memory come to real runs, and to a card's own record?",
        55,
        needs=MODELS,
    ),
    Step("tests", "Do the tests that need an accelerator pass?", 55, needs=("pytest",)),
)


def lacking(modules: Sequence[str]) -> list[str]:
    """Those that cannot be imported here."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def named(names: list[str]) -> tuple[Step, ...]:
    """The steps of these names in the plan's order; none: all of them.

    Raises:
        ValueError: a name that no step has.
    """
    unknown = sorted(set(names) - {step.name for step in STEPS})
    if unknown:
        there = ", ".join(step.name for step in STEPS)
        raise ValueError(f"no such step: {', '.join(unknown)}; choose from {there}")
    return tuple(step for step in STEPS if not names or step.name in names)
