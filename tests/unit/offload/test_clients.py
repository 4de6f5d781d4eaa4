"""Test small random transformers models, saved in shards: every placement computes the results of the whole model."""

import copy

import pytest
import torch

from headway import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from headway.errors import CheckpointError, ConfigError
from headway.offload.execution import Execution, undispatch_model
from headway.offload.placement.device_map import DeviceMap
from headway.offload.placement.storage_devices import Placement
from headway.offload.transport import HostTransport

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=3)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
                              decoder_start_token_id=0)
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=8, patch_size=4)
    ),
}  # fmt: skip


def run_model(name, model):
    ids = torch.arange(2, 8)[None]
    if name == "vit":
        return model(torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8)).logits
    return model(ids, **({"decoder_input_ids": ids} if name == "t5" else {})).logits


def generate_tokens(model):
    return model.generate(torch.arange(2, 8)[None], max_new_tokens=5, do_sample=False)


def save_model(name, folder):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.save_pretrained(folder, max_shard_size="8kB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    with init_empty_weights():
        empty = MODELS[name]().eval()
    return name, model, empty, folder


@pytest.fixture(scope="module", params=MODELS)
def client(request, tmp_path_factory):
    """Name, whole model, empty model and folder."""
    return save_model(request.param, tmp_path_factory.mktemp(request.param))


def alternate_devices(model):
    """Map modules to cpu, disk, cpu, disk and so on, as deep as modules are nested."""
    leaves = [name for name, module in model.named_modules() if next(module.children(), None) is None]
    owned = [n for n, _ in model.named_parameters(remove_duplicate=False) if n.rpartition(".")[0] not in leaves]
    owned += [n for n, _ in model.named_buffers() if n.rpartition(".")[0] not in leaves]
    return {name: ("cpu", "disk")[number % 2] for number, name in enumerate([*leaves, *owned])}


def test_every_placement_equals_the_whole_model(client, tmp_path):
    name, whole, empty, folder = client
    expected = run_model(name, whole)
    with torch.no_grad():
        expected_without_gradients = run_model(name, whole)
    expected_tokens = None if name == "vit" else generate_tokens(whole)
    for device_map in ("auto", {"": "cpu"}, {"": "disk"}, alternate_devices(empty)):
        model = load_checkpoint_and_dispatch(
            copy.deepcopy(empty), folder, device_map, offload_folder=tmp_path / str(len(device_map))
        )
        assert torch.equal(run_model(name, model), expected)
        with torch.no_grad():
            assert torch.equal(run_model(name, model), expected_without_gradients)
        if expected_tokens is not None:
            assert torch.equal(generate_tokens(model), expected_tokens)
            assert torch.equal(generate_tokens(model), expected_tokens)
        state = model.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in whole.state_dict().items())


def test_streamed_copies_equal_the_whole_model(client):
    name, whole, _, _ = client
    model = copy.deepcopy(whole)
    storage_devices = {
        key: "disk" for key, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    }
    Execution(
        model, Placement(DeviceMap({"": "disk"}), torch.device("cpu"), storage_devices), [], [], HostTransport()
    ).attach_hooks()
    assert torch.equal(run_model(name, model), run_model(name, whole))
    with torch.no_grad():
        assert torch.equal(run_model(name, model), run_model(name, whole))
    if name != "vit":
        assert torch.equal(generate_tokens(model), generate_tokens(whole))
    undispatch_model(model)
    assert torch.equal(run_model(name, dispatch_model(model, {"": "cpu"})), run_model(name, whole))


def test_separately_stored_experts_are_converted_by_rules_of_transformers(tmp_path):
    _, _, empty, folder = save_model("mixtral", tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="give offload_folder="):
        load_checkpoint_and_dispatch(copy.deepcopy(empty), folder, {"": "disk"})
    with init_empty_weights():
        fewer = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=2)
        )
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj: \[3, 48, 16\] float32 in the checkpoint"):
        load_checkpoint_and_dispatch(fewer, folder, {"": "cpu"})


def test_base_model_loads_the_weights_of_one_with_a_head(tmp_path):
    _, whole, _, folder = save_model("llama", tmp_path)
    with init_empty_weights():
        base = transformers.LlamaModel(whole.config).eval()
    load_checkpoint_and_dispatch(base, folder, {"": "disk"})
    ids = torch.arange(2, 8)[None]
    assert torch.equal(base(ids).last_hidden_state, whole.model(ids).last_hidden_state)


def test_code_of_the_documentation_runs_with_a_local_folder(tmp_path):
    _, whole, _, _ = save_model("mixtral", tmp_path)
    # fmt: off
    from transformers import AutoConfig, AutoModelForCausalLM

    from headway import init_empty_weights, load_checkpoint_and_dispatch

    config = AutoConfig.from_pretrained(tmp_path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)

    model = load_checkpoint_and_dispatch(
        model, checkpoint=str(tmp_path), device_map="auto", no_split_module_classes=["Block"]
    )
    # fmt: on
    assert torch.equal(run_model("mixtral", model.eval()), run_model("mixtral", whole))
