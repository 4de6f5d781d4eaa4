"""The ranks along a pipeline, rehearsed one after the other, until each has heard what it needs from the others."""

from collections.abc import Callable

from headway.config.mesh import Layout
from headway.errors import StateError
from headway.planning.dry_run.fake_collectives import AnswerNotReady, PeerAnswer
from headway.planning.dry_run.trial import StepDryRun


def rehearse_stages(layout: Layout, rehearse: Callable[[int, PeerAnswer], StepDryRun]) -> tuple[StepDryRun, ...]:
    """Rehearse the first replica's ranks along the pipeline, by their places.

    Args:
        layout: of the run.
        rehearse: one rank, by its number in the run.

    Raises:
        StateError: ranks wait for each other for ever.
    """
    told, found = PeerAnswer(), dict[int, StepDryRun]()
    ranks = layout.groups("pp")[0]
    while len(found) < len(ranks):
        before = len(found), sum(map(len, told.answers))
        for place, rank in enumerate(ranks):
            if place not in found:
                try:
                    found[place] = rehearse(rank, told)
                except AnswerNotReady:
                    continue
        if (len(found), sum(map(len, told.answers))) == before:
            raise StateError(f"the stages of a pipeline of {len(ranks)} ranks wait for each other in their rehearsals")
    return tuple(found[place] for place in range(len(ranks)))
