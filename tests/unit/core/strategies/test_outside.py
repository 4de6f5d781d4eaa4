"""Test strategies that other packages register, and the example strategy of the documentation."""

import sys
from pathlib import Path

import pytest

from headway import Accelerator
from headway.core.config import mesh
from headway.core.config.engines import EngineOptions
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.base import SingleStrategy
from headway.errors import CollectiveError, ConfigError, UnsupportedError
from tests.distributed.mirror import FOLDER, write_entry_points, write_package
from tests.docs.pages import ROOT, parse_blocks


class Lonely(SingleStrategy):
    """Strategy that keeps its text."""

    name = "lonely"

    def __init__(self, collectives: Collectives, text: str, options: EngineOptions) -> None:
        super().__init__(collectives)
        self.text = text


class Bare:
    """Class without the members of a strategy."""

    def __init__(self, *_: object) -> None:
        self.name = "bare"


class Lost(Lonely):
    """Strategy with a wrong data shard."""

    def __init__(self, collectives: Collectives, text: str, options: EngineOptions) -> None:
        super().__init__(collectives, text, options)
        self.data_shard = type(self.data_shard)(1, 2)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package that registers these strategies, and return its folder."""
    names = {"lonely": "Lonely", "bare": "Bare", "lost": "Lost", "gone": "Gone", "ddp": "Lonely"}
    write_package(
        tmp_path, "toys", {mesh.ENTRY_POINT_GROUP: {name: f"{__name__}:{made}" for name, made in names.items()}}
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_registered_strategy_is_found_by_name(installed: Path) -> None:
    strategy = Accelerator(cpu=True, strategy="lonely=3").strategy
    assert isinstance(strategy, Lonely)
    assert strategy.text == "lonely=3"


def test_layouts_have_priority_over_packages(installed: Path) -> None:
    assert type(Accelerator(cpu=True, strategy="ddp").strategy) is SingleStrategy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nobody", r"'nobody' is unknown; allowed: ddp, .* Installed packages register: .*lonely"),
        ("gone", r"registered as .*:Gone, cannot be loaded: .*; fix or uninstall that package"),
        ("bare", r"lacks .*capabilities.*; derive its class from SingleStrategy or DDPStrategy"),
        ("lost", r"on rank 0 data_shard is 1 of 2, but this process is rank 0 of 1 in data_group"),
    ],
)
def test_invalid_strategy_is_refused_with_a_remedy(installed: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Accelerator(cpu=True, strategy=text)


def test_name_registered_by_two_packages_is_refused(installed: Path) -> None:
    write_package(installed, "more-toys", {mesh.ENTRY_POINT_GROUP: {"lonely": "elsewhere:Lonely"}})
    with pytest.raises(ConfigError, match="registered 2 times"):
        mesh.find_entry_point("lonely")


def test_example_is_short_and_shown_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "mirror.py").read_text()
    assert len(text.splitlines()) < 60
    assert parse_blocks(ROOT / "docs" / "own_strategy.md")[0].text.strip() == text.strip()
    for folder in (write_entry_points(tmp_path / "site"), FOLDER):
        monkeypatch.syspath_prepend(str(folder))
    try:
        with pytest.raises(ConfigError, match="1 ranks cannot be divided into groups of 2"):
            Accelerator(cpu=True, strategy="mirror")
        with pytest.raises(
            UnsupportedError, match="the mirror strategy does not support rollback; leave microbatching off"
        ):
            Accelerator(cpu=True, strategy="mirror=1", microbatching="auto")
    finally:
        sys.modules.pop("mirror", None)


def test_split_groups_must_contain_each_rank_once() -> None:
    door = Collectives(process.start(cpu=True))
    alone = door.split([[0]])
    assert (alone.rank, alone.world_size, alone.group) == (0, 1, None)
    assert alone.gather_numbers([3.0]) == [[3.0]]
    for groups in ([], [[0], [0]], [[0, 1]]):
        with pytest.raises(CollectiveError, match="do not contain each of 1 ranks once"):
            door.split(groups)
