"""Test typed reads of environment variables, defaults, and temporary patches."""

import os

import pytest

from headway.common import env
from headway.errors import ConfigError


def test_typed_reads(monkeypatch):
    monkeypatch.setenv("HW_A", " 12 ")
    monkeypatch.setenv("HW_EMPTY", "")
    assert (env.get_int("HW_A"), env.get_int("HW_EMPTY"), env.get_int("HW_NONE")) == (12, None, None)
    assert (env.get("HW_EMPTY"), env.get("HW_NONE")) == ("", None)
    monkeypatch.setenv("HW_A", "twelve")
    with pytest.raises(ConfigError, match="HW_A='twelve' must be an integer"):
        env.get_int("HW_A")


@pytest.mark.parametrize("text", ["1", "true", "YES", " on ", "y"])
def test_words_for_true_are_parsed(text):
    assert env.parse_bool(text, "x") is True


@pytest.mark.parametrize("text", ["0", "False", "no", "OFF", ""])
def test_words_for_false_are_parsed(text):
    assert env.parse_bool(text, "x") is False


def test_word_that_is_neither_is_refused(monkeypatch):
    monkeypatch.setenv("HW_A", "maybe")
    with pytest.raises(ConfigError, match="HW_A='maybe'"):
        env.get_bool("HW_A")
    assert env.get_bool("HW_NONE") is None


def test_without_a_launcher_there_is_one_process(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (env.get_rank(), env.get_local_rank(), env.get_world_size(), env.get_local_world_size()) == (0, 0, 1, 1)


def test_patches_are_undone_even_after_an_error(monkeypatch):
    monkeypatch.setenv("HW_A", "before")

    def block():
        with env.patch_variables({"HW_A": None, "HW_B": "new"}):
            assert ("HW_A" in os.environ, os.environ["HW_B"]) == (False, "new")
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert os.environ["HW_A"] == "before"
    assert "HW_B" not in os.environ


def test_defaults_and_snapshots(monkeypatch):
    monkeypatch.setenv("HW_A", "mine")
    env.set_default("HW_A", "other")
    assert os.environ["HW_A"] == "mine"
    env.copy_variables()["HW_A"] = "changed"
    assert os.environ["HW_A"] == "mine"
