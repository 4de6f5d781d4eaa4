"""Parser of `names.txt`, the tables of Accelerate's public names, with their place in Headway or an alternative.

To provide another name, edit `names.txt`. A test in `tests/house` checks that together the tables cover every public
name of Accelerate 1.15. In most tables, several names follow a heading that applies to all of them, such as a module
or a sentence. A placeholder such as `{megatron}` in a sentence is replaced by the entry with this name in the table
"sentences".
"""

from pathlib import Path


def _read_tables() -> dict[str, dict[str, str]]:
    """Return the tables in `names.txt` as dicts, by the table's name.

    A line `[table]` starts a table. Each key is on a separate line, followed by its indented text. No parser of the
    standard library is used, because a module in the user's directory, which is first on `sys.path`, might shadow it.
    """
    tables: dict[str, dict[str, str]] = {}
    table, key = dict[str, str](), ""
    for line in Path(__file__).with_name("names.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            table = tables.setdefault(line.strip("[]"), {})
        elif line.startswith(" "):
            table[key] = f"{table[key]} {line.strip()}".lstrip()
        else:
            key, table[line] = line, ""
    return tables


_TABLES = _read_tables()


def _read_groups(table: str) -> dict[str, str]:
    """Return a dict from names to headings for a table in which each heading is followed by several names."""
    return {name: common for common, names in _TABLES[table].items() for name in names.split()}


def _fill_sentences(sentences: dict[str, str]) -> dict[str, str]:
    """Replace placeholders such as `{megatron}` in sentences by the texts in the table "sentences".

    Args:
        sentences: Sentences with placeholders, by name.
    """
    return {name: sentence.format_map(_TABLES["sentences"]) for name, sentence in sentences.items()}


def _read_places(table: str) -> dict[str, tuple[str, str]]:
    """Return a table as a dict from each name to its location, a pair of (module, name in that module)."""
    return {name: (location.partition(":")[0], location.partition(":")[2]) for name, location in _TABLES[table].items()}


PROVIDED = _read_groups("provided")
"""Modules of Headway that define Accelerate's names, by name. Public names of `headway` itself are left out."""

RENAMED = _read_places("renamed")
"""Pairs of (module, name in that module), by class name in Accelerate, for classes that Headway names differently.

Scripts need them mainly for `isinstance` checks.
"""

MODULES = frozenset(_TABLES["modules"]["all"].split())
"""Paths of Accelerate's modules that also exist under `headway`, such as "utils" for `headway.utils`.

Scripts in which only the imports were changed need them. "accelerator" is missing, because Headway has its own module
with this name.
"""

AS_ACCELERATE: dict[str, tuple[str, str]] = {
    **{name: (place, name) for name, place in _read_groups("provided as accelerate").items()},
    **_read_places("renamed as accelerate"),
}
"""Pairs of (module, name in that module), by name, for names that `headway` itself does not provide.

`import accelerate` provides these names when Headway replaces Accelerate.
"""

MODULES_AS_ACCELERATE = MODULES | {*_TABLES["modules as accelerate"]["all"].split()}
"""Paths of the modules that `accelerate` contains when Headway replaces Accelerate, such as "utils"."""

NAMES = _fill_sentences(_read_groups("not provided"))
"""Advice on alternatives, by public name of Accelerate that Headway does not provide."""

MEMBERS = _fill_sentences(_TABLES["members not provided"])
"""Advice on alternatives, by member of Accelerate's Accelerator that Headway does not provide."""

REFUSED = _fill_sentences(_TABLES["refused"])
"""Advice on alternatives, by name, member or argument that exists in Headway but raises an error when it is used."""

DIFFERENT = _read_groups("different")
"""Descriptions of differences from Accelerate, by name that behaves differently in Headway."""

SURFACE: dict[str, list[str]] = {module: names.split() for module, names in _TABLES["surface"].items()}
"""Public names of each module of Accelerate, by the module's name without the prefix `accelerate.`."""


TOP = tuple(_TABLES["top"]["all"].split())
"""Names of the package `accelerate` itself, without its modules."""
