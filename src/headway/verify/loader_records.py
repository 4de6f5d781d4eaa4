"""`LoaderRecorder`: records the batches that a script fetches from prepared loaders, and shares them among the ranks."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from headway.core.data.loader import PreparedLoader
from headway.core.data.sampling.order import LoadingRules
from headway.core.runtime.seed import mix_seed
from headway.core.training.prepared.scheduler import StepsPerMicroBatch, StepsPerProcess
from headway.core.training.run import Run
from headway.verify.calls import CallTrace
from headway.verify.fingerprints import hash_rows, reverse_rows
from headway.verify.readings import hash_generators, list_generators, list_indices, list_versions
from headway.verify.request import RunRequest
from headway.verify.slowness import SlowLines
from headway.verify.sources import watch_sources


class LoaderRecorder:
    """Recorder of the batches of a run.

    Args:
        run: Run of the Accelerator.
        request: Options of the run.
        trace: Trace of torch calls, which is paused while a batch is fetched.
        facts: Facts about the whole run, to which those about loaders are added.

    Attributes:
        num_fetched: Number of batches fetched so far.
        last_batch: Last batch, if the request asks for a test of the model with changed batches. Otherwise None.
        slow: Sampler of the script's functions that run while a batch is fetched.
    """

    def __init__(self, run: Run, request: RunRequest, trace: CallTrace, facts: dict[str, Any]) -> None:
        self._run = run
        self._request = request
        self._trace = trace
        self._facts = facts
        self._lines: list[str] = []
        self._pending: list[tuple[PreparedLoader, dict[str, Any]]] = []
        self.num_fetched = 0
        self.last_batch: Any = None
        self.slow = SlowLines()

    def attach(self, preparation: Any) -> None:
        """Record the script line that creates each loader, and split its batches over the ranks if the request says so.

        Batches are split only if the batch size is the same as in the single-process run. Otherwise the script has
        already divided it by the number of processes. If the batch size is not a multiple of the number of data shards,
        batches are not split, and the size is recorded as "undivided".

        Args:
            preparation: Object that prepares the Accelerator's loaders. Its `prepare_loader` is replaced.
        """
        self._facts["orders_apart"] = type(preparation.behavior.loading_rules) is not LoadingRules
        request, count = self._request, self._run.strategy.data_shard.count
        prepare = preparation.prepare_loader
        does_share = request.splits_batches and count > 1

        def prepare_shared(loader: Any, place: bool | None = None) -> Any:
            self._lines.append(watch_sources().get_birth(loader))
            if not does_share:
                return prepare(loader, place)
            expected = request.batch_sizes.get(str(len(preparation.loaders)))
            sampler = getattr(loader, "batch_sampler", None)
            size = loader.batch_size or getattr(sampler, "batch_size", None)
            if expected and size == expected and not preparation.loading.split_batches:
                if size % count:
                    self._facts["undivided"] = size
                else:
                    return split_prepared(loader, place)
            return prepare(loader, place)

        def split_prepared(loader: Any, place: bool | None) -> Any:
            loading = preparation.loading
            if isinstance(preparation.rule, StepsPerProcess | StepsPerMicroBatch):
                preparation.rule = replace(preparation.rule, num_processes=1)
            preparation.loading = replace(loading, split_batches=True)
            try:
                return prepare(loader, place)
            finally:  # the script may have divided the batch size of another loader itself
                preparation.loading = loading

        preparation.prepare_loader = prepare_shared

    def watch_loader(self, loader: PreparedLoader, deliveries: Iterator[Any]) -> Iterator[Any]:
        """Yield the pairs of `deliveries` to the script, and record each batch and how long the script waited for it.

        If `RunRequest.reverses_rows` is set, the rows of each yielded batch are reversed.

        Args:
            loader: Loader that the script iterates over.
            deliveries: Iterator over pairs of (batch, share). The share describes the batch's rows and dataset indices.
        """
        self._note_loader(loader)
        number = str(self._find_number(loader))
        versions = list_versions(loader.dataset)
        position = 0
        while True:
            before = hash_generators()
            self._trace.pause_recording()
            start, busy = time.perf_counter(), time.thread_time()
            try:
                with self.slow:
                    batch, share = next(deliveries)
            except StopIteration:
                self._trace.resume()
                return
            waited, busy = time.perf_counter() - start, time.thread_time() - busy
            after = hash_generators()
            written = [name for name, version in list_versions(loader.dataset).items() if versions.get(name) != version]
            if written:
                self._facts["changed_data"].setdefault(number, written)
            self.num_fetched += 1
            rows = share.num_rows
            counts = share.valid_counts
            entry: dict[str, Any] = {
                "loader": self._find_number(loader),
                "position": position,
                "epoch": loader.epoch,
                "waited": waited,
                "busy": busy,
                "num_rows": rows,
                "counts": counts,
                "drew": sorted(name for name in after if after[name] != before.get(name)),
                "indices": list_indices(share.indices),
            }
            position += 1
            if rows:
                valid = rows if counts is None else counts[self._run.strategy.data_shard.index]
                exact, loose = hash_rows(batch, rows)
                entry["rows"], entry["loose"] = exact[:valid], loose[:valid]
                entry["indices"] = entry["indices"][:valid] if len(entry["indices"]) >= valid else []
                if self._request.reverses_rows:
                    batch = reverse_rows(batch, rows)
            if self._request.probes_leaks:
                self.last_batch = batch
            self._pending.append((loader, entry))
            self._trace.begin_batch(rows)
            yield batch, share

    def _note_loader(self, loader: PreparedLoader) -> None:
        number = str(self._find_number(loader))
        try:
            length = len(loader.dataset)  # type: ignore[arg-type]
        except (TypeError, AttributeError, NotImplementedError):
            length = -1
        sampler = getattr(loader, "sampler", None)
        self._facts["loaders"].setdefault(
            number,
            {
                "dataset": type(loader.dataset).__name__,
                "length": length,
                "batch_size": loader.total_batch_size,
                "workers": getattr(loader, "num_workers", 0),
                "sampler": type(sampler).__name__,
                "line": self._lines[int(number)] if 0 <= int(number) < len(self._lines) else "",
                "is_stream": isinstance(loader.dataset, torch.utils.data.IterableDataset),
                "has_state": hasattr(loader.dataset, "state_dict"),
                "generators": list_generators(loader.dataset),
            },
        )

    def _find_number(self, loader: PreparedLoader) -> int:
        for number, each in enumerate(self._run.prepared.loaders):
            if each is loader or each.pass_position is loader.pass_position:
                return number
        return -1

    def find_place(self) -> tuple[int, int, int, int] | None:
        """Return the position of this rank's rows in the current global batch, and a seed for its random numbers.

        The value is (row count of this rank, row count of all ranks, first row of this rank, seed). Return None outside
        of a batch.
        """
        run = self._run
        active = run.events.active
        if not active or not self.num_fetched:
            return None
        share = active[-1].pass_position.share
        if not share.num_rows:
            return None
        index = run.strategy.data_shard.index
        counts = share.valid_counts or (share.num_rows,)
        seed = mix_seed(run.clock.num_updates, self.num_fetched) >> 2
        return share.num_rows, max(sum(counts), share.num_rows), sum(counts[:index]), seed

    @property
    def has_pending(self) -> bool:
        """Whether a batch was fetched after the last call of `take_used`."""
        return bool(self._pending)

    def take_used(self) -> list[dict[str, Any]]:
        """Return the records of the batches that were fetched since the last call, for the backward pass that uses them.

        Batches of loaders whose pass has ended are left out, because the script has read them for another purpose. The
        last one is kept if no pass is active: the script ended the pass right after the batch, as `next(iter(loader))`
        does.
        """
        active, pending = self._run.events.active, self._pending
        self._pending = []
        if not active:
            return [pending[-1][1]] if pending else []
        return [
            entry
            for loader, entry in pending
            if any(each is loader or each.pass_position is loader.pass_position for each in active)
        ]
