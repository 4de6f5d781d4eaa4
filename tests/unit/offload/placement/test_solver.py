"""Test the placement solver against brute force."""

from itertools import combinations_with_replacement, product

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.offload.placement.solver import ModelPart, balance_loads, minimize_first_load, solve_placement

DISK = 1 << 62


def sum_load(run, activations=0):
    return sum(p.size + p.cache for p in run) + max([activations, *(p.activations for p in run)])


def iterate_contiguous(parts, num_devices):
    """Iterate over all ways to give consecutive parts to devices in order."""
    yield from combinations_with_replacement(range(num_devices), len(parts))


def fits_whole(parts, budgets, device):
    return all(
        sum_load([p for p, where in zip(parts, device) if where == d]) <= budget for d, budget in enumerate(budgets)
    )


def sum_needs_of_main(away):
    return max((p.size - p.buffers for p in away), default=0) + sum(p.cache + p.buffers for p in away)


def fits_offloaded(parts, budgets, device):
    """Return whether a placement can run. A part's entry is a budget index, or len(budgets) if it is offloaded."""
    used = [where for where in device if where < len(budgets)]
    if not used:
        return False
    main = min(used)
    away = [p for p, where in zip(parts, device) if where >= len(budgets)]
    activations_away = max((p.activations for p in away), default=0)
    for d, budget in enumerate(budgets):
        run = [p for p, where in zip(parts, device) if where == d]
        extra = sum_needs_of_main(away) if d == main else 0
        if sum_load(run, activations_away if d == main else 0) + extra > budget:
            return False
    return True


@st.composite
def draw_problem(draw, ties=False, plain=False):
    top = draw(st.sampled_from([3, 10, 100]))
    parts = []
    for _ in range(draw(st.integers(1, 7))):
        size = draw(st.integers(0, top))
        parts.append(
            ModelPart(
                size,
                buffers=0 if plain else draw(st.integers(0, size)) // 2,
                cache=0 if plain else draw(st.integers(0, 2)),
                activations=0 if plain else draw(st.integers(0, top // 2)),
                is_tied=ties and draw(st.booleans()),
            )
        )
    budgets = draw(st.lists(st.integers(1, 3 * top), min_size=1, max_size=3))
    return parts, budgets


@settings(max_examples=120, deadline=None)
@given(draw_problem())
def test_all_parts_are_on_devices_if_a_contiguous_placement_fits(problem):
    parts, budgets = problem
    possible = any(fits_whole(parts, budgets, device) for device in iterate_contiguous(parts, len(budgets)))
    found = solve_placement(parts, budgets, [DISK])
    assert (found is not None and not found.is_offloading) == possible
    if possible:
        assert fits_whole(parts, budgets, found.part_devices)
        assert found.part_devices == sorted(found.part_devices)


@settings(max_examples=120, deadline=None)
@given(draw_problem(ties=True))
def test_tied_parts_may_be_on_any_device(problem):
    parts, budgets = problem
    # With more than 512 choices the solver only tries the place of the first member.
    assume(len(budgets) ** sum(part.is_tied for part in parts) <= 512)
    free = [i for i, part in enumerate(parts) if not part.is_tied]
    possible = any(
        fits_whole(parts, budgets, device)
        for device in product(range(len(budgets)), repeat=len(parts))
        if [device[i] for i in free] == sorted(device[i] for i in free)
    )
    found = solve_placement(parts, budgets, [DISK])
    if possible:
        assert not found.is_offloading
        assert fits_whole(parts, budgets, found.part_devices)
    else:
        assert found is None or found.is_offloading


@settings(max_examples=120, deadline=None)
@given(draw_problem())
def test_offloading_keeps_as_much_on_devices_as_any_contiguous_placement(problem):
    parts, budgets = problem
    best = max(
        (
            sum(p.size for p, where in zip(parts, device) if where < len(budgets))
            for device in iterate_contiguous(parts, len(budgets) + 1)
            if fits_offloaded(parts, budgets, device)
        ),
        default=None,
    )
    found = solve_placement(parts, budgets, [DISK])
    if found is not None:
        assert fits_offloaded(parts, budgets, found.part_devices) or fits_whole(parts, budgets, found.part_devices)
    if best is not None:
        assert found is not None
        assert sum(p.size for p, where in zip(parts, found.part_devices) if where < len(budgets)) >= best


@settings(max_examples=120, deadline=None)
@given(draw_problem(plain=True), st.integers(0, 300))
def test_stores_are_filled_in_order_within_their_limits(problem, memory):
    parts, budgets = problem
    found = solve_placement(parts, budgets, [memory, DISK])
    if found is not None:
        stored = [(where, p.size) for p, where in zip(parts, found.part_devices) if where >= len(budgets)]
        assert [where for where, _ in stored] == sorted(where for where, _ in stored)
        assert sum(size for where, size in stored if where == len(budgets)) <= memory


@settings(max_examples=120, deadline=None)
@given(draw_problem(plain=True))
def test_no_device_that_could_hold_an_offloaded_part_is_empty(problem):
    parts, budgets = problem
    found = solve_placement(parts, budgets, [DISK])
    if found is not None and found.is_offloading:
        away = [p for p, where in zip(parts, found.part_devices) if where >= len(budgets)]
        for d in range(found.main + 1, len(budgets)):
            if d not in found.part_devices:
                assert all(part.size > budgets[d] for part in away if part.size)


@settings(max_examples=120, deadline=None)
@given(draw_problem())
def test_balance_has_the_smallest_maximum(problem):
    parts, budgets = problem
    fitting = [device for device in iterate_contiguous(parts, len(budgets)) if fits_whole(parts, budgets, device)]

    def measure_largest(device):
        return max(sum_load([p for p, where in zip(parts, device) if where == d]) for d in range(len(budgets)))

    loads = balance_loads(parts, budgets)
    assert (loads is None) == (not fitting)
    if fitting:
        assert max(loads) == min(map(measure_largest, fitting))
        assert solve_placement(parts, [*loads[:-1], budgets[-1]], []) is not None


def test_balance_leaves_no_device_empty():
    assert balance_loads([ModelPart(10)] * 9, [100] * 4) == [20, 20, 30, 20]


@settings(max_examples=120, deadline=None)
@given(draw_problem())
def test_smallest_first_load_is_the_minimum(problem):
    parts, budgets = problem
    found = minimize_first_load(parts, budgets)
    loads = [
        sum_load([p for p, where in zip(parts, device) if where == 0])
        for device in iterate_contiguous(parts, len(budgets))
        if fits_whole(parts, budgets, device)
    ]
    assert (None if found is None else found[0]) == min(loads, default=None)


def test_solver_leaves_no_device_empty_in_a_former_failure():
    found = solve_placement([ModelPart(k * 1000) for k in (40, 40, 160, 40, 40)], [170_000] * 3, [DISK])
    assert found.part_devices == [0, 0, 1, 2, 2]


def test_device_that_runs_offloaded_parts_need_not_hold_one():
    parts = [ModelPart(10), ModelPart(10)]
    assert solve_placement(parts, [12], [DISK]) is None
    found = solve_placement(parts, [12], [DISK], may_hold_nothing=True)
    assert found.part_devices == [1, 1]
    assert solve_placement(parts, [9], [DISK], may_hold_nothing=True) is None
