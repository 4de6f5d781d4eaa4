"""All exceptions and warnings that Headway raises.

::

    HeadwayError
    |-- ConfigError            (ValueError)    a setting is unknown, out of range or contradictory
    |   `-- DeviceMapError                       a device map or memory budget does not fit the model
    |-- PrepareError           (TypeError)     prepare() got an object or a combination that it cannot prepare
    |-- DataError              (ValueError)    a batch or loader cannot be used, or a file of data cannot be read
    |-- LossError              (ValueError)    backward() got something that is not a loss
    |-- MetricError            (ValueError)    gather_for_metrics() got a value without one entry per sample
    |-- StateError             (RuntimeError)  a method was called at the wrong time
    |-- UnsupportedError       (RuntimeError)  the strategy or the hardware does not support the request
    |   |-- DeviceUnavailable                  the requested accelerator is not available
    |   |-- NotServed                          Headway does not have this name of another library
    |   |   |-- ImportNotServed (ImportError)    raised by an import
    |   |   `-- AttributeNotServed (AttributeError) raised by an attribute access
    |   `-- MetaModelError                      code read a value from a tensor on the meta device, which has none
    |-- NonFiniteError         (ArithmeticError) a loss or gradient is NaN or infinite (see `on_non_finite`)
    |-- SpikeError             (ArithmeticError) too many updates in a row had an outlying loss or gradient norm
    |-- MemoryExhausted        (RuntimeError)  memory ran out, and the batch cannot be split further
    |-- CollectiveError        (RuntimeError)  ranks made different calls, or another rank failed in a joint call
    |-- CheckpointError        (RuntimeError)  a checkpoint or file of weights cannot be written, read or loaded
    |   |-- CheckpointDamaged                    bytes are missing or differ from those that were written
    |   `-- ObjectStoreError                     an object store refused a request or did not answer in time
    |-- TrackingError          (ValueError)    a value cannot be logged, or a file is not a run's log
    |-- CallError              (TypeError)     a decorated function was called with arguments that do not fit
    |-- BatchSizeError         (RuntimeError)  no batch size fits into memory
    |-- PeerOutOfMemory        (RuntimeError)  another rank ran out of memory, so all ranks abandon this batch size
    |-- ControlPlaneError      (RuntimeError)  ranks missed a vote or a message, or the control plane's host is gone
    |-- LaunchError            (RuntimeError)  a run could not be started, or it failed
    |-- ImportFailed           (ImportError)   a module of Headway cannot be imported
    `-- OptionalDependencyMissing (ImportError) a package that the feature needs is not installed

    HeadwayWarning             (UserWarning)
    Preempted                  (SystemExit)  no failure: the run was asked to end, saved, and exits with PREEMPTED

Each message names the value that was given, the allowed values and a way to fix it. If it needs more explanation than
fits into a message, the message ends with a link to a section of the docs (`LINKS`).
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

PREEMPTED = 75
"""Exit code of a run that was asked to end and saved a checkpoint: EX_TEMPFAIL ("try again later") in sysexits.h."""


class HeadwayError(Exception):
    """Base class of all errors that Headway raises intentionally.

    Each subclass also inherits from one of Python's own exceptions, such as ValueError. The message names the value that
    was given and a way to fix it.
    """

    def __str__(self) -> str:
        text = super().__str__()
        link = find_link(self, text)
        return f"{text} ({link})" if link else text


class ConfigError(HeadwayError, ValueError):
    """Raised if a setting is unknown, out of range or contradicts another one."""


class DeviceMapError(ConfigError):
    """Raised if a device map or a memory budget does not fit the model."""


class PrepareError(HeadwayError, TypeError):
    """Raised if prepare() is given an object, or a combination of objects, that it cannot prepare."""


class DataError(HeadwayError, ValueError):
    """Raised if a batch, loader or sampler cannot be split, padded or counted, or if data cannot be read.

    Data cannot be read if a shard file is missing or damaged, or if another process holds the file's lock for too long.
    """


class LossError(HeadwayError, ValueError):
    """Raised if backward() is given something that is not a scalar loss, or an invalid weight or reduction."""


class MetricError(HeadwayError, ValueError):
    """Raised if a value passed to gather_for_metrics() does not have one entry per sample, or a list is ambiguous."""


class StateError(HeadwayError, RuntimeError):
    """Raised if a method is called in a state that does not allow the call, such as after the end of training."""


class UnsupportedError(HeadwayError, RuntimeError):
    """Raised if Headway, or the strategy or hardware in use, does not support the request."""


class DeviceUnavailable(UnsupportedError):
    """Raised if this process cannot use the requested accelerator."""


class MetaModelError(UnsupportedError):
    """Raised if a constructor reads a value from a tensor on the meta device, which has no values."""


SkeletonError = MetaModelError  # former name, kept until the next release


class NotServed(UnsupportedError):
    """Raised if code uses a name of another library that Headway does not have. The message names an alternative.

    An import must fail with an ImportError and an attribute access with an AttributeError, and no class can be both. In
    these two cases the subclass that fits is raised.
    """


class ImportNotServed(ImportError, NotServed):
    """Raised if code imports a name that Headway does not have."""


class AttributeNotServed(AttributeError, NotServed):
    """Raised if code reads an attribute that Headway does not have. `hasattr` returns False."""


class NonFiniteError(HeadwayError, ArithmeticError):
    """Raised if a loss or gradient is NaN or infinite, and the policy `on_non_finite` requires an error.

    An optimizer's step raises it on all ranks. The optimizer has not used the gradients for an update.
    """


class SpikeError(HeadwayError, ArithmeticError):
    """Raised if too many updates in a row had a loss or gradient norm far above those of recent updates.

    An optimizer's step raises it on all ranks, after `SpikePolicy.max_in_row` spikes in a row.
    """


class MemoryExhausted(HeadwayError, RuntimeError):
    """Raised if memory runs out with `microbatching="auto"`, and the micro-batch cannot be split any further."""


class CollectiveError(HeadwayError, RuntimeError):
    """Raised if ranks call different collectives or pass arguments that do not match, or if another rank has failed.

    All ranks that take part raise it. The message names the calls of the ranks.
    """

    is_on_all_ranks = False
    """Whether every rank of the run raises this error at the same call.

    The code that raises the error sets it. True if a handshake of all ranks found that they called different collectives.
    Code that catches the error then need not tell the other ranks about the failure.
    """


class CheckpointError(HeadwayError, RuntimeError):
    """Raised if a checkpoint or a file of weights cannot be written, read or loaded.

    It may be missing, incomplete or damaged, or not fit the objects that it is loaded into. Another run may also have
    locked its directory.
    """


class CheckpointDamaged(CheckpointError):
    """Raised if bytes of a checkpoint are missing or differ from those that were written."""


class ObjectStoreError(CheckpointError):
    """Raised if an object store refuses a request or does not answer in time."""


class TrackingError(HeadwayError, ValueError):
    """Raised if a value cannot be logged, or if a file is not a run's log."""


