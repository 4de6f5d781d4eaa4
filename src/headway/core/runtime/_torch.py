"""Private torch names that the runtime uses, each with the reason why no public name is used instead.

Some modules, such as the reader of the flight recorder, must run before torch is imported or without torch. They look
up their names at run time. `LAZY_NAMES` lists these names as "module:attribute". `GROUP_METHODS` and `BACKEND_METHODS`
list methods of process groups and of their backends. A test checks that all names exist.
"""

from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

# is_traceable_wrapper_subclass finds parameters that consist of other tensors, such as quantized parameters. torch has no
# public query.

abort_process_group = distributed_c10d._abort_process_group
"""Ends NCCL groups without waiting for lost peers. The public `destroy_process_group` waits for them."""

coalescing_manager = distributed_c10d._coalescing_manager
"""Sends many small tensors as one operation. There is no public equivalent."""

get_default_store = distributed_c10d._get_default_store
"""Returns the rendezvous store of the default process group. There is no public getter.

The runtime uses this function if the script itself has created the group.
"""

get_vendor_device_name = torch._C._get_privateuse1_backend_name
"""Returns the name of the device type that a vendor's package has registered.

The public functions in `torch.utils` can only set this name.
"""

is_allocator_initialized = torch._C._accelerator_isAllocatorInitialized
"""Returns whether the accelerator's allocator counts memory. If not, `torch.accelerator`'s memory functions raise an error."""

has_compatible_shallow_copy_type = torch._has_compatible_shallow_copy_type
"""Returns whether the `data` of one tensor can be set to another tensor. `torch.nn.Module.to` also calls it."""

LAZY_NAMES = (
    # Runs a function when CUDA is initialized, so that an error can name the line that did it. There is no public hook.
    "torch.cuda:_lazy_call",
    # Part of torch._C that contains the flight recorders. `torch.distributed` has no public reader of pending
    # collectives. Builds with NCCL or XCCL also have functions such as `_dump_nccl_trace_json` and
    # `_reset_fr_recording_nccl`, which are found by matching the name.
    "torch._C._distributed_c10d:_dump_fr_trace_json",
    # Names and ranks of the groups that the flight recorder's entries belong to. There is no public list of groups.
    "torch.distributed.distributed_c10d:_world",
)

GROUP_METHODS = (
    "_get_backend",
    # Device types for which a group has a backend. They are needed to count the collectives of each backend.
    "_device_types",
)

BACKEND_METHODS = (
    # Number of collectives entered, which shows whether a rank has made progress. There is no public counter.
    "_get_sequence_number_for_group",
    # Sets the timeout of later collectives. `extend_timeout` calls it.
    "_set_default_timeout",
)


def get_backend(group: Any, device: torch.device) -> Any:
    """Return the backend that a process group uses for a device, so that it can be queried or aborted.

    torch has no public getter.
    """
    return group._get_backend(device)


def list_groups() -> list[Any]:
    """Return all process groups of this process, including those that other libraries have created.

    torch has no public function for this.
    """
    return list(distributed_c10d._world.pg_map)


class BackendTimeout(NamedTuple):
    """Timeouts of a process group's backend before and after `extend_timeout` extended it."""

    original: timedelta
    extended: timedelta


def extend_timeout(group: Any, extension: timedelta, extended_timeouts: dict[str, BackendTimeout]) -> None:
    """Extend the timeout of a process group's later collectives. torch has no public setter.

    Backends without a timeout option, or without a method to set it, are skipped.

    Args:
        group: Process group.
        extension: Time to add to the group's original timeout. A later call replaces it instead of adding to it.
        extended_timeouts: Timeouts of each backend that an earlier call has extended. The keys consist of group name
            and device type. This function updates the dict.
    """
    for device_type in group._device_types:
        backend = group._get_backend(device_type)
        options = getattr(backend, "options", None)
        if options is None or not hasattr(backend, "_set_default_timeout"):
            continue
        key = f"{group.group_name} {device_type}"
        earlier = extended_timeouts.get(key)
        # If the current timeout is not the one that an earlier call has set, other code has set a new original one.
        is_extended = earlier is not None and options._timeout == earlier.extended
        original = earlier.original if earlier is not None and is_extended else options._timeout
        if options._timeout != original + extension:
            backend._set_default_timeout(original + extension)
        extended_timeouts[key] = BackendTimeout(original, original + extension)
