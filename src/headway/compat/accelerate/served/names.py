"""Accelerate's names and module paths: which are served, from where and with what difference, and what to use for the others.

`names.txt` has the tables, which together answer for every public name of Accelerate 1.15; a house test compares. Names stand in
lines of text, by what they have in common. `{megatron}` in a sentence is that of the table of sentences. `finder.py` makes the
modules. Nothing here imports torch.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from headway.errors import NotServed


def _tables() -> dict[str, dict[str, str]]:
    """By table, key -> text: `[table]`, then each key on a line of its own, and under it its text, indented.

    Without the standard library's parsers: this is imported with `headway`, while the user's folder still comes first on the path.
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


_TABLES = _tables()


def _by_name(table: str) -> dict[str, str]:
    """Name -> what the names of a group have in common."""
    return {name: common for common, names in _TABLES[table].items() for name in names.split()}


def _sentences(told: dict[str, str]) -> dict[str, str]:
    return {name: sentence.format_map(_TABLES["sentences"]) for name, sentence in told.items()}


def _places(table: str) -> dict[str, tuple[str, str]]:
    """Name -> (module, what it is called there)."""
    return {name: (place.partition(":")[0], place.partition(":")[2]) for name, place in _TABLES[table].items()}


SERVED = _by_name("served")
"""Name -> module, for what is Accelerate's and not one of Headway's own names."""

RENAMED = _places("renamed")
"""Name -> (module, what it is called there), for `isinstance` above all."""

MODULES = frozenset(_TABLES["modules"]["all"].split())
"""Accelerate's modules under the names that a changed import gives them: `headway.utils`, `headway.state`, ...

Not among them: `accelerator` and `tracking`, which Headway has itself.
"""

AS_ACCELERATE: dict[str, tuple[str, str]] = {
    **{name: (place, name) for name, place in _by_name("served as accelerate").items()},
    **_places("renamed as accelerate"),
}
"""Name -> (module, name there), for what `import accelerate` gives where Headway stands in for it, and `headway` does not."""

MODULES_AS_ACCELERATE = MODULES | {*_TABLES["modules as accelerate"]["all"].split()}
"""The modules of `accelerate` itself where Headway stands in for it."""

NAMES = _sentences(_by_name("not served"))
"""Public name that Headway does not serve -> a sentence that says why and what to use instead."""

MEMBERS = _sentences(_TABLES["members not served"])
"""Member of Accelerate's Accelerator -> sentence."""

REFUSED = _sentences(_TABLES["refused"])
"""What is there under Accelerate's name and refused when it is used: names, members, and arguments of calls -> sentence."""

DIFFERENT = _by_name("different")
"""Name that is served -> how it differs."""

SURFACE: dict[str, list[str]] = {module: names.split() for module, names in _TABLES["surface"].items()}
"""Module, without `accelerate.`, -> its public names."""


def find(name: str) -> Any:
    """What Accelerate calls `name`.

    Raises:
        AttributeError: it is not served; the message says what to use.
    """
    if name in SERVED:
        return getattr(import_module(SERVED[name]), name)
    if name in RENAMED:
        place, own = RENAMED[name]
        return getattr(import_module(place), own)
    if name in MODULES:
        return import_module(f"headway.{name}")
    raise AttributeError(advice(name) or f"module 'headway' has no name {name!r}")


def find_as_accelerate(name: str) -> Any:
    """What `accelerate.NAME` is where Headway stands in for Accelerate; of a name that is not served, a class that says so.

    Raises:
        AttributeError: Accelerate has no such name either.
    """
    if name in AS_ACCELERATE:
        place, own = AS_ACCELERATE[name]
        return getattr(import_module(place), own)
    try:
        return getattr(import_module("headway"), name)
    except AttributeError as error:
        sentence = advice(name)
        if sentence is not None:
            return refused(name, sentence)  # a script that only imports it runs
        raise AttributeError(f"module 'accelerate', served by Headway, has no attribute {name!r}", name=name) from error


class Refused(type):
    """Classes that stand for what is not served: they can be imported and named, and say so when they are called or subclassed."""

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        """Refuse.

        Raises:
            NotServed: always; the message says what to use.
        """
        raise NotServed(cls.__doc__ or cls.__name__)


@cache
def refused(name: str, sentence: str) -> Refused:
    """What stands for a name that is not served: the same object each time."""
    return Refused(name, (), {"__doc__": sentence, "__module__": "accelerate"})


def advice(name: str) -> str | None:
    """What an error says about an Accelerate name that is not served; None for any other name."""
    why = NAMES.get(name)
    return None if why is None else f"headway has no {name!r}: {why}"


def member_advice(name: str) -> str | None:
    """The same for a member of the Accelerator."""
    why = MEMBERS.get(name)
    return None if why is None else f"Headway's Accelerator has no {name!r}: {why}"
