"""Program of a `notebook_launcher` process: it runs the pickled call and writes its result or exception to a file."""

import pickle
import sys
from pathlib import Path
from typing import Any

from headway.common import atomic, env
from headway.common.optional import require


def main(folder: str) -> None:
    """Run the pickled call in `folder`. Write the result to `result<rank>`, or the exception to `error<rank>`.

    The exception is then raised again, so that the process fails.
    """
    function, args = pickle.loads(Path(folder, "call").read_bytes())
    try:
        result = function(*args)
    except Exception as error:
        _write_pickle(Path(folder, f"error{env.get_rank()}"), error)
        raise
    _write_pickle(Path(folder, f"result{env.get_rank()}"), result)


def _write_pickle(path: Path, obj: Any) -> None:
    """Pickle an object to a file for the notebook.

    If the object cannot be pickled and loaded again, no file is written. The notebook then receives None as the result
    of this rank, or an error without the rank's exception.
    """
    cloudpickle = require("cloudpickle", "notebook_launcher needs", "cloudpickle")
    try:
        content = cloudpickle.dumps(obj)
        pickle.loads(content)  # an exception class with its own constructor arguments can be pickled, but not loaded
    except Exception:  # a class can raise any error here; a queue of multiprocessing raises RuntimeError
        return
    with atomic.open_replacement(path) as staged:
        staged.write_bytes(content)


if __name__ == "__main__":
    main(sys.argv[1])
