"""Replace the batches of a script's loaders with batches that have shapes but no values."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from headway.core.data.loader import PreparedLoader
from headway.planning._torch import disable_current_modes
from headway.planning.dry_run.script_trace import ScriptDryRun


class DryRunLoader:
    """Wrapper of a prepared loader that yields batches of fake tensors in place of the real batches.

    Args:
        inner: Prepared loader to read from.
        dry_run: Dry run that records each batch.
    """

    def __init__(self, inner: PreparedLoader, dry_run: ScriptDryRun) -> None:
        self.inner = inner
        self._dry_run = dry_run

    def __iter__(self) -> Iterator[Any]:
        return yield_fake_batches(lambda: iter(self.inner), self._dry_run)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class UnpreparedLoaders:
    """Context in which the loaders that a script does not prepare pass on fake batches, as `DryRunLoader` does.

    The batches are fetched without the modes of the trace. With these modes, the code of a dataset would get fake
    tensors, and worker processes would inherit the modes.

    Args:
        dry_run: Dry run that records each batch.
    """

    def __init__(self, dry_run: ScriptDryRun) -> None:
        self._dry_run = dry_run
        self._iterate = torch.utils.data.DataLoader.__iter__

    def __enter__(self) -> None:
        iterate, dry_run = self._iterate, self._dry_run

        def iterate_fake_batches(loader: torch.utils.data.DataLoader[Any]) -> Iterator[Any]:
            # A prepared loader may read from a DataLoader of its own. Before a model is prepared, scripts compute
            # statistics of the data, such as a mean.
            if dry_run.is_fetching or not dry_run.has_models:
                return iterate(loader)
            return yield_fake_batches(lambda: iterate(loader), dry_run)

        torch.utils.data.DataLoader.__iter__ = iterate_fake_batches  # type: ignore[method-assign,assignment]

    def __exit__(self, *error: object) -> None:
        torch.utils.data.DataLoader.__iter__ = self._iterate  # type: ignore[method-assign]


def yield_fake_batches(iterate: Callable[[], Iterator[Any]], dry_run: ScriptDryRun) -> Iterator[Any]:
    """Yield fake copies of the batches of a loader, which are fetched without the modes of the trace.

    Args:
        iterate: Function that returns an iterator over real batches.
        dry_run: Dry run that records each batch.
    """
    end = object()
    with disable_current_modes(), dry_run.mark_fetching():
        batches = iterate()
    while True:
        with disable_current_modes(), dry_run.mark_fetching():
            batch = next(batches, end)
        if batch is end:
            return
        yield dry_run.receive_batch(batch)
