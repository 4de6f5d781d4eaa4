"""`RunRecorder`: records each update of a run for `headway verify`, and ends the run after the last requested update.

Each rank writes one JSON line per update. Rank 0 also writes an `.npz` file with values of gradients and parameters.
The recorder uses the hooks of the run and wraps a few methods of the Accelerator, so that the script runs unchanged.
"""

import atexit
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from headway.common import scope
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.seed import set_seed
from headway.core.training.run import Run
from headway.core.training.settings import Settings
from headway.verify.alive_tensors import measure_alive_tensors
from headway.verify.calls import CallTrace
from headway.verify.compilation import get_eager_calls, turn_off_compilation
from headway.verify.discards import DiscardWatch
from headway.verify.draws import SharedDraws
from headway.verify.escapes import EscapeWatch
from headway.verify.fingerprints import find_rows, hash_rows, measure_norm, sample_values, walk_tensors
from headway.verify.listings import list_reversed_lines
from headway.verify.loader_records import LoaderRecorder
from headway.verify.prepared_models import PreparedModels
from headway.verify.probes import CrossEntropies, LeakProbe
from headway.verify.rate_watch import RateWatch
from headway.verify.readings import hash_generators, measure_peak, measure_resident
from headway.verify.record_types import RunFacts, UpdateRecord
from headway.verify.request import STALLED_CODE, RunRequest, read_request, redirect_path
from headway.verify.script_frames import find_line
from headway.verify.sharded_tensors import gather_full_tensor
from headway.verify.sources import get_source_watch
from headway.verify.stacks import is_any_stuck, write_stack
from headway.verify.tensor_peak import TensorPeak
from headway.verify.transformers_trainer import watch_transformers_trainer
from headway.verify.unprepared_models import UnpreparedModels

_STACK_SECONDS = 2.5
"""Seconds that a rank without progress waits before it ends the run, so that the other ranks can write their stacks."""


def redirect_settings(settings: Settings) -> Settings:
    """Return an Accelerator's settings with output in the scratch folder, and without trackers and preemption handling.

    Also start to record where the script creates objects and reads clocks, and turn torch.compile off where calls are
    recorded. If the process's `RunRequest` asks for it, set the global seed, and make loaders shuffle with a seeded
    sampler.
    """
    request = read_request()
    assert request is not None  # this function is called only in processes of `headway verify`
    get_source_watch().install_watches()  # a forked run has done this before the script began
    turn_off_compilation(request)
    project = settings.project
    changes: dict[str, Any] = {}
    if project.project_dir is not None:
        changes["project_dir"] = redirect_path(project.project_dir, request)
    if project.logging_dir is not None:
        changes["logging_dir"] = redirect_path(project.logging_dir, request)
    if request.seed >= 0:
        set_seed(request.seed)
    loading = settings.loading
    if request.shares_order:
        loading = replace(loading, use_seedable_sampler=True, data_seed=loading.data_seed or 0)
    return replace(settings, project=replace(project, **changes), log_with=None, preemption=None, loading=loading)


class _FirstRun:
    """Marker that exists once an Accelerator of this process is recorded. Later Accelerators are not recorded."""


def record_run(run: Run) -> "RunRecorder | None":
    """Start to record a run, and return its recorder.

    Return None if `headway verify` did not start this process, if its request asks for no records, or if an earlier
    Accelerator of this process is already recorded.
    """
    request = read_request()
    if request is None or not request.is_recorded or scope.has(_FirstRun):
        return None
    scope.get_or_create(_FirstRun)
    return RunRecorder(run, request)


class _RecordingGuard:
    """Wrapper around the `StepGuard` of a training step that also passes each loss to the recorder.

    Args:
        guard: Guard to wrap.
        recorder: Recorder of the run.
    """

    def __init__(self, guard: Any, recorder: "RunRecorder") -> None:
        self._guard = guard
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._guard, name)

    def after_backward(self, loss: torch.Tensor) -> None:
        """Record the loss, and call the wrapped guard."""
        self._recorder.record_loss(loss)
        self._guard.after_backward(loss)


