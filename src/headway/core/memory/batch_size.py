"""Batch-size search: call a function with different batch sizes until one fits into memory on every rank.

`find_executable_batch_size` is the decorator. A call of the decorated function runs as follows::

    `_SearchCall.run_search`       asks a search (`size_search.py`) for the next size until it is done
        `SizeAttempt.run`          calls the function with this size, and frees the memory if it fails on any rank
        `search.report`            gets the outcome
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Literal, cast, overload

from headway.core.memory.oom import clear_device_cache
from headway.core.memory.predicted_size import PredictedSize
from headway.core.memory.probe import BatchProbe
from headway.core.memory.size_attempt import Outcome, SizeAttempt, has_peers
from headway.core.memory.size_parameter import STEPS, check_call, check_parameters, get_function_name, put_size_first
from headway.core.memory.size_search import (
    LARGEST,
    FirstThatFits,
    LargestSize,
    Reduce,
    list_divisors,
    make_smaller_sizes,
)
from headway.core.runtime import process
from headway.core.runtime.control_plane import control
from headway.core.runtime.events import notify_listeners
from headway.errors import BatchSizeError, CallError, ConfigError
from headway.log import get_logger

log = get_logger(__name__)

BatchSizeSearch = FirstThatFits | LargestSize | PredictedSize
SearchName = Literal["first", "largest", "predicted"]

_MAX_SIZE_WITHOUT_PREDICTION = 4
"""Upper limit of a search at or below which sizes are tried one by one, instead of predicted from two small sizes."""


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
                return FirstThatFits(size, make_smaller_sizes(size), self.sizes)
            limit = size if self.keeps_global_batch or self.limit is None else self.limit
            if limit <= _MAX_SIZE_WITHOUT_PREDICTION:
                return FirstThatFits(limit, lambda failed: failed - 1, self.sizes)
            return PredictedSize(limit, self.sizes, self.tolerance)
        if self.search == "largest":
            limit = self.start if self.keeps_global_batch else max(self.limit or LARGEST, size)
            return LargestSize(size, limit, self.sizes, self.tolerance)
        return FirstThatFits(size, self.reduce, self.sizes)


@overload
def find_executable_batch_size(function: Callable[..., Any]) -> Callable[..., Any]: ...
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
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
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

    Every rank must call the decorated function. Build the model, optimizer and loader inside it, because a call that
    failed leaves them half trained. Any other error passes through.

    Args:
        function: Function to decorate; None (the default) if the decorator is used with arguments.
        starting_batch_size: First size to try, at least 1. Default: 128.
        reduce_batch_size_fn: Function that returns the next size after a failure. Called with the size that failed, or
            without arguments if it takes none. Default: half, rounded down. Only for `search="first"`.
        search: Order in which sizes are tried. The result of the last call is returned.

            - "first" (the default): go down and take the first size that fits.
            - "largest": go up while sizes fit, or down until one does, in growing steps, and then bisect. It calls the
              function 2 or 3 times if the starting size is close to the result n, for example if it comes from
              `accelerator.forecast`. Otherwise it calls it about 2 log2(n) times, so the function should make only a few
              updates.
            - "predicted": first call the function with two small sizes, and end each call after two updates, by an error
              raised in the optimizer's step. From the memory used, predict the largest size up to `starting_batch_size`,
              and try it in the same way. Then call the function once more to run to its end. Create the Accelerator
              inside the function.
        keep_global_batch: Whether an update must see as many samples as with the starting size. Only divisors of
            `starting_batch_size` are then tried, and the function also receives
            `gradient_accumulation_steps=starting_batch_size // batch_size`. Default: False.
        max_batch_size: Largest size that "largest" and "predicted" try. Default: 65536 for "largest",
            `starting_batch_size` for "predicted" or with `keep_global_batch`.
        tolerance: Fraction by which the result of "largest" or "predicted" may be below the largest size that fits,
            which saves calls. "predicted" allows at least 1/32. Default: 0.

    Returns:
        The decorated function, or a decorator if `function` is None. It returns what `function` returns.

    Raises:
        CallError: From the call, if a batch size was passed or other arguments do not fit. CallError is a TypeError.
        BatchSizeError: From the call, if not even the smallest allowed size fits.
        ConfigError: If settings contradict each other, or `reduce_batch_size_fn` does not return a smaller size.
        UnsupportedError: From the call, if memory runs out in a run on several processes whose process group was not
            created by Headway.
        StateError: From the call, if ranks try different sizes, or make different numbers of updates.

    Example::

        @find_executable_batch_size(starting_batch_size=64)
        def train(batch_size, num_epochs):
            loader = DataLoader(dataset, batch_size=batch_size)
            ...  # build the model and train it

        train(num_epochs=3)
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


def _decorate(settings: _SearchSettings, function: Callable[..., Any]) -> Callable[..., Any]:
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
        function = put_size_first(function)
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    check_parameters(function, parameters, needs_steps=settings.keeps_global_batch)
    next_start = settings.start

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal next_start
        if settings.keeps_global_batch and STEPS in kwargs:
            raise CallError(
                f"{get_function_name(function)} was called with {STEPS}={kwargs[STEPS]!r}, but with keep_global_batch=True "
                "find_executable_batch_size passes it; leave it out"
            )
        # The number of steps differs between attempts; here only the presence of the argument counts.
        extra = {STEPS: 1} if settings.keeps_global_batch else {}
        check_call(get_function_name(function), signature, source_signature, args, {**kwargs, **extra})
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
        self, settings: _SearchSettings, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
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
            if not outcome.fits:
                last_failure = outcome
                ranks = f" on rank {', '.join(map(str, outcome.ranks))}" if outcome.ranks else ""
                log.info("batch size %d: out of memory%s; %s", size, ranks, _describe_next(search))
                notify_listeners("out_of_memory", ranks=list(outcome.ranks), batch_size=size)
                continue
            is_final_size = search.is_done and search.best_size == size
            if is_final_size and not is_probe:
                return outcome, size
            # The attempt's models are no longer wanted, and would take the next attempt's memory. So is its result.
            attempt.release_objects()
            outcome = Outcome(True)
            clear_device_cache(garbage_collection=True)
            attempt.restore_progress()
        if not search.best_size:
            raise self._make_no_fit_error(last_failure) from (None if last_failure is None else last_failure.error)
        # The last attempt had another size or was a probe. The size may not fit again, so search downward from it.
        return self.run_search(
            FirstThatFits(search.best_size, make_smaller_sizes(search.best_size), self.settings.sizes)
        )

    def _try_size(self, size: int, is_probe: bool) -> tuple[SizeAttempt, Outcome]:
        """Call the function with a batch size, and return the attempt and its outcome.

        Args:
            size: Batch size.
            is_probe: Whether to stop the function after two updates, and measure its memory.
        """
        self.tried.append(size)
        attempt = SizeAttempt(size)
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
        name = get_function_name(self.function)
        return BatchSizeError(
            f"No executable batch size found, reached zero. {name} ran out of memory with every size tried "
            f"({', '.join(map(str, self.tried))}). What it needs besides the batch (model, optimizer state) does not fit, or one "
            f"sample is too large.{why}"
        )


def _describe_next(search: BatchSizeSearch) -> str:
    return "nothing smaller is left" if search.is_done and not search.best_size else f"next is {search.size}"
