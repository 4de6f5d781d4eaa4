"""All exceptions and warnings that Headway raises.

::

    HeadwayError
    |-- ConfigError            (ValueError)    a setting is unknown, out of range or contradictory
    |   `-- DeviceMapError                       a device map or memory budget does not fit the model
    |-- PrepareError           (TypeError)     prepare() got an object or a combination that it cannot prepare
    |-- DataError              (ValueError)    a batch, loader or sampler cannot be split, padded or counted
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
    |-- CollectiveError        (RuntimeError)  ranks called a collective with arguments that do not match
    |-- CheckpointError        (RuntimeError)  a checkpoint is missing, incomplete, damaged or does not fit
    |   |-- CheckpointDamaged                    bytes are missing or differ from those that were written
    |   `-- ObjectStoreError                     an object store refused a request or did not answer in time
    |-- TrackingError          (ValueError)    a value cannot be logged, or a file is not a run's log
    |-- CallError              (TypeError)     a decorated function was called with arguments that do not fit
    |-- BatchSizeError         (RuntimeError)  no batch size fits into memory
    |-- PeerOutOfMemory        (RuntimeError)  another rank ran out of memory, so all ranks abandon this batch size
    |-- ControlPlaneError      (RuntimeError)  ranks missed a vote or a message, or the control plane's host is gone
    |-- LaunchError            (RuntimeError)  a run could not be started, or it failed
    `-- OptionalDependencyMissing (ImportError) a package that the feature needs is not installed

    HeadwayWarning             (UserWarning)
    Preempted                  (SystemExit)  no failure: the run was asked to end, saved, and exits with PREEMPTED

Each message names the value that was given, the allowed values and a way to fix it. If the symptom has an entry in
docs/troubleshooting.md, the message ends with a link to it (`TROUBLESHOOTING`).
"""

from __future__ import annotations

PREEMPTED = 75
"""Exit code of a run that was asked to end and saved a checkpoint: EX_TEMPFAIL ("try again later") in sysexits.h."""


class HeadwayError(Exception):
    """Base class of all errors that Headway raises intentionally."""

    def __str__(self) -> str:
        text = super().__str__()
        anchor = find_troubleshooting_anchor(self, text)
        return f"{text} ({TROUBLESHOOTING_PAGE}#{anchor})" if anchor else text


class ConfigError(HeadwayError, ValueError):
    """Raised if a setting is unknown, out of range or contradicts another one."""


class DeviceMapError(ConfigError):
    """Raised if a device map or a memory budget does not fit the model."""


class PrepareError(HeadwayError, TypeError):
    """Raised if prepare() is given an object, or a combination of objects, that it cannot prepare."""


class DataError(HeadwayError, ValueError):
    """Raised if a batch, loader or sampler cannot be split, padded or counted."""


class LossError(HeadwayError, ValueError):
    """Raised if backward() is given something that is not a scalar loss, or an invalid weight."""


class MetricError(HeadwayError, ValueError):
    """Raised if a value passed to gather_for_metrics() does not have one entry per sample."""


class StateError(HeadwayError, RuntimeError):
    """Raised if a method is called in a state that does not allow the call, such as after the end of training."""


class UnsupportedError(HeadwayError, RuntimeError):
    """Raised if the strategy or the hardware in use does not support the request."""


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
    """Raised if a loss or gradient is NaN or infinite. The optimizer has not used it for an update."""


class SpikeError(HeadwayError, ArithmeticError):
    """Raised if too many updates in a row had a loss or gradient norm far above those of recent updates."""


class MemoryExhausted(HeadwayError, RuntimeError):
    """Raised if memory runs out and the micro-batch cannot be split any further."""


class CollectiveError(HeadwayError, RuntimeError):
    """Raised if ranks call one collective with arguments that do not match."""


class CheckpointError(HeadwayError, RuntimeError):
    """Raised if a checkpoint is missing, incomplete, damaged, or does not fit the objects that it is loaded into."""


class CheckpointDamaged(CheckpointError):
    """Raised if bytes of a checkpoint are missing or differ from those that were written."""


class ObjectStoreError(CheckpointError):
    """Raised if an object store refuses a request or does not answer in time."""


class TrackingError(HeadwayError, ValueError):
    """Raised if a value cannot be logged, or if a file is not a run's log."""


class CallError(HeadwayError, TypeError):
    """Raised if a function is called with arguments that do not fit its signature."""


class BatchSizeError(HeadwayError, RuntimeError):
    """Raised if no allowed batch size fits into memory."""


class PeerOutOfMemory(HeadwayError, RuntimeError):
    """Raised on this rank if another rank runs out of memory, so that all ranks abandon the batch size together."""


class ControlPlaneError(HeadwayError, RuntimeError):
    """Raised if ranks miss a vote or a message on the control plane, or if the process that hosts it has ended."""


class LaunchError(HeadwayError, RuntimeError):
    """Raised if a run cannot be started or fails."""


class OptionalDependencyMissing(HeadwayError, ImportError):
    """Raised if a package that a feature needs is not installed."""


