"""Test `headway merge --average` on checkpoints and safetensors folders. The expected values come from plain torch."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from headway import Accelerator
from headway.cli.main import group
from headway.errors import CheckpointError, ConfigError
from tests.distributed.ranks import run_ranks


def run_command(*words):
    return CliRunner().invoke(group, [str(word) for word in words], catch_exceptions=True)


def average(*words):
    """Run `headway merge --average`, raise its error, and return its result."""
    ran = run_command("merge", "--average", *words)
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    return ran


class Model(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.words = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.half = torch.nn.Linear(4, 4).bfloat16()
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight
        self.norm.running_mean.add_(seed)
        self.norm.num_batches_tracked.add_(10 * seed)


def save_checkpoints(folder, seeds=(1, 2, 3)):
    """Save one checkpoint of `save_state` per seed, and return their paths and the models' state dicts."""
    places, states = [], []
    for seed in seeds:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(Model(seed))
        places.append(folder / f"checkpoint_{seed}")
        accelerator.save_state(places[-1])
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        accelerator.free_memory()
    return places, states


def compute_mean(values, weights):
    """Return the weighted mean in float64, rounded to the dtype of the values."""
    return (sum(w * v.double() for w, v in zip(weights, values)) / sum(weights)).to(values[0].dtype)


def check_close(found, expected):
    """Compare averages. In bf16, two correct averages can differ in the last bit."""
    assert found.dtype == expected.dtype
    rtol = 2**-7 if found.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("coefficients", [None, (2, 1, 5)])
def test_average_of_checkpoints_equals_the_mean_in_plain_torch(tmp_path, coefficients):
    places, states = save_checkpoints(tmp_path)
    words = [] if coefficients is None else ["--coefficients", ",".join(map(str, coefficients))]
    ran = average(*places, tmp_path / "soup", *words)
    assert ran.stdout.strip() == str(tmp_path / "soup" / "model.safetensors")
    found = load_file(tmp_path / "soup" / "model.safetensors")
    assert set(states[0]) - set(found) == {"head.weight"}  # tied, as after a merge of one checkpoint
    for name, value in found.items():
        values = [state[name] for state in states]
        if value.is_floating_point():
            check_close(value, compute_mean(values, coefficients or (1, 1, 1)))
        else:
            assert torch.equal(value, values[-1])
    assert found["norm.num_batches_tracked"].item() == 30
    assert (
        f"not averaged, but taken from {places[-1]}, because they are integers: norm.num_batches_tracked" in ran.stderr
    )
    assert "update_bn: norm.running_mean, norm.running_var" in ran.stderr


def test_equal_checkpoints_give_the_same_bits(tmp_path):
    tensors = {"w": torch.randn(1000), "mask": torch.tensor([0.0, -torch.inf]), "f8": torch.randn(50).to(torch.float8_e4m3fn),
               "edges": torch.tensor([1e-45, 3.4e38, -0.0, torch.inf]),
               "d": torch.randn(5, dtype=torch.float64), "c": torch.randn(3, dtype=torch.complex64), "b": torch.tensor([[True]]),
               "empty": torch.zeros(0, 2)}  # fmt: skip
    for name in "abc":
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    ran = average(*(tmp_path / name for name in "abc"), tmp_path / "out", "--coefficients", "0.1,0.2,0.7")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in tensors)
    assert "not averaged" not in ran.stderr


