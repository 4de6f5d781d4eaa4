"""The global batch of a run that goes on with other settings: which accumulation keeps it, and what is split raggedly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.data.loader import PreparedLoader
from headway.training.windows import AccumulationWindows

_REACH = 4
"""How many times the fewest rounds are tried before a window counts as not divisible."""
_MOST_STEPS = 2**16
"""More micro-batches an update are not looked for."""


@dataclass(frozen=True)
class BatchState:
    """What a checkpoint keeps of the global batch; for each loader, None where it varies.

    Attributes:
        asked: the samples of one update by the script's own settings.
        sizes: the samples of one update.
        units: what an incomplete end of an epoch is dropped by, with drop_last.
        trained: the numbers of the loaders that updates are made from.
    """

    asked: list[int | None]
    sizes: list[int | None]
    units: list[int | None]
    trained: list[int]


@dataclass
class BatchPlan:
    """How the loaders and the accumulation go on.

    Attributes:
        num_steps: micro-batches per update.
        windows: by loader number, (samples of one update, the unit that an end drops) where these are split raggedly.
        lines: what is not as it was.
        is_kept: the global batch is that of the checkpoint.
    """

    num_steps: int
    windows: dict[int, tuple[int, int]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    is_kept: bool = True


def _asked_window(loader: PreparedLoader, num_steps: int) -> int:
    """The samples of an update that a script's `global_batch_size` splits unevenly; 0: evenly, or other steps count since."""
    window, num_rounds = loader.asked_window
    return window if num_rounds == num_steps else 0


class GlobalBatch:
    """What the updates of a run are made of.

    Args:
        loaders: the prepared loaders; the list grows.
        accumulation: its number of steps is what the script asks for, until a plan is carried out.
    """

    def __init__(self, loaders: Sequence[PreparedLoader], accumulation: AccumulationWindows) -> None:
        self._loaders = loaders
        self._accumulation = accumulation
        self._kept: tuple[BatchPlan, int] | None = None

    @property
    def _plan(self) -> BatchPlan | None:
        """The plan in force; steps that the script has set since end it."""
        if self._kept is not None and self._kept[0].num_steps != self._accumulation.num_steps:
            self._kept = None
        return None if self._kept is None else self._kept[0]

    @property
    def _asked_steps(self) -> int:
        return self._accumulation.num_steps if self._plan is None or self._kept is None else self._kept[1]

    def asked(self) -> list[int | None]:
        """For each loader, the samples of one update by the script's own settings; None where they vary."""
        return [None if each.step_size is None else each.step_size * self._asked_steps for each in self._loaders]

    def sizes(self) -> list[int | None]:
        """For each loader, the samples of one update; None where they vary."""
        steps, windows = self._accumulation.num_steps, {} if self._plan is None else self._plan.windows
        plain = [_asked_window(each, steps) or (None if each.step_size is None else each.step_size * steps)
                 for each in self._loaders]  # fmt: skip
        return [windows[index][0] if index in windows else size for index, size in enumerate(plain)]

    def _trained(self) -> list[int]:
        """The numbers of the loaders that updates are made from."""
        trained = self._accumulation.trained_on
        return [index for index, each in enumerate(self._loaders) if any(each is one for one in trained)] or [0]

    def state(self) -> BatchState:
        """What a checkpoint keeps of it."""
        return BatchState(self.asked(), self.sizes(), self._units(), self._trained())

    def _units(self) -> list[int | None]:
        """For each loader, what an incomplete end of an epoch is dropped by where it has drop_last."""
        windows = {} if self._plan is None else self._plan.windows
        return [windows[index][1] if index in windows else each.step_size for index, each in enumerate(self._loaders)]

    def size(self) -> int | None:
        """Samples of one update; None where they vary."""
        return next((size for index, size in enumerate(self.sizes()) if index in self._trained()), None)

    # ---------------------------------------------------------------- a resumed run

    def plan(self, saved: BatchState, former_steps: int, is_same_world: bool) -> BatchPlan:
        """How a run that was saved like that goes on; nothing is changed.

        Where the script's own settings were changed and not the world, those count.

        Args:
            saved: what `state` returned.
            former_steps: micro-batches per update then.
            is_same_world: as many ranks as then.
        """
        steps, asked = self._asked_steps, self.asked()
        trained = [index for index in saved.trained if index < min(len(asked), len(saved.sizes))]
        wanted = {index: size for index in trained if (size := saved.sizes[index]) is not None}
        before = next((saved.sizes[index] for index in trained), None)
        is_kept = not (
            is_same_world and [saved.asked[index] for index in trained] != [asked[index] for index in trained]
        )
        if is_kept and wanted and wanted.keys() == set(trained) and all(asked[index] for index in trained):
            found = self._find(wanted, [unit or 1 for unit in saved.units])
            if found is not None:
                if found.num_steps != former_steps:
                    found.lines.insert(
                        0, f"accumulation {former_steps} -> {found.num_steps} to keep the global batch of {before}"
                    )
                return found
        now = next((asked[index] for index in trained), None)
        return BatchPlan(steps, lines=[] if before == now else [f"global batch {before} -> {now}"], is_kept=False)

    def _find(self, wanted: Mapping[int, int], units: Sequence[int]) -> BatchPlan | None:
        """The plan with the fewest steps that gives each loader's updates `wanted` samples; None where none does."""
        full = {index: self._loaders[index].step_size or 1 for index in wanted}
        fewest = max(-(-size // full[index]) for index, size in wanted.items())
        is_even = all(size == fewest * full[index] for index, size in wanted.items())
        plain = BatchPlan(fewest) if is_even else None
        is_exact = is_even and not any(self._drops(index) and units[index] != full[index] for index in wanted)
        # Windows that go on in the next epoch have no samples of their own.
        if is_exact or not self._accumulation.sync_with_loader:
            return plain
        sizes = " and ".join(map(str, wanted.values()))
        told = [] if is_even else [f"the global batch of {sizes} samples is split unevenly among the ranks"]
        for steps in range(fewest, min(_REACH * fewest, _MOST_STEPS) + 1):
            if all(self._loaders[index].fits_window(size, steps) for index, size in wanted.items()):
                return BatchPlan(steps, {index: (size, units[index]) for index, size in wanted.items()}, told)
        return plain

    def _drops(self, index: int) -> bool:
        loader = self._loaders[index]
        return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))

    def carry_out(self, plan: BatchPlan) -> None:
        """Go on by the plan; before the loaders take up their positions."""
        asked = self._asked_steps
        self._apply(plan)
        self._kept = (plan, asked)

    def way_back(self) -> Callable[[], None]:
        """A function that ends a plan which is carried out from now on, and goes on by the one in force."""
        kept, plan = self._kept, self._plan or BatchPlan(self._accumulation.num_steps)

        def back() -> None:
            self._apply(plan)
            self._kept = kept

        return back

    def _apply(self, plan: BatchPlan) -> None:
        for index, loader in enumerate(self._loaders):
            size, unit = plan.windows.get(index, (0, 1))
            loader.keep_window(size, plan.num_steps, unit)
        self._accumulation.set_steps(plan.num_steps)
