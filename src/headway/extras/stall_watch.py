"""Waiting for slow remote storage: longer timeouts for ranks that wait for a rank whose data is delayed.

A dataset that reads remote storage can repeat a failing read for `stall_limit` seconds. Meanwhile the other ranks wait
in their next collective. The backend fixes a collective's timeout when the collective starts. At that time no rank
knows whether another rank still waits for its batch. So while such a dataset is read, `stall_limit` is added to the
timeouts of all process groups, and of the ranks' exchanges on the control plane. Real hangs are still found after the
run's usual timeout. The hang watch adds the limit only while a rank's heartbeat reports that the rank waits for data.
"""

from headway.core.data.loader import LoaderEvents, PreparedLoader
from headway.core.runtime import heartbeat_file
from headway.core.runtime.longer_timeouts import extend_timeouts


def allow_stalls(loader: PreparedLoader, events: LoaderEvents) -> None:
    """Register callbacks that extend the timeouts of collectives before a rank waits for a loader's data.

    Do nothing if the loader's dataset reads no remote storage, or if such callbacks are registered already.

    Args:
        loader: Prepared loader.
        events: Callbacks and registry of the run's loaders.
    """
    is_registered = any(
        isinstance(getattr(callback, "__self__", None), StallWatch) for callback in events.before_fetch_hooks
    )
    if loader.stall_limit and not is_registered:
        watch = StallWatch()
        events.before_fetch_hooks.append(watch.begin_wait)
        events.after_fetch_hooks.append(watch.end_wait)
        events.after_pass_hooks.append(watch.end_pass)


class StallWatch:
    """Callbacks that extend timeouts because this rank waits for a batch from remote storage.

    In the heartbeat, the extension ends with the wait. In process groups and on the control plane, it remains.
    """

    def begin_wait(self, loader: PreparedLoader) -> None:
        """Report in this rank's heartbeat that the rank waits for a batch, and extend the timeouts of collectives.

        The loader's `stall_limit`, in seconds, is added to the timeouts. Of several loaders, the largest limit applies.
        Do nothing if the loader does not read remote storage. A single-process run has no timeouts to extend.

        Args:
            loader: Loader from which a batch is requested.
        """
        limit = loader.stall_limit
        if not limit:
            return
        extend_timeouts(limit)
        heartbeat_file.get_own_file().set_timeout_extension(limit)

    def end_wait(self, loader: PreparedLoader) -> None:
        """Report in this rank's heartbeat that the batch has arrived, so that the rank no longer waits.

        Do nothing if the loader does not read remote storage.

        Args:
            loader: Loader that yields the batch.
        """
        if loader.stall_limit:
            heartbeat_file.get_own_file().set_timeout_extension(0.0)

    def end_pass(self) -> None:
        """Report in this rank's heartbeat that the rank has stopped waiting, because a pass over a loader has ended."""
        heartbeat_file.get_own_file().set_timeout_extension(0.0)