class RunRecorder:
    """Recorder of the updates of one run in one process.

    Args:
        run: Run of the Accelerator.
        request: Options of the run.
    """

    def __init__(self, run: Run, request: RunRequest) -> None:
        self._run = run
        self._request = request
        self._rank = run.runtime.rank
        self._folder = Path(request.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        # Until here, the server's timer limits how long the script may run. From here on, `_watch_progress` does.
        faulthandler.cancel_dump_traceback_later()
        self._last_progress = time.monotonic()
        self._accelerator: Any = None
        self._checkpoints: Any = None
        self._models = PreparedModels(run)
        self._unprepared_models = UnpreparedModels()
        self._trace = CallTrace(
            self._folder / f"trace{self._rank}.jsonl", self._models, is_enabled=not request.measures_tensors
        )
        self._rates = RateWatch()
        self._discards = DiscardWatch()
        self._escapes = EscapeWatch(Path(request.output).parent.parent)
        self._tensor_peak: TensorPeak | None = None
        self._facts = RunFacts(
            rank=self._rank,
            data_shard_index=run.strategy.data_shard.index,
            strategy=run.strategy.name,
            mixed_precision=run.mixed_precision,
            replays_batches=run.replays_batches,
        )
        self._loaders = LoaderRecorder(run, request, self._trace, self._facts)
        self._draws = SharedDraws(
            request.shares_draws, request.reverses_rows, self._loaders.find_batch_place, self._trace
        )
        self._cross_entropies: CrossEntropies | None = None
        self._num_backwards = 0
        # Number of updates before a resume that the run's own counter leaves out.
        self._num_earlier_updates = 0
        # Number of parameters with optimizer state when a checkpoint was loaded; -1 from the next update on.
        self._num_restored_states = -1
        # Number of the last update whose record has been written.
        self._last_update = self._num_updates
        self._has_started = self._has_saved = self._is_writing = self._has_ended = False
        self._begin_update()
        events, hooks = run.events, run.hooks
        events.before_fetch_hooks.append(self._before_fetch)
        events.after_pass_hooks.append(self._after_pass)
        events.pass_wrappers.append(self._loaders.watch_loader)
        hooks.before_learning.append(self._before_learning)
        hooks.before_forward.append(self._before_forward)
        hooks.before_backward.append(self._before_backward)
        hooks.before_update.append(self._before_update)

    def attach_to(self, accelerator: Any, step: Any, checkpoints: Any) -> None:
        """Start to observe the parts of an Accelerator that do not exist yet when the recorder is created.

        Uploads to the Hugging Face Hub are turned off.

        Args:
            accelerator: Accelerator of the run.
            step: Training step of the Accelerator.
            checkpoints: Object that saves and loads the Accelerator's checkpoints.
        """
        self._accelerator = accelerator
        self._checkpoints = checkpoints
        step.guard = _RecordingGuard(step.guard, self)
        self._trace_losses(step)
        self._redirect_checkpoints(accelerator, checkpoints)
        self._loaders.attach_to(accelerator._preparation)
        watch_transformers_trainer(self, self._request)
        accelerator.push_to_hub = lambda *args, **kwargs: ""
        atexit.register(self._write_last_record)
        self._draws.__enter__()  # type: ignore[no-untyped-call]
        if self._request.patience:
            threading.Thread(target=self._watch_progress, daemon=True).start()
        self._write_facts()

    @property
    def _num_updates(self) -> int:
        """Number of updates so far, including those before a resume that the run's own counter leaves out."""
        return self._run.clock.num_updates + self._num_earlier_updates

    # ---------------------------------------------------------------- checkpoints

    def record_save(self, folder: str) -> None:
        """Record that the script has saved a checkpoint without the Accelerator's methods.

        Args:
            folder: Folder of the checkpoints.
        """
        self._facts.saves.append({"update": self._num_updates, "folder": folder})

    def record_load(self, num_updates: int, folder: str) -> None:
        """Record that the script has loaded a checkpoint without the Accelerator's methods.

        Args:
            num_updates: Number of updates that were made before the checkpoint was saved.
            folder: Folder of the checkpoints.
        """
        self._num_earlier_updates = num_updates - self._run.clock.num_updates
        self._last_update = num_updates
        self._facts.loads.append({"update": num_updates, "folder": folder})
        self._write_facts()

    def _redirect_checkpoints(self, accelerator: Any, checkpoints: Any) -> None:
        """Redirect saves and loads with an explicit folder to the scratch folder, and record each save and load.

        A checkpoint that is not in the scratch folder, such as one from before the verification, is loaded from its own
        folder.
        """
        request = self._request
        save, load, load_state = checkpoints.save, checkpoints.load, accelerator.load_state

        def save_in_scratch(output_dir: Any, *args: Any, **kwargs: Any) -> Any:
            saved_path = save(None if output_dir is None else redirect_path(output_dir, request), *args, **kwargs)
            self.record_save(str(output_dir or ""))
            return saved_path

        def find_copy(input_dir: Any) -> Any:
            copy = None if input_dir is None else redirect_path(input_dir, request)
            return copy if copy is not None and copy.exists() else input_dir

        def load_state_from_scratch(input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
            # In a script that uses Headway as `accelerate`, this method checks the folder before it calls `load`.
            return load_state(find_copy(input_dir), *args, **kwargs)

        def load_from_scratch(input_dir: Any, *args: Any, **kwargs: Any) -> Any:
            restored = load(find_copy(input_dir), *args, **kwargs)
            self._facts.loads.append({"update": self._num_updates, "folder": str(input_dir or "")})
            self._num_restored_states = self._models.count_states()
            self._last_update = self._num_updates
            self._write_facts()
            return restored

        checkpoints.save = save_in_scratch
        checkpoints.load = load_from_scratch
        accelerator.load_state = load_state_from_scratch

    # ---------------------------------------------------------------- hooks of the run

    def _before_fetch(self, loader: PreparedLoader) -> None:
        """Before a batch is fetched, write the record of the last update if it has ended, and save or end the run if due.

        The first call also records the RNG states and, if requested, begins to measure the memory of tensors.

        Args:
            loader: Loader that fetches the batch.
        """
        self._record_generators()
        self._begin_measuring()
        self._write_update()
        self._save_if_due(loader)
        self._end_if_due()

    def _record_generators(self) -> None:
        """Record the states of the global random number generators at the start of training. Do this only once."""
        if not self._facts.generator_hashes:
            self._facts.generator_hashes = hash_generators()

    def _begin_measuring(self) -> None:
        """Begin to measure the memory of tensors, if the request says so and it has not begun yet."""
        if self._request.measures_tensors and self._tensor_peak is None:
            tensors = [*self._models.list_tensors("named_parameters"), *self._models.list_tensors("named_buffers")]
            self._tensor_peak = TensorPeak(self._run.runtime.device, [tensor for _, tensor in tensors])

    def _after_pass(self) -> None:
        """After the last batch of a pass over a loader, write the record of the last update."""
        self._write_update()

    def _before_learning(self) -> None:
        """Before a micro-batch or a standalone backward, write the record of the last update, and end the run if due."""
        self._write_update()
        self._end_if_due()

    def _before_forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a prepared model's forward, record its mode and, in training, its inputs.

        If the script makes its batches without a prepared loader, the inputs are also recorded as a batch.

        Args:
            model: Prepared model.
            args: Positional arguments of the forward.
            kwargs: Keyword arguments of the forward.
        """
        if torch.is_grad_enabled():
            mode = "train" if model.training else "eval"
            modes = self._update.training_modes.setdefault(str(self._models.find_model(model)), [])
            if mode not in modes:
                modes.append(mode)
        if not (model.training and torch.is_grad_enabled()):
            return
        self._record_start()
        has_loader = bool(self._run.windows.reads.active_loaders)
        if not has_loader and not self._trace.is_recording:
            self._trace.begin_batch(None)
        self._trace.store_inputs(args, kwargs)
        if self._request.probes_leaks and self._facts.leak_entries is None:
            self._probe_model(model, args, kwargs)
        if not has_loader and not self._loaders.has_pending:  # the script makes its batches without a prepared loader
            self._begin_measuring()
            num_rows = find_rows(list(walk_tensors([args, kwargs])))
            if num_rows:
                hashes, unpadded_hashes = hash_rows([args, kwargs], num_rows)
                self._update.batches.append(
                    {"loader": -1, "num_rows": num_rows, "row_hashes": hashes, "unpadded_hashes": unpadded_hashes}
                )

    def _before_backward(self) -> None:
        """Before a backward pass, record the batches that its loss uses, and count the pass.

        Raises:
            torch.OutOfMemoryError: In the backward pass in which this run must fail, to test the replay of batches.
        """
        self._record_start()
        self._update.batches += self._loaders.take_used()
        self._num_backwards += 1
        if self._num_backwards == self._request.fails_in:
            self._facts.failed_backward = self._num_backwards
            self._trace.void_last_loss()
            self._trace.begin_batch(None)
            raise torch.OutOfMemoryError("CUDA out of memory. Injected by headway verify.")

    def _before_update(self) -> None:
        """Record the learning rates, and the gradients that the optimizer is about to use."""
        if self._has_ended or self._request.measures_tensors:  # copies of gradients would be measured, too
            return
        prepared = self._run.prepared
        if self._num_restored_states > 0:
            self._facts.lost_optimizer_state = self._models.count_states() < self._num_restored_states
        self._num_restored_states = -1
        self._rates.watch_optimizers(prepared.optimizers)
        groups = [group for each in prepared.optimizers for group in each.optimizer.param_groups]
        is_first_step = not self._update.learning_rates  # several optimizers can step within one update
        self._update.learning_rates = [float(group["lr"]) for group in groups]
        stale = self._models.list_stale_gradients()
        if not is_first_step:
            stale = [name for name in stale if name in self._update.frozen_with_gradient]
        self._update.frozen_with_gradient = stale
        self._discards.forget_backwards()
        trained = {id(each) for each in prepared.list_parameters_of(self._run.windows.current)}
        for name, parameter in self._models.list_tensors("named_parameters"):
            if parameter.grad is not None and id(parameter) in trained:
                self._record_gradient(name, parameter.grad)

    def _record_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Record a sample and the norm of a gradient, and which experts have no gradient.

        Args:
            name: Name of the parameter.
            gradient: Gradient that the optimizer is about to use. A sharded one is gathered, on all ranks.
        """
        full = gather_full_tensor(gradient.detach())
        if full.is_sparse:
            full = full.to_dense()
        self._gradient_samples[name] = sample_values(full)
        self._update.gradient_norms[name] = measure_norm(full)
        if "expert" in name and full.ndim > 2:  # the weights of all experts, stacked in the first dimension
            is_used = full.flatten(1).abs().amax(1) > 0
            self._update.idle_experts[name] = (~is_used).nonzero().flatten().tolist()

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record the value of a loss after its backward pass."""
        self._trace.resume_recording()
        if self._has_ended:
            return
        value = float(loss.detach().float().mean().item())
        self._update.losses.append(value)
        self._update.discard_lines += self._discards.record_backward(self._loaders.num_fetched, value)
        if self._cross_entropies is not None and self._facts.leak_entries is not None:
            self._facts.leak_entries.append(self._cross_entropies.judge_loss(value))
            self._cross_entropies = None

    def _probe_model(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Test the model for leaks with its first batch, and store two cross entropies for a test of the first loss.

        Args:
            model: Model that the script calls.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        self._facts.leak_entries = []  # set before the model is called, which calls this hook again
        self._trace.pause_recording()
        probe = LeakProbe(model, args, kwargs, self._loaders.last_batch)
        try:
            probe.test_model()
        except Exception as error:
            self._facts.probe_error = f"the model cannot be called on a changed batch: {type(error).__name__}: {error}"[
                :300
            ]
        self._facts.leak_entries = probe.entries
        self._facts.buffers_changed_by_eval = [name.replace("_orig_mod.", "") for name in probe.changed_buffers]
        self._cross_entropies = probe.compute_cross_entropies()
        self._trace.resume_recording()

    # ---------------------------------------------------------------- the start of training

    def _record_start(self) -> None:
        """Record the models and the optimizers before the first update, and start to watch them. Do this only once."""
        if self._has_started:
            return
        models, facts = self._models, self._facts
        self._record_generators()
        hashes, samples = models.sample_parameters()
        buffer_hashes = {f"buffer:{name}": value for name, value in models.hash_buffers().items()}
        facts.initial_hashes = {**hashes, **buffer_hashes}
        self._has_started = bool(facts.initial_hashes)  # a script can call backward() before it prepares a model
        facts.trainable_parameters = models.list_trainable()
        facts.frozen_parameters = models.list_frozen()
        facts.optimized_parameters = models.list_optimized()
        facts.trainable_dtypes = models.list_trainable_dtypes()
        facts.batch_norms = models.list_batch_norms()
        facts.optimizers = models.describe_optimizers()
        facts.num_dropout_rates = models.count_dropout_rates(sets_to_zero=self._request.shares_draws)
        self._trace.update_names()
        prepared = self._run.prepared
        self._unprepared_models.find_models(prepared.models)
        models.unprepared_models = self._unprepared_models.map_addresses()
        self._rates.watch_optimizers(prepared.optimizers)
        self._watch_scheduler_metrics()
        # In fp16, updates with infinite gradients are skipped. With several processes, reading sharded gradients is a
        # collective operation, which all ranks would have to call.
        if self._run.runtime.world_size == 1 and self._run.mixed_precision != "fp16":
            self._discards.watch_optimizer(prepared.optimizers)
        self._save_arrays("start", {f"p:{name}": value for name, value in samples.items()})
        self._write_facts()

    def _watch_scheduler_metrics(self) -> None:
        """Record the values that the script passes to prepared schedulers, such as a loss for `ReduceLROnPlateau`."""
        for each in self._run.prepared.schedulers:
            scheduler: Any = each
            scheduler.step = self._wrap_scheduler_step(scheduler.step)

    def _wrap_scheduler_step(self, step: Any) -> Any:
        """Return a `scheduler.step` that also records the metrics that the script passes to it.

        Args:
            step: Method of the scheduler.
        """

        def step_and_record(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if _is_number(value) and not isinstance(value, int):  # an integer is the number of an epoch
                    self._facts.scheduler_metrics.append(
                        {"update": self._num_updates, "value": float(value), "line": find_line()}
                    )
            return step(*args, **kwargs)

        return step_and_record

    def _trace_losses(self, step: Any) -> None:
        """Make the training step record the torch calls that computed a loss, before the backward pass of the loss."""
        backward = step.backward

        def trace_and_backward(loss: Any, weight: Any = None, reduction: str = "mean", **kwargs: Any) -> Any:
            if isinstance(loss, torch.Tensor) and not self._has_ended:
                self._trace.update = self._num_updates + 1
                self._trace.write_loss(loss, weight, reduction)
            return backward(loss, weight, reduction, **kwargs)

        step.backward = trace_and_backward

    # ---------------------------------------------------------------- records

    def _begin_update(self) -> None:
        """Reset what is recorded about the current update."""
        self._update = UpdateRecord()
        self._gradient_samples: dict[str, Any] = {}
        self._start_time, self._start_cpu_time = time.perf_counter(), time.thread_time()

    def _write_update(self) -> None:
        """Write the record of the last update if it has not been written."""
        self._last_progress = time.monotonic()
        if self._has_ended or self._is_writing or self._num_updates <= self._last_update:
            return
        self._is_writing = True
        number = self._last_update = self._num_updates
        is_last = number >= self._request.num_updates
        if self._tensor_peak is not None and is_last:
            self._facts.tensor_peak_bytes = self._tensor_peak.stop()
        update, device = self._update, self._run.runtime.device
        update.number = number
        update.parameter_hashes, samples = self._models.sample_parameters()
        update.buffer_hashes = self._models.hash_buffers()
        update.unprepared_hashes = self._unprepared_models.hash_parameters()
        update.seconds = time.perf_counter() - self._start_time
        update.cpu_seconds = time.thread_time() - self._start_cpu_time
        update.peak_bytes, update.resident_bytes = measure_peak(device), measure_resident(device)
        update.rate_lines = self._rates.take_lines()
        self._trace.move_lines(update)
        if is_last:
            gc.collect()
            results = self._trace.list_alive_results(number)
            _, names_by_address = self._models.map_tensors()
            self._facts.alive_tensors = measure_alive_tensors(results, names_by_address)
        self._facts.slow_functions = self._loaders.slow_functions.list_functions()
        gradients = {f"g:{name}": value for name, value in self._gradient_samples.items()}
        parameters = {f"p:{name}": value for name, value in samples.items()}
        self._save_arrays(f"update_{number}", gradients | parameters)
        with open(self._folder / f"rank{self._rank}.jsonl", "a") as file:
            file.write(json.dumps(vars(update)) + "\n")
        self._begin_update()
        self._write_facts()
        self._is_writing = False

    def _write_facts(self) -> None:
        """Write all facts about the run so far into this rank's file."""
        facts = self._facts
        facts.num_backwards = self._num_backwards
        facts.draw_lines = self._draws.draw_lines
        facts.unshared_draw_lines = self._draws.unshared_lines
        facts.num_dropout_calls = self._draws.num_dropout_calls
        facts.escaped_files = self._escapes.list_files()
        facts.reversed_listing_lines = list_reversed_lines()
        facts.uses_compilation = get_eager_calls().is_used
        facts.write_lines = self._trace.write_lines
        vars(facts).update(vars(get_source_watch().list_facts()))  # `RunFacts` has all fields of `SourceFacts`
        path = self._folder / f"facts{self._rank}.json"
        # The process can be killed at any time, so the file is replaced in one step.
        path.with_suffix(".new").write_text(json.dumps(vars(facts)))
        path.with_suffix(".new").replace(path)

    def _save_arrays(self, name: str, arrays: dict[str, Any]) -> None:
        """Write arrays into a file of the run's folder. Do nothing on other ranks than 0 if rank 0 has equal arrays.

        Args:
            name: Name of the file, without the rank and the suffix.
            arrays: Arrays by name.
        """
        # Under pipeline parallelism, each rank has only the parameters of its stages, so each rank writes its own.
        if self._rank == 0 or self._models.is_partial:
            numpy.savez(self._folder / f"{name}.{self._rank}.npz", **arrays)

    # ---------------------------------------------------------------- the end

    def _save_if_due(self, loader: PreparedLoader) -> None:
        """Save one checkpoint as soon as possible after the requested number of updates.

        The script's `resume("latest")` can find it. Wait while the loop cannot stop at this batch, or while gradients
        are being accumulated. Save nothing if the script does not use automatic checkpoint naming.

        Args:
            loader: Loader that is about to fetch a batch.
        """
        request = self._request
        if self._has_saved or not request.saves_after or self._last_update < request.saves_after or self._has_ended:
            return
        if not self._run.windows.reads.forget_dropped_batches(loader) or self._run.windows.is_unfinished:
            return
        self._has_saved = True
        if not self._checkpoints.checkpoint_folder.is_automatic:
            return  # only the script knows in which folder it looks for checkpoints
        self._accelerator.save_state()
        self._write_facts()

    def _end_if_due(self) -> None:
        """End the process after the last update, or kill rank 0 earlier if the request asks for that."""
        request = self._request
        if self._has_ended:
            return
        if request.kills_after and self._last_update >= request.kills_after:
            self._write_facts()
            if self._rank == 0:
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)  # the launcher kills the other ranks
        if self._last_update >= request.num_updates:
            self._facts.end_reason = "enough"
            self._end_process()

    def _end_process(self) -> None:
        """End this process with exit code 0, so that the script does not continue after the last update."""
        self._write_last_record()
        if self._run.runtime.world_size > 1:
            self._run.collectives.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _watch_progress(self) -> None:
        """Wait until any rank makes no progress for too long, then write this rank's stack and end this process.

        The exit code is then `STALLED_CODE`. This method runs in a separate thread of each rank.
        """
        patience = self._request.patience
        while time.monotonic() - self._last_progress < patience and not is_any_stuck(self._folder):
            time.sleep(min(1.0, patience / 4))
        if self._has_ended:
            return
        self._facts.end_reason = "too slow"
        self._write_facts()
        write_stack(self._folder, self._rank)
        time.sleep(_STACK_SECONDS)
        os._exit(STALLED_CODE)

    def _write_last_record(self) -> None:
        """Write the record of the last update when the process ends."""
        if self._has_ended:
            return
        self._write_update()
        self._has_ended = True
        self._facts.end_reason = self._facts.end_reason or "ended"
        self._write_facts()


def _is_number(value: Any) -> bool:
    """Whether a value is a number that is not a bool, or a tensor with one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
