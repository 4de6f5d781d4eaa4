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
    Step("synchronisations", "How often does an update wait for the device, beside a loop by hand?", 45),
    Step("gpt2", "How fast is GPT-2 124M in bf16, by hand, with Headway, with Accelerate?", 105),
    Step("out_of_memory", "Is a first step that runs out of memory made again with the same bits?", 35),
    Step("microbatching", "What does automatic micro-batching find, beside bisection?", 40),
    Step("notebook", "What do the notebook's four rows take here?", 55),
    Step("weights", "How near to the link's bandwidth do weights stream from host memory?", 60),
    Step("activations", "What does keeping activations in host memory cost, beside computing them again?", 40),
    Step("saves", "How long does a save behind the loop hold up GPT-2 XL with AdamW, beside dcp.async_save?", 65),
    Step("ranks", "Do two ranks on one card train what one process does?", 40),
    Step("tests", "Do the tests that need an accelerator pass?", 55),
)


def named(names: list[str]) -> tuple[Step, ...]:
    """The steps of these names in the plan's order; none: all of them.

    Raises:
        ValueError: a name that no step has.
    """
    unknown = sorted(set(names) - {step.name for step in STEPS})
    if unknown:
        there = ", ".join(step.name for step in STEPS)
        raise ValueError(f"no such step: {', '.join(unknown)}; there are {there}")
    return tuple(step for step in STEPS if not names or step.name in names)
