"""Random cases of data loading and schedules give the same results as Accelerate, on one and on two processes."""

import pytest

from tests.ecosystem.both import Both

pytestmark = pytest.mark.slow
NUM_CASES = 200


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return Both(tmp_path_factory.mktemp("random_cases"))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["loading", "scheduling"])
def test_random_cases_give_the_results_of_accelerate(both, kind, world_size):
    sides = both.run("random_cases", kind, "0", str(NUM_CASES), world_size=world_size)
    wrong = {name.partition(":")[0] for name in sides.accelerate[0] if name.endswith("raised")}
    assert len(wrong) < NUM_CASES / 50
    for theirs, ours in zip(sides.accelerate, sides.headway):
        cases = {name: value for name, value in theirs.items() if name.partition(":")[0] not in wrong}
        assert {name: ours.get(name) for name in cases} == cases
        assert len(cases) > 2 * NUM_CASES - 20
