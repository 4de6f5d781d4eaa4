"""Tests of verify with a transformers model under layouts of all axes: the correct script passes, each planted fault fails."""

from pathlib import Path

import pytest

from tests.verify.sessions import Verifier

SCRIPT = Path(__file__).parent / "layouts" / "language_model.py"
MIXTRAL = ("--model", "mixtral")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("flags", "fault", "args"),
    [
        ("-n 2 --strategy tp", "norm_of_own_shard", ()),
        ("-n 2 --strategy cp", "mean_over_own_tokens", ()),
        ("-n 2 --strategy pp", "decay_of_own_stage", ()),
        ("-n 2 --strategy ep", "scale_by_own_experts", MIXTRAL),
        ("-n 4 --strategy fsdp+tp=2", "norm_of_own_shard", ()),
        ("-n 4 --strategy hsdp=2", "norm_of_own_shard", ()),
        ("-n 4 --strategy ddp", "sum_over_rows", ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_correct_script_passes_and_faulty_script_fails(
    verifier: Verifier, flags: str, fault: str, args: tuple[str, ...]
) -> None:
    verdict = verifier.verify(SCRIPT, *args, flags=flags, only="layout")["layout"]
    assert verdict.status == "PASS", verdict
    verdict = verifier.verify(SCRIPT, *args, "--fault", fault, flags=flags, only="layout")["layout"]
    assert verdict.status == "FAIL", verdict
