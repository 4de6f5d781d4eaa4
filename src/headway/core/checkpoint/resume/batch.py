"""Global batch size of a run that resumes with other settings, such as another number of ranks.

The global batch size is the number of samples per update. To keep it, the number of accumulation steps is changed. If
this is not enough, batches are split unevenly among the ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.core.data.loader import PreparedLoader
from headway.core.training.windows import AccumulationWindows

_REACH = 4
"""Maximum number of micro-batches per update to try, as a multiple of the smallest possible number.

If no number up to this limit fits the global batch size, the resumed run does not split batches unevenly.
"""
_MOST_STEPS = 2**16
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
        lines: Messages about differences from the saved run.
        is_kept: Whether the global batch size is that of the checkpoint.
    """

    num_steps: int
    windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    is_kept: bool = True


def _find_requested_window(loader: PreparedLoader, num_steps: int) -> int:
    """Return the `global_batch_size` that the script requested for a loader, if it makes micro-batches differ in size.

    Return 0 if their sizes are equal, or if the number of micro-batches per update has changed since the request.

    Args:
        loader: Prepared loader.
        num_steps: Current number of micro-batches per update.
    """
    window, num_rounds = loader.requested_window
    return window if num_rounds == num_steps else 0


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
        self._kept: tuple[BatchPlan, int] | None = None

    @property
    def _plan(self) -> BatchPlan | None:
        """Plan that was applied last, or None if no plan is in effect.

        It becomes None once the script has set another number of accumulation steps.
        """
        if self._kept is not None and self._kept[0].num_steps != self._accumulation.num_steps:
            self._kept = None
        return None if self._kept is None else self._kept[0]

    @property
    def _requested_steps(self) -> int:
        """Number of micro-batches per update that the script requested, before a resume changed it."""
        return self._accumulation.num_steps if self._plan is None or self._kept is None else self._kept[1]

    def list_requested_sizes(self) -> list[int | None]:
        """Return, for each loader, the number of samples per update that the script requests, or None if it varies."""
        return [None if each.step_size is None else each.step_size * self._requested_steps for each in self._loaders]

    def list_sizes(self) -> list[int | None]:
        """Return, for each loader, the number of samples per update that is used, or None if it varies."""
        steps, windows = self._accumulation.num_steps, {} if self._plan is None else self._plan.windows
        plain = [_find_requested_window(each, steps) or (None if each.step_size is None else each.step_size * steps)
                 for each in self._loaders]  # fmt: skip
        return [windows[index][0] if index in windows else size for index, size in enumerate(plain)]

    def _list_trained(self) -> list[int]:
        """Return the indices of the loaders whose batches are used for training, or [0] before the first such batch."""
        trained = self._accumulation.trained_on
        return [index for index, each in enumerate(self._loaders) if any(each is one for one in trained)] or [0]

    def state(self) -> BatchState:
        """Return the global batch's settings, to be stored in a checkpoint."""
        return BatchState(self.list_requested_sizes(), self.list_sizes(), self._list_units(), self._list_trained())

    def _list_units(self) -> list[int | None]:
        """Return, for each loader, the unit of `drop_last` in samples, or None if the samples per step vary.

        With `drop_last`, the number of samples in an epoch is rounded down to a multiple of this unit.
        """
        windows = {} if self._plan is None else self._plan.windows
        return [windows[index][1] if index in windows else each.step_size for index, each in enumerate(self._loaders)]

    def size(self) -> int | None:
        """Return the number of samples per update of the first training loader, or None if it varies."""
        return next((size for index, size in enumerate(self.list_sizes()) if index in self._list_trained()), None)

    # ---------------------------------------------------------------- a resumed run

    def plan(self, saved: BatchState, former_steps: int, is_same_world: bool) -> BatchPlan:
        """Return the settings with which a resumed run continues. Nothing is changed.

        The global batch size is kept if possible. If the script requests another one and the number of data shards is
        unchanged, the script's new settings apply.

        Args:
            saved: Result of `state` in the saved run.
            former_steps: Number of micro-batches per update in the saved run.
            is_same_world: Whether the number of data shards is that of the saved run.
        """
        steps, asked = self._requested_steps, self.list_requested_sizes()
        trained = [index for index in saved.trained if index < min(len(asked), len(saved.sizes))]
        wanted = {index: size for index in trained if (size := saved.sizes[index]) is not None}
        before = next((saved.sizes[index] for index in trained), None)
        is_kept = not (
            is_same_world and [saved.asked[index] for index in trained] != [asked[index] for index in trained]
        )
        if is_kept and wanted and wanted.keys() == set(trained) and all(asked[index] for index in trained):
            found = self._find_plan(wanted, [unit or 1 for unit in saved.units])
            if found is not None:
                if found.num_steps != former_steps:
                    found.lines.insert(
                        0, f"accumulation {former_steps} -> {found.num_steps} to keep the global batch of {before}"
                    )
                return found
        now = next((asked[index] for index in trained), None)
        return BatchPlan(steps, lines=[] if before == now else [f"global batch {before} -> {now}"], is_kept=False)

    def _find_plan(self, wanted: Mapping[int, int], units: Sequence[int]) -> BatchPlan | None:
        """Return the plan that keeps the global batch size with the fewest micro-batches per update.

        Return None if no plan keeps it.

        Args:
            wanted: Number of samples per update in the saved run, by loader index.
            units: For each loader, a number of samples. With `drop_last`, an epoch is shortened to a multiple of it.
        """
        full = {index: self._loaders[index].step_size or 1 for index in wanted}
        fewest = max(-(-size // full[index]) for index, size in wanted.items())
        is_even = all(size == fewest * full[index] for index, size in wanted.items())
        plain = BatchPlan(fewest) if is_even else None
        is_exact = is_even and not any(self._does_drop_last(index) and units[index] != full[index] for index in wanted)
        # A window that continues in the next epoch does not consist of a fixed set of samples.
        if is_exact or not self._accumulation.sync_with_loader:
            return plain
        sizes = " and ".join(map(str, wanted.values()))
        lines = [] if is_even else [f"the global batch of {sizes} samples is split unevenly among the ranks"]
        for steps in range(fewest, min(_REACH * fewest, _MOST_STEPS) + 1):
            if all(self._loaders[index].can_fit_window(size, steps) for index, size in wanted.items()):
                return BatchPlan(steps, {index: (size, units[index]) for index, size in wanted.items()}, lines)
        return plain

    def _does_drop_last(self, index: int) -> bool:
        loader = self._loaders[index]
        return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))

    def apply_plan(self, plan: BatchPlan) -> None:
        """Change the loaders and the gradient accumulation to the settings of a plan.

        It must be called before the positions of the loaders are restored.

        Args:
            plan: Result of `plan`.
        """
        asked = self._requested_steps
        self._apply_plan(plan)
        self._kept = (plan, asked)

    def prepare_undo(self) -> Callable[[], None]:
        """Record the current settings, and return a function that restores them after another plan has been applied."""
        kept, plan = self._kept, self._plan or BatchPlan(self._accumulation.num_steps)

        def undo_plan() -> None:
            self._apply_plan(plan)
            self._kept = kept

        return undo_plan

    def _apply_plan(self, plan: BatchPlan) -> None:
        for index, loader in enumerate(self._loaders):
            size, unit = plan.windows.get(index, (0, 1))
            loader.keep_window(size, plan.num_steps, unit)
        self._accumulation.set_num_steps(plan.num_steps)
