"""Tables of Accelerate's public names and module paths, with their location in Headway or an alternative.

`names.txt` contains the tables, which together cover every public name of Accelerate 1.15, as a test in `tests/house`
checks. Each heading is followed by the names to which it applies. `{megatron}` in a sentence is replaced by the entry
of this name in the table of sentences.
"""

from pathlib import Path


def _read_tables() -> dict[str, dict[str, str]]:
    """Return the tables in `names.txt` as dicts, by the table's name.

    A line `[table]` starts a table. Each key is on a separate line, followed by its indented text. Parsers of the
    standard library are avoided: `headway` imports this module while the user's directory is still first on `sys.path`.
    """
    found: dict[str, dict[str, str]] = {}
    table, key = dict[str, str](), ""
    for line in Path(__file__).with_name("names.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            table = found.setdefault(line.strip("[]"), {})
        elif line.startswith(" "):
            table[key] = f"{table[key]} {line.strip()}".lstrip()
        else:
            key, table[line] = line, ""
    return found


_TABLES = _read_tables()


def _read_groups(table: str) -> dict[str, str]:
    """Return a table as a dict from each name to its heading. In the table, several names follow each heading."""
    return {name: common for common, names in _TABLES[table].items() for name in names.split()}


def _fill_sentences(sentences: dict[str, str]) -> dict[str, str]:
    """Return the sentences with placeholders such as `{megatron}` replaced by the text that several sentences share."""
    return {name: sentence.format_map(_TABLES["sentences"]) for name, sentence in sentences.items()}


def _read_places(table: str) -> dict[str, tuple[str, str]]:
    """Return a table as a dict from each name to its location: the pair of (module, name in that module)."""
    return {name: (place.partition(":")[0], place.partition(":")[2]) for name, place in _TABLES[table].items()}


SERVED = _read_groups("served")
"""Headway's module of each Accelerate name that is not also a name in `headway` itself."""

RENAMED = _read_places("renamed")
"""Classes that have another name in Headway, as pairs of (module, name in that module).

Mainly for `isinstance` checks.
"""

MODULES = frozenset(_TABLES["modules"]["all"].split())
"""Modules of Accelerate that also exist under `headway`, such as `headway.utils`.

They serve scripts that only changed imports. `accelerator` is missing because Headway has its own module with this
name.
"""

AS_ACCELERATE: dict[str, tuple[str, str]] = {
    **{name: (place, name) for name, place in _read_groups("served as accelerate").items()},
    **_read_places("renamed as accelerate"),
}
"""Names that `import accelerate` provides when Headway replaces Accelerate, and that `headway` does not have.

Values are pairs of (module, name in that module).
"""

MODULES_AS_ACCELERATE = MODULES | {*_TABLES["modules as accelerate"]["all"].split()}
"""Modules that `import accelerate` provides when Headway replaces Accelerate."""

NAMES = _fill_sentences(_read_groups("not served"))
"""Reason and alternative for each public name that Headway does not provide."""

MEMBERS = _fill_sentences(_TABLES["members not served"])
"""Reason and alternative for each member of Accelerate's Accelerator that Headway does not provide."""

REFUSED = _fill_sentences(_TABLES["refused"])
"""Reason and alternative for names, members and arguments that exist but raise an error when they are used."""

DIFFERENT = _read_groups("different")
"""Difference from Accelerate for each name that behaves differently in Headway."""

SURFACE: dict[str, list[str]] = {module: names.split() for module, names in _TABLES["surface"].items()}
"""Public names of each module of Accelerate, by the module's name without the prefix `accelerate.`."""


TOP = tuple(_TABLES["top"]["all"].split())
"""Names of the package `accelerate` itself, without its modules."""
