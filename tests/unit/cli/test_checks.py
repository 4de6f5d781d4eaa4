"""Test how `headway doctor` compares the ranks' locations, versions, clocks and links, without starting processes."""

from dataclasses import replace

from headway.cli.fabric_checks import RankFacts, check_link, compare_rank_facts

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
