"""`torch_compile` and its backend and mode: the model is compiled, trains to the same weights, and trains twice."""

import pytest
import torch

from headway import TrainingArguments
from headway.errors import ConfigError
from headway.extras.compiling import is_compiled_module
from headway.trainer.builder import create_accelerator
from tests.unit.trainer.models import Net, losses, make, weights


def test_compiled_training_equals_the_eager_one(tmp_path):
    eager, compiled = make(tmp_path / "eager"), make(tmp_path / "compiled", torch_compile_backend="aot_eager")
    for trainer in (eager, compiled):
        trainer.train()
    assert is_compiled_module(compiled.model)
    assert not is_compiled_module(eager.model)
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-5)
    assert torch.allclose(weights(compiled.model), weights(eager.model), atol=1e-6)
    assert list(compiled.model.state_dict()) == list(Net().state_dict())
    eager.train()
    compiled.train()
    assert torch.allclose(weights(compiled.model), weights(eager.model), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "backend", "mode"),
    [
        ({"torch_compile": True}, "inductor", None),
        ({"torch_compile_mode": "max-autotune"}, "inductor", "max-autotune"),
        ({"torch_compile_backend": "eager"}, "eager", None),
        ({"torch_compile": False}, None, None),
    ],
)
def test_settings_reach_the_accelerator(given, backend, mode, tmp_path):
    args = TrainingArguments(tmp_path, use_cpu=True, **given)
    assert args.torch_compile == (backend is not None)
    plugin = create_accelerator(args)._facts.dynamo_plugin
    assert (plugin.backend.value.lower(), plugin.mode, plugin.compiles) == (
        backend or "no",
        mode or "default",
        backend is not None,
    )


@pytest.mark.parametrize("name", ["dynamo_backend", "dynamo_plugin"])
def test_two_settings_of_one_compiler_are_an_error(name, tmp_path):
    with pytest.raises(ConfigError, match=f"torch_compile and {name} in accelerator_config"):
        TrainingArguments(tmp_path, torch_compile=True, accelerator_config={name: "eager"})
