"""Test `headway estimate`: sizes, placements, throughput ceilings, training forecasts and errors for real model configs."""

import importlib.util
import json
import re
import sys

import pytest
import torch
import transformers

from headway import infer_auto_device_map
from headway.cli import estimate, main
from headway.common.text import parse_bytes
from headway.errors import ConfigError, DeviceMapError
from headway.offload.placement import bandwidth
from headway.offload.placement.workload import Workload
from headway.planning import inference
from headway.planning.inference import (
    Bandwidths,
    ModelSizes,
    can_generate,
    compute_ceiling,
    count_traffic,
    get_expert_share,
    measure_generation,
    measure_sizes,
)
from headway.planning.model_types import check_model_name
from headway.planning.sources import load_meta_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.fixture
def run(capsys):
    """Return a function that runs `headway estimate` and returns stdout, or stderr if an exit code is expected."""

    def run_command(*args, code=0):
        with pytest.raises(SystemExit) as exc_info:
            main.main(["estimate", *map(str, args)])
        said = capsys.readouterr()
        assert exc_info.value.code == code, said
        return said.out if code == 0 else said.err

    return run_command


@pytest.fixture
def folder(tmp_path):
    """Save the config of a small Llama model without weights, and return its folder."""
    config = transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def small(tmp_path):
    """Write the config of a model that is quickly traced, with short sequences, and return its folder."""
    few = {"num_hidden_layers": 1, "max_position_embeddings": 128}
    transformers.LlamaConfig(**SIZES | few, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return tmp_path


def make_bandwidths(*measures):
    """Return bandwidths in bytes per second. Defaults: 100 for memory, 10 to an accelerator, 1 from disk."""
    memory, copy, disk = measures or (100.0, 10.0, 1.0)
    return Bandwidths(["file"], lambda device: memory, lambda device: copy, lambda files: disk)


def measure_placed_sizes(model, max_memory, dtype="float32"):
    device_map = infer_auto_device_map(model, max_memory, ["LlamaDecoderLayer"], dtype)
    return ModelSizes(dtype, 0, 0, "", device_map, "", count_traffic(model, device_map, dtype))


def test_config_without_weights_gives_sizes_in_each_dtype(run, folder):
    output = run(folder)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    parameters = sum(p.numel() for p in model.parameters())
    num_bytes = 2 * parameters + sum(buffer.nbytes for buffer in model.buffers())
    assert f"LlamaForCausalLM: {parameters:,} parameters\nno weights in the folder" in output
    rows = {line.split()[0]: line for line in output.splitlines() if line.endswith("tokens/s")}
    assert list(rows) == ["float32", "bfloat16", "int8", "int4"]
    assert "model.layers.0" in rows["int4"]
    assert f"cpu {num_bytes / 1024:.1f} KiB" in rows["bfloat16"]
    assert 'device_map="auto" in bfloat16:\ndevice  units' in output
    assert "reading the stored weights" not in output
    # The ceiling is the measured bandwidth over the bytes read.
    read = parse_bytes(re.search(r"read for each token: (.*)", output)[1])
    measured = parse_bytes(re.search(r"main memory (\S+ \S+)/s", output)[1])
    rate = float(re.search(r"([\d.,]+) tokens/s", rows["bfloat16"])[1].replace(",", ""))
    assert rate == pytest.approx(measured / read, rel=0.05)  # printed with one decimal


def test_workload_adds_cache_and_logits_to_the_weights_of_a_checkpoint(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "_PIECE", 1 << 14)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).half().save_pretrained(tmp_path, max_shard_size="100kB")
    output = run(tmp_path, "--sequence", "64", "--batch-size", "3", "--dtype", "float16")
    assert re.search(r"stored: .* KiB in \d file\(s\), float16", output)
    cache = 2 * 2 * 3 * 64 * 64 * 2  # keys and values, layers, samples, tokens, width, bytes
    logits = 3 * 64 * 100 * 2
    assert re.search(rf"cpu +\d+ +\S+ KiB  {cache / 1024:.1f} KiB", output)
    assert f"cache: 512 B for each token of each sample; {cache / 1024:.1f} KiB for 3 samples of 64 tokens" in output
    assert f"logits of all these tokens: {logits / 1024:.1f} KiB, counted with the activations; 600 B if" in output
    assert 'device_map="auto" in float16' in output
    next(tmp_path.glob("model-00001-of-*.safetensors")).unlink()
    assert "shards are missing" in run(tmp_path, code=1)


