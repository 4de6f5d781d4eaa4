"""`LoaderRecorder`: records the batches that a script fetches from prepared loaders, and shares them among the ranks."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from headway.core.data.loader import PreparedLoader
from headway.core.data.loading_rules import LoadingRules
from headway.core.data.sampling.shard import RankBatch
from headway.core.runtime.seed import mix_seed
from headway.core.training.prepared.scheduler import StepsPerMicroBatch, StepsPerProcess
from headway.core.training.run import Run
from headway.verify.calls import CallTrace
from headway.verify.draws import BatchPlace
from headway.verify.fingerprints import hash_rows, reverse_rows
from headway.verify.readings import hash_generators, list_generators, list_indices, list_versions
from headway.verify.record_types import BatchEntry, RunFacts
from headway.verify.request import RunRequest
from headway.verify.slowness import SlowFunctions
from headway.verify.sources import get_source_watch


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
        slow_functions: Sampler of the script's functions that run while a batch is fetched.
    """

    def __init__(self, run: Run, request: RunRequest, trace: CallTrace, facts: RunFacts) -> None:
        self._run = run
        self._request = request
        self._trace = trace
        self._facts = facts
        # Line of the script that created each loader, in the order in which loaders are prepared.
        self._creation_lines: list[str] = []
        # Batches that were fetched after the last backward pass.
        self._pending: list[tuple[PreparedLoader, BatchEntry]] = []
        self.num_fetched = 0
        self.last_batch: Any = None
        self.slow_functions = SlowFunctions()

    def attach_to(self, preparation: Any) -> None:
        """Record the script line that creates each loader, and split its batches over the ranks if the request says so.

        Batches are split only if the batch size is the same as in the single-process run. Otherwise the script has
        already divided it by the number of processes. If the batch size is not a multiple of the number of data shards,
        batches are not split, and the size is recorded as `indivisible_batch_size`.

        Args:
            preparation: Object that prepares the Accelerator's loaders. Its `prepare_loader` is replaced.
        """
        self._facts.uses_accelerate_rules = type(preparation.behavior.loading_rules) is not LoadingRules
        num_shards = self._run.strategy.data_shard.count
        splits_batches = self._request.splits_batches and num_shards > 1
        prepare = preparation.prepare_loader

        def prepare_and_record(loader: Any, place: bool | None = None) -> Any:
            self._creation_lines.append(get_source_watch().get_creation_line(loader))
            batch_size = self._find_undivided_size(loader, preparation) if splits_batches else None
            if batch_size is None:
                return prepare(loader, place)
            if batch_size % num_shards:
                self._facts.indivisible_batch_size = batch_size
                return prepare(loader, place)
            return prepare_split(loader, place)

        def prepare_split(loader: Any, place: bool | None) -> Any:
            loading = preparation.loading
            if isinstance(preparation.rule, StepsPerProcess | StepsPerMicroBatch):
                # Schedulers then make as many steps per update as on one process.
                preparation.rule = replace(preparation.rule, num_processes=1)
            preparation.loading = replace(loading, split_batches=True)
            try:
                return prepare(loader, place)
            finally:  # the script may have divided the batch size of another loader itself
                preparation.loading = loading

        preparation.prepare_loader = prepare_and_record

    def _find_undivided_size(self, loader: Any, preparation: Any) -> int | None:
        """Return a loader's batch size if it equals that of the single-process run, else None.

        Return None also if the script itself uses `split_batches=True`.

        Args:
            loader: Loader that is about to be prepared.
            preparation: Object that prepares the Accelerator's loaders.
        """
        expected = self._request.batch_sizes.get(str(len(preparation.loaders)))
        sampler = getattr(loader, "batch_sampler", None)
        size: int | None = loader.batch_size or getattr(sampler, "batch_size", None)
        is_undivided = bool(expected) and size == expected
        return size if is_undivided and not preparation.loading.split_batches else None

    def watch_loader(self, loader: PreparedLoader, deliveries: Iterator[Any]) -> Iterator[Any]:
        """Yield the pairs of `deliveries` to the script, and record each batch and how long the script waited for it.

        If `RunRequest.reverses_rows` is set, the rows of each yielded batch are reversed.

        Args:
            loader: Loader that the script iterates over.
            deliveries: Iterator over pairs of (batch, share). The share describes the batch's rows and dataset indices.
        """
        number = self._find_number(loader)
        self._record_loader(loader, number)
        first_versions = list_versions(loader.dataset)
        for position in itertools.count():
            generators = hash_generators()
            self._trace.pause_recording()
            start_time, start_cpu_time = time.perf_counter(), time.thread_time()
            try:
                with self.slow_functions:
                    batch, share = next(deliveries)
            except StopIteration:
                self._trace.resume_recording()
                return
            entry: BatchEntry = {
                "loader": number,
                "position": position,
                "epoch": loader.epoch,
                "wait_seconds": time.perf_counter() - start_time,
                "cpu_seconds": time.thread_time() - start_cpu_time,
                "num_rows": share.num_rows,
                "valid_counts": None if share.valid_counts is None else list(share.valid_counts),
                "advanced_generators": sorted(
                    name for name, value in hash_generators().items() if value != generators.get(name)
                ),
                "indices": list_indices(share.indices),
            }
            versions = list_versions(loader.dataset)
            changed = [name for name, version in versions.items() if version != first_versions.get(name)]
            if changed:
                self._facts.changed_dataset_tensors.setdefault(str(number), changed)
            self.num_fetched += 1
            if share.num_rows:
                self._add_hashes(entry, batch, share)
                if self._request.reverses_rows:
                    batch = reverse_rows(batch, share.num_rows)
            if self._request.probes_leaks:
                self.last_batch = batch
            self._pending.append((loader, entry))
            self._trace.begin_batch(share.num_rows)
            yield batch, share

    def _add_hashes(self, entry: BatchEntry, batch: Any, share: RankBatch) -> None:
        """Add the hashes of the rows of a batch to its record, without the rows that only fill the last batch.

        Args:
            entry: Record of the batch, whose `indices` are shortened, too.
            batch: Batch of this rank.
            share: Description of the batch's rows.
        """
        num_rows = share.num_rows or 0
        num_valid = num_rows
        if share.valid_counts is not None:
            num_valid = share.valid_counts[self._run.strategy.data_shard.index]
        hashes, unpadded_hashes = hash_rows(batch, num_rows)
        entry["row_hashes"], entry["unpadded_hashes"] = hashes[:num_valid], unpadded_hashes[:num_valid]
        entry["indices"] = entry["indices"][:num_valid] if len(entry["indices"]) >= num_valid else []

    def _record_loader(self, loader: PreparedLoader, number: int) -> None:
        """Record a loader when the script first iterates over it.

        Args:
            loader: Prepared loader.
            number: Index of the loader among the prepared loaders, or -1.
        """
        try:
            length = len(loader.dataset)  # type: ignore[arg-type]
        except (TypeError, AttributeError, NotImplementedError):
            length = -1
        self._facts.loaders.setdefault(
            str(number),
            {
                "dataset": type(loader.dataset).__name__,
                "length": length,
                "batch_size": loader.total_batch_size,
                "workers": getattr(loader, "num_workers", 0),
                "line": self._creation_lines[number] if 0 <= number < len(self._creation_lines) else "",
                "is_stream": isinstance(loader.dataset, torch.utils.data.IterableDataset),
                "has_state": hasattr(loader.dataset, "state_dict"),
                "generators": list_generators(loader.dataset),
            },
        )

    def _find_number(self, loader: PreparedLoader) -> int:
        """Return the index of a loader among the prepared loaders, or -1 if it is not one of them."""
        for number, prepared in enumerate(self._run.prepared.loaders):
            if _reads_same_pass(prepared, loader):
                return number
        return -1

    def find_batch_place(self) -> BatchPlace | None:
        """Return the position of this rank's rows in the current global batch, and a seed for its random numbers.

        Return None outside of a batch.
        """
        run = self._run
        active = run.windows.reads.active_loaders
        if not active or not self.num_fetched:
            return None
        share = active[-1].pass_position.rank_batch
        if not share.num_rows:
            return None
        index = run.strategy.data_shard.index
        counts = share.valid_counts or (share.num_rows,)
        return BatchPlace(
            num_rows=share.num_rows,
            total_rows=max(sum(counts), share.num_rows),
            first_row=sum(counts[:index]),
            seed=mix_seed(run.clock.num_updates, self.num_fetched) >> 2,
        )

    @property
    def has_pending(self) -> bool:
        """Whether a batch was fetched after the last call of `take_used`."""
        return bool(self._pending)

    def take_used(self) -> list[BatchEntry]:
        """Return the records of the batches that were fetched since the last call, for the backward pass that uses them.

        Batches of loaders whose pass has ended are left out, because the script has read them for another purpose. The
        last one is kept if no pass is active: the script ended the pass right after the batch, as `next(iter(loader))`
        does.
        """
        active, pending = self._run.windows.reads.active_loaders, self._pending
        self._pending = []
        if not active:
            return [pending[-1][1]] if pending else []
        return [entry for loader, entry in pending if any(_reads_same_pass(each, loader) for each in active)]


def _reads_same_pass(one: PreparedLoader, other: PreparedLoader) -> bool:
    """Whether two loaders read the same pass over the data, as a loader and its copy by `skip_first_batches` do."""
    return one is other or one.pass_position is other.pass_position
