"""Place parts of a model on devices with memory budgets, in order, with integer arithmetic only.

A placement is contiguous: the devices, in order, get consecutive runs of parts. Filling the devices one after the other
is optimal: for any k, no other placement has more parts on the first k devices. An exchange argument shows this. It
also holds for demands that are a maximum over the run instead of a sum, because a shorter run never needs more.

If not all parts fit, the last ones are offloaded. They run on the main device, which is the first one in use and also
needs memory for the largest offloaded part. If fewer parts are offloaded, the main device might need less memory for
the largest of them, but more parts must be placed. So feasibility is not monotone in the number of offloaded parts.
Therefore all numbers are tried, starting with the smallest, each in O(log n).

Tied parts can be on any device, which makes this a bin packing problem. If the parts do not fit in order, every choice
of devices for the tied parts is tried, up to 512 choices. Models have one or two groups of tied parts.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product

_MAX_CHOICES = 512
"""Maximum number of choices of devices for tied parts that are tried."""


@dataclass(frozen=True)
class ModelPart:
    """Part of a model that a placement does not divide. Sizes are in bytes.

    Attributes:
        size: Size of weights and buffers.
        buffers: Size of the buffers that stay on the main device when the part is offloaded. Included in `size`.
        kept: Memory that stays in use after the part has run, such as a KV cache.
        passing: Memory that is in use only while the part runs, such as activations.
        is_tied: Whether the part consists of tied modules at different positions in the model. Such a part can be on
            any device.
    """

    size: int
    buffers: int = 0
    kept: int = 0
    passing: int = 0
    is_tied: bool = False


@dataclass
class PlacementSolution:
    """Placement of all parts of a model.

    Attributes:
        device: Index of each part's device. Indices number the compute devices first, then main memory and disk.
        main: Index of the compute device that runs offloaded parts.
        is_offloading: Whether any part is in main memory or on disk.
    """

    device: list[int]
    main: int
    is_offloading: bool = field(default=False)


def solve_placement(
    parts: Sequence[ModelPart], budgets: Sequence[int], stores: Sequence[int], may_hold_nothing: bool = False
) -> PlacementSolution | None:
    """Place parts on compute devices in order. Parts that do not fit are placed in stores (main memory, disk).

    Args:
        parts: Parts in the order of execution. A tied part has the position of its first member.
        budgets: Bytes of each compute device, in the order in which devices are filled.
        stores: Bytes of each store, in the order in which stores are filled.
        may_hold_nothing: Whether a device may run offloaded parts without storing any part, as the CPU does. Default:
            False.

    Returns:
        If all parts fit on compute devices, a placement without offloading, with tied parts on any device. Otherwise
        the placement that offloads the fewest bytes. None if no device in use has memory to run the largest offloaded
        part, or if the stores are too small.
    """
    whole = _place_without_offloading(parts, budgets)
    if whole is not None:
        return PlacementSolution(whole, min(whole, default=0))
    best: PlacementSolution | None = None
    placed = -1
    for main in range(len(budgets)):
        found = _place_with_offloading(parts, budgets, stores, main)
        if found is None or not (may_hold_nothing or main in found.device):
            continue
        held = sum(part.size for part, device in zip(parts, found.device) if device < len(budgets))
        if held > placed:
            best, placed = found, held
        if main in found.device and len({*found.device} & {*range(len(budgets))}) == len(budgets):
            break
    return best


def _place_without_offloading(parts: Sequence[ModelPart], budgets: Sequence[int]) -> list[int] | None:
    """Place all parts on compute devices, first in order, then with each choice of devices for tied parts.

    Returns:
        The device of each part, or None if the parts do not fit.
    """
    straight = _fill_devices(parts, budgets)
    tied = [i for i, part in enumerate(parts) if part.is_tied]
    if straight is not None or not tied or len(budgets) ** len(tied) > _MAX_CHOICES:
        return straight
    rest = [i for i, part in enumerate(parts) if not part.is_tied]
    for choice in product(range(len(budgets)), repeat=len(tied)):
        room, floor = list(budgets), [0] * len(budgets)
        for i, device in zip(tied, choice):
            room[device] -= parts[i].size + parts[i].kept
            floor[device] = max(floor[device], parts[i].passing)
        if any(free < passing for free, passing in zip(room, floor)):
            continue
        found = _fill_devices([parts[i] for i in rest], room, floor)
        if found is not None:
            device_of = dict(zip(rest, found)) | dict(zip(tied, choice))
            return [device_of[i] for i in range(len(parts))]
    return None


def _fill_devices(parts: Sequence[ModelPart], budgets: Sequence[int], floor: Sequence[int] = ()) -> list[int] | None:
    """Assign parts to devices in order, and return the device of each part, or None if the parts do not fit.

    Each device takes as many parts as fit.

    Args:
        parts: Parts to place.
        budgets: Bytes of each device.
        floor: Bytes to reserve on each device for temporary memory, even if no part needs as much. Empty for none.
    """
    found: list[int] = []
    for device, budget in enumerate(budgets):
        end = _find_run_end(parts, budget, len(found), floor[device] if floor else 0)
        found += [device] * (end - len(found))
    return found if len(found) == len(parts) else None


def _place_with_offloading(
    parts: Sequence[ModelPart], budgets: Sequence[int], stores: Sequence[int], main: int
) -> PlacementSolution | None:
    """Return the placement that offloads the fewest parts and uses `main` as the first compute device.

    Return None if there is no such placement.

    Args:
        parts: Parts to place.
        budgets: Bytes of each compute device.
        stores: Bytes of each store (main memory, disk).
        main: Index of the main device, which runs offloaded parts.
    """
    n = len(parts)
    cut = _find_best_cut(parts, budgets, main)
    if cut is None:
        return None
    first, end = cut
    device = [main] * first
    for d in range(main + 1, len(budgets)):
        stop = min(_find_run_end(parts, budgets[d], len(device)), end)
        device += [d] * (stop - len(device))
    device += [-1] * (n - end)
    _use_empty_devices(parts, budgets, main, device)
    return PlacementSolution(device, main, True) if _fill_stores(parts, stores, device, len(budgets)) else None


def _find_best_cut(parts: Sequence[ModelPart], budgets: Sequence[int], main: int) -> tuple[int, int] | None:
    """Find the number of parts on the main device that leaves the fewest parts to offload.

    Args:
        parts: Parts to place.
        budgets: Bytes of each compute device.
        main: Index of the main device, which runs offloaded parts.

    Returns:
        Number of parts on the main device, and number of parts on all compute devices. None if the main device cannot
        run the offloaded parts in any case.
    """
    n = len(parts)
    reach = list(range(n + 1))
    for d in range(len(budgets) - 1, main, -1):
        ends = _find_run_ends(parts, budgets[d])
        reach = [reach[end] for end in ends]
    held, with_passing = [0], [0]
    passing = 0
    for part in parts:
        held.append(held[-1] + part.size + part.kept)
        passing = max(passing, part.passing)
        with_passing.append(held[-1] + passing)
    largest = stays = passing = 0
    for end in range(n, -1, -1):
        if end < n:
            part = parts[end]
            largest = max(largest, part.size - part.buffers)
            stays += part.kept + part.buffers
            passing = max(passing, part.passing)
        room = budgets[main] - largest - stays
        first = min(bisect_right(held, room - passing), bisect_right(with_passing, room)) - 1
        if first >= 0 and reach[min(first, end)] >= end:
            return min(first, end), end
    return None


def _find_run_end(parts: Sequence[ModelPart], budget: int, start: int, passing: int = 0) -> int:
    """Return the index after the longest run of consecutive parts that starts at `start` and fits on a device.

    Args:
        parts: Parts to place.
        budget: Bytes of the device.
        start: Index of the first part.
        passing: Bytes to reserve on the device for temporary memory, even if no part needs as much. Default: 0.
    """
    held = 0
    for i in range(start, len(parts)):
        held += parts[i].size + parts[i].kept
        passing = max(passing, parts[i].passing)
        if held + passing > budget:
            return i
    return len(parts)


def _find_run_ends(parts: Sequence[ModelPart], budget: int) -> list[int]:
    """Return the end (exclusive) of the longest run of parts that fits on a device, for each start index.

    The computation uses two pointers and a monotone queue of maxima.

    Args:
        parts: Parts to place, of which a run takes consecutive ones.
        budget: Bytes of the device.
    """
    n, end, held = len(parts), 0, 0
    ends: list[int] = []
    peaks: list[int] = []  # indices with falling `passing`; the front is `head`
    head = 0
    for start in range(n + 1):
        if end < start:
            end, held = start, 0
        while head < len(peaks) and peaks[head] < start:
            head += 1
        while end < n:
            part = parts[end]
            peak = max(parts[peaks[head]].passing if head < len(peaks) else 0, part.passing)
            if held + part.size + part.kept + peak > budget:
                break
            held += part.size + part.kept
            while len(peaks) > head and parts[peaks[-1]].passing <= part.passing:
                peaks.pop()
            peaks.append(end)
            end += 1
        ends.append(end)
        if start < end:
            held -= parts[start].size + parts[start].kept
    return ends


def _use_empty_devices(parts: Sequence[ModelPart], budgets: Sequence[int], main: int, device: list[int]) -> None:
    """Move runs of offloaded parts to compute devices that are empty and have enough memory for them.

    Args:
        parts: All parts.
        budgets: Bytes of each compute device.
        main: Index of the device that runs offloaded parts.
        device: Index of each part's device, or -1 for an offloaded part. It is changed in place.
    """
    for d in range(main, len(budgets)):
        if d in device:
            continue
        room = budgets[d]
        if d == main:
            # At most the parts in `away` stay offloaded, so enough memory to run all of them is sufficient.
            away = [part for part, where in zip(parts, device) if where < 0]
            room -= max((p.size - p.buffers + p.passing for p in away), default=0)
            room -= sum(p.kept + p.buffers for p in away)
        held = passing = 0
        for i, part in enumerate(parts):
            if device[i] >= 0:
                continue
            peak = max(passing, part.passing)
            if held + part.size + part.kept + peak <= room:
                device[i] = d
                held, passing = held + part.size + part.kept, peak
            elif held:
                break


def _fill_stores(parts: Sequence[ModelPart], stores: Sequence[int], device: list[int], num_compute: int) -> bool:
    """Assign the offloaded parts, whose device is -1, to the stores in order. Return False if they do not fit.

    Args:
        parts: All parts.
        stores: Bytes of each store (main memory, disk).
        device: Index of each part's device. It is changed in place.
        num_compute: Number of compute devices, which is the index of the first store.
    """
    store, held = 0, 0
    for i, part in enumerate(parts):
        if device[i] >= 0:
            continue
        size = part.size - part.buffers
        while store < len(stores) and held + size > stores[store]:
            store, held = store + 1, 0
        if store == len(stores):
            return False
        device[i] = num_compute + store
        held += size
    return True


def balance_loads(parts: Sequence[ModelPart], budgets: Sequence[int]) -> list[int] | None:
    """Return the load of each device in the contiguous placement whose largest load is as small as possible.

    Within that bound, loads are as even as possible. Each device gets about an equal share of the parts that the
    devices before it have not taken.

    Args:
        parts: Parts to place.
        budgets: Bytes of each device.

    Returns:
        Bytes used on each device, including temporary memory, or None if the parts do not fit.
    """
    if _fill_devices(parts, budgets) is None:
        return None
    held = list(accumulate((part.size + part.kept for part in parts), initial=0))
    passing = max((part.passing for part in parts), default=0)
    low, high = held[-1] // max(1, len(budgets)), held[-1] + passing
    while low < high:
        middle = (low + high) // 2
        caps = [min(budget, middle) for budget in budgets]
        if _fill_devices(parts, caps) is not None if passing else _can_fit_sums(held, caps):
            high = middle
        else:
            low = middle + 1
    caps = [min(budget, high) for budget in budgets]
    return _compute_even_loads(parts, caps)


def _can_fit_sums(held: Sequence[int], budgets: Sequence[int]) -> bool:
    """Whether parts fit on the devices in order if each device takes as many as possible.

    Only the parts' sizes count, not their temporary memory. This takes O(log n) per device.

    Args:
        held: Cumulative sizes of the parts, starting with 0.
        budgets: Bytes of each device.
    """
    end = 0
    for budget in budgets:
        end = bisect_right(held, held[end] + budget) - 1
    return end == len(held) - 1


def _compute_even_loads(parts: Sequence[ModelPart], caps: Sequence[int]) -> list[int]:
    """Return the load of each device in bytes, with the parts spread as evenly as possible.

    In order, each device gets about an equal share of the parts that the devices before it have not taken. It gets more
    if the remaining parts would otherwise not fit on the devices after it.

    Args:
        parts: Parts to place.
        caps: Maximum load of each device in bytes.
    """
    n = len(parts)
    # earliest[d]: index of the first part from which devices d, d+1, ... can store all remaining parts.
    earliest = [0] * len(caps) + [n]
    for d in range(len(caps) - 1, -1, -1):
        start, held, passing = earliest[d + 1], 0, 0
        while start > 0:
            part = parts[start - 1]
            held, passing = held + part.size + part.kept, max(passing, part.passing)
            if held + passing > caps[d]:
                break
            start -= 1
        earliest[d] = start
    left = sum(part.size + part.kept for part in parts)
    loads: list[int] = []
    start = 0
    for d, cap in enumerate(caps):
        target = left / (len(caps) - d)
        end, held, passing, load = start, 0, 0, 0
        while end < n:
            more = held + parts[end].size + parts[end].kept
            passing = max(passing, parts[end].passing)
            must = end < earliest[d + 1]
            if more + passing > cap or (not must and abs(more - target) > abs(held - target)):
                break
            held, load, end = more, more + passing, end + 1
        loads.append(load)
        left -= held
        start = end
    return loads


def minimize_first_load(parts: Sequence[ModelPart], budgets: Sequence[int]) -> list[int] | None:
    """Return the budgets, with the first one reduced as far as possible, or None if the parts do not fit at all.

    The first budget is reduced as long as the other devices can store the parts that no longer fit on the first device.

    Args:
        parts: Parts to place.
        budgets: Bytes of each device.
    """
    if not budgets:
        return None
    ends = list(range(len(parts) + 1))
    for budget in reversed(budgets[1:]):
        ends = [ends[end] for end in _find_run_ends(parts, budget)]
    held = passing = 0
    for start in range(len(parts) + 1):
        if ends[start] == len(parts):
            return [held + passing, *budgets[1:]] if held + passing <= budgets[0] else None
        held += parts[start].size + parts[start].kept
        passing = max(passing, parts[start].passing)
    return None