def test_output_has_no_mode_and_no_exponents(run, folder):
    output = run(folder)
    assert "cache: 512 B for each token of each sample\n" in output
    assert "logits" not in output
    assert not re.search(r"\d[eE][+-]?\d", output)
    with_flag = run(folder, "--inference")  # accepted from earlier versions
    assert [line.split()[:1] for line in with_flag.splitlines()] == [line.split()[:1] for line in output.splitlines()]


REAL = {
    "grouped": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "sliding": transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=8),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=50),
}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_cache_size_equals_that_of_a_real_forward(name, batch_size):
    model = transformers.AutoModelForCausalLM.from_config(REAL[name]).eval()

    def measure_real_cache(num_tokens, num_samples=batch_size):
        with torch.no_grad():
            outputs = model(torch.zeros(num_samples, num_tokens, dtype=torch.long), use_cache=True)
        # Count storages. With a sliding window, the last keys are a view of the keys of the whole prompt.
        kept = [
            value
            for layer in outputs.past_key_values.layers
            for value in vars(layer).values()
            if torch.is_tensor(value)
        ]
        return sum(
            {x.data_ptr(): x.untyped_storage().nbytes() for x in kept if x.numel()}.values()
        ), outputs.logits.nbytes

    found = measure_generation(model, "float32", Workload(batch_size, 24))
    assert (found.cache, found.logits) == measure_real_cache(24)
    one, two = measure_real_cache(1, 1)[0], measure_real_cache(2, 1)[0]
    assert (found.per_sample, found.per_token) == (2 * one - two, two - one)
    assert found.last_logits == measure_real_cache(1)[1]


@pytest.mark.parametrize("name", ["grouped", "gpt2"])
def test_cache_size_equals_that_of_a_real_generation(name):
    """Compare with the DynamicCache that `generate()` returns. No other tensor of the forward counts as cache."""
    model = transformers.AutoModelForCausalLM.from_config(REAL[name]).eval()
    prompt = torch.zeros(2, 1, dtype=torch.long)
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, eos_token_id=None, **options)
    cache = made.past_key_values
    assert type(cache) is transformers.DynamicCache
    real = sum(each.nbytes for layer in cache.layers for each in (layer.keys, layer.values))
    found = measure_generation(model, "float32", Workload(2, 24))  # the last token is never an input
    assert (found.cache, found.per_sample) == (real, 0)
    assert found.last_logits == made.sequences.shape[0] * model.config.vocab_size * 4


def test_models_that_cannot_be_estimated_are_refused_with_a_reason(run, tmp_path, folder):
    assert "no folder with a config.json" in run(tmp_path / "none", code=2)
    assert "needs --sequence" in run(folder, "--batch_size", 2, code=2)
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    assert "transformers cannot build a model from its config.json" in run(folder, code=2)
    (folder / "config.json").write_text("[" * 200_000)
    assert "transformers cannot build a model from its config.json" in run(folder, code=2)


def test_code_in_the_folder_is_not_run(run, folder):
    content = json.loads((folder / "config.json").read_text())
    content |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "mine.py").write_text("import pathlib; pathlib.Path('ran').touch()\n")
    assert "transformers cannot build a" in run(folder, code=2)
    assert not list(folder.rglob("ran"))


def test_model_that_fits_nowhere_has_no_rate(folder, monkeypatch, run):
    def refuse(*args, **options):
        raise DeviceMapError("the largest layer fits nowhere")

    monkeypatch.setattr(inference, "resolve_device_map", refuse)
    output = run(folder)
    assert output.count("does not fit") == 4
    assert "no placement in bfloat16: the largest layer fits nowhere" in output


def test_workload_that_cannot_be_measured_raises_an_error(tmp_path):
    transformers.ViTConfig(hidden_size=64, architectures=["ViTModel"], num_attention_heads=4).save_pretrained(tmp_path)
    model = load_meta_model(tmp_path)
    assert not can_generate(model)
    with pytest.raises(DeviceMapError, match="could not be measured"):
        measure_sizes(model, "float32", Workload(1, 8))


def test_embedding_weights_count_only_if_tied_to_the_output():
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    tied = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    found = [sum(measure_sizes(model, "float32").traffic.values()) for model in (plain, tied)]
    assert found[0] == found[1] == 4 * sum(p.numel() for p in tied.parameters())


