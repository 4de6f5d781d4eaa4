"""The core stays below its limit of code lines and reaches extensions only through the registry (`python scripts/core.py`)."""

from importlib import import_module

import pytest

from headway.core import extensions
from headway.errors import ConfigError
from scripts.core import count_lines, find_closure, find_leaks, find_modules, is_extension, read_registry

MAX_LINES = 32_000
"""Maximum number of code lines in all core modules that `import headway.accelerator` can reach.

It is an alarm for features that belong in an extension, not a budget: plain statements may take more lines.
"""


def test_the_accelerator_reaches_no_extension() -> None:
    assert set(find_leaks(find_closure())) == set()


def test_no_module_of_the_core_imports_an_extension() -> None:
    assert set(find_leaks(set(find_modules()) - {"headway.__main__"})) == set()


def test_the_core_is_small() -> None:
    own = {name for name in find_closure() if not is_extension(name)}
    assert sum(count_lines(own).values()) <= MAX_LINES


@pytest.mark.parametrize(
    ("kind", "word"), [(kind, word) for kind, words in read_registry().items() for word in words]
)  # fmt: skip
def test_every_registered_name_resolves_to_an_extension(kind: str, word: str) -> None:
    module, _, name = read_registry()[kind][word].partition(":")
    assert module in find_modules()
    assert not name or hasattr(import_module(module), name)
    assert word in extensions.list_words(kind)


def test_unknown_registry_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="no feature is called 'spikes'; choose one of 'adapted_models', 'average'"):
        extensions.load("feature", "spikes")
