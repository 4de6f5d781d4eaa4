"""`SharedDraws`: makes the random numbers of a training loop independent of the number of processes.

On n processes, each rank draws its own noise, dropout masks and timesteps. They differ from those of a run on one
process, so the two runs cannot be compared. If draws are shared, each draw with one row per sample is made for the
global batch, and each rank uses the rows of its own samples. Dropout is then turned off. Other draws are unchanged, but
recorded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from headway.common.callsite import Frame, is_user_file, walk_stack
from headway.verify.calls import CallTrace
from headway.verify.random_calls import INTEGER, NORMAL, OTHERS, RANDOM_CALLS

Place = Callable[[], tuple[int, int, int, int] | None]
"""Function that returns (row count of this rank, row count of all ranks, first row of this rank, seed).

It returns None outside of a batch.
"""

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
        find_place: Function that returns the position of this rank's rows in the global batch, and a seed.
        trace: Recorder to which each torch call is passed.

    Attributes:
        num_dropped: Number of calls with active dropout. Calls whose dropout this mode turned off are included.
        seen: Names of the functions that drew random numbers, by the script line that called each of them. Draws
            outside of a batch, and draws from a generator that the script passed, are left out.
        unshared: Entries of `seen` whose draws could not be made for the global batch.
    """

    def __init__(self, shares: bool, reverses: bool, find_place: Place, trace: CallTrace) -> None:
        super().__init__()
        self._trace = trace
        self._shares = shares
        self._reverses = reverses
        self._find_place = find_place
        self._count = 0
        self._seed = -1
        self.num_dropped = 0
        self.seen: dict[str, str] = {}
        self.unshared: dict[str, str] = {}

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
        where = _find_line()
        self.seen.setdefault(where, name)
        if not self._shares:
            return func(*args, **kwargs)
        return self._draw_globally(name, func, args, kwargs, place, where)

    def _call_dropout(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a dropout function, with a rate of 0 if draws are shared."""
        rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        is_on = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        if rate and is_on:  # also without gradients: a teacher's outputs are part of the loss
            self.num_dropped += 1
            if self._shares:
                kwargs = {name: value for name, value in kwargs.items() if name not in ("p", "training", "train")}
                flag = "train" if func is torch.dropout else "training"
                return func(args[0], p=0.0, **{flag: True}, **{k: v for k, v in kwargs.items() if k == "inplace"})
        return func(*args, **kwargs)

    def _call_attention(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call `scaled_dot_product_attention`, with a dropout rate of 0 if draws are shared."""
        rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if rate:
            self.num_dropped += 1
            if self._shares and len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif self._shares:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)

    def _draw_globally(
        self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: Any, where: str
    ) -> Any:
        """Draw random numbers for the global batch, and return the rows of this rank.

        After such a draw, torch's global CPU generator has the state that it had before the call. If the rows of the
        result cannot be assigned to samples, the function's own result is returned, and the call is recorded in
        `unshared`.

        Args:
            name: Name of the function.
            func: Function that draws random numbers.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            place: Return value of `find_place`.
            where: Line of code that calls the function.
        """
        local, total, first, seed = place
        state = torch.get_rng_state()
        result = func(*args, **kwargs)
        is_shared = isinstance(result, torch.Tensor) and result.ndim and result.shape[0] and not result.shape[0] % local
        if not is_shared or name in OTHERS:
            self.unshared.setdefault(where, name)
            return result
        torch.set_rng_state(state)
        if seed != self._seed:
            self._seed, self._count = seed, 0
        self._count += 1
        generator = torch.Generator().manual_seed((seed * 1_000_003 + self._count * 7919) % (1 << 62))
        per_row = result.shape[0] // local
        whole = torch.empty((total * per_row, *result.shape[1:]), dtype=torch.float32)
        with torch.no_grad():
            _fill_shared(name, whole, result, args, kwargs, generator)
            rows = whole[first * per_row : (first + local) * per_row]
            if self._reverses:
                rows = rows.view(local, per_row, *rows.shape[1:]).flip(0).reshape(rows.shape)
            if name.startswith("bernoulli"):
                rate = args[0] if name == "bernoulli" else kwargs.get("p", args[1] if len(args) > 1 else 0.5)
                rows = (rows.to(result.device) < rate).to(result.dtype)
            result.copy_(rows)
        return result


def _fill_shared(
    name: str, whole: torch.Tensor, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any], source: Any
) -> None:
    """Fill a tensor for the global batch with random numbers from the distribution that the call requested.

    Args:
        name: Name of the function that draws random numbers.
        whole: Tensor to fill.
        result: Return value of the original call.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        source: Generator to draw from.
    """
    if name in NORMAL:
        mean, deviation = 0.0, 1.0
        if name == "normal_":
            mean = kwargs.get("mean", args[1] if len(args) > 1 else 0.0)
            deviation = kwargs.get("std", args[2] if len(args) > 2 else 1.0)
        whole.normal_(mean, deviation, generator=source)
    elif name in INTEGER:
        low, high = _read_range(name, args, kwargs)
        whole.random_(low, high, generator=source)
    else:
        least, most = 0.0, 1.0
        if name == "uniform_":
            least = kwargs.get("from", args[1] if len(args) > 1 else 0.0)
            most = kwargs.get("to", args[2] if len(args) > 2 else 1.0)
        whole.uniform_(least, most, generator=source)


def _read_range(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
    numbers = [each for each in (args if name == "randint" else args[1:]) if isinstance(each, int)]
    low = kwargs.get("low", kwargs.get("from", numbers[0] if len(numbers) > 1 else 0))
    high = kwargs.get("high", kwargs.get("to", numbers[-1] if numbers else 2**24))
    return int(low), int(high)


def _find_line() -> str:
    """Return the innermost line of the user's code on the stack, or "a library" if there is none."""
    for frame in walk_stack():
        if is_user_file(frame.f_code.co_filename):
            return str(Frame.from_frame(frame))
    return "a library"