def test_bf16_is_accumulated_in_float32(tmp_path):
    # In bf16, 256 + 1 is 256: a sum in bf16 would lose the ones.
    values = [torch.full((4,), value, dtype=torch.bfloat16) for value in (256.0, *[1.0] * 15)]
    for number, value in enumerate(values):
        save_file({"w": value}, tmp_path / f"{number}.safetensors")
    average(*(tmp_path / f"{number}.safetensors" for number in range(16)), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert torch.equal(found, torch.full((4,), 271 / 16).bfloat16())


def average_tensors(folder, tensors, coefficients=None):
    """Save each tensor as a checkpoint, and return the average of these checkpoints."""
    places = [folder / f"{number}.safetensors" for number in range(len(tensors))]
    for place, tensor in zip(places, tensors):
        save_file({"w": tensor}, place)
    average(*places, folder / "out.safetensors", *(["--coefficients", coefficients] if coefficients else []))
    return load_file(folder / "out.safetensors" / "model.safetensors")["w"]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_infinite_and_large_values_are_averaged_in_any_order(tmp_path, order, dtype):
    inf = torch.inf
    largest = torch.finfo(dtype).max
    rows = [[-inf, inf, largest, 1.0], [0.0, -2.0, -largest, 2.0], [0.0, inf, 0.0, 6.0]]
    expected = torch.tensor([-inf, inf, 0.0, 3.0])
    tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    if dtype.is_complex:  # the imaginary parts stay finite where the real parts are infinite
        tensors = [torch.complex(tensor, torch.full_like(tensor, number)) for number, tensor in enumerate(tensors)]
    found = average_tensors(tmp_path, [tensors[number].to(dtype) for number in order])
    if dtype.is_complex:
        torch.testing.assert_close(found.imag, torch.ones(4))
        found = found.real
    torch.testing.assert_close(found[[0, 1, 3]], expected[[0, 1, 3]].to(found.dtype))
    assert abs(found[2].item()) <= largest * torch.finfo(found.dtype).eps


def test_weights_of_large_values(tmp_path):
    tensors = [torch.tensor([-3e38, 3e38]), torch.tensor([3e38, -3e38])]
    found = average_tensors(tmp_path, tensors, "1,9")
    torch.testing.assert_close(found, torch.tensor([2.4e38, -2.4e38]))


def test_opposite_infinities_have_no_average(tmp_path):
    with pytest.raises(CheckpointError, match="w contains inf in one checkpoint and -inf in another"):
        average_tensors(tmp_path, [torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]), torch.ones(2)])
    assert not list(tmp_path.glob("out.safetensors/*"))