def test_only_the_chosen_experts_of_a_mixture_count():
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2)
    model = transformers.MixtralForCausalLM(config)
    assert get_expert_share(model) == 0.25
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    others = sum(p.nbytes for p in model.parameters()) - experts - model.model.embed_tokens.weight.nbytes
    assert sum(measure_sizes(model, "float32").traffic.values()) == others + experts // 4


def test_slowest_of_memory_link_and_disk_sets_the_ceiling():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 8}))
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    total = sum(p.nbytes for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    everything = measure_placed_sizes(model, {"cpu": "1GB"})
    assert compute_ceiling(everything, make_bandwidths()) == pytest.approx(100 / total)
    split = measure_placed_sizes(model, {0: 4 * layer, "cpu": "1GB"})
    host = split.traffic["cpu"]
    assert 0 < host < total
    assert compute_ceiling(split, make_bandwidths()) == pytest.approx(10 / host)
    assert compute_ceiling(split, make_bandwidths(100.0, 1e9, 1.0)) == pytest.approx(100 / total)
    disk = measure_placed_sizes(model, {"cpu": 3 * layer})
    kept = 3 * layer - disk.list_places()["cpu"]
    assert compute_ceiling(disk, make_bandwidths()) == pytest.approx(1 / (disk.traffic["disk"] - kept))
    assert compute_ceiling(disk, make_bandwidths(1e-3, 1.0, 1e9)) == pytest.approx(1e-3 / total)
    assert compute_ceiling(disk, make_bandwidths(100.0, 10.0, None)) is None


def test_bandwidths_are_measured(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(bandwidth._PIECE * 2 + 5))
    cpu = torch.device("cpu")
    assert bandwidth.measure_memory_bandwidth(cpu, 1) > 1e6
    assert bandwidth.measure_copy_bandwidth(cpu, 1) > 1e6
    found = bandwidth.measure_disk_bandwidth([file])
    assert found is None or found > 1e3  # None on a file system in memory
    assert bandwidth.measure_disk_bandwidth([file], most=100) is None


@pytest.mark.slow
def test_estimate_forecasts_for_an_absent_gpu(run, small):
    output = run(small, "--device", "a100-40gb", "--batch_size", 2, "--sequence", 32, "--activation-checkpointing")
    assert "a100-40gb, batch 2" in output
    assert "2 x 32 tokens" in output
    assert "optimizer state" in output
    assert "largest batch:" in output
    options = ("--device", "t4", "--sequence", 32, "--attention", "eager", "--budget", "2GiB", "--json")
    found = json.loads(run(small / "config.json", *options))
    assert found["device"] == "t4"
    assert found["fits"] is True


@pytest.mark.slow
def test_estimate_forecasts_one_rank_of_a_layout(run, small):
    options = ("--device", "t4", "--budget", "1GiB", "--sequence", 32, "--ranks", 8)
    assert "t4, rank 0 of 8 under fsdp, batch 1" in run(small, *options, "--strategy", "fsdp")
    found = json.loads(run(small, *options, "--strategy", "hsdp", "--machine_ranks", 2, "--json"))
    assert (found["strategy"], found["num_ranks"]) == ("hsdp", 8)
    assert found["split"]["gathered weights"] > 0
    assert "--strategy and --ranks go together" in run(small, *options, code=2)


def test_global_batch_size_compares_configurations_of_one_gpu(run, folder):
    options = ("--device", "t4", "--sequence", 32, "--global_batch_size", 64)
    assert "`headway plan` ranks layouts" in run(folder, *options, "--ranks", 8, "--strategy", "fsdp", code=2)
    # Any other option of a forecast is either one of its own or refused with a reason.
    own = {
        "global_batch_size",
        "device",
        "task",
        "loop",
        "budget",
        "sequence",
        "optimizer",
        "mixed_precision",
        "attention",
        "as_json",
    }
    others = {
        "folder",
        "arguments",
        "script",
        "module",
        "calibrate",
        "inference",
        "dtype",
        "activation_checkpointing",
        "help_all",
    }
    assert {each.name for each in estimate.estimate.params} == own | others | estimate.NOT_FOR_RANKING.keys()


@pytest.mark.matrix
def test_task_adapters_dtype_and_loop_change_the_forecast(run, folder):
    options = ("--device", "48GiB", "--sequence", 32, "--batch_size", 4, "--json")
    whole = json.loads(run(folder, *options))
    assert whole["device"] == "48gib"
    thin = json.loads(run(folder, *options, "--lora", "r=4"))
    assert thin["split"].get("optimizer state", 0) < whole["split"]["optimizer state"] / 4
    half = json.loads(run(folder, *options, "--dtype", "bfloat16"))
    assert half["split"]["weights"] < 0.6 * whole["split"]["weights"]
    kept, dropped = (json.loads(run(folder, *options, "--loop", name)) for name in ("plain", "loss_function"))
    assert kept == {**whole, "seconds": kept["seconds"]}
    assert dropped["allocated"] <= kept["allocated"]
    labeled = run(folder, *options[:-1], "--task", "token-classification")
    assert "ForTokenClassification" in labeled
    packed = json.loads(run(folder, *options, "--lora", "r=4", "--dtype", "int4"))
    assert packed["split"]["weights"] < thin["split"]["weights"]
    assert "int4 with --lora (QLoRA)" in run(folder, *options, "--dtype", "int4", code=2)
    assert "as in --lora r=16" in run(folder, *options, "--lora", "16x", code=2)
    assert "sequence_classification" in run(folder, *options, "--task", "parsing", code=2)


@pytest.mark.slow
def test_earlier_option_names_are_accepted_and_hidden(run, small):
    options = ("--device", "t4", "--budget", "1GiB", "--json")
    earlier = json.loads(run(small, *options, "--num_tokens", 32, "--recompute"))
    now = json.loads(run(small, *options, "--sequence", 32, "--activation_checkpointing"))
    assert {name: now[name] for name in ("allocated", "split")} == {
        name: earlier[name] for name in ("allocated", "split")
    }
    output = run("--help")
    assert "--sequence" in output
    assert not any(name in output for name in ("--num_tokens", "--recompute"))


@pytest.mark.slow
def test_page_is_written_and_the_longest_sequence_is_found(run, small, tmp_path):
    page = tmp_path / "forecast.html"
    options = ("--device", "t4", "--budget", "4GiB", "--sequence", 32, "--longest", "--page", page)
    output = run(small, *options)
    limit = json.loads((small / "config.json").read_text())["max_position_embeddings"]
    assert f"longest sequence in a batch of 1: {limit:,}" in output
    drawn = page.read_text()
    assert drawn.count("<svg") == 2
    assert "step 2 backward" in drawn
    assert "longest sequence" in drawn
    nowhere = tmp_path / "no" / "such.html"
    assert "name another file with --page" in run(small, "--device", "t4", "--sequence", 32, "--page", nowhere, code=2)


def test_training_options_and_inference_options_are_distinguished(run, folder):
    assert "add --device" in run(folder, "--mixed_precision", "bf16", code=2)
    assert "--dtype int8 is for running" in run(folder, "--device", "t4", "--dtype", "int8", code=2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["estimate", "lama", "--device", "h100"], "did you mean llama?"),
        (["plan", "berd", "--ranks", "8"], "did you mean bert?"),
        (["estimate", "llama"], "no folder with a config.json; .* such as llama, add --device"),
        (["estimate", "bert", "--json"], "error: --json is for training"),
        (["estimate", "--script", "train.py", "--device", "h100", "--lora", "r=1"], "error: --lora is decided by"),
        (["estimate", "bert", "--device", "h100", "--mixed_precision", "fp32"], "fp32 is called no"),
        (["plan", "bert", "--ranks", "8", "--mixed_precision", "BFloat16"], "BFloat16 is called bf16"),
    ],
)
def test_wrong_word_is_explained_before_torch_is_imported(line, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "headway.planning.sources", None)  # importing it now raises an error
    monkeypatch.setitem(sys.modules, "headway.planning.compare", None)
    monkeypatch.setitem(sys.modules, "headway.planning.plan", None)
    with pytest.raises(SystemExit) as exc_info:
        main.main(line)
    assert exc_info.value.code == 2
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["nosuchmodel", "mymodel", "notamodel", "unknown"])
def test_unknown_name_without_similar_model_gets_no_suggestion(name):
    with pytest.raises(ConfigError) as exc_info:
        check_model_name(name)
    assert "did you mean" not in str(exc_info.value)


def test_all_model_types_of_transformers_are_accepted(monkeypatch):
    for name in transformers.CONFIG_MAPPING:
        check_model_name(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_model_name("nosuchmodel")  # without transformers, find_source reports what is missing