class CallError(HeadwayError, TypeError):
    """Raised if a function is called with arguments that do not fit its signature."""


class BatchSizeError(HeadwayError, RuntimeError):
    """Raised if no allowed batch size fits into memory, by `find_executable_batch_size` and the Trainer's search."""


class PeerOutOfMemory(HeadwayError, RuntimeError):
    """Raised on this rank if another rank runs out of memory, so that all ranks abandon the batch size together."""


class ControlPlaneError(HeadwayError, RuntimeError):
    """Raised if ranks miss a vote or a message on the control plane, or if the process that hosts it has ended."""


class LaunchError(HeadwayError, RuntimeError):
    """Raised if a run cannot be started or fails, for example by `notebook_launcher` if one of its processes fails."""


class ImportFailed(HeadwayError, ImportError):
    """Raised if a module of Headway cannot be imported, such as because torch has a version that Headway does not support."""


class OptionalDependencyMissing(HeadwayError, ImportError):
    """Raised if a package that a feature needs is not installed. The message names the package."""


class HeadwayWarning(UserWarning):
    """Warning about code that works, but probably not as intended."""


class Preempted(SystemExit):
    """Raised to end the process with exit code 75 (PREEMPTED) after the run was asked to end and saved a checkpoint.

    It is a SystemExit, so `except Exception` does not catch it. Let it pass. If the same command is started again,
    `Accelerator.resume` continues the run.

    Args:
        message: Text of the exception.
        checkpoint: Directory of the committed checkpoint.

    Attributes:
        checkpoint: Directory of the committed checkpoint.
    """

    def __init__(self, message: str, checkpoint: str) -> None:
        super().__init__(message)
        self.code = PREEMPTED
        self.checkpoint = checkpoint


_LINK = re.compile(r"\bdocs/\w+\.md\b")
LINKS = "error_links.json"
"""File beside this module with rows (target, class, part): a section of the docs, and which errors link to it.

A row fits an error of the class, or of a subclass, whose message contains the part. The first row that fits counts. The
file is read when the first error is printed, so the table costs an import nothing.
"""


@cache
def read_links() -> tuple[tuple[str, str, str], ...]:
    """Return the rows of the table `LINKS`: section of the docs, name of the error class, part of the message.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it contains no such rows.
    """
    file = Path(__file__).with_name(LINKS)
    return tuple((target, class_name, part) for target, class_name, part in json.loads(file.read_text("utf-8")))


def find_link(error: HeadwayError, text: str) -> str | None:
    """Return the section of the docs that explains an error, such as "docs/fsdp.md#units", or None.

    Args:
        error: Error that is explained.
        text: Message of the error.

    Returns:
        None if no section explains the error, or if the message already contains a link, such as one quoted from
        another error. None, too, if the table cannot be read: printing an error must not raise another one.
    """
    if _LINK.search(text):
        return None
    classes = {each.__name__ for each in type(error).__mro__}
    try:
        links = read_links()
    except (OSError, ValueError):
        return None
    for target, class_name, part in links:
        if class_name in classes and part in text:
            return f"docs/{target}"
    return None
