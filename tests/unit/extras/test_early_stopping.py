"""Test early stopping on one process. tests/distributed/test_best_checkpoint.py tests the agreement of ranks."""

import pytest
import torch

from headway import EarlyStopping
from headway.errors import ConfigError


def count_calls(values, **settings):
    """Return the number of updates until `update` returns True, or None."""
    stopping = EarlyStopping(**settings)
    return next((count for count, value in enumerate(values, 1) if stopping.update(value)), None)


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([3.0, 2.0, 2.5, 1.0, 1.0, 1.1], {"patience": 2}, 6),  # an equal value is no improvement
        ([3.0, 2.0, 2.5, 1.0, 1.0, 0.9], {"patience": 2}, None),
        ([0.1, 0.5, 0.52, 0.54, 0.9], {"patience": 2, "min_delta": 0.05, "mode": "max"}, 4),
        ([1.0, 0.9, 0.8], {"min_delta": 0.2}, 2),
        ([1.0, 1.0], {}, 2),
        ([float("nan"), float("nan"), 1.0], {"patience": 2}, 2),
        ([float("nan"), 1.0, 0.5, float("inf"), 0.4], {"patience": 2}, None),
        ([2.0, float("-inf"), 1.0, 1.5, 1.5], {"patience": 2}, 5),
        ([torch.tensor(2.0), torch.tensor([3.0]), 1], {"patience": 2}, None),
    ],
)
def test_early_stopping_counts_evaluations_without_improvement(values, settings, expected):
    assert count_calls(values, **settings) == expected


def test_state_is_saved_loaded_and_reset():
    stopping = EarlyStopping(patience=2, mode="max")
    assert [stopping.update(value) for value in (0.5, 0.7, 0.6)] == [False, False, False]
    assert (stopping.best, stopping.num_without_gain, stopping.should_stop) == (0.7, 1, False)
    again = EarlyStopping(patience=2, mode="max")
    again.load_state_dict(stopping.state_dict())
    assert again.update(0.65)
    assert again.should_stop
    again.reset()
    assert not again.should_stop
    assert not again.update(0.1)
    assert again.best == 0.1


@pytest.mark.parametrize(
    "settings",
    [{"patience": 0}, {"patience": 1.5}, {"patience": True}, {"min_delta": -1}, {"min_delta": float("nan")},
     {"mode": "auto"}],
    ids=str,
)  # fmt: skip
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=f"{next(iter(settings))}="):
        EarlyStopping(**settings)


def test_value_must_be_a_number():
    for value in (None, "low", {"loss": 1.0}, torch.ones(2)):
        with pytest.raises((ConfigError), match="a number"):
            EarlyStopping().update(value)
