"""Test writing a checkpoint: parts of several processes, failures, and saving again under the same name."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from headway.core.checkpoint.format.manifest import read_manifest
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.checkpoint.saving import file_plan, writer
from headway.core.checkpoint.stores import disk
from headway.errors import CheckpointError
from tests.unit.core.checkpoint.amount import EXAMPLES
from tests.unit.core.checkpoint.reading import read_tensors
from tests.unit.core.checkpoint.saved import TENSORS, make_job, save


def test_two_parts_make_one_checkpoint(tmp_path):
    lead = make_job(tmp_path, num_parts=2)
    other = make_job(tmp_path, num_parts=2, part=1, is_committer=False)
    writer.create_staging(lead)
    writer.mark_as_writing(lead)
    writer.mark_as_writing(other)
    assert writer.write_checkpoint(other) is None
    writer.write_checkpoint(lead)
    found = verify_checkpoint(tmp_path / "checkpoint_1")
    assert len(found.files) > 2
    assert dict(read_tensors(tmp_path / "checkpoint_1", found)).keys() == TENSORS.keys()


def test_failed_part_fails_the_save_and_keeps_the_earlier_checkpoint(tmp_path):
    save(tmp_path)
    lead = make_job(tmp_path, nonce="1" * 16, num_parts=2)
    writer.create_staging(lead)
    writer.mark_as_writing(lead)
    with pytest.raises(CheckpointError, match=r"part 1 of 2 .* could not be written"):
        writer.write_checkpoint(lead)
    writer.remove_staging(lead)
    verify_checkpoint(tmp_path / "checkpoint_1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "latest"]


def test_saving_again_exchanges_the_checkpoint(tmp_path):
    save(tmp_path)
    save(tmp_path, nonce="1" * 16, about={"num_updates": 8})
    assert read_manifest(tmp_path / "checkpoint_1").about == {"num_updates": 8}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "latest"]


def test_saving_again_works_without_an_atomic_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.sys, "platform", "other")
    save(tmp_path)
    save(tmp_path, nonce="1" * 16, about={"num_updates": 8})
    assert read_manifest(tmp_path / "checkpoint_1").about == {"num_updates": 8}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_1", "latest"]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_parts_are_contiguous_and_balanced(sizes, num_parts):
    named = {f"t{i}": size for i, size in enumerate(sizes)}
    parts = file_plan.partition_by_size(named, num_parts)
    assert [name for part in parts for name in part] == list(named)
    if sizes:
        heaviest = max(sum(named[name] for name in part) for part in parts)
        assert heaviest <= sum(sizes) / num_parts + max(sizes)
