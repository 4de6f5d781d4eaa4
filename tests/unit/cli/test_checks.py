"""Test how `headway doctor` compares the ranks' locations, versions, clocks and links, without starting processes."""

from dataclasses import replace

import torch

from headway.cli.fabric_checks import RankFacts, check_link, compare_rank_facts, find_isolated_gpus

HERE = RankFacts(0, "a", (("torch", "2.13"),), True, 100.0, "eth0")


def get_levels(findings):
    """Return the level of each finding, by its text."""
    return {finding.description: finding.level for finding in findings}


def test_machines_that_agree_have_no_problems():
    assert set(get_levels(compare_rank_facts([HERE, replace(HERE, rank=1, host="b", clock=100.2)])).values()) == {"ok"}


def test_different_versions_are_bad_and_different_folders_and_clocks_are_noted():
    other = RankFacts(1, "b", (("torch", "2.11"),), False, 107.0, "eth0")
    found = get_levels(compare_rank_facts([HERE, other]))
    assert found["machines run different versions: a: torch 2.13; b: torch 2.11"] == "bad"
    assert found["the clocks of a and b are 7.0 s apart"] == "note"
    assert any("is not shared with b" in what and level == "note" for what, level in found.items())


def test_slow_link_is_noted_with_a_hint():
    late, slow = check_link(9.0, 11.0, [HERE, replace(HERE, rank=1, host="b")])
    assert (late.level, slow.level) == ("note", "note")
    assert "GLOO_SOCKET_IFNAME" in slow.hint
    assert [finding.level for finding in check_link(0.2, 900.0, [HERE, HERE])] == ["ok", "ok"]


def test_gpus_without_access_to_each_other_are_found(monkeypatch):
    """torch's answers are replaced, because this needs several GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: (first, second) != (2, 0))
    assert find_isolated_gpus(torch.device("cuda", 1)) == (3, ("0-2",))
    assert find_isolated_gpus(torch.device("cpu")) == (0, ())


def test_access_between_gpus_is_reported_once_per_host():
    ranks = [
        replace(HERE, num_gpus=2),
        replace(HERE, rank=1, num_gpus=2),
        replace(HERE, rank=2, host="b", num_gpus=3, isolated_pairs=("0-1", "0-2")),
        replace(HERE, rank=3, host="c", num_gpus=1),
    ]
    found = get_levels(compare_rank_facts(ranks))
    assert found["2 GPUs of a have direct access to each other's memory"] == "ok"
    assert found["GPUs of b without direct access to each other's memory: 0-1, 0-2"] == "note"
    assert sum("direct access" in text for text in found) == 2
