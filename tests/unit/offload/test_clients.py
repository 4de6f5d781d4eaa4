"""transformers' models, small and random, saved in shards: every placement computes what the undivided model does."""

import copy

import pytest
import torch

from headway import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from headway.errors import CheckpointError, ConfigError
from headway.offload.execution import Execution, undispatch_model
from headway.offload.placement.device_map import DeviceMap
from headway.offload.placement.homes import Placement
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


def run(name, model):
    ids = torch.arange(2, 8)[None]
    if name == "vit":
        return model(torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8)).logits
    return model(ids, **({"decoder_input_ids": ids} if name == "t5" else {})).logits


def tokens(model):
    return model.generate(torch.arange(2, 8)[None], max_new_tokens=5, do_sample=False)


def saved(name, folder):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.save_pretrained(folder, max_shard_size="8kB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    with init_empty_weights():
        empty = MODELS[name]().eval()
    return name, model, empty, folder


@pytest.fixture(scope="module", params=MODELS)
def client(request, tmp_path_factory):
    return saved(request.param, tmp_path_factory.mktemp(request.param))


def alternating(model):
    """cpu, disk, cpu, disk ... as deep as modules go."""
    leaves = [name for name, module in model.named_modules() if next(module.children(), None) is None]
    owned = [n for n, _ in model.named_parameters(remove_duplicate=False) if n.rpartition(".")[0] not in leaves]
    owned += [n for n, _ in model.named_buffers() if n.rpartition(".")[0] not in leaves]
    return {name: ("cpu", "disk")[number % 2] for number, name in enumerate([*leaves, *owned])}


def test_every_placement_computes_what_the_undivided_model_does(client, tmp_path):
    name, whole, empty, folder = client
    wanted = run(name, whole)
    with torch.no_grad():
        wanted_without_gradients = run(name, whole)
    wanted_tokens = None if name == "vit" else tokens(whole)
    for device_map in ("auto", {"": "cpu"}, {"": "disk"}, alternating(empty)):
        model = load_checkpoint_and_dispatch(
            copy.deepcopy(empty), folder, device_map, offload_folder=tmp_path / str(len(device_map))
        )
        assert torch.equal(run(name, model), wanted)
        with torch.no_grad():
            assert torch.equal(run(name, model), wanted_without_gradients)
        if wanted_tokens is not None:
            assert torch.equal(tokens(model), wanted_tokens)
            assert torch.equal(tokens(model), wanted_tokens)
        state = model.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in whole.state_dict().items())


def test_streamed_copies_compute_what_the_undivided_model_does(client):
    name, whole, _, _ = client
    model = copy.deepcopy(whole)
    homes = {key: "disk" for key, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}
    Execution(
        model, Placement(DeviceMap({"": "disk"}), torch.device("cpu"), homes), [], [], HostTransport()
    ).attach_hooks()
    assert torch.equal(run(name, model), run(name, whole))
    with torch.no_grad():
        assert torch.equal(run(name, model), run(name, whole))
    if name != "vit":
        assert torch.equal(tokens(model), tokens(whole))
    undispatch_model(model)
    assert torch.equal(run(name, dispatch_model(model, {"": "cpu"})), run(name, whole))


def test_experts_that_are_stored_apart_are_converted_by_transformers_own_rules(tmp_path):
    _, _, empty, folder = saved("mixtral", tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="give offload_folder="):
        load_checkpoint_and_dispatch(copy.deepcopy(empty), folder, {"": "disk"})
    with init_empty_weights():
        fewer = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=2)
        )
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj: \[3, 48, 16\] float32 in the checkpoint"):
        load_checkpoint_and_dispatch(fewer, folder, {"": "cpu"})


def test_a_base_model_takes_the_weights_of_one_with_a_head(tmp_path):
    _, whole, _, folder = saved("llama", tmp_path)
    with init_empty_weights():
        base = transformers.LlamaModel(whole.config).eval()
    load_checkpoint_and_dispatch(base, folder, {"": "disk"})
    ids = torch.arange(2, 8)[None]
    assert torch.equal(base(ids).last_hidden_state, whole.model(ids).last_hidden_state)


def test_the_documents_own_lines_with_a_local_folder(tmp_path):
    _, whole, _, _ = saved("mixtral", tmp_path)
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
    assert torch.equal(run("mixtral", model.eval()), run("mixtral", whole))
