"""The stages of a pipeline in a plan: the ranks along `pp`, each of which is rehearsed by itself, put together."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from headway.config.mesh import Layout
from headway.errors import StateError
from headway.planning.echoes import NotYet, Told
from headway.planning.shares import Piece
from headway.planning.trial import StateOf, Trial


def rehearse_stages(layout: Layout, rehearse: Callable[[int, Told], Trial]) -> tuple[Trial, ...]:
    """Rehearse the first replica's ranks along the pipeline, by their places.

    Args:
        layout: of the run.
        rehearse: one rank, by its number in the run.

    Raises:
        StateError: ranks wait for each other for ever.
    """
    told, found = Told(), dict[int, Trial]()
    ranks = layout.groups("pp")[0]
    while len(found) < len(ranks):
        before = len(found), sum(map(len, told.answers))
        for place, rank in enumerate(ranks):
            if place not in found:
                try:
                    found[place] = rehearse(rank, told)
                except NotYet:
                    continue
        if (len(found), sum(map(len, told.answers))) == before:
            raise StateError(f"the stages of a pipeline of {len(ranks)} ranks wait for each other in their rehearsals")
    return tuple(found[place] for place in range(len(ranks)))


def joined(trials: Sequence[Trial]) -> tuple[tuple[Piece, ...], tuple[StateOf, ...]]:
    """The parameters of all stages, with the places that hold them, and what the optimizer keeps for each."""
    on: dict[str, set[int]] = {}
    found: dict[str, tuple[Piece, StateOf | None]] = {}
    for place, trial in enumerate(trials):
        for index, piece in enumerate(trial.pieces):
            on.setdefault(piece.name, set()).add(place)
            found.setdefault(piece.name, (piece, trial.states[index] if trial.states else None))
    pieces = tuple(replace(piece, stages=frozenset(on[name])) for name, (piece, _) in found.items())
    return pieces, tuple(state for _, state in found.values() if state is not None)
