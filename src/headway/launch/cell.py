"""What a process of `notebook_launcher` runs: the pickled call, whose result or exception goes back by file."""

import pickle
import sys
from pathlib import Path
from typing import Any

from headway.common import atomic, env
from headway.common.optional import require


def main(folder: str) -> None:
    """Run the call in `folder`."""
    function, args = pickle.loads(Path(folder, "call").read_bytes())
    try:
        result = function(*args)
    except Exception as error:
        _write(Path(folder, f"error{env.rank()}"), error)
        raise
    _write(Path(folder, f"result{env.rank()}"), result)


def _write(path: Path, obj: Any) -> None:
    """Keep `obj` for the caller where it can be pickled; what cannot be is None there."""
    cloudpickle = require("cloudpickle", "notebook_launcher needs", "cloudpickle")
    try:
        content = cloudpickle.dumps(obj)
        pickle.loads(content)  # an exception with arguments of its own may fail only here
    except (TypeError, AttributeError, ValueError, pickle.PicklingError):
        return
    with atomic.replacing(path) as staged:
        staged.write_bytes(content)


if __name__ == "__main__":
    main(sys.argv[1])
