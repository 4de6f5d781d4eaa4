"""The placement solver: parts in order, devices with budgets, and the one rule that every placement must fit.

Pure: integers in, integers out. A placement is contiguous: the devices, in order, take consecutive runs of parts. Taking
as many as fit on each device in turn is optimal for that (by exchange: after every device, no placement is further
along), also with demands that are a maximum over the run instead of a sum, because a shorter run never needs more.

Where not all parts fit, the last ones are offloaded. They run on the main device (the first in use), which then needs
room for the largest of them besides its own. A smaller offloaded part needs less room but leaves more to place, so
feasibility is not monotone in it: all cuts are tried, from the smallest offloaded part on, each in O(log n).

Tied parts, free to go to any device, make this bin packing: where the order alone does not fit, every choice of devices
for them is tried, up to 512 (models have one or two groups).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product

_MAX_CHOICES = 512


@dataclass(frozen=True)
class Part:
    """What a placement may not divide.

    Attributes:
        size: bytes of its weights and buffers.
        buffers: the part of them that stays on the main device when the part is offloaded.
        kept: bytes that running it leaves behind on the device it runs on (a KV cache).
        passing: bytes that it needs there only while it runs (activations).
        is_tied: members lie at several places of the model, so that it may go to any device.
    """

    size: int
    buffers: int = 0
    kept: int = 0
    passing: int = 0
    is_tied: bool = False


@dataclass
class Solution:
    """Where each part goes.

    Attributes:
        device: for each part, an index into the compute devices' budgets, or that number plus an index into the stores'.
        main: the compute device that runs offloaded parts, also where there are none.
        is_offloading: is any part in a store?
    """

    device: list[int]
    main: int
    is_offloading: bool = field(default=False)


def solve(
    parts: Sequence[Part], budgets: Sequence[int], stores: Sequence[int], may_hold_nothing: bool = False
) -> Solution | None:
    """Place `parts` on compute devices, and what does not fit in stores (main memory, disk), in order.

    Args:
        parts: in order of execution; a tied part takes the place of its first member.
        budgets: bytes of each compute device, in the order of filling.
        stores: bytes of each store, in the order of filling.
        may_hold_nothing: may a device run offloaded parts that holds none itself (as the CPU does)?

    Returns:
        A placement without offloading if there is a contiguous one (tied parts free to go anywhere); else the one whose
        offloaded part is smallest; None if the first device with any use cannot even hold the largest offloaded part.
    """
    whole = _without_offloading(parts, budgets)
    if whole is not None:
        return Solution(whole, min(whole, default=0))
    best: Solution | None = None
    placed = -1
    for main in range(len(budgets)):
        found = _with_offloading(parts, budgets, stores, main)
        if found is None or not (may_hold_nothing or main in found.device):
            continue
        held = sum(part.size for part, device in zip(parts, found.device) if device < len(budgets))
        if held > placed:
            best, placed = found, held
        if main in found.device and len({*found.device} & {*range(len(budgets))}) == len(budgets):
            break
    return best


def _without_offloading(parts: Sequence[Part], budgets: Sequence[int]) -> list[int] | None:
    """All parts on compute devices: in order first, then with each tied part on each device in turn."""
    straight = _runs(parts, budgets)
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
        found = _runs([parts[i] for i in rest], room, floor)
        if found is not None:
            device_of = dict(zip(rest, found)) | dict(zip(tied, choice))
            return [device_of[i] for i in range(len(parts))]
    return None


def _runs(parts: Sequence[Part], budgets: Sequence[int], floor: Sequence[int] = ()) -> list[int] | None:
    """Fill the devices in order; None where parts are left over. `floor` is what already passes on a device."""
    found: list[int] = []
    for device, budget in enumerate(budgets):
        end = _end_of_run(parts, budget, len(found), floor[device] if floor else 0)
        found += [device] * (end - len(found))
    return found if len(found) == len(parts) else None


def _with_offloading(
    parts: Sequence[Part], budgets: Sequence[int], stores: Sequence[int], main: int
) -> Solution | None:
    """The placement with the fewest offloaded parts where `main` is the first compute device in use."""
    n = len(parts)
    cut = _best_cut(parts, budgets, main)
    if cut is None:
        return None
    first, end = cut
    device = [main] * first
    for d in range(main + 1, len(budgets)):
        stop = min(_end_of_run(parts, budgets[d], len(device)), end)
        device += [d] * (stop - len(device))
    device += [-1] * (n - end)
    _use_empty_devices(parts, budgets, main, device)
    return Solution(device, main, True) if _fill_stores(parts, stores, device, len(budgets)) else None


def _best_cut(parts: Sequence[Part], budgets: Sequence[int], main: int) -> tuple[int, int] | None:
    """(parts on the main device, parts on compute devices) with the latter as large as it can be."""
    n = len(parts)
    reach = list(range(n + 1))
    for d in range(len(budgets) - 1, main, -1):
        ends = _ends_of_runs(parts, budgets[d])
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


def _end_of_run(parts: Sequence[Part], budget: int, start: int, passing: int = 0) -> int:
    """Up to which part one device takes all from `start` on; `passing` is what already passes on it."""
    held = 0
    for i in range(start, len(parts)):
        held += parts[i].size + parts[i].kept
        passing = max(passing, parts[i].passing)
        if held + passing > budget:
            return i
    return len(parts)


def _ends_of_runs(parts: Sequence[Part], budget: int) -> list[int]:
    """For each start, where the longest run that fits `budget` ends: two pointers and a monotone queue of maxima."""
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


def _use_empty_devices(parts: Sequence[Part], budgets: Sequence[int], main: int, device: list[int]) -> None:
    """No device stays empty while a part that it could hold is offloaded: it takes a run of them."""
    for d in range(main, len(budgets)):
        if d in device:
            continue
        room = budgets[d]
        if d == main:
            # What stays offloaded is no more than now, so room for all of it is enough.
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


def _fill_stores(parts: Sequence[Part], stores: Sequence[int], device: list[int], num_compute: int) -> bool:
    """Put what is offloaded (-1) in the stores, in order; False where it does not fit."""
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


def balance(parts: Sequence[Part], budgets: Sequence[int]) -> list[int] | None:
    """The loads of the most even contiguous placement: the largest one is as small as it can be.

    Within that bound each device's load is the nearest to an equal part of what is left.

    Returns:
        Bytes for each device; None if the parts do not fit.
    """
    if _runs(parts, budgets) is None:
        return None
    held = list(accumulate((part.size + part.kept for part in parts), initial=0))
    passing = max((part.passing for part in parts), default=0)
    low, high = held[-1] // max(1, len(budgets)), held[-1] + passing
    while low < high:
        middle = (low + high) // 2
        caps = [min(budget, middle) for budget in budgets]
        if _runs(parts, caps) is not None if passing else _sums_fit(held, caps):
            high = middle
        else:
            low = middle + 1
    caps = [min(budget, high) for budget in budgets]
    return _even_loads(parts, caps)


def _sums_fit(held: Sequence[int], budgets: Sequence[int]) -> bool:
    """Do parts with these running sums fit? As _runs, in O(log n) for each device."""
    end = 0
    for budget in budgets:
        end = bisect_right(held, held[end] + budget) - 1
    return end == len(held) - 1


def _even_loads(parts: Sequence[Part], caps: Sequence[int]) -> list[int]:
    """Cut where each load comes nearest to the mean of what is left, keeping the rest feasible under `caps`."""
    n = len(parts)
    # earliest[d]: from which part on devices d, d+1, ... can take everything that is left.
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


def smallest_first(parts: Sequence[Part], budgets: Sequence[int]) -> list[int] | None:
    """The smallest load of the first device with which the others, in order, take the rest; None if there is none."""
    if not budgets:
        return None
    ends = list(range(len(parts) + 1))
    for budget in reversed(budgets[1:]):
        ends = [ends[end] for end in _ends_of_runs(parts, budget)]
    held = passing = 0
    for start in range(len(parts) + 1):
        if ends[start] == len(parts):
            return [held + passing, *budgets[1:]] if held + passing <= budgets[0] else None
        held += parts[start].size + parts[start].kept
        passing = max(passing, parts[start].passing)
    return None
