"""Who hears of a step's moments."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Moments:
    """Who hears of a step's moments: lists of functions, empty while nothing is measured or watched.

    Attributes:
        before_learning: a micro-batch is about to begin, or a backward comes outside of any.
        before_begin: a micro-batch is about to begin.
        begun: it has, as (number of its window, its number in it).
        before_backward: a loss is about to run backward.
        phases: the name of the phase that begins: "forward", "backward", "step".
    """

    before_learning: list[Callable[[], None]] = field(default_factory=list)
    before_begin: list[Callable[[], None]] = field(default_factory=list)
    begun: list[Callable[[int, int], None]] = field(default_factory=list)
    before_backward: list[Callable[[], None]] = field(default_factory=list)
    phases: list[Callable[[str], None]] = field(default_factory=list)
