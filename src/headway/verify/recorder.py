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
from collections.abc import Iterator
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
from headway.verify.calls import CallTrace, TensorPlaces, find_line, get_address
from headway.verify.compilation import run_eagerly
from headway.verify.discards import DiscardWatch
from headway.verify.draws import SharedDraws
from headway.verify.escapes import EscapeWatch
from headway.verify.fingerprints import (
    find_rows,
    hash_rows,
    hash_tensor,
    sample_values,
    walk_tensors,
)
from headway.verify.listings import list_reversed
from headway.verify.loader_records import LoaderRecorder
from headway.verify.probes import LeakProbe
from headway.verify.readings import get_shard, hash_generators, measure_peak, measure_resident
from headway.verify.request import RunRequest, read_request, redirect_path
from headway.verify.sources import watch_sources
from headway.verify.stacks import is_any_stuck, write_stack
from headway.verify.tensor_peak import TensorPeak
from headway.verify.transformers_trainer import watch_transformers_trainer
from headway.verify.watches import GraphSizes, OtherModules, RateWatch
from headway.verify.whole_tensors import gather_whole

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_STACK_SECONDS = 2.5
"""Seconds that a rank without progress waits before it ends the run, so that the other ranks can write their stacks."""
_NORMALIZED = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def redirect_settings(settings: Settings) -> Settings:
    """Return an Accelerator's settings with output in the scratch folder, and without trackers and preemption handling.

    Also start to record where the script creates objects and reads clocks, and turn torch.compile off where calls are
    recorded. If the process's `RunRequest` asks for it, set the global seed, and make loaders shuffle with a seeded
    sampler.
    """
    request = read_request()
    assert request is not None
    watch_sources().install_watches()  # a forked run has done this before the script began
    run_eagerly().install_for(request)
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
        self._recorder.add_loss(loss)
        self._guard.after_backward(loss)


