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
from dataclasses import dataclass
from itertools import accumulate, product

_MAX_CHOICES = 512
"""Maximum number of choices of devices for tied parts that are tried."""


@dataclass(frozen=True)
class ModelPart:
    """Part of a model that a placement does not divide. Sizes are in bytes.

    Attributes:
        size: Size of weights and buffers.
        buffers: Size of the buffers that stay on the main device when the part is offloaded. Included in `size`.
        cache: Memory that stays in use after the part has run, such as a KV cache.
        activations: Memory that is in use only while the part runs, such as activations.
        is_tied: Whether the part consists of tied modules at different positions in the model. Such a part can be on
            any device.
    """

    size: int
    buffers: int = 0
    cache: int = 0
    activations: int = 0
    is_tied: bool = False

    @property
    def resident_bytes(self) -> int:
        """Memory that stays in use on the part's device: weights, buffers and cache."""
        return self.size + self.cache


@dataclass
class PlacementSolution:
    """Placement of all parts of a model.

    Attributes:
        part_devices: Index of each part's device. Indices number the compute devices first, then main memory and disk.
        main: Index of the compute device that runs offloaded parts.
        is_offloading: Whether any part is in main memory or on disk.
    """

    part_devices: list[int]
    main: int
    is_offloading: bool = False


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
    without_offloading = _place_without_offloading(parts, budgets)
    if without_offloading is not None:
        return PlacementSolution(without_offloading, min(without_offloading, default=0))
    num_devices = len(budgets)
    best: PlacementSolution | None = None
    best_size = -1  # bytes of the parts on compute devices
    for main in range(num_devices):
        solution = _place_with_offloading(parts, budgets, stores, main)
        if solution is None or not (may_hold_nothing or main in solution.part_devices):
            continue
        size = sum(part.size for part, device in zip(parts, solution.part_devices) if device < num_devices)
        if size > best_size:
            best, best_size = solution, size
        # If every compute device has parts, another main device would only leave this one empty.
        if main in solution.part_devices and set(range(num_devices)) <= set(solution.part_devices):
            break
    return best


def _place_without_offloading(parts: Sequence[ModelPart], budgets: Sequence[int]) -> list[int] | None:
    """Place all parts on compute devices, first in order, then with each choice of devices for tied parts.

    Returns:
        The device of each part, or None if the parts do not fit.
    """
    in_order = _fill_devices(parts, budgets)
    tied = [i for i, part in enumerate(parts) if part.is_tied]
    if in_order is not None or not tied or len(budgets) ** len(tied) > _MAX_CHOICES:
        return in_order
    others = [i for i, part in enumerate(parts) if not part.is_tied]
    for choice in product(range(len(budgets)), repeat=len(tied)):
        free_bytes, floor = list(budgets), [0] * len(budgets)
        for i, device in zip(tied, choice):
            free_bytes[device] -= parts[i].resident_bytes
            floor[device] = max(floor[device], parts[i].activations)
        if any(free < activations for free, activations in zip(free_bytes, floor)):
            continue
        other_devices = _fill_devices([parts[i] for i in others], free_bytes, floor)
        if other_devices is not None:
            device_by_part = dict(zip(others, other_devices)) | dict(zip(tied, choice))
            return [device_by_part[i] for i in range(len(parts))]
    return None


