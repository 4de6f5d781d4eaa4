"""The steps in their order, with the seconds reserved for each. A rented machine limits a command to ten minutes."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

TOTAL = 540.0
"""Seconds for all steps on an accelerator. The rest of the ten minutes is for the first import of torch, which finds the device."""

ON_CPU = 1800.0
"""Seconds for all steps on a CPU, which may be shared with other work."""

SIZES = ("full", "small", "smallest")
"""Sizes of the workloads: for an accelerator, for a CPU, and for tests."""


@dataclass(frozen=True)
class Step:
    """One step of the benchmark.

    Attributes:
        name: Name on the command line.
        question: Question that the step answers.
        seconds: Time reserved for the step. It may also use time that earlier steps have left.
        module: Module with the step's `run` function; by default the one of this name in benchmarks/gpu/steps.
        needs: Packages that the step needs besides Headway's own. Without one of them, it is left out.
    """

    name: str
    question: str
    seconds: float
    module: str = ""
    needs: tuple[str, ...] = ()

    @property
    def module_name(self) -> str:
        """Full name of the module with the step's `run` function."""
        return self.module or f"benchmarks.gpu.steps.{self.name}"


MODELS = ("transformers",)
"""Packages that a step with transformers models needs."""

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
        "How much faster than bf16 is float8 with the layers of Llama 3 8B, and how much do the losses differ?",
        45,
        needs=MODELS,
    ),
    Step("out_of_memory", "Does a first step that runs out of memory give the same bits when it is repeated?", 30),
    Step(
        "microbatching",
        "Which micro-batch size does automatic micro-batching find, compared with bisection?",
        35,
        needs=MODELS,
    ),
    Step(
        "notebook",
        "How much memory do the notebook's four configurations need here, and how fast are they?",
        40,
        needs=MODELS,
    ),
    Step("weights", "How much of the link's bandwidth do weights streamed from host memory use?", 35, needs=MODELS),
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
    Step("disk", "How fast are blocking saves and loads of a device's state, compared with the disk?", 45),
    Step("ranks", "Do two ranks on one device train the same model as one process?", 30),
    Step(
        "forecast",
        "How close are memory forecasts to real runs, and to the allocator's own record?",
        55,
        needs=MODELS,
    ),
    Step("tests", "Do the tests that need an accelerator pass?", 55, needs=("pytest",)),
)


def find_missing(modules: Sequence[str]) -> list[str]:
    """Return the modules that cannot be imported here."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def select_steps(names: list[str]) -> tuple[Step, ...]:
    """Return the steps of these names in the plan's order, or all steps without names.

    Raises:
        ValueError: If no step has one of the names.
    """
    unknown = sorted(set(names) - {step.name for step in STEPS})
    if unknown:
        known = ", ".join(step.name for step in STEPS)
        raise ValueError(f"no such step: {', '.join(unknown)}; choose from {known}")
    return tuple(step for step in STEPS if not names or step.name in names)
