"""How each public name of Accelerate is served: as in Accelerate, with a difference, or not at all. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

import headway
from headway.compat.accelerate.served.names import (
    AS_ACCELERATE,
    DIFFERENT,
    MODULES_AS_ACCELERATE,
    NAMES,
    REFUSED,
    RENAMED,
    SERVED,
)

Status = Literal["served", "differs", "not served", "unknown"]


@dataclass(frozen=True)
class Answer:
    """How one name is served.

    Attributes:
        name: Accelerate's; with "Accelerator." before a member of it.
        status: "served", "differs", "not served", or "unknown": not a public name of Accelerate 1.15.
        note: the difference, or what to use instead; empty if it is served as in Accelerate.
    """

    name: str
    status: Status
    note: str = ""


def answer(name: str) -> Answer:
    """How `name`, a public name, a module ("utils.dataclasses") or a member ("Accelerator.step"), is served."""
    if name in REFUSED:
        return Answer(name, "not served", REFUSED[name])
    if name.startswith("Accelerator."):
        return Answer(name, "served")
    if name in DIFFERENT:
        return Answer(name, "differs", DIFFERENT[name])
    if name in AS_ACCELERATE or name in SERVED or name in RENAMED or name in headway.__all__:
        return Answer(name, "served")
    if name in NAMES:
        return Answer(name, "not served", NAMES[name])
    return Answer(name, "served" if name in MODULES_AS_ACCELERATE else "unknown")
