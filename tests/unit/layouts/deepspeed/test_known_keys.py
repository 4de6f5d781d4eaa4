"""Test the list of DeepSpeed's keys against the installed version."""

import pytest

from headway.layouts.deepspeed.known_keys import TOP_LEVEL


def test_list_of_sections_is_that_of_deepspeeds_version() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install deepspeed")
    from deepspeed.runtime import constants

    named = {
        value
        for name, value in vars(constants).items()
        if isinstance(value, str) and name.endswith(("_BATCH_SIZE", "_GPU"))
    }
    assert {value for value in named if value.isidentifier()} <= TOP_LEVEL