def test_sources_of_different_kinds(tmp_path):
    """A Headway checkpoint, sharded safetensors, a folder of torch.distributed.checkpoint, and a pickled file."""
    places, states = save_checkpoints(tmp_path, (1,))
    others = [Model(seed).state_dict() for seed in (2, 3, 4)]
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    names = [name for name in others[0] if name != "head.weight"]
    weight_map = {}
    for number, part in enumerate((names[:3], names[3:])):
        save_file({name: others[0][name] for name in part}, sharded / f"model-0000{number + 1}-of-00002.safetensors")
        weight_map |= dict.fromkeys(part, f"model-0000{number + 1}-of-00002.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (sharded / "config.json").write_text("{}")
    torch.distributed.checkpoint.save(
        {name: others[1][name] for name in names}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    torch.save({name: others[2][name] for name in names}, tmp_path / "weights.bin")
    average(*places, tmp_path / "dcp", tmp_path / "weights.bin", sharded, tmp_path / "out", "--max_shard_size", "150B")
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(path)
    assert set(found) == set(names)
    for name in names:
        values = [states[0][name], others[1][name], others[2][name], others[0][name]]
        expected = compute_mean(values, (1, 1, 1, 1)) if values[0].is_floating_point() else values[-1]
        check_close(found[name], expected)
    assert (tmp_path / "out" / "config.json").read_text() == "{}"  # of the last source
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_a_tied_name_that_another_checkpoint_stores_is_averaged(tmp_path):
    places, states = save_checkpoints(tmp_path, (1,))
    untied = {name: value.clone() for name, value in Model(2).state_dict().items()}
    untied["head.weight"] = torch.randn(6, 4)
    save_file(untied, tmp_path / "untied.safetensors")
    average(*places, tmp_path / "untied.safetensors", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, other in (("head.weight", untied["head.weight"]), ("words.weight", untied["words.weight"])):
        torch.testing.assert_close(found[name], (states[0]["words.weight"] + other) / 2)


def test_a_nan_a_shape_a_name_and_a_dtype(tmp_path):
    cases = {
        "first": {"w": torch.ones(2, 2), "i": torch.tensor(1)},
        "nan": {"w": torch.tensor([[1, torch.nan], [1, 1]]), "i": torch.tensor(1)},
        "shape": {"w": torch.ones(2, 3), "i": torch.tensor(1)},
        "name": {"w": torch.ones(2, 2), "j": torch.tensor(1)},
        "dtype": {"w": torch.ones(2, 2, dtype=torch.int64), "i": torch.tensor(1)},
        "half": {"w": 2 * torch.ones(2, 2, dtype=torch.bfloat16), "i": torch.tensor(1)},
    }
    for name, tensors in cases.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    messages = {
        "nan": "w in .*nan contains NaN; leave this checkpoint out",
        "shape": r"w has the shapes \[2, 2\] and \[2, 3\] in the checkpoints",
        "name": "different tensors, so they cannot be averaged; only in .*first: i; only in .*name: j",
        "dtype": "w has the dtypes torch.float32 and torch.int64",
    }
    for name, message in messages.items():
        with pytest.raises(CheckpointError, match=message):
            average(tmp_path / "first", tmp_path / name, tmp_path / "out")
        assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True
    average(tmp_path / "first", tmp_path / "half", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.full((2, 2), 1.5))
    average(tmp_path / "first", tmp_path / "nan", tmp_path / "zero", "--coefficients", "1,0")  # not read


def test_quantized_weights_are_refused(tmp_path):
    for name in "ab":
        save_file({"q": torch.randint(-9, 9, (4, 4), dtype=torch.int8)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        CheckpointError, match=r"q has integers of shape \[4, 4\] that differ .*before the quantization"
    ):
        average(tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "out")


def test_adapters_are_averaged_with_a_note(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file(
            {"q.lora_A.weight": torch.ones(1, 2), "q.lora_B.weight": torch.ones(2, 1)},
            tmp_path / name / "adapter_model.safetensors",
        )
    ran = average(tmp_path / "a", tmp_path / "b", tmp_path / "out")
    assert "the average of LoRA adapters is not the average of the models" in ran.stderr
    assert "q.lora_A.weight, q.lora_B.weight" in ran.stderr


def test_wrong_commands(tmp_path):
    places, _ = save_checkpoints(tmp_path, (1, 2))
    cases = [
        ((*places, tmp_path / "out"), "merge got 2 checkpoints .* or --average"),
        ((places[0], tmp_path / "out", "--coefficients", "1"), "--coefficients needs --average"),
        ((places[0], tmp_path / "out", "--average"), "at least two checkpoints, not 1"),
        ((*places, tmp_path / "out", "--average", "--coefficients", "1"), "1 coefficients for 2 checkpoints"),
        ((*places, tmp_path / "out", "--average", "--coefficients", "1,x"), "give one number per checkpoint"),
        ((*places, tmp_path / "out", "--average", "--coefficients", "1,-1"), "give numbers from 0"),
        ((*places, tmp_path / "out", "--average", "--coefficients", "0,0"), "give numbers from 0"),
        ((places[0], *places, tmp_path / "out", "--average"), "is given twice"),
        ((places[0], places[0] / ".." / places[0].name, tmp_path / "out", "--average"), "is given twice"),
        ((*places, tmp_path / "out", "--average", "--model", "3"), "contains the models 0"),
    ]
    for words, message in cases:
        with pytest.raises(ConfigError, match=message):
            raise run_command("merge", *words).exception
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        average(places[0], tmp_path / "empty", tmp_path / "out")
    path = places[1] / "model-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="is damaged"):
        average(*places, tmp_path / "out")


def save_sharded(layout, folder, seeds):
    for seed in seeds:
        accelerator = Accelerator(cpu=True, strategy=layout)
        torch.manual_seed(seed)
        accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)))
        accelerator.save_state(f"{folder}/{layout}_{seed}")
        accelerator.free_memory()


@pytest.mark.slow
def test_checkpoints_of_different_layouts(tmp_path):
    run_ranks(save_sharded, 2, "fsdp", str(tmp_path), (1, 2))
    save_sharded("ddp", str(tmp_path), (3,))
    average(tmp_path / "fsdp_1", tmp_path / "ddp_3", tmp_path / "fsdp_2", tmp_path / "out")
    states = []
    for seed in (1, 3, 2):
        torch.manual_seed(seed)
        states.append(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).state_dict())
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(states[0])
    for name, value in found.items():
        torch.testing.assert_close(value, compute_mean([state[name] for state in states], (1, 1, 1)))
