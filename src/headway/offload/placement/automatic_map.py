"""Infer device maps: contiguous placements that fit given budgets, and the strategy names that `device_map` accepts."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from headway.common.text import format_bytes
from headway.errors import DeviceMapError
from headway.log import get_logger
from headway.offload.placement.budget import (
    UNLIMITED,
    Device,
    get_max_memory,
    is_accelerator,
    parse_device,
)
from headway.offload.placement.device_map import DeviceMap, check_device_map, check_presence, clean_device_map
from headway.offload.placement.report import make_report
from headway.offload.placement.sizes import Dtype
from headway.offload.placement.solver import PlacementSolution, balance_loads, minimize_first_load, solve_placement
from headway.offload.placement.survey import ModuleTree, survey_model
from headway.offload.placement.workload import Workload

logger = get_logger(__name__)
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Names of placement strategies that `device_map` accepts."""


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    workload: Workload | None = None,
) -> DeviceMap:
    """Place a model's layers on devices in order, so that every device has enough memory to store and run its layers.

    Each device gets a contiguous run of layers. If there is a contiguous placement on accelerators alone, it is found.
    Otherwise the smallest possible number of layers at the end is offloaded, to main memory and then to disk. The first
    accelerator in use keeps memory free for the largest offloaded layer, which runs there. Layers that share tensors
    are placed together, on the device of the first of them. No device stays empty if it could store an offloaded layer.
    If no accelerator has enough memory to run the largest offloaded layer, the model is placed on the CPU, with a
    warning. Nothing is moved; pass the result to `dispatch_model` or `load_checkpoint_and_dispatch`.

    Args:
        model: Model on any device, including the meta device.
        max_memory: Memory limit of each device, in bytes or as text, such as {0: "20GiB", "cpu": "60GiB"}. A device is
            an index, "cuda:0", "mps", "cpu" or "disk". The disk has no limit unless one is given. None (the default):
            the memory that is free now (`get_max_memory`).
        no_split_module_classes: Names of classes whose modules must stay on one device, such as blocks with a residual
            connection. Modules without children are never divided. None (the default): no other modules.
        dtype: Dtype in which the model will be loaded. None (the default): the model's dtype.
        special_dtypes: Dtypes of tensors by name. They take precedence over `dtype`. None (the default): none.
        verbose: Whether to log the table of DeviceMap.explain. Default: False.
        clean_result: Whether a module gets a single entry if all of its parts are on one device. False: each
            indivisible module or tensor gets an entry. Default: True.
        offload_buffers: Whether the buffers of offloaded layers are offloaded, too. False (the default): they stay on
            the main device and count against its budget.
        fallback_allocation: No effect, because no device is left empty unnecessarily. Accepted for compatibility with
            Accelerate.
        workload: Workload of the first forward. If given, its KV cache and activations are taken into account. None (the
            default): only weights count.

    Returns:
        A dict from names of modules or tensors to devices: an index, "mps", "cpu" or "disk". Its method `explain()`
        returns a table of the memory of each device.

    Raises:
        DeviceMapError: If a budget is invalid, no device has enough memory to run the largest layer, or the workload
            cannot be measured.
        ConfigError: If `dtype` or one of `special_dtypes` is not a dtype.

    Example::

        with init_empty_weights():
            model = build_model()
        device_map = infer_auto_device_map(model, max_memory={0: "20GiB", "cpu": "60GiB"}, dtype=torch.bfloat16)
        print(device_map.explain())
    """
    tree = survey_model(model, no_split_module_classes, dtype, special_dtypes, offload_buffers, workload)
    return _infer_map(tree, get_max_memory(max_memory), clean_result, verbose)


