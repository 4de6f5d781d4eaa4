"""Batch-size search: call a function with different batch sizes until one fits into memory on every rank.

`find_executable_batch_size` is the decorator. Three searches choose the next size: `FirstThatFits` goes down from the
starting size, `LargestSize` finds the largest size that fits, and `PredictedSize` predicts the largest size from short
probes. All assume that memory grows with the batch size. The caller tries `size` and passes the result to `report`::

    search = LargestSize(starting_size=128)
    while not search.is_done:
        search.report(fits=try_it(search.size))
    search.best_size            # 0 if nothing fits
"""

import functools
import inspect
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Literal, cast, overload

from headway.core.memory.attempt import Attempt, Outcome, has_peers
from headway.core.memory.oom import clear_device_cache
from headway.core.memory.predicted_size import PredictedSize
from headway.core.memory.probe import BatchProbe
from headway.core.runtime import process
from headway.core.runtime.control_plane import control
from headway.core.runtime.events import notify_listeners
from headway.errors import BatchSizeError, CallError, ConfigError
from headway.log import get_logger

log = get_logger(__name__)

STEPS = "gradient_accumulation_steps"
"""Name of the parameter through which the function gets the number of accumulation steps with
`keep_global_batch=True`.
"""

_IS_DEFERRED = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
"""Tests for kinds of functions whose body does not run during the call."""

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)
"""Kinds of parameters that a positional argument can fill."""

_Function = Callable[..., Any]
Reduce = Callable[..., int]
"""Function that returns the next size after a failure. Called with the size that failed, or without arguments if it
takes none.
"""

LARGEST = 65536
"""Default upper limit of the search for the largest size."""

_GROWTH = 8
"""Factor by which the steps of the search grow.

If the start is far from the result, growth by 8 takes two or three more attempts than doubling from the beginning. If
the start is close, it saves the attempts that bisection would need.
"""


class FirstThatFits:
    """Search downward from a starting size until one fits.

    Args:
        starting_size: First size to try.
        reduce: Function that returns the next size. Default: half, rounded down.
        sizes: Allowed sizes in ascending order. A size between two allowed sizes is rounded down. Default: all sizes.

    Attributes:
        size: Next size to try; 0 if no smaller size is left.
        best_size: Size that fitted; 0 until one has.

    Raises:
        ConfigError: From `report`, if `reduce` does not return a smaller integer.
    """

    def __init__(self, starting_size: int, reduce: Reduce | None = None, sizes: Sequence[int] | None = None) -> None:
        self.size = starting_size
        self.best_size = 0
        self._reduce = reduce
        self._sizes = sizes

    def move_to(self, size: int) -> None:
        """Try `size` next, because all ranks have agreed on it."""
        self.size = size

    def report(self, fits: bool) -> None:
        """Record whether the current size fits. If not, move to the next smaller one."""
        if fits:
            self.best_size = self.size
        else:
            self.size = self._round_to_allowed(self._reduce_size())

    @property
    def is_done(self) -> bool:
        """Whether a size has fitted, or no size is left to try."""
        return self.size in (0, self.best_size)

    def _reduce_size(self) -> int:
        """Return the size that follows the current one, before it is rounded to an allowed size.

        Raises:
            ConfigError: If the function `reduce` does not return a smaller integer.
        """
        if self._reduce is None:
            return self.size // 2
        reduced: Any = self._reduce(self.size) if _accepts_size(self._reduce) else self._reduce()
        if isinstance(reduced, bool) or not isinstance(reduced, int) or not reduced < self.size:
            raise ConfigError(
                f"reduce_batch_size_fn returned {reduced!r} after a batch size of {self.size} ran out of memory; it must return an "
                "integer below that, or 0 to give up"
            )
        return max(0, reduced)

    def _round_to_allowed(self, size: int) -> int:
        """Return the largest allowed size up to `size`, or 0 if there is none."""
        if self._sizes is None:
            return size
        index = bisect_right(self._sizes, size)
        return self._sizes[index - 1] if index else 0


