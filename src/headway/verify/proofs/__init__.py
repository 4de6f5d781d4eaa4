"""Proofs, the checks of `headway verify`: functions that take the records of all runs and return a `Verdict`.

`PROOFS` lists them by name, and so does `PROOFS` in `headway.cli.verify`, which imports no torch.
"""

from collections.abc import Callable

from headway.verify.proofs.data_wait import check_data_wait
from headway.verify.proofs.leaks import check_leaks
from headway.verify.proofs.learning import check_learning
from headway.verify.proofs.memory import check_memory
from headway.verify.proofs.processes import check_layout, check_processes
from headway.verify.proofs.repeats import check_repeat
from headway.verify.proofs.replays import check_out_of_memory
from headway.verify.proofs.resumes import check_resume
from headway.verify.proofs.samples import check_samples
from headway.verify.verdict import RunSet, Verdict

PROOFS: dict[str, Callable[[RunSet], Verdict]] = {
    "repeat": check_repeat,
    "processes": check_processes,
    "layout": check_layout,
    "samples": check_samples,
    "resume": check_resume,
    "out_of_memory": check_out_of_memory,
    "learning": check_learning,
    "leaks": check_leaks,
    "memory": check_memory,
    "data": check_data_wait,
}
"""Proof functions by the key that selects each on the command line, in the order of the printed table."""