def _infer_map(tree: ModuleTree, budgets: dict[Device, int], clean_result: bool, verbose: bool = False) -> DeviceMap:
    """Place the parts of a model on devices. See `infer_auto_device_map` for the rules.

    Args:
        tree: Parts of the model.
        budgets: Available bytes of each device, in the order in which devices are filled.
        clean_result: Whether a module gets a single entry if all of its parts are on one device.
        verbose: Whether to log the table of the result. Default: False.

    Raises:
        DeviceMapError: If no device has enough memory to run the largest part.
    """
    compute, stores = _split_roles(budgets)
    if not compute:
        return DeviceMap({"" if clean_result else name: "disk" for name in tree.unit_names})
    solution = _solve_placement(tree, budgets, compute, stores)
    if solution is None and compute != ["cpu"]:
        name, size = tree.find_largest()
        logger.warning(
            f"no accelerator in {_format_budgets(budgets)} has enough memory to run the largest offloaded layer ({name} is "
            f"{format_bytes(size)}); the model is placed on the CPU"
        )
        compute, stores = (["cpu"] if budgets.get("cpu") else []), ["disk"]
        solution = _solve_placement(tree, budgets, compute, stores) if compute else None
    if solution is None:
        name, size = tree.find_largest()
        raise DeviceMapError(
            f"the model does not fit {_format_budgets(budgets)}: every offloaded layer must fit on one device to run, and the "
            f"largest one ({name}) takes {format_bytes(size)}. Raise max_memory, load in a smaller dtype, or allow this layer to "
            "be divided: remove its class from no_split_module_classes"
        )
    devices: list[Device] = [*compute, *stores]
    entries = {name: devices[index] for name, index in tree.make_device_map(solution.part_devices).items()}
    plan = make_report(tree, solution, devices, len(compute), budgets)
    result = DeviceMap(clean_device_map(entries) if clean_result else entries, plan)
    if verbose:
        logger.info(result.explain())
    return result


def _split_roles(budgets: Mapping[Device, int]) -> tuple[list[Device], list[Device]]:
    """Split the devices into those that compute and those that only store weights.

    Both lists are in the order in which the devices are filled.
    """
    accelerators = [device for device, size in budgets.items() if is_accelerator(device) and size > 0]
    has_cpu = budgets.get("cpu", 0) > 0
    if accelerators:
        return accelerators, ["cpu", "disk"] if has_cpu else ["disk"]
    return (["cpu"] if has_cpu else []), ["disk"]


def _solve_placement(
    tree: ModuleTree, budgets: Mapping[Device, int], compute: list[Device], stores: list[Device]
) -> PlacementSolution | None:
    """Place the parts of a model, and return None if they do not fit.

    Args:
        tree: Parts of the model.
        budgets: Available bytes of each device.
        compute: Devices that compute.
        stores: Devices that only store weights. They have no limit unless `budgets` has an entry.
    """
    return solve_placement(
        tree.parts,
        [budgets[device] for device in compute],
        [budgets.get(store, UNLIMITED) for store in stores],
        may_hold_nothing=compute == ["cpu"],
    )


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
    offload_buffers: bool = False,
    workload: Workload | None = None,
) -> dict[Device, int]:
    """Return memory budgets for infer_auto_device_map that spread the model evenly over the accelerators.

    The largest load of an accelerator is as small as a contiguous placement allows. The last accelerator keeps its full
    budget. If the model does not fit on the accelerators, all of them keep their full budgets. With one accelerator and
    `max_memory=None`, 10% of its memory stays free. Budgets of the CPU and the disk do not change.

    Args:
        model: Model on any device, including the meta device.
        max_memory: Memory limit of each device, in bytes or as text such as "20GiB". None (the default): the memory
            that is free now (`get_max_memory`).
        no_split_module_classes: Names of classes whose modules must stay on one device. None (the default): only
            modules without children are never divided.
        dtype: Dtype in which the model will be loaded. None (the default): the model's dtype.
        special_dtypes: Dtypes of tensors by name. They take precedence over `dtype`. None (the default): none.
        low_zero: Whether to leave as much memory as possible free on the first accelerator, for example for generation,
            and to balance only the other accelerators. Default: False.
        offload_buffers: Whether the buffers of offloaded layers will be offloaded, too. Default: False.
        workload: Workload of the first forward, whose KV cache and activations are taken into account. None (the
            default): only weights count.

    Returns:
        Budget in bytes by device, for the argument `max_memory` of infer_auto_device_map.

    Raises:
        DeviceMapError: If a budget is invalid, or the workload cannot be measured.
        ConfigError: If `dtype` or one of `special_dtypes` is not a dtype.
    """
    budgets = get_max_memory(max_memory)
    tree = survey_model(model, no_split_module_classes, dtype, special_dtypes, offload_buffers, workload)
    return _balance_budgets(tree, budgets, low_zero, max_memory is None)


