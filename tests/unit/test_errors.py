"""Test the tree of errors, and the links in their messages."""

import ast
import inspect
import pickle
import re

import pytest

from headway import errors
from tests.house.tree_of_source import ROOT, list_modules, list_nodes

DOCUMENTS = "language_models.md#document-boundaries-in-attention"
ONE_RUN = "checkpoint_reference.md#one-run-at-a-time"
SPLIT = "pipeline_parallel.md#where-the-model-is-split"


def test_every_error_is_in_the_tree_under_its_parents():
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and kind.__name__ == name and kind.__module__ == errors.__name__
    }
    drawn = dict(re.findall(r"^\s+[|`\- ]+(\w+)(?:\s+\((\w+)\))?", errors.__doc__, re.MULTILINE))
    assert set(drawn) == set(kinds)
    for name, builtin in drawn.items():
        assert issubclass(kinds[name], errors.HeadwayError) or name in ("HeadwayWarning", "Preempted")
        if builtin:
            assert builtin in {base.__name__ for base in kinds[name].__mro__}
    assert issubclass(errors.HeadwayWarning, UserWarning)
    assert issubclass(errors.Preempted, SystemExit)


def test_unsupported_names_raise_a_common_error():
    for kind, python in ((errors.ImportNotServed, ImportError), (errors.AttributeNotServed, AttributeError)):
        assert issubclass(kind, errors.NotServed)
        assert issubclass(kind, python)
    assert issubclass(errors.NotServed, errors.UnsupportedError)


def test_message_ends_with_a_link():
    link = "(docs/troubleshooting.md#the-loss-is-nan)"
    error = errors.NonFiniteError("update 3: the loss was nan")
    assert str(error) == f"update 3: the loss was nan {link}"
    assert error.args == ("update 3: the loss was nan",)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(errors.NonFiniteError(str(error))) == str(error)  # one link, even if an error is quoted
    assert str(errors.ConfigError("no entry")) == "no entry"
    assert str(errors.NonFiniteError("nan (docs/non_finite.md)")) == "nan (docs/non_finite.md)"


def test_error_without_a_readable_table_has_no_link(monkeypatch, tmp_path):
    errors.read_links.cache_clear()
    monkeypatch.setattr(errors, "LINKS", str(tmp_path / "missing.json"))
    try:
        assert str(errors.NonFiniteError("the loss was nan")) == "the loss was nan"
    finally:
        errors.read_links.cache_clear()


@pytest.mark.parametrize(
    ("error", "link"),
    [
        (errors.LossError("backward() got a loss without a graph: ..."), "troubleshooting.md#the-loss-has-no-graph"),
        (errors.PrepareError("ranks have built different models: ..."), "troubleshooting.md#ranks-build-different-models"),
        (errors.UnsupportedError("'pp' called block 3 ... PipelineOptions(blocks=[...])"), SPLIT),
        (errors.StateError("... under pipeline parallelism a forward has one backward"), "pipeline_parallel.md#not-supported"),
        (errors.PrepareError("sequence_parallel=True: ..."), "tensor_parallel.md#sequence-parallelism-and-loss-parallelism"),
        (errors.ConfigError("Net has no tensor-parallel plan of its own"), "tensor_parallel.md#your-own-models"),
        (errors.PrepareError("Net cannot shard its sequences (context parallelism)"), "context_parallel.md#which-models"),
        (errors.PrepareError("Net has no experts that ep=2 could distribute"), "expert_parallel.md#which-models"),
        (errors.ConfigError("DeepSpeed's JSON contradicts the run: ..."), "deepspeed.md#the-json-configuration"),
        (errors.UnsupportedError("mixed_precision='fp8': ... float8 needs CUDA ..."), "float8.md#hardware"),
        (errors.UnsupportedError("microbatching='auto' does not work with tp"), "microbatching.md#limits"),
        (errors.PrepareError("ShardingOptions(units=...) names 'a'"), "fsdp.md#units"),
        (errors.PrepareError("Net was built on the meta device"), "fsdp.md#models-that-do-not-fit-in-one-process"),
        (errors.UnsupportedError("Rprop cannot train a sharded model"), "optimizers.md#how-an-optimizer-is-judged"),
        (errors.DeviceMapError("the model does not fit on ..."), "placement.md#placement"),
        (errors.UnsupportedError("the step cannot be traced: ..."), "forecast.md#what-it-cannot-see"),
        (errors.ObjectStoreError("the store did not answer"), "object_stores.md#when-something-fails"),
        (errors.PrepareError("Net ignores the boundaries of packed documents"), DOCUMENTS),
        (errors.CheckpointError("run is in use by another run. Two runs in one folder ..."), ONE_RUN),
        (errors.CheckpointError("5 tensors are missing"), None),
        (errors.ConfigError("keep_best='most'; allowed: 'max', 'min' or None"), None),
    ],
)  # fmt: skip
def test_message_links_to_the_section_that_explains_it(error, link):
    text = error.args[0]
    assert str(error) == (f"{text} (docs/{link})" if link else text)


def test_every_link_leads_to_a_heading():
    missing = []
    for target in {target for target, _, _ in errors.read_links()}:
        page, _, anchor = target.partition("#")
        file = ROOT / "docs" / page
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if file.exists() else []
        anchors = {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).lower()) for heading in headings}
        if not headings or (anchor and anchor not in anchors):
            missing.append(target)
    assert missing == []


def test_every_row_of_the_table_of_links_fits_a_message():
    texts = [
        node.value
        for file in list_modules("src") if file.name != "errors.py"
        for node in list_nodes(file) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]  # fmt: skip
    rows = errors.read_links()
    assert [part for _, _, part in rows if not any(part in text for text in texts)] == []
    assert len({(kind, part) for _, kind, part in rows}) == len(rows)


def test_every_class_in_the_table_of_links_is_an_error():
    kinds = {kind for _, kind, _ in errors.read_links()}
    assert [kind for kind in kinds if not issubclass(getattr(errors, kind, object), errors.HeadwayError)] == []
