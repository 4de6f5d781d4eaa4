"""`SharedDraws`: makes the random numbers of a training loop independent of the number of processes.

On n processes, each rank draws its own noise, dropout masks and timesteps. They differ from those of a run on one
process, so the two runs cannot be compared. If draws are shared, each draw with one row per sample is made for the
global batch, and each rank uses the rows of its own samples. Dropout is then turned off. Other draws are unchanged, but
recorded.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from headway.verify.calls import CallTrace
from headway.verify.random_calls import INTEGER, NORMAL, OTHERS, RANDOM_CALLS
from headway.verify.script_frames import find_line


class BatchPlace(NamedTuple):
    """Position of one rank's rows in the current global batch.

    Attributes:
        num_rows: Number of rows of this rank.
        total_rows: Number of rows of all ranks together.
        first_row: Index of the first row of this rank in the global batch.
        seed: Seed for random numbers of this batch, equal on all ranks.
    """

    num_rows: int
    total_rows: int
    first_row: int
    seed: int


_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_dropout",
    "feature_alpha_dropout",
)


class SharedDraws(TorchFunctionMode):
    """Torch function mode that records random draws, and optionally makes them equal for any number of processes.

    Args:
        shares: Whether to make draws for the global batch and to turn off dropout. If False, draws are only recorded.
        reverses: Whether to reverse the rows of a draw, for runs that reverse the rows of each batch.
        find_place: Function that returns the position of this rank's rows in the global batch, or None outside of a
            batch.
        trace: Recorder to which each torch call is passed.

    Attributes:
        num_dropout_calls: Number of calls with active dropout. Calls whose dropout this mode turned off are included.
        draw_lines: Names of the functions that drew random numbers, by the script line that called each of them. Draws
            outside of a batch, and draws from a generator that the script passed, are left out.
        unshared_lines: Entries of `draw_lines` whose draws could not be made for the global batch.
    """

    def __init__(
        self, shares: bool, reverses: bool, find_place: Callable[[], BatchPlace | None], trace: CallTrace
    ) -> None:
        super().__init__()
        self._trace = trace
        self._shares = shares
        self._reverses = reverses
        self._find_place = find_place
        # Number of shared draws in the batch that has this seed.
        self._num_draws = 0
        self._seed = -1
        self.num_dropout_calls = 0
        self.draw_lines: dict[str, str] = {}
        self.unshared_lines: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call a function and record the call.

        If draws are shared, random numbers are replaced by ones that do not depend on the number of processes, and
        dropout is off.
        """
        kwargs = kwargs or {}
        result = self._call_draw(func, args, kwargs)
        if not torch.compiler.is_compiling():
            self._trace.record_call(func, args, kwargs, result)
        return result

    def _call_draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a torch function. If it draws random numbers, let all ranks share the draw, unless draws are only recorded.

        Args:
            func: Function to call.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return self._call_dropout(func, args, kwargs)
        if name == "scaled_dot_product_attention":
            return self._call_attention(func, args, kwargs)
        if name not in RANDOM_CALLS:
            return func(*args, **kwargs)
        place = self._find_place()
        # Draws from a generator that the script passes are unchanged: other draws do not advance this generator.
        if place is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        line = find_line() or "a library"
        self.draw_lines.setdefault(line, name)
        if not self._shares:
            return func(*args, **kwargs)
        return self._draw_globally(name, func, args, kwargs, place, line)

    def _call_dropout(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a dropout function, with a rate of 0 if draws are shared."""
        rate = _read_argument(args, kwargs, "p", 1, default=0.5)
        is_active = kwargs.get("training", _read_argument(args, kwargs, "train", 2, default=True))
        if not (rate and is_active):
            return func(*args, **kwargs)
        self.num_dropout_calls += 1  # also without gradients, because a teacher's outputs are part of the loss
        if not self._shares:
            return func(*args, **kwargs)
        # Functions of torch itself, such as torch.alpha_dropout, have another name for it than those of torch.nn.functional.
        flag = "train" if func is getattr(torch, func.__name__, None) else "training"
        options = {flag: True, **{name: value for name, value in kwargs.items() if name == "inplace"}}
        return func(_read_argument(args, kwargs, "input", 0), p=0.0, **options)

    def _call_attention(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call `scaled_dot_product_attention`, with a dropout rate of 0 if draws are shared."""
        rate = _read_argument(args, kwargs, "dropout_p", 4, default=0.0)
        if rate:
            self.num_dropout_calls += 1
            if self._shares and len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif self._shares:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)

    def _draw_globally(
        self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: BatchPlace, line: str
    ) -> Any:
        """Draw random numbers for the global batch, and return the rows of this rank.

        After such a draw, torch's global CPU generator has the state that it had before the call. If the rows of the
        result cannot be assigned to samples, the function's own result is returned, and the call is recorded in
        `unshared_lines`.

        Args:
            name: Name of the function.
            func: Function that draws random numbers.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            place: Position of this rank's rows in the global batch.
            line: Line of code that calls the function.
        """
        state = torch.get_rng_state()
        result = func(*args, **kwargs)
        has_rows = isinstance(result, torch.Tensor) and result.ndim and result.shape[0]
        if not has_rows or result.shape[0] % place.num_rows or name in OTHERS:
            self.unshared_lines.setdefault(line, name)
            return result
        torch.set_rng_state(state)
        if place.seed != self._seed:
            self._seed, self._num_draws = place.seed, 0
        self._num_draws += 1
        # Each draw of a batch has its own seed. The factors are arbitrary primes that keep the seeds apart.
        generator = torch.Generator().manual_seed((place.seed * 1_000_003 + self._num_draws * 7919) % (1 << 62))
        # A sample can have several rows in the result, such as one for each token.
        rows_per_sample = result.shape[0] // place.num_rows
        global_values = torch.empty((place.total_rows * rows_per_sample, *result.shape[1:]), dtype=torch.float32)
        with torch.no_grad():
            _fill_shared(name, global_values, args, kwargs, generator)
            start = place.first_row * rows_per_sample
            rows = global_values[start : start + place.num_rows * rows_per_sample]
            if self._reverses:
                rows = rows.view(place.num_rows, rows_per_sample, *rows.shape[1:]).flip(0).reshape(rows.shape)
            if name.startswith("bernoulli"):
                rows = (rows.to(result.device) < _read_bernoulli_rate(name, args, kwargs)).to(result.dtype)
            result.copy_(rows)
        return result