class LargestSize:
    """Search for the largest size that fits.

    Each step away from the starting size is eight times the previous step, but at most doubles or halves the size. Once
    one size has fitted and a larger one has not, the search bisects. If the starting size is close to the result, for
    example because it comes from a memory forecast, the search takes 2 or 3 attempts. Otherwise it takes at most about
    2 log2(n) attempts for a result n.

    Args:
        starting_size: First size to try.
        limit: Largest size to try, at least `starting_size`.
        sizes: Allowed sizes in ascending order. The first size tried is the largest allowed one up to `starting_size`.
            Default: all sizes.
        tolerance: Fraction by which the result may be below the largest size that fits. 0: the result is exactly the
            largest size that fits.

    Attributes:
        size: Next size to try; 0 if no smaller size is left.
    """

    def __init__(
        self, starting_size: int, limit: int = LARGEST, sizes: Sequence[int] | None = None, tolerance: float = 0.0
    ) -> None:
        self._tolerance = tolerance
        allowed: Sequence[int] = range(1, limit + 1) if sizes is None else sizes
        self._sizes = allowed[: bisect_right(allowed, limit)]
        # Indices into `_sizes`: the largest size that fitted, the smallest that did not, and the next one to try.
        self._best_index = -1
        self._failed_index = len(self._sizes)
        self._index = max(0, bisect_right(self._sizes, starting_size) - 1)
        self._num_steps = 0  # steps away from the starting size so far
        self.size = self._sizes[self._index]

    @property
    def best_size(self) -> int:
        """Largest size that has fitted so far, or 0 if none has."""
        return self._sizes[self._best_index] if self._best_index >= 0 else 0

    @property
    def is_done(self) -> bool:
        """Whether the search has ended.

        The next larger size then does not fit, is not allowed, or is within the tolerance.
        """
        if self._best_index + 1 >= self._failed_index:
            return True
        is_bounded = self._best_index >= 0 and self._failed_index < len(self._sizes)
        return is_bounded and self._sizes[self._failed_index] <= self.best_size * (1 + self._tolerance)

    def move_to(self, size: int) -> None:
        """Try the largest allowed size up to `size` next, because all ranks have agreed on it."""
        self._index = max(0, bisect_right(self._sizes, size) - 1)
        self.size = self._sizes[self._index]

    def report(self, fits: bool) -> None:
        """Record whether the current size fits, and choose the next one."""
        if fits:
            self._best_index = self._index
        else:
            self._failed_index = self._index
        self._index = self._choose_index()
        self.size = 0 if self.is_done and self._best_index < 0 else self._sizes[self._index]

    def _choose_index(self) -> int:
        """Return the index of the next size to try, which is between the best and the failed size."""
        if self.is_done:
            return max(self._best_index, 0)
        if self._failed_index == len(self._sizes):  # nothing has failed yet: go up, at most to twice the size
            step = min(self._compute_next_step(self.best_size * self._tolerance), self.best_size)
            index = bisect_right(self._sizes, self.best_size + step) - 1
        elif self._best_index < 0:  # nothing has fitted yet: go down, at most to half the size
            failed = self._sizes[self._failed_index]
            first_step = failed * self._tolerance / (1 + self._tolerance)
            index = (
                bisect_right(self._sizes, failed - min(self._compute_next_step(first_step), failed - failed // 2)) - 1
            )
        else:  # bisect
            index = bisect_left(self._sizes, (self.best_size + self._sizes[self._failed_index]) // 2)
        return min(max(index, self._best_index + 1), self._failed_index - 1)

    def _compute_next_step(self, first_step: float) -> int:
        """Return the change in batch size for the next attempt, and count the step.

        Args:
            first_step: Size of the first step away from the starting size. Each later step is eight times the one
                before.
        """
        self._num_steps += 1
        return int(max(1, int(first_step)) * _GROWTH ** (self._num_steps - 1))


BatchSizeSearch = FirstThatFits | LargestSize | PredictedSize
SearchName = Literal["first", "largest", "predicted"]

_MAX_SIZE_WITHOUT_PREDICTION = 4
"""Upper limit of a search at or below which sizes are tried one by one, instead of predicted from two small sizes."""


def list_divisors(number: int) -> list[int]:
    """Return all divisors of a positive integer in ascending order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _check_size(value: Any, name: str) -> int:
    """Return `value` if it is an integer of at least 1, else raise an error.

    Args:
        value: Value to check.
        name: Name of the argument, for the message.

    Raises:
        ConfigError: If the value is not such an integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}; give the number of samples in a batch, an integer of at least 1")
    return value


def _check_tolerance(value: Any) -> float:
    """Return `value` as a float if it is a fraction in [0, 1), else raise an error.

    Raises:
        ConfigError: If the value is not such a fraction.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(
            f"tolerance={value!r}; give how far below the largest size the answer may be, as a share of it, such as 0.05, or 0"
        )
    return float(value)


def _accepts_size(reduce: Reduce) -> bool:
    """Whether a function must be called with the size that failed, because it has a positional parameter for it."""
    try:
        parameters = inspect.signature(reduce).parameters.values()
    except ValueError:  # a callable of C without a signature
        return True
    return any(each.kind in _POSITIONAL and each.default is Parameter.empty for each in parameters)


@dataclass(frozen=True)
class _SearchSettings:
    """Arguments of `find_executable_batch_size`.

    Attributes:
        start: First size to try: `starting_batch_size`.
        reduce: Function that returns the next size after a failure, or None for half: `reduce_batch_size_fn`.
        search: Name of the search.
        keeps_global_batch: Whether an update must see as many samples as with the starting size.
        limit: Largest size to try, or None: `max_batch_size`.
        tolerance: Fraction by which the result may be below the largest size that fits.
    """

    start: int
    reduce: Reduce | None
    search: SearchName
    keeps_global_batch: bool
    limit: int | None
    tolerance: float

    @property
    def sizes(self) -> list[int] | None:
        """Allowed sizes in ascending order, or None if all are allowed."""
        return list_divisors(self.start) if self.keeps_global_batch else None

    def start_search(self, size: int, is_known: bool = False) -> BatchSizeSearch:
        """Return a new search of the kind that the field `search` selects.

        Args:
            size: First batch size to try. For "predicted", the largest batch size to consider, unless `limit` is set.
            is_known: Whether an earlier call has found that this size fits. "predicted" then tries it without probes.
        """
        if self.search == "predicted":
            if is_known:
                return FirstThatFits(size, _make_smaller_sizes(size), self.sizes)
            limit = size if self.keeps_global_batch or self.limit is None else self.limit
            if limit <= _MAX_SIZE_WITHOUT_PREDICTION:
                return FirstThatFits(limit, lambda failed: failed - 1, self.sizes)
            return PredictedSize(limit, self.sizes, self.tolerance)
        if self.search == "largest":
            limit = self.start if self.keeps_global_batch else max(self.limit or LARGEST, size)
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
    search: SearchName = "first",
    keep_global_batch: bool = False,
    max_batch_size: int | None = None,
    tolerance: float = 0.0,
) -> Callable[[_Function], _Function]: ...
def find_executable_batch_size(
    function: _Function | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Reduce | None = None,
    *,
    search: SearchName = "first",
    keep_global_batch: bool = False,
    max_batch_size: int | None = None,
    tolerance: float = 0.0,
) -> Any:
    """Decorate a function so that it is called with a batch size that fits into memory on all ranks.

    The function's first parameter is the batch size (for a method, the first after `self`). Call the decorated
    function without it. If memory runs out on any rank, the call ends on all ranks, its memory is freed, and RNG states
    and update counters are restored. Then the function is called again with a smaller size. A later call of the
    decorated function starts with the size that fitted last. This size is stored in the decorated function's attribute
    `batch_size`, which is None before the first call.

    Args:
        function: Function to decorate; None if the decorator is used with arguments.
        starting_batch_size: First size to try. Default: 128.
        reduce_batch_size_fn: Function that returns the next size after a failure. Called with the size that failed, or
            without arguments if it takes none. Default: half, rounded down. Only for `search="first"`.
        search: "first" goes down and takes the first size that fits. "largest" goes up while sizes fit, or down until
            one does, in growing steps, and then bisects. It calls the function 2 or 3 times if the starting size is
            close to the result n, for example if it comes from `accelerator.forecast`. Otherwise it calls it about
            2 log2(n) times, so the function should make only a few updates. The last call uses the size that was found,
            and its result is returned. "predicted" first calls the function with two small sizes, and ends each call
            after two updates, by an error raised in the optimizer's step. From the memory used it predicts the largest
            size up to `starting_batch_size`, and tries that size in the same way. Then it calls the function once more
            to run to its end. Create the Accelerator inside the function.
        keep_global_batch: Whether an update must see as many samples as with the starting size. Only divisors of
            `starting_batch_size` are then tried, and the function also receives
            `gradient_accumulation_steps=starting_batch_size // batch_size`.
        max_batch_size: Largest size that "largest" and "predicted" try. Default: 65536 for "largest",
            `starting_batch_size` for "predicted" or with `keep_global_batch`.
        tolerance: Fraction by which the result of "largest" or "predicted" may be below the largest size that fits,
            which saves calls. "predicted" allows at least 1/32.

    Returns:
        The decorated function, or a decorator if `function` is None.

    Raises:
        CallError: From the call, if a batch size was passed or other arguments do not fit. CallError is a TypeError.
        BatchSizeError: From the call, if not even the smallest allowed size fits.
        ConfigError: If settings contradict each other, or `reduce_batch_size_fn` does not return a smaller size.
        UnsupportedError: From the call, if memory runs out in a run on several processes whose process group was not
            created by Headway.
        StateError: From the call, if ranks try different sizes, or make different numbers of updates.
    """
    settings = _SearchSettings(
        _check_size(starting_batch_size, "starting_batch_size"),
        reduce_batch_size_fn,
        _check_search(search, reduce_batch_size_fn),
        keep_global_batch,
        None if max_batch_size is None else _check_size(max_batch_size, "max_batch_size"),
        _check_tolerance(tolerance),
    )
    if tolerance and settings.search == "first":
        raise ConfigError(
            "tolerance is only for search='largest' and 'predicted'; 'first' takes the first size that fits. Leave tolerance out"
        )
    if max_batch_size is not None and max_batch_size < starting_batch_size:
        raise ConfigError(
            f"max_batch_size={max_batch_size} is below starting_batch_size={starting_batch_size}; raise it, or start lower"
        )
    if max_batch_size is not None and settings.search == "first":
        raise ConfigError(
            "max_batch_size is only for search='largest' and 'predicted'; 'first' never goes above starting_batch_size. Leave "
            "max_batch_size out"
        )
    return functools.partial(_decorate, settings) if function is None else _decorate(settings, function)


def _check_search(search: str, reduce: Reduce | None) -> SearchName:
    """Return `search` if it is the name of a search and can be combined with `reduce`.

    Raises:
        ConfigError: If the name is unknown, or `reduce` is given for a search other than "first".
    """
    if search not in ("first", "largest", "predicted"):
        raise ConfigError(
            f"search={search!r}; allowed: 'first' (the first that fits, in descending order), 'largest' and 'predicted' (the "
            "largest, by short probes)"
        )
    if search != "first" and reduce is not None:
        raise ConfigError(
            f"reduce_batch_size_fn has no meaning with search={search!r}, which chooses sizes itself; leave it out"
        )
    return cast("SearchName", search)


def _decorate(settings: _SearchSettings, function: _Function) -> _Function:
    """Return the function that searches for a batch size and calls `function` with it.

    Raises:
        ConfigError: If `function` is not callable, or its parameters do not fit the settings.
    """
    if not callable(function):
        raise ConfigError(
            f"find_executable_batch_size got {function!r} to decorate. Pass sizes by keyword, such as starting_batch_size=64"
        )
    source_signature = inspect.signature(function)
    if next(iter(source_signature.parameters), "") in ("self", "cls"):
        function = _put_size_first(function)
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    _check_parameters(settings, function, parameters)
    next_start = settings.start

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal next_start
        if settings.keeps_global_batch and STEPS in kwargs:
            raise CallError(
                f"{_get_function_name(function)} was called with {STEPS}={kwargs[STEPS]!r}, but with keep_global_batch=True "
                "find_executable_batch_size passes it; leave it out"
            )
        # The number of steps differs between attempts; here only the presence of the argument counts.
        extra = {STEPS: 1} if settings.keeps_global_batch else {}
        _check_call(_get_function_name(function), signature, source_signature, args, {**kwargs, **extra})
        clear_device_cache(garbage_collection=True)
        search = settings.start_search(next_start, is_known=run.batch_size is not None)  # type: ignore[attr-defined]
        outcome, next_start = _SearchCall(settings, function, args, kwargs).run_search(search)
        run.batch_size = next_start  # type: ignore[attr-defined]
        return outcome.result

    run.batch_size = None  # type: ignore[attr-defined]
    # The signature shows only the parameters that the caller passes. `*args` can contain the batch size and more.
    if parameters[0].kind is Parameter.VAR_POSITIONAL:
        run.__signature__ = signature  # type: ignore[attr-defined]
    else:
        callers = [each for each in parameters[1:] if not (settings.keeps_global_batch and each.name == STEPS)]
        run.__signature__ = signature.replace(parameters=callers)  # type: ignore[attr-defined]
    return run


def _put_size_first(method: _Function) -> _Function:
    """Wrap a method so that its first parameter is the batch size and its second one is `self`."""

    @functools.wraps(method)
    def call_method(size: int, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return method(owner, size, *args, **kwargs)

    signature = inspect.signature(method)
    owner, *rest = signature.parameters.values()
    call_method.__signature__ = signature.replace(parameters=[*rest[:1], owner, *rest[1:]] if rest else [])  # type: ignore[attr-defined]
    return call_method


def _check_parameters(settings: _SearchSettings, function: _Function, parameters: list[Parameter]) -> None:
    """Check that a function can be called with a batch size, and with a number of steps if the settings require it.

    Args:
        settings: Arguments of the decorator.
        function: Function to decorate. For a method, `_put_size_first` has wrapped it.
        parameters: Parameters of the function.

    Raises:
        ConfigError: If a parameter is missing, or the function is a generator or a coroutine.
    """
    name = _get_function_name(function)
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise ConfigError(f"{name} has no first parameter for the batch size; write `def {name}(batch_size, ...)`")
    if any(is_deferred(function) for is_deferred in _IS_DEFERRED):
        raise ConfigError(
            f"{name} is a generator or a coroutine, whose body runs only after the call has returned. If it runs out of "
            "memory, it cannot be called again with a smaller size. Decorate a plain function"
        )
    takes_steps = any(each.name == STEPS or each.kind is Parameter.VAR_KEYWORD for each in parameters)
    if settings.keeps_global_batch and not takes_steps:
        raise ConfigError(
            f"with keep_global_batch=True {_get_function_name(function)} is given {STEPS}=...; add it, and hand it to the Accelerator"
        )


def _check_call(
    name: str,
    signature: inspect.Signature,
    source_signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise an error if the caller's arguments, together with a batch size, do not fit the signature of the function.

    Args:
        name: Name of the function.
        signature: Signature with the batch size as first parameter.
        source_signature: Signature in the source. For a method, its first parameter is `self`.
        args: Positional arguments of the call, without the batch size.
        kwargs: Keyword arguments of the call.

    Raises:
        CallError: If the arguments do not fit. If they would fit without the batch size that the decorator adds, the
            message shows the correct call.
    """
    try:
        signature.bind(0, *args, **kwargs)
        return
    except TypeError as error:
        try:
            source_signature.bind(*args, **kwargs)
        except TypeError:
            raise CallError(f"{name}(batch_size, ...) cannot be called with these arguments: {error}") from None
    size_name = next(iter(signature.parameters))
    num_owners = int(size_name != next(iter(source_signature.parameters)))  # 1 for a method, whose `self` is in `args`
    num_sizes = int(size_name not in kwargs)  # 1 if the batch size is in `args`
    other_args = [repr(each) for each in args[num_owners + num_sizes :]]
    other_kwargs = [f"{key}={value!r}" for key, value in kwargs.items() if key not in (size_name, STEPS)]
    raise CallError(
        f"Batch size was passed into `{name}` as the first argument when called, but its parameter {size_name!r} is filled in by "
        f"find_executable_batch_size; call it without: {name}({', '.join([*other_args, *other_kwargs])})"
    )


def _get_function_name(function: _Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


class _SearchCall:
    """One call of a function decorated with `find_executable_batch_size`. The call tries several batch sizes.

    Args:
        settings: Arguments of the decorator.
        function: Decorated function, whose first parameter is the batch size.
        args: Positional arguments of the call, without the batch size.
        kwargs: Keyword arguments of the call.

    Attributes:
        tried: Sizes that have been tried, in order.
    """

    def __init__(
        self, settings: _SearchSettings, function: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.settings = settings
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.tried: list[int] = []
        self._probe = BatchProbe()

    def run_search(self, search: BatchSizeSearch) -> tuple[Outcome, int]:
        """Try batch sizes until `search` is done, and return the outcome and the size of the final, complete call.

        Raises:
            BatchSizeError: If no size fits.
        """
        last_failure: Outcome | None = None
        while not search.is_done:
            size = search.size
            if self.tried:  # before the first attempt the script may not have joined the other processes yet
                size = self._agree_on_smallest(search.size)
                if size != search.size:
                    search.move_to(size)
            is_probe = isinstance(search, PredictedSize)
            attempt, outcome = self._try_size(size, is_probe)
            if isinstance(search, PredictedSize):
                search.report(outcome.fits, self._predict_size() if outcome.fits else None)
            else:
                search.report(outcome.fits)
            if outcome.fits and search.is_done and search.best_size == size and not is_probe:
                return outcome, size
            if outcome.fits:
                # Its models are no longer wanted, and would take the next attempt's memory.
                attempt.release_objects()
                outcome = Outcome(True)
                clear_device_cache(garbage_collection=True)
                attempt.restore_progress()
            else:
                last_failure = outcome
                ranks = f" on rank {', '.join(map(str, outcome.ranks))}" if outcome.ranks else ""
                log.info("batch size %d: out of memory%s; %s", size, ranks, _describe_next(search))
                notify_listeners("out_of_memory", ranks=list(outcome.ranks), batch_size=size)
        if not search.best_size:
            raise self._make_no_fit_error(last_failure) from (None if last_failure is None else last_failure.error)
        # The last attempt had another size or was a probe. The size may not fit again, so search downward from it.
        return self.run_search(
            FirstThatFits(search.best_size, _make_smaller_sizes(search.best_size), self.settings.sizes)
        )

    def _try_size(self, size: int, is_probe: bool) -> tuple[Attempt, Outcome]:
        """Call the function with a batch size, and return the attempt and its outcome.

        Args:
            size: Batch size.
            is_probe: Whether to stop the function after two updates, and measure its memory.
        """
        self.tried.append(size)
        attempt = Attempt(size)
        kwargs = self.kwargs
        if self.settings.keeps_global_batch:
            kwargs = {**kwargs, STEPS: self.settings.start // size}
        function = self._probe.wrap(self.function) if is_probe else self.function
        return attempt, attempt.run(function, self.args, kwargs)

    def _predict_size(self) -> int | None:
        """Return the largest size that is predicted to fit on all ranks, or None if a rank's memory is not measured."""
        own = self._probe.predict_largest()
        smallest = self._agree_on_smallest(-1 if own is None else own)
        return None if smallest < 0 else smallest

    def _agree_on_smallest(self, size: int) -> int:
        """Return the smallest of all ranks' sizes, found by a vote. In a single-process run, return `size`."""
        if not has_peers():
            return size
        process.current()  # starts the runtime if the script has not done so yet: the vote needs the other processes
        return int(control.current().vote([size], "min")[0])

    def _make_no_fit_error(self, last_failure: Outcome | None) -> BatchSizeError:
        """Return the error for a search in which no size has fitted.

        Args:
            last_failure: Outcome of the last attempt, or None if there was none.
        """
        why = ""
        if last_failure is not None and last_failure.error is not None:
            why = f" The last error: {str(last_failure.error)[:300]}"
        name = _get_function_name(self.function)
        return BatchSizeError(
            f"No executable batch size found, reached zero. {name} ran out of memory with every size tried "
            f"({', '.join(map(str, self.tried))}). What it needs besides the batch (model, optimizer state) does not fit, or one "
            f"sample is too large.{why}"
        )


def _make_smaller_sizes(fitting_size: int) -> Reduce:
    """Return a function that reduces a size that fitted once and then failed.

    The first reduction is small, and each further one is twice the previous one.

    Args:
        fitting_size: Size that fitted once.
    """
    step = max(1, fitting_size // 32)

    def reduce_size(size: int) -> int:
        nonlocal step
        reduced = max(0, size - step)
        step *= 2
        return reduced

    return reduce_size


def _describe_next(search: BatchSizeSearch) -> str:
    return "nothing smaller is left" if search.is_done and not search.best_size else f"next is {search.size}"
