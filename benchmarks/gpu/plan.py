"""The steps in their order, and the seconds that each is promised of the ten minutes that a lent machine gives to a command."""

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
    """

    name: str
    question: str
    seconds: float
    module: str = ""

    @property
    def place(self) -> str:
        """The module that is imported."""
        return self.module or f"benchmarks.gpu.steps.{self.name}"


STEPS = (
    Step("synchronisations", "How often does an update wait for the device, compared with a hand-written loop?", 35),
    Step("gpt2", "How fast is GPT-2 124M in bf16 in a hand-written loop, with Headway and with Accelerate?", 70),
    Step("float8", "How much faster than bf16 are wide layers in float8, and how far do the losses part?", 45),
    Step("out_of_memory", "Does a first step that runs out of memory give the same bits when it is repeated?", 35),
    Step("microbatching", "Which size does automatic micro-batching find, compared with bisection?", 40),
    Step("notebook", "How much memory do the notebook's four configurations need here, and how fast are they?", 45),
    Step("weights", "How close do weights streamed from host memory come to the link's bandwidth?", 45),
    Step("activations", "What does keeping activations in host memory cost, compared with recomputing them?", 40),
    Step("saves", "How long does a background save stall GPT-2 XL with AdamW, compared with dcp.async_save?", 50),
    Step("ranks", "Do two ranks on one device train the same model as one process?", 35),
    Step("forecast", "How close do forecasts of memory come to twelve real runs, and to a card's own record?", 50),
    Step("tests", "Do the tests that need an accelerator pass?", 50),
)


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