def _read_argument(args: Sequence[Any], kwargs: dict[str, Any], name: str, index: int, default: Any = None) -> Any:
    """Return an argument of a call that can be passed by name or by position.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        name: Name of the argument.
        index: Position of the argument.
        default: Value if the call does not pass the argument. Default: None.
    """
    return kwargs.get(name, args[index] if len(args) > index else default)


def _read_bernoulli_rate(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the probability of drawing 1, as a number or a tensor, that a Bernoulli draw requests.

    Args:
        name: "bernoulli", whose input contains the probabilities unless `p` is passed, or "bernoulli_".
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    rate = _read_argument(args, kwargs, "p", 1)
    if rate is not None:
        return rate
    return _read_argument(args, kwargs, "input", 0) if name == "bernoulli" else 0.5


def _fill_shared(
    name: str, values: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any], generator: torch.Generator
) -> None:
    """Fill a tensor for the global batch with random numbers from the distribution that the call requested.

    For Bernoulli draws, fill it with uniform numbers between 0 and 1.

    Args:
        name: Name of the function that draws random numbers.
        values: Tensor to fill.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        generator: Generator to draw from.
    """
    if name in NORMAL:
        mean, deviation = 0.0, 1.0
        if name == "normal_":
            mean = _read_argument(args, kwargs, "mean", 1, default=0.0)
            deviation = _read_argument(args, kwargs, "std", 2, default=1.0)
        values.normal_(mean, deviation, generator=generator)
    elif name in INTEGER:
        low, high = _read_range(name, args, kwargs)
        values.random_(low, high, generator=generator)
    else:
        least, most = 0.0, 1.0
        if name == "uniform_":
            least = _read_argument(args, kwargs, "from", 1, default=0.0)
            most = _read_argument(args, kwargs, "to", 2, default=1.0)
        values.uniform_(least, most, generator=generator)


def _read_range(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the lowest integer and the exclusive upper bound that a call requests. Defaults: 0 and 2**24.

    Args:
        name: "randint", "randint_like" or "random_". The first argument of the last two is a tensor.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    numbers = [each for each in (args if name == "randint" else args[1:]) if isinstance(each, int)]
    low = kwargs.get("low", kwargs.get("from", numbers[0] if len(numbers) > 1 else 0))
    high = kwargs.get("high", kwargs.get("to", numbers[-1] if numbers else 2**24))
    return int(low), int(high)
