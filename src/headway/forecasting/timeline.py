"""Memory in use over a step, by what it is held for, in as many points as a picture can show."""

from dataclasses import dataclass

from headway.forecasting.tracing.events import KINDS, MemoryEvent

POINTS = 400


@dataclass(frozen=True)
class Timeline:
    """Memory in use after chosen requests of a step.

    Attributes:
        places: the request's number, rising; of each stretch of requests the one with the most memory in use.
        sizes: kind -> bytes at each place, for the kinds that occur, in the order in which they are shown.
        phases: (phase, number of its first request): "step 1 forward", ...
    """

    places: tuple[int, ...]
    sizes: dict[str, tuple[int, ...]]
    phases: tuple[tuple[str, int], ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes of all kinds at each place."""
        return tuple(map(sum, zip(*self.sizes.values())))


def timeline(events: list[MemoryEvent], phases: dict[str, int], points: int = POINTS) -> Timeline:
    """The timeline of a trace.

    Args:
        events: in order, with their kinds.
        phases: the index of each phase's first event.
        points: at most so many places.
    """
    stretch = max(1, -(-len(events) // points))
    held = dict.fromkeys(KINDS, 0)
    total, best = 0, -1
    chosen: tuple[int, ...] = ()
    place = 0
    places: list[int] = []
    rows: list[tuple[int, ...]] = []
    for index, event in enumerate(events):
        held[event.kind] += event.num_bytes
        total += event.num_bytes
        if total > best:
            best, place, chosen = total, index, tuple(held.values())
        if (index + 1) % stretch == 0 or index == len(events) - 1:
            places.append(place)
            rows.append(chosen)
            best = -1
    columns = dict(zip(KINDS, zip(*rows))) if rows else {}
    sizes = {kind: column for kind, column in columns.items() if any(column)}
    return Timeline(tuple(places), sizes, tuple(sorted(phases.items(), key=lambda pair: pair[1])))
