"""Every exception and warning Headway raises, in one tree.

::

    HeadwayError
    |-- ConfigError            (ValueError)    a setting that cannot be: unknown, out of range, in conflict
    |-- PrepareError           (TypeError)     prepare() got an object it cannot prepare, or in the wrong combination
    |-- DataError              (ValueError)    a batch, loader or sampler that cannot be split, padded or counted
    |-- LossError              (ValueError)    backward() got something that is no loss
    |-- MetricError            (ValueError)    gather_for_metrics() got something that is not per sample
    |-- StateError             (RuntimeError)  a call at a moment when it makes no sense
    |-- UnsupportedError       (RuntimeError)  the strategy or the hardware cannot do what was asked
    |   `-- DeviceUnavailable                  an accelerator was asked for that is not here
    |-- CollectiveError        (RuntimeError)  ranks called a collective with arguments that do not fit together
    |-- LaunchError            (RuntimeError)  a run could not be started, or ended in failure
    `-- OptionalDependencyMissing (ImportError) a package that this feature needs is not installed

    HeadwayWarning             (UserWarning)

Each message says what came in, what is allowed and what to do about it.
"""


class HeadwayError(Exception):
    """Root of every error that Headway raises on purpose."""


class ConfigError(HeadwayError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class PrepareError(HeadwayError, TypeError):
    """prepare() was given an object it cannot prepare."""


class DataError(HeadwayError, ValueError):
    """A batch, loader or sampler cannot be split, padded or counted."""


class LossError(HeadwayError, ValueError):
    """backward() was given something that is no scalar loss, or an impossible weight."""


class MetricError(HeadwayError, ValueError):
    """A value handed to gather_for_metrics() does not hold one entry per sample."""


class StateError(HeadwayError, RuntimeError):
    """A call came at a moment when it makes no sense."""


class UnsupportedError(HeadwayError, RuntimeError):
    """The strategy or the hardware in use cannot do what was asked."""


class DeviceUnavailable(UnsupportedError):
    """An accelerator was asked for that this process cannot use."""


class CollectiveError(HeadwayError, RuntimeError):
    """Ranks called one collective with arguments that do not fit together."""


class LaunchError(HeadwayError, RuntimeError):
    """A run could not be started, or ended in failure."""


class OptionalDependencyMissing(HeadwayError, ImportError):
    """A package that the feature needs is not installed."""


class HeadwayWarning(UserWarning):
    """Something that works, but probably not as meant."""
