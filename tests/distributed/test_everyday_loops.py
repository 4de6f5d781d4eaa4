"""Loops over several loaders continue exactly after being killed twice, on one and two processes."""

import json

import pytest

from tests.distributed.everyday_loops import LOOPS, run
from tests.distributed.ranks import RankFailed, run_ranks


def read_log(folder):
    """Return the lines of a log by kind and update. Fail if an update that was repeated after a kill differs."""
    found = {}
    for text in (folder / "log").read_text().splitlines():
        line = json.loads(text)
        key = ("evaluation", line["evaluated_after"]) if "loss" in line else ("update", line.get("update"))
        if key in found:
            assert found[key] == line or pytest.approx(found[key].get("loss")) == line.get("loss")
        found[key] = line
    return found


def make_cases():
    for name in LOOPS:
        is_first = name in ("zip_loaders", "evaluate_in_mid_epoch")
        yield pytest.param(name, (1, 1, 1), marks=() if is_first else pytest.mark.slow)
        yield pytest.param(name, (2, 2, 2), marks=pytest.mark.slow)
        yield pytest.param(name, (2, 1, 2), marks=pytest.mark.matrix)


@pytest.mark.parametrize(("name", "ranks"), make_cases())
def test_loop_killed_twice_matches_uninterrupted_run(tmp_path, name, ranks):
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    folder.mkdir()
    run_ranks(run, ranks[0], name, str(whole))
    for world_size, stop, is_saved in zip(ranks, (4, 9), (True, False)):
        with pytest.raises(RankFailed, match="died"):
            run_ranks(run, world_size, name, str(folder), stop, is_saved)
    run_ranks(run, ranks[2], name, str(folder))
    expected, found = read_log(whole), read_log(folder)
    assert found.keys() == expected.keys()
    for key, line in expected.items():
        if key[0] == "update" and "samples" in line:
            assert found[key] == line
    if len(set(ranks)) == 1:
        assert found == expected
