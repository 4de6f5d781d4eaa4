"""tqdm's bar on one process of each machine."""

import pytest

import headway
from headway import optional
from headway.errors import ConfigError, OptionalDependencyMissing


def test_it_iterates_and_takes_tqdms_options(capsys):
    pytest.importorskip("tqdm", reason="tqdm is an optional package")
    bar = headway.tqdm(range(3), desc="steps")
    assert list(bar) == [0, 1, 2]
    assert "steps" in capsys.readouterr().err
    assert headway.tqdm(range(3), disable=True).disable
    assert headway.tqdm(total=2, main_process_only=False).total == 2


def test_the_old_spelling_is_named():
    with pytest.raises(ConfigError, match="write main_process_only=True"):
        headway.tqdm(True, range(3))


def test_a_missing_tqdm_is_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(OptionalDependencyMissing, match="pip install 'tqdm'"):
        headway.tqdm(range(3))