class HeadwayWarning(UserWarning):
    """Warning about code that works, but probably not as intended."""


class Preempted(SystemExit):
    """Raised to end the process with exit code PREEMPTED after the run was asked to end and committed a checkpoint.

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


TROUBLESHOOTING_PAGE = "docs/troubleshooting.md"
TROUBLESHOOTING: tuple[tuple[str, type[HeadwayError], str], ...] = (
    ("the-loss-is-nan", NonFiniteError, ""),
    ("the-loss-is-nan", SpikeError, ""),
    ("the-loss-has-no-graph", LossError, "without a graph"),
    ("memory-runs-out-at-once", MemoryExhausted, ""),
    ("memory-runs-out-at-once", BatchSizeError, ""),
    ("a-rank-does-not-take-part", CollectiveError, "not every rank came here"),
    ("a-rank-does-not-take-part", CollectiveError, "do not fit together"),
    ("a-rank-does-not-take-part", CollectiveError, "ranks voted about different things"),
    ("a-rank-does-not-take-part", CollectiveError, "ranks are at different votes"),
    ("a-rank-does-not-take-part", ControlPlaneError, " voted"),
    ("a-rank-does-not-take-part", ControlPlaneError, "it is dead or stopped"),
    ("a-rank-does-not-take-part", LaunchError, "processes were asked for and"),
    ("a-rank-does-not-take-part", UnsupportedError, "Call it on every rank"),
    ("a-rank-does-not-take-part", StateError, "outside conditions on the rank"),
    ("a-rank-does-not-take-part", StateError, "the process group has ended"),
    ("processes-do-not-find-each-other", LaunchError, "cannot be reached"),
    ("processes-do-not-find-each-other", LaunchError, "did not open"),
    ("processes-do-not-find-each-other", LaunchError, "did not meet at"),
    ("processes-do-not-find-each-other", LaunchError, "more processes than the"),
    ("a-port-is-in-use", LaunchError, "of this machine is taken"),
    ("no-accelerator-is-found", DeviceUnavailable, "local rank"),
    ("no-accelerator-is-found", DeviceUnavailable, "`headway launch`"),
    ("parameters-differ-between-ranks", StateError, "Change them alike on all ranks"),
    ("a-parameter-takes-no-part-in-the-loss", UnsupportedError, "took no part in the last loss"),
    ("a-parameter-takes-no-part-in-the-loss", StateError, "took no part in this one's"),
    ("a-parameter-takes-no-part-in-the-loss", StateError, "were unfrozen after prepare()"),
    ("an-object-is-not-prepared", PrepareError, "belong to no prepared model"),
    ("an-object-is-not-prepared", StateError, "is not prepared, and"),
    ("an-object-is-not-prepared", StateError, "stepped inside an accumulation window"),
    ("an-object-is-not-prepared", StateError, "multiplied by fp16's loss scale"),
    ("the-data-differs-between-ranks-or-runs", DataError, "DataLoaders have different lengths"),
    ("the-data-differs-between-ranks-or-runs", DataError, "ranks gave prepare() different data"),
    ("the-data-differs-between-ranks-or-runs", DataError, "is not the same on all ranks"),
    ("the-data-differs-between-ranks-or-runs", DataError, "Its samples come in another order now"),
    ("the-data-differs-between-ranks-or-runs", DataError, "have changed since the state was saved"),
    ("the-data-differs-between-ranks-or-runs", StateError, "the position was saved by"),
    ("the-resumed-run-starts-at-update-0", CheckpointError, "holds copies only"),
    ("the-resumed-run-starts-at-update-0", StateError, "for epoch in accelerator.epochs(num_epochs)"),
    ("a-checkpoint-does-not-fit", CheckpointError, "does not fit what is prepared"),
    ("a-checkpoint-does-not-fit", CheckpointError, "differs from this run"),
    ("a-checkpoint-does-not-fit", CheckpointError, "the checkpoint holds no frozen weights"),
    ("a-checkpoint-does-not-fit", CheckpointError, "and all of them are damaged"),
    ("metrics-differ-with-the-number-of-processes", MetricError, "for the whole batch"),
    ("metrics-differ-with-the-number-of-processes", MetricError, "entry per sample"),
)
"""Tuples of (anchor in docs/troubleshooting.md, error class, part of the message), for links in error messages.

A message links to the anchor if the error has the class and the message contains the part. An empty part matches all.
"""


def find_troubleshooting_anchor(error: HeadwayError, text: str) -> str | None:
    """Return the anchor of the section in docs/troubleshooting.md about an error, or None.

    Args:
        error: Error whose symptom is looked up.
        text: Message of the error.

    Returns:
        The anchor without "#". None if no section matches, or if the message already links to the page, for example
        because it quotes another error.
    """
    if TROUBLESHOOTING_PAGE in text:
        return None
    return next(
        (anchor for anchor, kind, part in TROUBLESHOOTING if isinstance(error, kind) and part in text),
        None,
    )
