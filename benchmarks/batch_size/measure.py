"""Number of attempts of a batch size search: from 1024 where 8 fits, and from 128 where 7 fits. Counts have no spread.

Run it with `python -m benchmarks.batch_size.measure`.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.timing import HAS_ACCELERATE, save_result
from headway import find_executable_batch_size

CASES = ((1024, 8), (128, 7))


def count_attempts(find_batch_size: Callable[..., Any], start: int, fits: int, **settings: Any) -> tuple[int, int]:
    """Return the number of calls of the function, and the batch size of the last call."""
    sizes: list[int] = []

    def attempt(batch_size: int) -> None:
        sizes.append(batch_size)
        if batch_size > fits:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    find_batch_size(starting_batch_size=start, **settings)(attempt)()
    return len(sizes), sizes[-1]


def main() -> None:
    """Count the attempts and write result.json."""
    searches: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "headway": (find_executable_batch_size, {}),
        "headway, again (A/A)": (find_executable_batch_size, {}),
        "headway, search='largest'": (find_executable_batch_size, {"search": "largest"}),
    }
    if HAS_ACCELERATE:
        from accelerate.utils import find_executable_batch_size as accelerate_search

        searches["accelerate"] = (accelerate_search, {})
    rows = {
        f"{start} where {fits} fits: {name}": dict(
            zip(("attempts", "found"), count_attempts(find_batch_size, start, fits, **settings))
        )
        for start, fits in CASES
        for name, (find_batch_size, settings) in searches.items()
    }
    for name, row in rows.items():
        print(f"{name:50} {row['attempts']:3} attempts, batch size {row['found']}")
    save_result("batch_size", "attempts", rows)


if __name__ == "__main__":
    main()