class _RunPlaces(TensorPlaces):
    """Lookup of the modules and gradients of a run's prepared models, by which `CallTrace` names tensors.

    Args:
        run: Run of the Accelerator.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def list_modules(self) -> dict[int, str]:
        """Return the name of each module of the prepared models, by its `id`."""
        return {id(each): name for model in self._run.prepared.models for name, each in model.named_modules()}

    def list_gradients(self) -> dict[int, str]:
        """Return the name of each parameter with a gradient, by the address of this rank's part of the gradient."""
        named = [pair for model in self._run.prepared.models for pair in model.named_parameters()]
        return {get_address(get_shard(p.grad)): name for name, p in named if p.grad is not None and p.grad.numel()}


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
        self._accelerator: Any = None
        self._checkpoints: Any = None
        self._progressed = time.monotonic()
        self._escapes = EscapeWatch(Path(request.output).parent.parent)
        self._num_backwards = 0
        self._is_done = self._is_busy = self._has_saved = self._has_part = False
        self._num_skipped = 0
        self._closed = self._num_updates
        self._targets: tuple[float, float] | None = None
        self._tensor_peak: TensorPeak | None = None
        self._update: dict[str, Any] = self._new_update()
        self._gradients: dict[str, Any] = {}
        self._initial: dict[str, str] = {}
        self._trace = CallTrace(
            self._folder / f"trace{self._rank}.jsonl",
            self._name_tensors,
            _RunPlaces(run),
            is_enabled=not request.measures_tensors,
        )
        self._rates = RateWatch()
        self._discards = DiscardWatch()
        self._others = OtherModules()
        self._num_restored = -1
        self._facts: dict[str, Any] = {
            "rank": self._rank,
            "world_size": run.runtime.world_size,
            "loaded": [],
            "saved": [],
            "loaders": {},
            "changed_data": {},
            "shard": [run.strategy.data_shard.index, run.strategy.data_shard.count],
            "strategy": run.strategy.name,
            "mixed_precision": run.mixed_precision,
            "microbatching": run.replays_batches,
            "device_type": run.runtime.device.type,
            "seeds": hash_generators(),
            "failed": 0,
            "error": "",
            "metrics": [],
        }
        self._loaders = LoaderRecorder(run, request, self._trace, self._facts)
        self._draws = SharedDraws(request.shares_draws, request.reverses_rows, self._loaders.find_place, self._trace)
        events, hooks = run.events, run.hooks
        events.before_fetch.append(self._before_fetch)
        events.after_pass.append(self._after_pass)
        events.repeats.append(self._loaders.watch_loader)
        hooks.before_learning.append(self._before_learning)
        hooks.before_forward.append(self._before_forward)
        hooks.before_backward.append(self._before_backward)
        hooks.before_update.append(self._before_update)

    def attach_to(self, accelerator: Any, step: Any, checkpoints: Any) -> None:
        """Start to observe the parts of an Accelerator that do not exist yet when the recorder is created.

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
        self._loaders.attach(accelerator._preparation)
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
        return self._run.clock.num_updates + self._num_skipped

    # ---------------------------------------------------------------- output of the script

    def note_save(self, folder: str) -> None:
        """Record that the script has saved a checkpoint without the Accelerator's methods.

        Args:
            folder: Folder of the checkpoints.
        """
        self._facts["saved"].append([self._num_updates, folder])

    def note_load(self, num_updates: int, folder: str) -> None:
        """Record that the script has loaded a checkpoint without the Accelerator's methods.

        Args:
            num_updates: Number of updates that were made before the checkpoint was saved.
            folder: Folder of the checkpoints.
        """
        self._num_skipped = num_updates - self._run.clock.num_updates
        self._closed = num_updates
        self._facts["loaded"].append([num_updates, folder])
        self._write_facts()

    def _redirect_checkpoints(self, accelerator: Any, checkpoints: Any) -> None:
        """Redirect saves and loads with an explicit folder to the scratch folder, and record each save and load."""
        request, facts = self._request, self._facts
        save, load, load_state = checkpoints.save, checkpoints.load, accelerator.load_state

        def save_in_scratch(output_dir: Any, *args: Any, **kwargs: Any) -> Any:
            place = save(None if output_dir is None else redirect_path(output_dir, request), *args, **kwargs)
            facts["saved"].append([self._num_updates, str(output_dir or "")])
            return place

        def find_copy(input_dir: Any) -> Any:
            if input_dir is not None and (copied := redirect_path(input_dir, request)).exists():
                return copied
            return input_dir

        def load_state_from_scratch(input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
            # In a script that uses Headway as `accelerate`, this method checks the folder before it calls `load`.
            return load_state(find_copy(input_dir), *args, **kwargs)

        def load_from_scratch(input_dir: Any, *args: Any, **kwargs: Any) -> Any:
            restored = load(find_copy(input_dir), *args, **kwargs)
            facts["loaded"].append([self._num_updates, str(input_dir or "")])
            self._num_restored = self._count_states()
            self._closed = self._num_updates
            self._write_facts()
            return restored

        checkpoints.save = save_in_scratch
        checkpoints.load = load_from_scratch
        accelerator.load_state = load_state_from_scratch

    # ---------------------------------------------------------------- the loop

    def _before_fetch(self, loader: PreparedLoader) -> None:
        self._facts.setdefault("seeds_at_start", hash_generators())
        if self._request.measures_tensors and self._tensor_peak is None:
            kinds = ("named_parameters", "named_buffers")
            existing = [tensor for kind in kinds for _, tensor in self._list_tensors(kind)]
            self._tensor_peak = TensorPeak(self._run.runtime.device, existing)
        self._close_update()
        self._save_if_due(loader)
        self._end_if_due()

    def _after_pass(self) -> None:
        self._close_update()

    def _before_learning(self) -> None:
        self._close_update()
        self._end_if_due()

    def _probe_model(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Test the model for leaks with its first batch, and store two cross entropies for a test of the first loss."""
        self._facts["leaks"] = []
        self._trace.pause_recording()
        probe = LeakProbe(model, args, kwargs, self._loaders.last_batch)
        try:
            probe.run()
        except Exception as error:
            self._facts["probe_error"] = (
                f"the model cannot be called on a changed batch: {type(error).__name__}: {error}"[:300]
            )
        self._facts["leaks"] = probe.findings
        self._facts["changes_in_evaluation"] = [name.replace("_orig_mod.", "") for name in probe.changing]
        self._targets = probe.find_targets()
        self._trace.resume()

    def _before_forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            mode = "train" if model.training else "eval"
            modes = self._update["modes"].setdefault(str(self._find_model(model)), [])
            if mode not in modes:
                modes.append(mode)
        if not (model.training and torch.is_grad_enabled()):
            return
        self._note_start()
        if not self._run.events.active and not self._trace.is_on:
            self._trace.begin_batch(None)
        self._trace.note_inputs(args, kwargs)
        if self._request.probes_leaks and "leaks" not in self._facts:
            self._probe_model(model, args, kwargs)
        if not self._run.events.active and not self._loaders.has_pending:
            rows = find_rows(list(walk_tensors([args, kwargs])))
            if rows:
                exact, loose = hash_rows([args, kwargs], rows)
                self._update["batches"].append({"loader": -1, "num_rows": rows, "rows": exact, "loose": loose})

    def _find_model(self, model: torch.nn.Module) -> int:
        """Return the index of a model among the prepared models, or -1 if it is not one of them."""
        return next((number for number, each in enumerate(self._run.prepared.models) if each is model), -1)

    def _before_backward(self) -> None:
        self._note_start()
        self._update["batches"] += self._loaders.take_used()
        self._num_backwards += 1
        if self._num_backwards == self._request.fails_in:
            self._facts["failed"] = self._num_backwards
            self._trace.void_last_loss()
            self._trace.begin_batch(None)
            raise torch.OutOfMemoryError("CUDA out of memory. Injected by headway verify.")

    def _note_start(self) -> None:
        """Record the models and the optimizers before the first update, and start to watch them. Do this only once."""
        if self._initial:
            return
        self._facts.setdefault("seeds_at_start", hash_generators())
        arrays: dict[str, Any] = {}
        for name, tensor in self._list_tensors("named_parameters"):
            whole = gather_whole(tensor.detach())
            self._initial[name] = hash_tensor(whole)
            arrays[f"p:{name}"] = sample_values(whole)
        for name, tensor in self._list_tensors("named_buffers"):
            self._initial[f"buffer:{name}"] = hash_tensor(gather_whole(tensor.detach()))
        self._facts["trainable"] = [name for name, p in self._list_tensors("named_parameters") if p.requires_grad]
        # bitsandbytes replaces the values of its parameters by packed ones when it first uses them.
        self._facts["frozen"] = [
            name
            for name, p in self._list_tensors("named_parameters")
            if not p.requires_grad and not type(p).__module__.startswith("bitsandbytes")
        ]
        self._facts["modules"] = sorted(
            {type(each).__name__ for m in self._run.prepared.models for each in m.modules()}
        )
        self._facts["norms"] = [
            name for m in self._run.prepared.models for name, each in m.named_modules() if _is_batch_norm(each)
        ]
        self._facts["initial"] = self._initial
        self._facts["dtypes"] = sorted(
            {str(p.dtype).removeprefix("torch.") for _, p in self._list_tensors("named_parameters") if p.requires_grad}
        )
        self._facts["in_optimizer"] = self._list_optimized()
        self._facts["optimizers"] = self._describe_optimizers()
        self._trace.learn_names()
        self._others.find_models(self._run.prepared.models)
        self._trace.places.outside = self._others.list_addresses()
        self._rates.watch_optimizers(self._run.prepared.optimizers)
        self._watch_metrics()
        if self._run.runtime.world_size == 1 and self._run.mixed_precision != "fp16":
            self._discards.watch_optimizer(self._run.prepared.optimizers)
        self._turn_dropout_off()
        self._save_arrays("start", arrays)
        self._write_facts()

    def _list_optimized(self) -> list[str]:
        """Return the names of the parameters that belong to a prepared optimizer."""
        held = {
            id(p)
            for each in self._run.prepared.optimizers
            for group in each.optimizer.param_groups
            for p in group["params"]
        }
        return [name for name, p in self._list_tensors("named_parameters") if id(p) in held]

    def _describe_optimizers(self) -> list[dict[str, Any]]:
        """Return, for each prepared optimizer, its type, the script line that created it, and its parameters' names."""
        names = {id(p): name for name, p in self._list_tensors("named_parameters")}
        return [
            {
                "type": type(each.optimizer).__name__,
                "line": watch_sources().get_birth(each.optimizer),
                "parameters": [names.get(id(p), "") for group in each.optimizer.param_groups for p in group["params"]],
            }
            for each in self._run.prepared.optimizers
        ]

    def _watch_metrics(self) -> None:
        """Record the values that the script passes to prepared schedulers, such as a loss for `ReduceLROnPlateau`."""
        for each in self._run.prepared.schedulers:
            scheduler: Any = each
            scheduler.step = self._record_metric(scheduler.step)

    def _record_metric(self, step: Any) -> Any:
        def step_and_record(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if _is_number(value) and not isinstance(value, int):
                    self._facts["metrics"].append([self._num_updates, float(value), find_line()])
            return step(*args, **kwargs)

        return step_and_record

    def _trace_losses(self, step: Any) -> None:
        """Make the training step record the torch calls that computed a loss, before the backward pass of the loss."""
        backward = step.backward

        def trace_and_backward(loss: Any, weight: Any = None, reduction: str = "mean", **kwargs: Any) -> Any:
            if isinstance(loss, torch.Tensor) and not self._is_done:
                self._trace.update = self._num_updates + 1
                self._trace.close(loss, weight, reduction)
            return backward(loss, weight, reduction, **kwargs)

        step.backward = trace_and_backward

    def _count_states(self) -> int:
        """Return the number of parameters for which prepared optimizers have a state."""
        return sum(len(each.optimizer.state) for each in self._run.prepared.optimizers)

    def _name_tensors(self) -> tuple[dict[int, str], dict[int, str]]:
        """Return two dicts with the names of parameters and buffers: by the tensor's `id`, and by its memory address.

        Sharded parameters are not gathered, because this function is called during a forward pass.
        """
        models = self._run.prepared.models
        kinds = ("named_parameters", "named_buffers")
        named = [pair for model in models for kind in kinds for pair in getattr(model, kind)()]
        shards = [(name, get_shard(tensor)) for name, tensor in named]
        by_address = {get_address(tensor): name for name, tensor in shards if tensor.numel()}
        return {id(tensor): name for name, tensor in named}, by_address

    def _turn_dropout_off(self) -> None:
        """Count the models' nonzero dropout rates, and set them to 0 if random draws are shared between ranks."""
        num = 0
        for model in self._run.prepared.models:
            for module in model.modules():
                for name, value in list(vars(module).items()):
                    is_rate = "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
                    if is_rate and isinstance(value, float) and 0 < value < 1:
                        num += 1
                        if self._request.shares_draws:
                            setattr(module, name, 0.0)
        self._facts["num_dropouts"] = num

    def add_loss(self, loss: torch.Tensor) -> None:
        """Record the value of a loss after its backward pass."""
        self._trace.resume()
        if not self._is_done:
            value = float(loss.detach().float().mean().item())
            self._update["losses"].append(value)
            self._update["discarded"] += self._discards.note_backward(self._loaders.num_fetched, value)
            if self._targets is not None:
                own, following = self._targets
                self._targets = None
                # The first loss equals the cross entropy with the input tokens themselves, not with the next ones.
                leaks = abs(value - own) < 1e-4 * abs(own) < 0.1 * abs(own - following)
                where = "the loss compares the output of each position with the token of the same position, which the model has seen"
                self._facts["leaks"].append({"kind": "copy", "leaks": leaks, "where": where if leaks else ""})

    def _before_update(self) -> None:
        """Record the learning rates, and the gradients that the optimizer is about to use."""
        if self._is_done or self._request.measures_tensors:  # copies of gradients would be measured, too
            return
        if self._num_restored > 0:
            self._facts["state_emptied"] = self._count_states() < self._num_restored
        self._num_restored = -1
        self._rates.watch_optimizers(self._run.prepared.optimizers)
        self._update["rates"] = [
            float(group["lr"]) for each in self._run.prepared.optimizers for group in each.optimizer.param_groups
        ]
        window = self._run.windows.current
        trained = {id(each) for each in self._run.prepared.list_parameters_of(window)}
        stale = [
            name for name, p in self._list_tensors("named_parameters") if p.grad is not None and not p.requires_grad
        ]
        self._update["stale"] = [name for name in stale if name in self._update.get("stale", stale)]
        self._discards.forget_backwards()
        for name, parameter in self._list_tensors("named_parameters"):
            if parameter.grad is None or id(parameter) not in trained:
                continue
            whole = gather_whole(parameter.grad.detach())
            if whole.is_sparse:
                whole = whole.to_dense()
            self._gradients[name] = sample_values(whole)
            if "expert" in name and whole.ndim > 2:
                used = whole.flatten(1).abs().amax(1) > 0
                self._update["unused"][name] = (~used).nonzero().flatten().tolist()
            self._update["norms"][name] = float(whole.detach().to(torch.float64).norm().item())

    def _close_update(self) -> None:
        """Write the record of the last update if it has not been written."""
        self._progressed = time.monotonic()
        run = self._run
        if self._is_done or self._is_busy or self._num_updates <= self._closed:
            return
        self._is_busy = True
        if self._tensor_peak is not None and self._num_updates >= self._request.num_updates:
            self._facts["tensor_peak"] = self._tensor_peak.stop()
        self._closed = number = self._num_updates
        record, arrays = self._update, {f"g:{name}": value for name, value in self._gradients.items()}
        hashes: dict[str, str] = {}
        for name, tensor in self._list_tensors("named_parameters"):
            whole = gather_whole(tensor.detach())
            hashes[name] = hash_tensor(whole)
            arrays[f"p:{name}"] = sample_values(whole)
        buffers = {
            name: hash_tensor(gather_whole(tensor.detach())) for name, tensor in self._list_tensors("named_buffers")
        }
        record.update(
            update=number,
            hashes=hashes,
            buffers=buffers,
            seconds=time.perf_counter() - record.pop("began"),
            memory=measure_peak(run.runtime.device),
            resident=measure_resident(run.runtime.device),
            is_training=[bool(model.training) for model in run.prepared.models],
            **self._trace.take_written(),
            rate_lines=self._rates.take_lines(),
            others=self._others.hash_all(),
        )
        record["busy"] = time.thread_time() - record.pop("busy_at_start")
        if number >= self._request.num_updates:
            gc.collect()
            alive = GraphSizes(self._trace.list_alive(number), self._name_tensors()[1])
            self._facts["kept"] = alive.list_lines()
        self._facts["slow_lines"] = self._loaders.slow.list_lines()
        self._save_arrays(f"update_{number}", arrays)
        with open(self._folder / f"rank{self._rank}.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        self._gradients, self._update = {}, self._new_update()
        self._write_facts()
        self._is_busy = False

    def _new_update(self) -> dict[str, Any]:
        began, busy = time.perf_counter(), time.thread_time()
        return {
            "batches": [],
            "losses": [],
            "norms": {},
            "rates": [],
            "unused": {},
            "modes": {},
            "discarded": [],
            "began": began,
            "busy_at_start": busy,
        }

    # ---------------------------------------------------------------- the end

    def _save_if_due(self, loader: PreparedLoader) -> None:
        """Save one checkpoint as soon as possible after the requested number of updates.

        The script's `resume("latest")` can find it. Wait while the loop cannot stop at this batch, or while gradients
        are being accumulated. Save nothing if the script does not use automatic checkpoint naming.

        Args:
            loader: Loader that is about to fetch a batch.
        """
        request = self._request
        if self._has_saved or not request.saves_after or self._closed < request.saves_after or self._is_done:
            return
        if not self._run.events.can_stop(loader) or self._run.windows.is_unfinished:
            return
        self._has_saved = True
        if not self._checkpoints.place.is_automatic:
            return  # only the script knows in which folder it looks for checkpoints
        self._accelerator.save_state()
        self._write_facts()

    def _end_if_due(self) -> None:
        """End the process after the last update, or kill rank 0 earlier if the request asks for that."""
        request = self._request
        if self._is_done:
            return
        if request.kills_after and self._closed >= request.kills_after:
            self._write_facts()
            if self._rank == 0:
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)  # the launcher kills the other ranks
        if self._closed >= request.num_updates:
            self._facts["end"] = "enough"
            self._end_process(0)

    def _end_process(self, code: int) -> None:
        """End this process immediately, so that the script does not continue after the last update.

        Args:
            code: Exit code of the process.
        """
        self._write_last_record()
        if self._run.runtime.world_size > 1 and code == 0:
            self._run.collectives.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _watch_progress(self) -> None:
        """Wait until any rank makes no progress for too long, then write this rank's stack and end this process.

        The exit code is then 70. This method runs in a separate thread of each rank.
        """
        patience = self._request.patience
        while time.monotonic() - self._progressed < patience and not is_any_stuck(self._folder):
            time.sleep(min(1.0, patience / 4))
        if self._is_done:
            return
        self._facts["end"] = "too slow"
        self._write_facts()
        write_stack(self._folder, self._rank)
        time.sleep(_STACK_SECONDS)
        os._exit(70)

    def _write_last_record(self) -> None:
        """Write the record of the last update when the process ends."""
        if self._is_done:
            return
        self._close_update()
        self._is_done = True
        self._facts.setdefault("end", "ended")
        self._write_facts()

    def _write_facts(self) -> None:
        facts = self._facts
        facts.update(
            drawn=self._draws.seen,
            unshared=self._draws.unshared,
            num_dropped=self._draws.num_dropped,
            escaped=self._escapes.list_files(),
            num_updates=self._closed,
            num_fetched=self._loaders.num_fetched,
            num_backwards=self._num_backwards,
            listed=list_reversed(),
            compiles=run_eagerly().is_used,
            written=self._trace.written,
            **watch_sources().list_facts(),
        )
        path = self._folder / f"facts{self._rank}.json"
        path.with_suffix(".new").write_text(json.dumps(facts))
        path.with_suffix(".new").replace(path)

    def _save_arrays(self, name: str, arrays: dict[str, Any]) -> None:
        # Under pipeline parallelism, each rank has only the parameters of its stages, so each rank writes its own.
        if self._rank == 0 or self._has_part:
            numpy.savez(self._folder / f"{name}.{self._rank}.npz", **arrays)

    # ---------------------------------------------------------------- readings

    def _list_tensors(self, attribute: str) -> Iterator[tuple[str, Any]]:
        several = len(self._run.prepared.models) > 1
        for number, model in enumerate(self._run.prepared.reshard_models()):
            for name, tensor in getattr(model, attribute)():
                if tensor.is_meta:
                    self._has_part = True
                    continue
                for wrapper in _WRAPPERS:
                    name = name.replace(wrapper, "")
                yield (f"{type(model).__name__.removeprefix('Prepared')} {number}: {name}" if several else name), tensor


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, _NORMALIZED) and not isinstance(module, torch.nn.SyncBatchNorm)
