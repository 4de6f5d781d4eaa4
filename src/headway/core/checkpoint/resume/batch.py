"""Global batch size of a run that resumes with other settings, such as another number of ranks.

The global batch size is the number of samples per update. To keep it, the number of accumulation steps is changed. If
this is not enough, batches are split unevenly among the ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.core.data.loader import PreparedLoader
from headway.core.training.windows import AccumulationWindows

_MAX_STEPS_FACTOR = 4
"""Maximum number of micro-batches per update to try, as a multiple of the smallest possible number.

If no number up to this limit fits the global batch size, the resumed run does not split batches unevenly.
"""
_MAX_STEPS = 2**16
"""Maximum number of micro-batches per update that is tried."""


@dataclass(frozen=True)
class BatchState:
    """Settings of the global batch, as stored in a checkpoint. A loader's item in a list is None if its value varies.

    Attributes:
        asked: For each loader, the number of samples per update that the script's settings request.
        sizes: For each loader, the number of samples per update that is used.
        units: For each loader, the unit of `drop_last` in samples. With `drop_last`, the number of samples in an epoch
            is rounded down to a multiple of this unit.
        trained: Indices of the loaders whose batches are used for training.
    """

    asked: list[int | None]
    sizes: list[int | None]
    units: list[int | None]
    trained: list[int]


@dataclass
class BatchPlan:
    """Settings of loaders and gradient accumulation with which a run continues after a resume.

    Attributes:
        num_steps: Number of micro-batches per update.
        windows: Settings by loader index, for loaders whose batches are split unevenly. Each is a pair of (samples per
            update, unit). With `drop_last`, an epoch is shortened to a multiple of this unit in samples.
        differences: Messages about differences from the saved run, one line each.
        is_kept: Whether the global batch size is that of the checkpoint.
    """

    num_steps: int
    windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    is_kept: bool = True


def _find_requested_window(loader: PreparedLoader, num_steps: int) -> int:
    """Return the `global_batch_size` that the script requested for a loader, if it makes micro-batches differ in size.

    Return 0 if the micro-batches have equal sizes, or if the number of micro-batches per update has changed since the
    request.

    Args:
        loader: Prepared loader.
        num_steps: Current number of micro-batches per update.
    """
    global_batch, requested_steps = loader.requested_update_size
    return global_batch if requested_steps == num_steps else 0


class GlobalBatch:
    """Global batch of a run: the number of samples in each update, which a resume keeps if possible.

    Args:
        loaders: Prepared loaders. The run may add loaders to this list later.
        accumulation: Gradient accumulation of the run. The script sets its number of micro-batches per update, until
            `apply_plan` changes it.
    """

    def __init__(self, loaders: Sequence[PreparedLoader], accumulation: AccumulationWindows) -> None:
        self._loaders = loaders
        self._accumulation = accumulation
        self._applied_plan: tuple[BatchPlan, int] | None = None
        """Pair of (plan that was applied last, number of micro-batches per update that the script had requested)."""

    @property
    def _plan(self) -> BatchPlan | None:
        """Plan that was applied last, or None if no plan is in effect.

        It becomes None once the script has set another number of accumulation steps.
        """
        if self._applied_plan is None:
            return None
        plan, _ = self._applied_plan
        if plan.num_steps != self._accumulation.num_steps:
            self._applied_plan = None
            return None
        return plan

    @property
    def _requested_steps(self) -> int:
        """Number of micro-batches per update that the script requested, before a resume changed it."""
        if self._plan is None or self._applied_plan is None:
            return self._accumulation.num_steps
        _, requested_steps = self._applied_plan
        return requested_steps

    def list_requested_sizes(self) -> list[int | None]:
        """Return, for each loader, the number of samples per update that the script requests, or None if it varies."""
        return [
            None
            if each.configured_samples_per_step is None
            else each.configured_samples_per_step * self._requested_steps
            for each in self._loaders
        ]

    def list_sizes(self) -> list[int | None]:
        """Return, for each loader, the number of samples per update that is used, or None if it varies."""
        num_steps, windows = self._accumulation.num_steps, {} if self._plan is None else self._plan.windows
        sizes: list[int | None] = []
        for index, loader in enumerate(self._loaders):
            if index in windows:
                size, _ = windows[index]
                sizes.append(size)
            elif requested := _find_requested_window(loader, num_steps):
                sizes.append(requested)
            else:
                sizes.append(
                    None
                    if loader.configured_samples_per_step is None
                    else loader.configured_samples_per_step * num_steps
                )
        return sizes

    def _list_trained(self) -> list[int]:
        """Return the indices of the loaders whose batches are used for training, or [0] before the first such batch."""
        trained = self._accumulation.reads.trained_on
        return [index for index, each in enumerate(self._loaders) if any(each is one for one in trained)] or [0]

    def get_state(self) -> BatchState:
        """Return the global batch's settings, to be stored in a checkpoint."""
        return BatchState(self.list_requested_sizes(), self.list_sizes(), self._list_units(), self._list_trained())

    def _list_units(self) -> list[int | None]:
        """Return, for each loader, the unit of `drop_last` in samples, or None if the samples per step vary.

        With `drop_last`, the number of samples in an epoch is rounded down to a multiple of this unit.
        """
        windows = {} if self._plan is None else self._plan.windows
        units: list[int | None] = [each.configured_samples_per_step for each in self._loaders]
        for index, (_, unit) in windows.items():
            units[index] = unit
        return units

    def get_size(self) -> int | None:
        """Return the number of samples per update of the first training loader, or None if it varies."""
        return next((size for index, size in enumerate(self.list_sizes()) if index in self._list_trained()), None)

    # ---------------------------------------------------------------- a resumed run

    def make_plan(self, saved: BatchState, saved_steps: int, is_same_world: bool) -> BatchPlan:
        """Return the settings with which a resumed run continues. Nothing is changed.

        The global batch size is kept if possible. If the script requests another one and the number of data shards is
        unchanged, the script's new settings apply.

        Args:
            saved: Result of `get_state` in the saved run.
            saved_steps: Number of micro-batches per update in the saved run.
            is_same_world: Whether the number of data shards is that of the saved run.
        """
        requested = self.list_requested_sizes()
        # Indices of the loaders that were used for training, and that both runs have.
        trained = [index for index in saved.trained if index < min(len(requested), len(saved.sizes))]
        # Messages contain the size of the first of these loaders.
        first_saved_size = saved.sizes[trained[0]] if trained else None
        first_requested_size = requested[trained[0]] if trained else None
        saved_sizes = {index: size for index in trained if (size := saved.sizes[index]) is not None}
        has_new_request = is_same_world and any(saved.asked[index] != requested[index] for index in trained)
        are_sizes_known = bool(trained) and all(index in saved_sizes and requested[index] for index in trained)
        plan: BatchPlan | None = None
        if are_sizes_known and not has_new_request:
            plan = self._find_plan(saved_sizes, [unit or 1 for unit in saved.units])
        if plan is None:
            differences: list[str] = []
            if first_saved_size != first_requested_size:
                differences.append(f"global batch {first_saved_size} -> {first_requested_size}")
            return BatchPlan(self._requested_steps, differences=differences, is_kept=False)
        if plan.num_steps != saved_steps:
            line = f"accumulation {saved_steps} -> {plan.num_steps} to keep the global batch of {first_saved_size}"
            plan.differences.insert(0, line)
        return plan

    def _find_plan(self, saved_sizes: Mapping[int, int], units: Sequence[int]) -> BatchPlan | None:
        """Return the plan that keeps the global batch size with the fewest micro-batches per update.

        Return None if no plan keeps it.

        Args:
            saved_sizes: Number of samples per update in the saved run, by loader index.
            units: For each loader, a number of samples. With `drop_last`, an epoch is shortened to a multiple of it.
        """
        step_sizes = {index: self._loaders[index].configured_samples_per_step or 1 for index in saved_sizes}
        # Largest of the quotients, rounded up. With fewer micro-batches, some loader could not deliver its samples.
        fewest = max(-(-size // step_sizes[index]) for index, size in saved_sizes.items())
        is_even = all(size == fewest * step_sizes[index] for index, size in saved_sizes.items())
        even_plan = BatchPlan(fewest) if is_even else None
        # With drop_last, an epoch of equal batches could end at another sample than that of the saved run.
        has_equal_end = not any(
            self._does_drop_last(index) and units[index] != step_sizes[index] for index in saved_sizes
        )
        if is_even and has_equal_end:
            return even_plan
        if not self._accumulation.sync_with_loader:
            # Windows continue in the next epoch, so they do not consist of fixed sets of samples to split unevenly.
            return even_plan
        sizes = " and ".join(map(str, saved_sizes.values()))
        differences = [] if is_even else [f"the global batch of {sizes} samples is split unevenly among the ranks"]
        for num_steps in range(fewest, min(_MAX_STEPS_FACTOR * fewest, _MAX_STEPS) + 1):
            if all(self._loaders[index].can_fit_update(size, num_steps) for index, size in saved_sizes.items()):
                windows = {index: (size, units[index]) for index, size in saved_sizes.items()}
                return BatchPlan(num_steps, windows, differences)
        return even_plan

    def _does_drop_last(self, index: int) -> bool:
        """Whether the loader with this index drops the incomplete last batch of an epoch."""
        loader = self._loaders[index]
        return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))

    def apply_plan(self, plan: BatchPlan) -> None:
        """Change the loaders and the gradient accumulation to the settings of a plan.

        It must be called before the positions of the loaders are restored.

        Args:
            plan: Result of `make_plan`.
        """
        requested_steps = self._requested_steps
        self._change_settings(plan)
        self._applied_plan = (plan, requested_steps)

    def prepare_undo(self) -> Callable[[], None]:
        """Record the current settings, and return a function that restores them after another plan has been applied."""
        applied, plan = self._applied_plan, self._plan or BatchPlan(self._accumulation.num_steps)

        def undo_plan() -> None:
            self._change_settings(plan)
            self._applied_plan = applied

        return undo_plan

    def _change_settings(self, plan: BatchPlan) -> None:
        """Set the number of samples per update of each loader, and the number of micro-batches per update, as in a plan."""
        for index, loader in enumerate(self._loaders):
            size, unit = plan.windows.get(index, (0, 1))
            loader.set_update_size(size, plan.num_steps, unit)
        self._accumulation.set_num_steps(plan.num_steps)
