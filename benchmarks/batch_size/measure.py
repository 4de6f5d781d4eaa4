"""How many attempts a batch size costs: from 1024 where 8 fits, and from 128 where 7 does. Counted, so without spread."""

from collections.abc import Callable
from typing import Any

from benchmarks.timing import HAS_ACCELERATE, save
from headway import find_executable_batch_size

CASES = ((1024, 8), (128, 7))


def attempts(decorate: Callable[..., Any], start: int, fits: int, **settings: Any) -> tuple[int, int]:
    """How often the function was called, and the size of the last call."""
    tried: list[int] = []

    def attempt(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > fits:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    decorate(starting_batch_size=start, **settings)(attempt)()
    return len(tried), tried[-1]


def main() -> None:
    """Count and save."""
    contestants: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "headway": (find_executable_batch_size, {}),
        "headway, again (A/A)": (find_executable_batch_size, {}),
        "headway, search='largest'": (find_executable_batch_size, {"search": "largest"}),
    }
    if HAS_ACCELERATE:
        from accelerate.utils import find_executable_batch_size as peer

        contestants["accelerate"] = (peer, {})
    rows = {
        f"{start} where {fits} fits: {name}": dict(
            zip(("attempts", "found"), attempts(decorate, start, fits, **settings))
        )
        for start, fits in CASES
        for name, (decorate, settings) in contestants.items()
    }
    for name, row in rows.items():
        print(f"{name:50} {row['attempts']:3} attempts, batch size {row['found']}")
    save("batch_size", "attempts", rows)


if __name__ == "__main__":
    main()