def _fill_devices(parts: Sequence[ModelPart], budgets: Sequence[int], floor: Sequence[int] = ()) -> list[int] | None:
    """Assign parts to devices in order, and return the device of each part, or None if the parts do not fit.

    Each device takes as many parts as fit.

    Args:
        parts: Parts to place.
        budgets: Bytes of each device.
        floor: Bytes to reserve on each device for activations, even if no part needs as much. Empty for none.
            Default: empty.
    """
    part_devices: list[int] = []
    for device, budget in enumerate(budgets):
        start = len(part_devices)
        end = _find_run_end(parts, budget, start, floor[device] if floor else 0)
        part_devices += [device] * (end - start)
    return part_devices if len(part_devices) == len(parts) else None


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
    cut = _find_best_cut(parts, budgets, main)
    if cut is None:
        return None
    num_on_main, num_computed = cut
    part_devices = [main] * num_on_main
    for device in range(main + 1, len(budgets)):
        start = len(part_devices)
        end = min(_find_run_end(parts, budgets[device], start), num_computed)
        part_devices += [device] * (end - start)
    part_devices += [-1] * (len(parts) - num_computed)
    _use_empty_devices(parts, budgets, main, part_devices)
    has_space = _fill_stores(parts, stores, part_devices, len(budgets))
    return PlacementSolution(part_devices, main, is_offloading=True) if has_space else None


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
    num_parts = len(parts)
    # reach[start]: index after the last part that the devices after `main` can store, if they begin with part `start`.
    reach = list(range(num_parts + 1))
    for device in range(len(budgets) - 1, main, -1):
        reach = [reach[end] for end in _find_run_ends(parts, budgets[device])]
    # Bytes that the first k parts need on one device, without and with the memory that is in use while one of them runs.
    used, used_with_activations = [0], [0]
    activations = 0
    for part in parts:
        used.append(used[-1] + part.resident_bytes)
        activations = max(activations, part.activations)
        used_with_activations.append(used[-1] + activations)
    largest = remaining_on_main = activations = 0
    for end in range(num_parts, -1, -1):  # the parts from `end` on are offloaded
        if end < num_parts:
            part = parts[end]
            largest = max(largest, part.size - part.buffers)
            remaining_on_main += part.cache + part.buffers
            activations = max(activations, part.activations)
        free_bytes = budgets[main] - largest - remaining_on_main
        # The main device also runs the offloaded parts, so it needs memory for the activations of both.
        num_fitting = min(bisect_right(used, free_bytes - activations), bisect_right(used_with_activations, free_bytes))
        num_on_main = min(num_fitting - 1, end)
        if num_on_main >= 0 and reach[num_on_main] >= end:
            return num_on_main, end
    return None


def _find_run_end(parts: Sequence[ModelPart], budget: int, start: int, activations: int = 0) -> int:
    """Return the index after the longest run of consecutive parts that starts at `start` and fits on a device.

    Args:
        parts: Parts to place.
        budget: Bytes of the device.
        start: Index of the first part.
        activations: Bytes to reserve on the device for activations, even if no part needs as much. Default: 0.
    """
    used = 0
    for i in range(start, len(parts)):
        used += parts[i].resident_bytes
        activations = max(activations, parts[i].activations)
        if used + activations > budget:
            return i
    return len(parts)


def _find_run_ends(parts: Sequence[ModelPart], budget: int) -> list[int]:
    """Return the end (exclusive) of the longest run of parts that fits on a device, for each start index.

    The computation uses two pointers and a monotone queue of maxima.

    Args:
        parts: Parts to place, of which a run takes consecutive ones.
        budget: Bytes of the device.
    """
    num_parts, end, used = len(parts), 0, 0
    ends: list[int] = []
    # Parts of the current run whose activations are larger than those of all later parts of the run. `head` is the
    # index of the first entry in use, which has the largest activations.
    peaks: list[int] = []
    head = 0
    for start in range(num_parts + 1):
        if end < start:
            end, used = start, 0
        while head < len(peaks) and peaks[head] < start:
            head += 1
        while end < num_parts:
            part = parts[end]
            peak = max(parts[peaks[head]].activations if head < len(peaks) else 0, part.activations)
            if used + part.resident_bytes + peak > budget:
                break
            used += part.resident_bytes
            while len(peaks) > head and parts[peaks[-1]].activations <= part.activations:
                peaks.pop()
            peaks.append(end)
            end += 1
        ends.append(end)
        if start < end:
            used -= parts[start].resident_bytes
    return ends


def _use_empty_devices(parts: Sequence[ModelPart], budgets: Sequence[int], main: int, part_devices: list[int]) -> None:
    """Move runs of offloaded parts to compute devices that are empty and have enough memory for them.

    Args:
        parts: All parts.
        budgets: Bytes of each compute device.
        main: Index of the device that runs offloaded parts.
        part_devices: Index of each part's device, or -1 for an offloaded part. It is changed in place.
    """
    for device in range(main, len(budgets)):
        if device in part_devices:
            continue
        free_bytes = budgets[device]
        if device == main:
            # At most these parts stay offloaded, so enough memory to run all of them is sufficient.
            offloaded = [part for part, part_device in zip(parts, part_devices) if part_device < 0]
            free_bytes -= max((p.size - p.buffers + p.activations for p in offloaded), default=0)
            free_bytes -= sum(p.cache + p.buffers for p in offloaded)
        for i in _find_offloaded_run(parts, part_devices, free_bytes):
            part_devices[i] = device


