"""Strategies that other packages register: entry points of the group `headway.strategies`. Torch-free.

::

    [project.entry-points."headway.strategies"]
    mirror = "my_package.mirror:MirrorStrategy"
"""

from typing import TYPE_CHECKING

from headway.config.layout.mesh import normal, parse
from headway.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "headway.strategies"


def find(text: str) -> "EntryPoint | None":
    """What a package registered under the name in this text, as in "mirror" or "mirror=2"; None where the text is a layout.

    Layouts win over packages; nothing is imported.

    Raises:
        ConfigError: neither a layout nor registered, or registered by two packages.
    """
    try:
        parse(text)
    except ConfigError as error:
        from importlib.metadata import entry_points  # as long an import as all of a launch

        name = text.partition("=")[0].strip()
        registered = entry_points(group=GROUP)
        found = {point.value: point for point in registered if point.name == name}
        if len(found) > 1:
            every = ", ".join(sorted(found))
            raise ConfigError(
                f"strategy {text!r} is registered {len(found)} times ({every}); keep one of these packages"
            ) from None
        if not found:
            others = ", ".join(sorted({point.name for point in registered}))
            told = f"{error}. Installed packages register: {others}" if others else str(error)
            raise ConfigError(told) from None
        return next(iter(found.values()))
    return None


def spelled(text: str) -> str:
    """The one spelling: a layout in small letters without spaces, a registered name as it is.

    Raises:
        ConfigError: neither a layout nor registered.
    """
    return normal(text) if find(text) is None else text.strip()
