"""Run `headway verify` on the collection of scripts, and compare its reports with the planted faults.

    python tests/verify/run_collection.py                       # all scripts, about 40 minutes on two cores
    python tests/verify/run_collection.py faulty/no_seed.py     # some of them
    python tests/verify/run_collection.py --full correct        # with all proofs, not only the expected one
    python tests/verify/run_collection.py /some/folder/train.py # a script from elsewhere

`scripts/causes.py` also grades the cause that a report names: "right" if the report contains the words of the planted
cause and names no other line, "wrong" if it names another line or another cause with a line, else "generic".

Faulty scripts run only the proofs that can find their fault; correct ones run all. Two server processes fork all runs.
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from headway.cli.options import make_setting_options
from headway.cli.verify import PROOFS, make_options
from headway.verify.command import read_options
from headway.verify.proofs import PROOFS as FUNCTIONS
from headway.verify.runs import ForkServer, VerifyError
from headway.verify.session import VerifySession
from headway.verify.verdict import Proof, Verdict

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from table import Script, read_script

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.verify.grading import grade

FOLDER = Path(__file__).parent / "scripts"
WORDS = {
    "same result on n processes": "processes,samples",
    "same result under the layout": "layout,processes",
    "every sample once": "samples",
    "resume is exact": "resume",
    "a run repeats itself": "repeat",
    "out of memory is harmless": "out_of_memory",
    "what learns, learns": "learning",
    "nothing leaks": "leaks,processes",
    "memory": "memory",
    "data keeps up": "data",
}


def verify_script(path: Path, words: str | None, flags: str, servers: list[ForkServer]) -> list[Verdict]:
    """Return the verdicts of some proofs on one script, or one failed verdict if it could not be verified."""
    settings = dict.fromkeys((str(each.name) for each in make_setting_options()), None)
    tokens = shlex.split(flags)
    names = {"-n": "num_processes", "--strategy": "strategy", "--as": "run_as"}
    settings.update({names[flag]: value for flag, value in zip(tokens[::2], tokens[1::2], strict=True)})
    proofs = [word for word in (words or "").split(",") if word in PROOFS]
    if words and not proofs:
        return []
    options = read_options(make_options(str(path), (), only=",".join(proofs) or None, **settings))
    try:
        with VerifySession(options, lambda name: None, servers) as session:
            runs = session.run()
            return [FUNCTIONS[word](runs) for word in FUNCTIONS if word in options.proofs]
    except VerifyError as error:
        return [Proof("script", title="script").report_failure(str(error))]


def judge(script: Script, verdicts: list[Verdict]) -> str:
    """Return "ok", "alarm" (a correct script failed), "missed" or "other" (another proof than expected failed)."""
    failed = [each.key for each in verdicts if each.status == "FAIL"]
    if not script.proof:
        return "alarm" if failed else "ok"
    if not failed:
        return "missed"
    return "ok" if WORDS[script.proof].split(",")[0] in failed else "other"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scripts", nargs="*", default=["correct", "faulty"])
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    paths = [
        p
        for each in args.scripts
        for p in (sorted((FOLDER / each).glob("*.py")) if (FOLDER / each).is_dir() else [FOLDER / each])
        if not p.name.startswith("_")
    ]
    os.chdir(tempfile.mkdtemp())
    servers = [ForkServer(), ForkServer()]
    counts: dict[str, int] = {}
    for path in paths:
        script, began = read_script(path), time.monotonic()
        verdicts = verify_script(
            path, None if args.full or not script.proof else WORDS[script.proof], script.flags, servers
        )
        result = judge(script, verdicts)
        graded = grade(path, verdicts) if script.proof and result != "missed" else ""
        for each_grade in (result, graded.partition(",")[0]):
            counts[each_grade] = counts.get(each_grade, 0) + bool(each_grade)
        print(
            f"{result:7} {path.parent.name}/{path.name} ({time.monotonic() - began:.0f} s) {script.proof}; {graded}",
            flush=True,
        )
        for each in verdicts:
            if each.status == "FAIL" or (not script.proof and each.status == "NOT CHECKED") or result == "missed":
                print(f"        {each.status} {each.key}: {each.reason}", flush=True)
                if each.status == "FAIL":
                    for line in each.details:
                        print(f"            {line}")
    for server in servers:
        server.close()
    print(counts)


if __name__ == "__main__":
    main()
