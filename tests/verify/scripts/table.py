"""Write README.md in this folder, with tables of all scripts made from their docstrings.

Run: python tests/verify/scripts/table.py [--check]
"""

import ast
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PROOFS = (
    "same result on n processes",
    "same result under the layout",
    "every sample once",
    "resume is exact",
    "a run repeats itself",
    "out of memory is harmless",
    "what learns, learns",
    "nothing leaks",
    "memory",
    "data keeps up",
)
REPORT = re.compile(r"[\w./-]+#\d+")


@dataclass(frozen=True)
class Script:
    """The contents of a script's docstring.

    Attributes:
        name: File name.
        summary: First paragraph, which describes the program.
        flags: Launch flags that the script needs. Empty for the defaults.
        fault: The planted fault. Empty for a correct script.
        proof: Name of the proof that must fail. Empty for a correct script.
        cause: What a good report contains.
    """

    name: str
    summary: str
    flags: str
    fault: str
    proof: str
    cause: str

    @property
    def is_from_a_report(self) -> bool:
        """Return whether the fault was reported in public."""
        return REPORT.search(self.fault) is not None


def read_script(path: Path) -> Script:
    """Read the docstring of a script.

    Raises:
        ValueError: If a faulty script lacks a line, or names a proof that does not exist.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    sections = {"": "", "Run": "", "Fault": "", "Expect": ""}
    part = ""
    for line in docstring.splitlines():
        keyword, colon, rest = line.partition(":")
        if colon and keyword in sections:
            part, line = keyword, rest
        sections[part] += f" {line.strip()}"
    sections = {keyword: text.strip() for keyword, text in sections.items()}
    proof, _, cause = sections["Expect"].partition(":")
    if path.parent.name == "faulty" and not (sections["Fault"] and proof in PROOFS and cause):
        raise ValueError(f"{path.name}: a faulty script needs a line Fault: and a line Expect: <proof>: <cause>")
    return Script(path.name, sections[""], sections["Run"], sections["Fault"], proof, cause.strip())


def read_scripts(kind: str) -> list[Script]:
    """Read all scripts of one kind, "faulty" or "correct"."""
    return [read_script(path) for path in sorted((FOLDER / kind).glob("*.py"))]


HARDEST = {
    "faulty/average_only_evaluated.py": "losses, parameters and samples agree after a resume; only the delivered weights are wrong",
    "faulty/expert_never_chosen.py": "every parameter has a gradient and changes; a slice of it does not",
    "faulty/files_in_listed_order.py": "two runs on one machine often agree; only a shuffled listing shows the fault",
    "faulty/head_frozen_with_the_encoder.py": "only the optimizer's list says that the frozen head was meant to learn",
    "faulty/class_weights_mean.py": "a mean over something other than rows, without a visible sum or padding",
    "faulty/hardest_rows_of_rank.py": "samples, weights and scale are right; each rank chooses among its own rows",
    "faulty/lookahead_forgets_its_counter.py": "the object is registered; one field of its state is missing",
    "faulty/always_the_first_batch.py": "one process also reads duplicates, so the reference run has them",
    "faulty/stream_in_two_workers.py": "one process also reads duplicates, so the reference run has them",
    "faulty/unfrozen_after_prepare.py": "the fault begins in the second epoch, at update 4",
    "faulty/labels_not_shifted.py": "the attention is causal; the loss uses the current token as its target",
    "correct/causal_model_by_hand.py": "correct, but parameters without effect differ between numbers of processes",
    "correct/dropout_seeded.py": "correct, but dropout masks differ between ranks",
    "correct/augmentation_in_workers.py": "correct, but two processes use twice as many rows per update",
    "correct/weighted_sampler.py": "correct, but rows come more than once by design",
    "correct/replay_buffer.py": "correct, but rows come more than once by design",
}
"""The reason why a script is hard, for each of the hardest scripts."""


def make_page() -> str:
    """Return the text of README.md."""
    faulty, correct = read_scripts("faulty"), read_scripts("correct")
    counts = Counter(script.proof for script in faulty)
    lines = [
        "# Scripts for `headway verify`",
        "",
        f"{len(faulty)} training scripts with one planted fault each, and {len(correct)} correct ones. They were written",
        "independently of `headway verify`, to test it: each fault must be found and attributed to its cause, and no correct script",
        "may raise an alarm. `python tests/verify/scripts/table.py` writes this page from the docstrings.",
        "",
        "- Each script is complete, takes no arguments, makes at least eight updates, and trains in seconds on a CPU. Most save and",
        "  resume with the documented calls, in `runs/` of the current folder.",
        "- `Run:` in a docstring gives flags that differ from the defaults. Every script runs without an error on one process.",
        "- Most scripts divide a fixed global batch by `num_processes`. A few set the batch of each process",
        "  (`augmentation_in_workers.py`, `accelerate_script.py`, all with a Trainer), or `global_batch_size`.",
        "- A fault may fail more than one proof. `Expect:` names the proof to which its cause belongs.",
        "- `run_collection.py` grades the cause that a report names by the words and the line in `causes.py`.",
        f"- {sum(script.is_from_a_report for script in faulty)} faults come from public reports, which the docstrings name.",
        "",
        "## The hardest",
        "",
        "| script | why |",
        "|---|---|",
        *(f"| [{Path(path).name}]({path}) | {why} |" for path, why in HARDEST.items()),
        "",
        "## Faulty",
        "",
    ]
    for proof in PROOFS:
        lines += [
            f"### {proof[0].upper()}{proof[1:]} ({counts[proof]})",
            "",
            "| script | fault | report |",
            "|---|---|---|",
        ]
        for script in faulty:
            if script.proof == proof:
                flags = f" (`{script.flags}`)" if script.flags else ""
                fault = script.fault.replace("|", "\\|")
                cause = script.cause.replace("|", "\\|")
                lines.append(f"| [{script.name}](faulty/{script.name}){flags} | {fault} | {cause} |")
        lines.append("")
    lines += ["## Correct", "", "| script | program |", "|---|---|"]
    for script in correct:
        flags = f" (`{script.flags}`)" if script.flags else ""
        lines.append(f"| [{script.name}](correct/{script.name}){flags} | {script.summary} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page, or compare it with `--check`."""
    page = FOLDER / "README.md"
    text = make_page()
    if "--check" not in sys.argv:
        page.write_text(text)
    elif page.read_text() != text:
        sys.exit(f"{page} is out of date: run {Path(__file__).name}")


if __name__ == "__main__":
    main()