def _find_offloaded_run(parts: Sequence[ModelPart], part_devices: Sequence[int], free_bytes: int) -> list[int]:
    """Return the indices of the first run of offloaded parts that fits in memory.

    Parts on other devices do not interrupt a run. It starts with the first offloaded part that fits, and ends before
    the next one that does not.

    Args:
        parts: All parts.
        part_devices: Index of each part's device, or -1 for an offloaded part.
        free_bytes: Available bytes.
    """
    run: list[int] = []
    used = activations = 0
    for i, part in enumerate(parts):
        if part_devices[i] >= 0:
            continue
        peak = max(activations, part.activations)
        if used + part.resident_bytes + peak <= free_bytes:
            run.append(i)
            used, activations = used + part.resident_bytes, peak
        elif used:
            break
    return run


def _fill_stores(parts: Sequence[ModelPart], stores: Sequence[int], part_devices: list[int], num_compute: int) -> bool:
    """Assign the offloaded parts, whose device is -1, to the stores in order. Return False if they do not fit.

    Args:
        parts: All parts.
        stores: Bytes of each store (main memory, disk).
        part_devices: Index of each part's device. It is changed in place.
        num_compute: Number of compute devices, which is the index of the first store.
    """
    store, used = 0, 0
    for i, part in enumerate(parts):
        if part_devices[i] >= 0:
            continue
        size = part.size - part.buffers
        while store < len(stores) and used + size > stores[store]:
            store, used = store + 1, 0
        if store == len(stores):
            return False
        part_devices[i] = num_compute + store
        used += size
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
    used = list(accumulate((part.resident_bytes for part in parts), initial=0))
    activations = max((part.activations for part in parts), default=0)
    low, high = used[-1] // max(1, len(budgets)), used[-1] + activations
    while low < high:  # binary search for the smallest bound
        middle = (low + high) // 2
        caps = [min(budget, middle) for budget in budgets]
        fits = _can_fit_sums(used, caps) if not activations else _fill_devices(parts, caps) is not None
        if fits:
            high = middle
        else:
            low = middle + 1
    caps = [min(budget, high) for budget in budgets]
    return _compute_even_loads(parts, caps)


def _can_fit_sums(used: Sequence[int], budgets: Sequence[int]) -> bool:
    """Whether parts fit on the devices in order if each device takes as many as possible.

    Only the parts' sizes count, not their temporary memory. This takes O(log n) per device.

    Args:
        used: Cumulative sizes of the parts, starting with 0.
        budgets: Bytes of each device.
    """
    end = 0
    for budget in budgets:
        end = bisect_right(used, used[end] + budget) - 1
    return end == len(used) - 1


def _compute_even_loads(parts: Sequence[ModelPart], caps: Sequence[int]) -> list[int]:
    """Return the load of each device in bytes, with the parts spread as evenly as possible.

    In order, each device gets about an equal share of the parts that the devices before it have not taken. It gets more
    if the remaining parts would otherwise not fit on the devices after it.

    Args:
        parts: Parts to place.
        caps: Maximum load of each device in bytes.
    """
    num_parts, num_devices = len(parts), len(caps)
    # earliest[d]: index of the first part from which devices d, d+1, ... can store all remaining parts.
    earliest = [0] * num_devices + [num_parts]
    for device in range(num_devices - 1, -1, -1):
        start, used, activations = earliest[device + 1], 0, 0
        while start > 0:
            part = parts[start - 1]
            used, activations = used + part.resident_bytes, max(activations, part.activations)
            if used + activations > caps[device]:
                break
            start -= 1
        earliest[device] = start
    remaining = sum(part.resident_bytes for part in parts)
    loads: list[int] = []
    start = 0
    for device, cap in enumerate(caps):
        equal_share = remaining / (num_devices - device)
        end, used, activations, load = start, 0, 0, 0
        while end < num_parts:
            next_used = used + parts[end].resident_bytes
            activations = max(activations, parts[end].activations)
            is_required = end < earliest[device + 1]
            is_closer = abs(next_used - equal_share) <= abs(used - equal_share)
            if next_used + activations > cap or not (is_required or is_closer):
                break
            used, load, end = next_used, next_used + activations, end + 1
        loads.append(load)
        remaining -= used
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
    used = activations = 0
    for start in range(len(parts) + 1):
        if ends[start] == len(parts):
            return [used + activations, *budgets[1:]] if used + activations <= budgets[0] else None
        used += parts[start].resident_bytes
        activations = max(activations, parts[start].activations)
    return None
