"""find_executable_batch_size: calls a function with smaller batch sizes, or the largest, until it fits on every rank.

Two searches say which size comes next, downwards only or for the largest that fits; both assume that memory grows with the size.
They are asked for `size`, and told by `report` whether it fitted::

    search = LargestSize(starting_size=128)
    while not search.is_done:
        search.report(fits=try_it(search.size))
    search.found            # 0 where nothing fitted
"""

import functools
import inspect
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Literal, overload

from headway.errors import BatchSizeError, CallError, ConfigError
from headway.log import get_logger
from headway.memory.attempt import Attempt, Outcome, is_several
from headway.memory.oom import clear_device_cache
from headway.runtime import process
from headway.runtime.control_plane import control
from headway.runtime.events import notify

log = get_logger(__name__)

STEPS = "gradient_accumulation_steps"
"""The parameter through which `keep_global_batch=True` tells the function its accumulation."""

_LATE = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)

_Function = Callable[..., Any]
Reduce = Callable[..., int]
"""What gives the next size after a failure: called with the size that failed, or with nothing where it takes nothing."""

LARGEST = 65536
"""The size up to which the search for the largest one grows, where no other limit is given."""

_GROWTH = 8
"""A start that is off costs two or three tries more than doubling at once; one that is near saves as many as bisecting takes."""


class FirstThatFits:
    """From a size downwards until one fits.

    Args:
        starting_size: the first one.
        reduce: gives the next one; None: half of it.
        sizes: the only sizes allowed, ascending; None: all. A size between two of them becomes the lower one.

    Attributes:
        size: what to try next; 0 where nothing is left below the last failure.
        found: the size that fitted; 0 while none did.

    Raises:
        ConfigError: (from `report`) a reduced size that is not a smaller integer.
    """

    def __init__(self, starting_size: int, reduce: Reduce | None = None, sizes: Sequence[int] | None = None) -> None:
        self.size = starting_size
        self.found = 0
        self._reduce = reduce
        self._sizes = sizes

    def report(self, fits: bool) -> None:
        """Stop at a size that fitted; else make the next one smaller."""
        if fits:
            self.found = self.size
        else:
            self.size = self._fitted_in(self._next())

    @property
    def is_done(self) -> bool:
        """Did a size fit, or is none left?"""
        return self.size in (0, self.found)

    def _next(self) -> int:
        if self._reduce is None:
            return self.size // 2
        reduced: Any = self._reduce(self.size) if _takes_the_size(self._reduce) else self._reduce()
        if isinstance(reduced, bool) or not isinstance(reduced, int) or not reduced < self.size:
            raise ConfigError(
                f"reduce_batch_size_fn returned {reduced!r} after a batch size of {self.size} ran out of memory; it must return an "
                "integer below that, or 0 to give up"
            )
        return max(0, reduced)

    def _fitted_in(self, size: int) -> int:
        if self._sizes is None:
            return size
        index = bisect_right(self._sizes, size)
        return self._sizes[index - 1] if index else 0


