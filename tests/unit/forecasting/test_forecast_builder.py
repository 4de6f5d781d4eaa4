"""Test the timeline of a step on events written by hand."""

from headway.forecasting.device.memory_events import MemoryEvent, compute_exact_peak, split_by_kind
from headway.forecasting.forecast_builder import build_timeline
from headway.forecasting.tracing.trace import PhaseStart

EVENTS = [
    MemoryEvent(1, 100, kind="weights"),
    MemoryEvent(2, 10, kind="activations"),
    MemoryEvent(3, 500, kind="temporaries"),
    MemoryEvent(3, -500, kind="temporaries"),
    MemoryEvent(4, 20, kind="activations"),
    MemoryEvent(4, -20, kind="activations"),
    MemoryEvent(2, -10, kind="activations"),
]
PHASES = [PhaseStart("set-up", 0), PhaseStart("step 1 forward", 1), PhaseStart("step 1 backward", 5)]


def test_short_timeline_contains_every_request():
    found = build_timeline(EVENTS, PHASES)
    assert found.places == tuple(range(7))
    assert found.totals == (100, 110, 610, 110, 130, 110, 100)
    assert found.sizes["temporaries"] == (0, 0, 500, 0, 0, 0, 0)
    assert list(found.sizes) == ["weights", "activations", "temporaries"]
    assert found.phases == (("set-up", 0), ("step 1 forward", 1), ("step 1 backward", 5))


def test_timeline_with_fewer_points_keeps_the_peak():
    for points in (1, 2, 3):
        found = build_timeline(EVENTS, PHASES, points)
        assert len(found.places) <= points
        assert max(found.totals) == compute_exact_peak(EVENTS) == 610
        peak = found.totals.index(610)
        assert {kind: sizes[peak] for kind, sizes in found.sizes.items() if sizes[peak]} == split_by_kind(EVENTS, 2)


def test_timeline_without_events_is_empty():
    assert build_timeline([], []).places == ()
    assert build_timeline([], []).totals == ()


def test_timeline_lists_each_start_of_a_phase_that_repeats():
    phase_starts = [PhaseStart("step 1 forward", 0), PhaseStart("step 1 backward", 2), PhaseStart("step 1 forward", 4)]
    assert build_timeline(EVENTS, phase_starts).phases == tuple(phase_starts)