def _balance_budgets(
    tree: ModuleTree, budgets: dict[Device, int], low_zero: bool, is_measured: bool
) -> dict[Device, int]:
    """Return budgets that spread a model evenly over the accelerators. See `get_balanced_memory` for the rules.

    Args:
        tree: Parts of the model.
        budgets: Available bytes of each device.
        low_zero: Whether to leave as much memory as possible free on the first accelerator.
        is_measured: Whether the budgets were measured, and not given by the user.
    """
    devices = [device for device, size in budgets.items() if is_accelerator(device) and size > 0]
    if not devices:
        return budgets
    if len(devices) == 1:
        return {**budgets, devices[0]: budgets[devices[0]] * 9 // 10} if is_measured else budgets
    sizes = [budgets[device] for device in devices]
    if not low_zero:
        loads = balance_loads(tree.parts, sizes)
    else:
        other_loads = balance_loads(tree.parts, sizes[1:])
        loads = minimize_first_load(tree.parts, sizes) if other_loads is None else [0, *other_loads]
    return budgets if loads is None else {**budgets, **dict(zip(devices[:-1], loads[:-1]))}


def resolve_device_map(
    model: nn.Module,
    device_map: str | int | torch.device | Mapping[str, Device | torch.device],
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    offload_buffers: bool = False,
    workload: Workload | None = None,
) -> DeviceMap:
    """Convert any value that users can give as `device_map` to a map that covers the model.

    Args:
        model: Model to place.
        device_map: "auto" or "balanced" (equivalent), "balanced_low_0", "sequential", one device for the whole model,
            or a map.
        max_memory, dtype, special_dtypes, offload_buffers, workload: As in `infer_auto_device_map`, with the same
            defaults. Unused if `device_map` is a device or a map.
        no_split_module_classes: Names of classes whose modules must stay on one device. None (the default): the model's
            own `_no_split_modules`.

    Raises:
        DeviceMapError: If the strategy name is unknown, the map has faults, or a device is not on this machine. The
            message lists the faults. For a strategy, also if infer_auto_device_map() would raise it.
    """
    if isinstance(device_map, Mapping):
        check_device_map(model, device_map)
        parsed_map = {name: parse_device(device) for name, device in device_map.items()}
        check_presence(parsed_map)
        return DeviceMap(parsed_map, getattr(device_map, "plan", None))
    if device_map not in STRATEGIES:
        try:
            device = parse_device(device_map)
        except DeviceMapError as error:
            raise DeviceMapError(
                f"device_map={device_map!r} is neither one of {', '.join(STRATEGIES)}, nor a map, nor a device: {error}"
            ) from None
        check_presence({"": device})
        return DeviceMap({"": device})
    classes = getattr(model, "_no_split_modules", None) if no_split_module_classes is None else no_split_module_classes
    budgets = get_max_memory(max_memory)
    tree = survey_model(model, classes, dtype, special_dtypes, offload_buffers, workload)
    if device_map != "sequential":
        budgets = _balance_budgets(tree, budgets, device_map == "balanced_low_0", max_memory is None)
    return _infer_map(tree, budgets, clean_result=True)


def _format_budgets(budgets: Mapping[Device, int]) -> str:
    return "{" + ", ".join(f"{device}: {format_bytes(size)}" for device, size in budgets.items()) + "}"