class LargestSize:
    """The largest size that fits, by steps away from the start that grow eightfold up to doubling and halving, then by bisection.

    A start that is near the answer, as one that was forecast, takes 2 to 3 tries; from anywhere else there are at most about
    2 log2(n) for an answer of n.

    Args:
        starting_size: the first one to try.
        limit: the largest one to try, not below the first.
        sizes: the only sizes allowed, ascending; None: all. The first one is the largest of them up to `starting_size`.
        tolerance: the answer may be below the largest size that fits by this share of itself; 0: it is that one.

    Attributes:
        size: what to try next; 0 where nothing is left below the last failure.
    """

    def __init__(
        self, starting_size: int, limit: int = LARGEST, sizes: Sequence[int] | None = None, tolerance: float = 0.0
    ) -> None:
        self._tolerance = tolerance
        allowed: Sequence[int] = range(1, limit + 1) if sizes is None else sizes
        # Everything below is about positions in the allowed sizes: the last that fitted, the first that did not.
        self._sizes = allowed[: bisect_right(allowed, limit)]
        self._fits = -1
        self._fails = len(self._sizes)
        self._at = max(0, bisect_right(self._sizes, starting_size) - 1)
        self._num_steps = 0
        self.size = self._sizes[self._at]

    @property
    def found(self) -> int:
        """The largest size that fitted; 0 while none did."""
        return self._sizes[self._fits] if self._fits >= 0 else 0

    @property
    def is_done(self) -> bool:
        """Is the next larger size known not to fit, or not allowed, or near enough?"""
        if self._fits + 1 >= self._fails:
            return True
        is_bounded = self._fits >= 0 and self._fails < len(self._sizes)
        return is_bounded and self._sizes[self._fails] <= self.found * (1 + self._tolerance)

    def report(self, fits: bool) -> None:
        """Close in from below or from above."""
        if fits:
            self._fits = self._at
        else:
            self._fails = self._at
        self._at = self._choose()
        self.size = 0 if self.is_done and self._fits < 0 else self._sizes[min(self._at, len(self._sizes) - 1)]

    def _choose(self) -> int:
        if self.is_done:
            return max(self._fits, 0)
        if self._fails == len(self._sizes):  # nothing has failed yet: go up
            step = min(self._step(self.found * self._tolerance), self.found)
            return min(max(bisect_right(self._sizes, self.found + step) - 1, self._fits + 1), self._fails - 1)
        if self._fits < 0:  # nothing has fitted yet: go down
            failed = self._sizes[self._fails]
            step = min(self._step(failed * self._tolerance / (1 + self._tolerance)), failed - failed // 2)
            return min(max(bisect_right(self._sizes, failed - step) - 1, 0), self._fails - 1)
        middle = bisect_left(self._sizes, (self.found + self._sizes[self._fails]) // 2)
        return min(max(middle, self._fits + 1), self._fails - 1)

    def _step(self, first: float) -> int:
        """The next step, where the first one was so long."""
        self._num_steps += 1
        return int(max(1, int(first)) * _GROWTH ** (self._num_steps - 1))


BatchSizeSearch = FirstThatFits | LargestSize


def divisors(number: int) -> list[int]:
    """All divisors of a number from 1 on, ascending."""
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*low, *(number // each for each in low)})


def _check_size(value: Any, name: str) -> int:
    """The value, which must be an integer from 1 on.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}; give the number of samples in a batch, an integer from 1 on")
    return value


def _check_tolerance(value: Any) -> float:
    """The value, which must be a share below 1.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(
            f"tolerance={value!r}; give how far below the largest size the answer may be, as a share of it, such as 0.05, or 0"
        )
    return float(value)


def _takes_the_size(reduce: Reduce) -> bool:
    try:
        parameters = inspect.signature(reduce).parameters.values()
    except ValueError:  # a callable of C without a signature
        return True
    return any(each.kind in _POSITIONAL and each.default is Parameter.empty for each in parameters)


@dataclass(frozen=True)
class _SearchSettings:
    """The settings of a search."""

    start: int
    reduce: Reduce | None
    is_largest: bool
    keeps_global_batch: bool
    limit: int
    tolerance: float

    @property
    def sizes(self) -> list[int] | None:
        """The only ones allowed; None: all."""
        return divisors(self.start) if self.keeps_global_batch else None

    def begin(self, size: int) -> BatchSizeSearch:
        """A search that tries `size` first."""
        if self.is_largest:
            limit = self.start if self.keeps_global_batch else max(self.limit, size)
            return LargestSize(size, limit, self.sizes, self.tolerance)
        return FirstThatFits(size, self.reduce, self.sizes)


@overload
def find_executable_batch_size(function: _Function) -> _Function: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Reduce | None = None,
    *,
    search: Literal["first", "largest"] = "first",
    keep_global_batch: bool = False,
    max_batch_size: int | None = None,
    tolerance: float = 0.0,
) -> Callable[[_Function], _Function]: ...
def find_executable_batch_size(
    function: _Function | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Reduce | None = None,
    *,
    search: Literal["first", "largest"] = "first",
    keep_global_batch: bool = False,
    max_batch_size: int | None = None,
    tolerance: float = 0.0,
) -> Any:
    """Call a function with a batch size that fits into memory, the same on all ranks.

    Decorate a function whose first parameter is the batch size (of a method: the first after `self`), and call it without
    that. Where it runs out of memory on any rank, the attempt ends on all of them, what it held is freed, RNG states
    are put back, and the function is called again, from its beginning, with a smaller size. A later call begins with the
    size that fitted last, which is the attribute `batch_size` of what the decorator returns.

    Args:
        function: what to call; None where the decorator is used with arguments.
        starting_batch_size: the first size tried.
        reduce_batch_size_fn: gives the next size after a failure: called with the size that failed, or with nothing where
            it takes nothing. None: half of it, rounded down. It may not be given with `search="largest"`.
        search: "first": go down, and take the first size that fits. "largest": go up while the size fits, or down until it does,
            in growing steps, then bisect; the function is called 2 or 3 times if the start is near (`accelerator.forecast`), else
            about 2 log2(n) times, so let it make only a few updates. Its last call is the one with the size found, and the result
            of that call is returned.
        keep_global_batch: only divisors of `starting_batch_size` are tried, and the function is also given
            `gradient_accumulation_steps=starting_batch_size // batch_size`, so that an update sees as many samples as with the
            starting size.
        max_batch_size: where "largest" stops growing; None: 65536, or `starting_batch_size` with `keep_global_batch`.
        tolerance: "largest" may end below the largest size that fits by this share of it, which saves calls; 0: it may not.

    Returns:
        The decorated function, or a decorator.

    Raises:
        CallError: (from the call) a batch size was passed, or other arguments that do not fit; a TypeError.
        BatchSizeError: (from the call) not even a batch size of 1 (or the last one allowed) fits.
        ConfigError: impossible settings, or a `reduce_batch_size_fn` that does not reduce.
        UnsupportedError: (from the call) memory ran out on several processes whose group Headway did not start.
    """
    plan = _SearchSettings(
        _check_size(starting_batch_size, "starting_batch_size"),
        reduce_batch_size_fn,
        _is_largest(search, reduce_batch_size_fn),
        keep_global_batch,
        _check_size(LARGEST if max_batch_size is None else max_batch_size, "max_batch_size"),
        _check_tolerance(tolerance),
    )
    if tolerance and not plan.is_largest:
        raise ConfigError(
            "tolerance is only for search='largest'; 'first' takes the first size that fits. Leave tolerance out"
        )
    if max_batch_size is not None and max_batch_size < starting_batch_size:
        raise ConfigError(
            f"max_batch_size={max_batch_size} is below starting_batch_size={starting_batch_size}; raise it, or start lower"
        )
    return functools.partial(_decorate, plan) if function is None else _decorate(plan, function)


def _is_largest(search: str, reduce: Reduce | None) -> bool:
    if search not in ("first", "largest"):
        raise ConfigError(f"search={search!r}; allowed: 'first' (that fits, downwards) and 'largest'")
    if search == "largest" and reduce is not None:
        raise ConfigError(
            "reduce_batch_size_fn has no meaning with search='largest', which chooses sizes itself; leave it out"
        )
    return search == "largest"


def _decorate(plan: _SearchSettings, function: _Function) -> _Function:
    if not callable(function):
        raise ConfigError(
            f"find_executable_batch_size got {function!r} to decorate; sizes go by name: starting_batch_size=..."
        )
    written = inspect.signature(function)
    if next(iter(written.parameters), "") in ("self", "cls"):
        function = _size_first(function)
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    _check_parameters(plan, function, parameters)
    next_start = plan.start

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal next_start
        extra = {STEPS: 1} if plan.keeps_global_batch else {}
        _check_call(_name(function), signature, written, args, {**kwargs, **extra})
        clear_device_cache(garbage_collection=True)
        outcome, next_start = _SearchCall(plan, function, args, kwargs).follow(plan.begin(next_start))
        run.batch_size = next_start  # type: ignore[attr-defined]
        return outcome.result

    run.batch_size = None  # type: ignore[attr-defined]
    shown = [each for each in parameters[1:] if not (plan.keeps_global_batch and each.name == STEPS)]
    takes_any = bool(parameters) and parameters[0].kind is Parameter.VAR_POSITIONAL
    run.__signature__ = signature if takes_any else signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return run


def _size_first(method: _Function) -> _Function:
    """A method as a function of the batch size and then its object, as all others take the size first."""

    @functools.wraps(method)
    def call(size: int, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return method(owner, size, *args, **kwargs)

    signature = inspect.signature(method)
    owner, *rest = signature.parameters.values()
    call.__signature__ = signature.replace(parameters=[*rest[:1], owner, *rest[1:]] if rest else [])  # type: ignore[attr-defined]
    return call


def _check_parameters(plan: _SearchSettings, function: _Function, parameters: list[Parameter]) -> None:
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise ConfigError(
            f"{_name(function)} has no first parameter for the batch size; write `def {_name(function)}(batch_size, ...)`"
        )
    if any(is_late(function) for is_late in _LATE):
        raise ConfigError(
            f"{_name(function)} is a generator or a coroutine: its body runs after the call has returned, where nobody can call it "
            "again with a smaller size; decorate a plain function that runs to its end"
        )
    takes_steps = any(each.name == STEPS or each.kind is Parameter.VAR_KEYWORD for each in parameters)
    if plan.keeps_global_batch and not takes_steps:
        raise ConfigError(
            f"with keep_global_batch=True {_name(function)} is given {STEPS}=...; add it, and hand it to the Accelerator"
        )


def _check_call(
    name: str, signature: inspect.Signature, written: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise where the caller's arguments do not fit beside a batch size.

    Args:
        name: the function's.
        signature: with the batch size first.
        written: as the function was written: of a method with its object first.
        args: without the batch size, as they should be.
        kwargs: the same.

    Raises:
        CallError: they do not.
    """
    try:
        signature.bind(0, *args, **kwargs)
        return
    except TypeError as error:
        try:
            written.bind(*args, **kwargs)
        except TypeError:
            raise CallError(f"{name}(batch_size, ...) cannot be called so: {error}") from None
    first = next(iter(signature.parameters))
    num_owners = int(first != next(iter(written.parameters)))
    rest = {key: value for key, value in kwargs.items() if key not in (first, STEPS)}
    left = [repr(each) for each in args[num_owners + (first not in kwargs) :]]
    call = ", ".join([*left, *(f"{key}={value!r}" for key, value in rest.items())])
    raise CallError(
        f"Batch size was passed into `{name}` as the first argument when called, but its parameter {first!r} is filled in by "
        f"find_executable_batch_size; call it without: {name}({call})"
    )


def _name(function: _Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


class _SearchCall:
    """One call of a decorated function: its attempts, and what they taught."""

    def __init__(
        self, plan: _SearchSettings, function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.plan = plan
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.tried: list[int] = []

    def follow(self, search: BatchSizeSearch) -> tuple[Outcome, int]:
        """The outcome that fits, and its size."""
        last: Outcome | None = None
        while not search.is_done:
            # Before the first attempt the script may not have joined the other processes yet.
            size = self._agree(search.size) if self.tried else search.size
            attempt, outcome = self._attempt(size)
            search.report(outcome.fits)
            if outcome.fits and (search.is_done and search.found == size):
                return outcome, size
            if outcome.fits:
                # Its models are no longer wanted, and would take the next attempt's memory.
                attempt.let_go()
                outcome = Outcome(True)
                clear_device_cache(garbage_collection=True)
            else:
                last = outcome
                ranks = f" on rank {', '.join(map(str, outcome.ranks))}" if outcome.ranks else ""
                log.info("batch size %d: out of memory%s; %s", size, ranks, _plans(search))
                notify("out_of_memory", ranks=list(outcome.ranks), batch_size=size)
        if not search.found:
            raise self._nothing_fits(last) from (None if last is None else last.error)
        # The last attempt was another size's. What fitted may not fit quite again: then downwards.
        return self.follow(FirstThatFits(search.found, _ever_less(search.found), self.plan.sizes))

    def _attempt(self, size: int) -> tuple[Attempt, Outcome]:
        self.tried.append(size)
        attempt = Attempt(size)
        kwargs = {**self.kwargs, STEPS: self.plan.start // size} if self.plan.keeps_global_batch else self.kwargs
        return attempt, attempt.run(self.function, self.args, kwargs)

    def _agree(self, size: int) -> int:
        return int(control.current().vote([size], "min")[0]) if is_several() and process.current() else size

    def _nothing_fits(self, last: Outcome | None) -> BatchSizeError:
        why = "" if last is None or last.error is None else f" The last error: {str(last.error)[:300]}"
        return BatchSizeError(
            f"No executable batch size found, reached zero. {_name(self.function)} ran out of memory with every size tried "
            f"({', '.join(map(str, self.tried))}). What it needs besides the batch (model, optimizer state) does not fit, or one "
            f"sample is too large.{why}"
        )


def _ever_less(found: int) -> Reduce:
    """What is tried below a size that fitted once and then did not: a little less, and then less and less."""
    step = max(1, found // 32)

    def reduce(size: int) -> int:
        nonlocal step
        step *= 2
        return max(0, size - step // 2)

    return reduce


def _plans(search: BatchSizeSearch) -> str:
    return "nothing smaller is left" if search.is_done and not search.found else f"next is {search.size}"
