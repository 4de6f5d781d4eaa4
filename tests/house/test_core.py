"""The core stays small, and reaches no extension except through the registry (`python scripts/core.py`)."""

from importlib import import_module

import pytest

from headway.core import extensions
from headway.errors import ConfigError
from scripts.core import count_lines, find_closure, find_leaks, find_modules, is_extension, read_registry

MOST_LINES = 27_000
"""Lines of code that `import headway.accelerator` may reach. The core is what a contributor can hold in mind."""


def test_no_extension_is_reached() -> None:
    assert set(find_leaks(find_closure())) == set()


def test_no_other_part_of_the_core_names_an_extension() -> None:
    assert set(find_leaks(set(find_modules()) - {"headway.__main__"})) == set()


def test_the_core_is_small() -> None:
    own = {name for name in find_closure() if not is_extension(name)}
    assert sum(count_lines(own).values()) <= MOST_LINES


@pytest.mark.parametrize(
    ("kind", "word"), [(kind, word) for kind, words in read_registry().items() for word in words]
)  # fmt: skip
def test_every_word_leads_to_an_extension(kind: str, word: str) -> None:
    module, _, name = read_registry()[kind][word].partition(":")
    assert module in find_modules()
    assert not name or hasattr(import_module(module), name)
    assert word in extensions.list_words(kind)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="no feature is called 'spikes'; choose one of 'average'"):
        extensions.load("feature", "spikes")
