"""Every exception and warning Headway raises, in one tree.

::

    HeadwayError
    |-- ConfigError            (ValueError)    a setting that cannot be: unknown, out of range, in conflict
    |   `-- DeviceMapError                       a device map or a memory budget that does not fit the model
    |-- PrepareError           (TypeError)     prepare() got an object it cannot prepare, or in the wrong combination
    |-- DataError              (ValueError)    a batch, loader or sampler that cannot be split, padded or counted
    |-- LossError              (ValueError)    backward() got something that is not a loss
    |-- MetricError            (ValueError)    gather_for_metrics() got something that is not per sample
    |-- StateError             (RuntimeError)  a call at a moment when it makes no sense
    |-- UnsupportedError       (RuntimeError)  the strategy or the hardware cannot do what was asked
    |   |-- DeviceUnavailable                  an accelerator was asked for that is not here
    |   |-- NotServed                          a name of another library that Headway does not have
    |   |   |-- ImportNotServed (ImportError)    it was imported
    |   |   `-- AttributeNotServed (AttributeError) an object was asked for it
    |   `-- MetaModelError                      a model built without memory read a value that it does not have
    |-- NonFiniteError         (ArithmeticError) a loss or gradient is nan or infinite, and the run was to end then
    |-- SpikeError             (ArithmeticError) too many updates in a row had an outlying loss or gradient norm
    |-- MemoryExhausted        (RuntimeError)  memory ran out, and nothing smaller is left to try
    |-- CollectiveError        (RuntimeError)  ranks called a collective with arguments that do not fit together
    |-- CheckpointError        (RuntimeError)  a checkpoint that is missing, incomplete, damaged or does not fit
    |   |-- CheckpointDamaged                    its bytes are not those that were written, or some are gone
    |   `-- ObjectStoreError                     an object store refused a request, or did not answer for too long
    |-- TrackingError          (ValueError)    a value that cannot be logged, or a file that is not a run's log
    |-- CallError              (TypeError)     a decorated function was called with arguments that do not fit it
    |-- BatchSizeError         (RuntimeError)  no batch size fits into memory
    |-- PeerOutOfMemory        (RuntimeError)  another rank ran out of memory, so the attempt ends on this one too
    |-- ControlPlaneError      (RuntimeError)  a vote or a hand-over that ranks missed, or whose host is gone
    |-- LaunchError            (RuntimeError)  a run could not be started, or ended in failure
    `-- OptionalDependencyMissing (ImportError) a package that this feature needs is not installed

    HeadwayWarning             (UserWarning)
    Preempted                  (SystemExit)  no failure: the run was asked to end, has saved, and ends with PREEMPTED

Each message says what came in, what is allowed and what to do about it.
"""

PREEMPTED = 75
"""The exit code of a run that was asked to end and has saved: sysexits.h calls it EX_TEMPFAIL, "try again later"."""


class HeadwayError(Exception):
    """Root of every error that Headway raises on purpose."""


class ConfigError(HeadwayError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class DeviceMapError(ConfigError):
    """A device map or a memory budget does not fit the model."""


class PrepareError(HeadwayError, TypeError):
    """prepare() was given an object it cannot prepare."""


class DataError(HeadwayError, ValueError):
    """A batch, loader or sampler cannot be split, padded or counted."""


class LossError(HeadwayError, ValueError):
    """backward() was given something that is not a scalar loss, or an impossible weight."""


class MetricError(HeadwayError, ValueError):
    """A value handed to gather_for_metrics() does not hold one entry per sample."""


class StateError(HeadwayError, RuntimeError):
    """A call came at a moment when it makes no sense."""


class UnsupportedError(HeadwayError, RuntimeError):
    """The strategy or the hardware in use cannot do what was asked."""


class DeviceUnavailable(UnsupportedError):
    """An accelerator was asked for that this process cannot use."""


class MetaModelError(UnsupportedError):
    """A constructor read a value from a tensor of the meta device, which has none."""


SkeletonError = MetaModelError  # its earlier name, until the next release


class NotServed(UnsupportedError):
    """A name of another library that Headway does not have; the message says what to use.

    Python wants an ImportError from a failed import and an AttributeError from a missing attribute, and no class can be both:
    what is raised is one of the two classes below.
    """


class ImportNotServed(ImportError, NotServed):
    """The name was imported."""


class AttributeNotServed(AttributeError, NotServed):
    """The name was asked of an object; `hasattr` is False."""


class NonFiniteError(HeadwayError, ArithmeticError):
    """A loss or gradient is nan or infinite; no update was made from it."""


class SpikeError(HeadwayError, ArithmeticError):
    """Too many updates in a row had a loss or gradient norm far above those before."""


class MemoryExhausted(HeadwayError, RuntimeError):
    """Memory ran out, and nothing smaller is left to try."""


class CollectiveError(HeadwayError, RuntimeError):
    """Ranks called one collective with arguments that do not fit together."""


class CheckpointError(HeadwayError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or does not fit what it is loaded into."""


class CheckpointDamaged(CheckpointError):
    """Bytes of a checkpoint are not those that were written, or some are gone."""


class ObjectStoreError(CheckpointError):
    """An object store refused a request, or did not answer for too long."""


class TrackingError(HeadwayError, ValueError):
    """A value cannot be logged, or a file is not a run's log."""


class CallError(HeadwayError, TypeError):
    """A decorated function was called with arguments that do not fit it."""


class BatchSizeError(HeadwayError, RuntimeError):
    """No batch size that was allowed fits into memory."""


class PeerOutOfMemory(HeadwayError, RuntimeError):
    """Another rank ran out of memory: the attempt in progress ends on this rank too."""


class ControlPlaneError(HeadwayError, RuntimeError):
    """Ranks missed a vote or a hand-over on the control plane, or its host is gone."""


class LaunchError(HeadwayError, RuntimeError):
    """A run could not be started, or ended in failure."""


class OptionalDependencyMissing(HeadwayError, ImportError):
    """A package that the feature needs is not installed."""


class HeadwayWarning(UserWarning):
    """Something that works, but probably not as meant."""


class Preempted(SystemExit):
    """The run was asked to end and has committed a checkpoint; the process ends with PREEMPTED.

    Attributes:
        checkpoint: its folder.
    """

    def __init__(self, message: str, checkpoint: str) -> None:
        super().__init__(message)
        self.code = PREEMPTED
        self.checkpoint = checkpoint
