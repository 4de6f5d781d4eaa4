"""Test `PowerDecay` and `reconstruct_average` against averages of the whole trajectory, computed independently."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from headway import Accelerator, ExponentialMovingAverage, PowerDecay, reconstruct_average
from headway.errors import CheckpointError, ConfigError, StateError

NUM_UPDATES = 60
WIDTHS = {"narrow": 0.05, "wide": 0.1}


def find_gamma(sigma_rel: float) -> float:
    """Solve the paper's relation between width and exponent: (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) = sigma_rel^2."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        is_wider = (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > sigma_rel**2
        low, high = (middle, high) if is_wider else (low, middle)
    return low


def average_by_hand(states: list[torch.Tensor], sigma_rel: float) -> torch.Tensor:
    """Average in float64. The weight of each state is the integral of the power function over its step."""
    power = find_gamma(sigma_rel) + 1
    t = len(states)
    weights = [(k / t) ** power - ((k - 1) / t) ** power for k in range(1, t + 1)]
    assert sum(weights) == pytest.approx(1)
    return sum(weight * state.double() for weight, state in zip(weights, states))  # type: ignore[return-value]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    net[0].bias.requires_grad_(False)
    return net


def train(
    folder: Path, kind: str = "snapshots", interval: int = 5, **options: Any
) -> tuple[list[Path], dict[str, list[torch.Tensor]]]:
    """Train, and save snapshots or checkpoints at regular intervals.

    Returns:
        Pair of (folders of the snapshots, states of each trained tensor after each update).

    """
    accelerator = Accelerator(cpu=True)
    net = make_model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    averages = [
        ExponentialMovingAverage(model, decay=PowerDecay(width), name=name, **options) for name, width in WIDTHS.items()
    ]
    states: dict[str, list[torch.Tensor]] = {}
    places = []
    for number in range(1, NUM_UPDATES + 1):
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        accelerator.backward((model(data) - data[:, :2]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                states.setdefault(name, []).append(parameter.detach().clone())
        if number % interval == 0 and kind == "checkpoints":
            places.append(folder / f"checkpoint-{number}")
            accelerator.save_state(places[-1])
        elif number % interval == 0:
            for average in averages:
                places.append(folder / f"{average.name}-{number}")
                average.save_snapshot(places[-1])
    accelerator.end_training()
    return places, states


def list_errors(found: dict[str, torch.Tensor], states: dict[str, list[torch.Tensor]], width: float) -> list[float]:
    """Return the largest error of each tensor, relative to each weight's standard deviation over the updates."""
    assert found.keys() == states.keys()
    errors = []
    for name, trajectory in states.items():
        expected = average_by_hand(trajectory, width)
        spread = torch.stack(trajectory).double().std(dim=0, correction=0)
        errors.append(float(((found[name].double() - expected).abs() / spread).max()))
    return errors


def test_widths_equal_those_of_the_paper() -> None:
    assert PowerDecay(0.05).gamma == pytest.approx(16.97, abs=0.01)
    assert PowerDecay(0.1).gamma == pytest.approx(6.94, abs=0.01)
    assert PowerDecay(1 / math.sqrt(12)).gamma == pytest.approx(0, abs=1e-9)
    for sigma_rel in (0.01, 0.05, 0.2, 0.2886):
        gamma = PowerDecay(sigma_rel).gamma
        assert gamma == pytest.approx(find_gamma(sigma_rel))
        assert [PowerDecay(sigma_rel)(n) for n in (1, 2, 9)] == pytest.approx(
            [(1 - 1 / n) ** (gamma + 1) for n in (1, 2, 9)]
        )


@pytest.mark.parametrize("sigma_rel", [0, -0.1, 0.3, math.nan, True, "0.1"])
def test_invalid_widths_are_refused(sigma_rel: Any) -> None:
    with pytest.raises(ConfigError, match=r"at most 0\.2886"):
        PowerDecay(sigma_rel)


@pytest.mark.parametrize(
    ("kind", "options"), [("snapshots", {}), ("checkpoints", {}), ("snapshots", {"dtype": torch.float64})]
)
def test_any_width_is_reconstructed_within_the_bound(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    places, states = train(tmp_path, kind, **options)
    for width in (0.05, 0.07, 0.1, 0.15, 0.25):
        result = reconstruct_average(places, tmp_path / "result", width)
        assert result.num_averages == 24
        found = load_file(result.files[0])
        assert {each.dtype for each in found.values()} == {options.get("dtype", torch.float32)}
        errors = list_errors(found, states, width)
        assert max(errors) <= result.error + 1e-5  # rounding
        if width in WIDTHS.values():
            assert result.error < 1e-6
    assert 0 < reconstruct_average(places, tmp_path / "result", 0.15).error < 0.05


def test_bound_is_sharp(tmp_path: Path) -> None:
    """A trajectory that is proportional to the difference of the profiles has exactly this error."""
    from headway.extras.power_average import Profile, solve_coefficients

    profiles, target = [Profile(0.1, t) for t in (50, 75, 100)], Profile(0.2, 100)
    coefficients, error = solve_coefficients(profiles, target)
    # profiles in steps of 1/50, whose bound approaches that of the continuous profiles
    parts = torch.arange(5001, dtype=torch.float64) / 50

    def list_weights(profile: Profile) -> torch.Tensor:
        power = find_gamma(profile.sigma_rel) + 1
        return ((parts / profile.num_averaged).clamp(max=1) ** power).diff()

    difference = list_weights(target) - sum(x * list_weights(each) for x, each in zip(coefficients, profiles))
    assert sum(coefficients) == pytest.approx(1)
    assert float((difference * difference).sum() / difference.std(correction=0)) == pytest.approx(error, rel=1e-3)
    for other in ([0.2, 0.3, 0.5], [0.0, 0.0, 1.0], [coefficients[0] + 0.01, coefficients[1] - 0.01, coefficients[2]]):
        worse = list_weights(target) - sum(x * list_weights(each) for x, each in zip(other, profiles))
        assert worse.norm() > difference.norm()


def test_infinite_elements_are_those_of_the_newest_snapshot(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))
    average = ExponentialMovingAverage(model, PowerDecay(0.1), buffers="average")
    places = []
    for number in range(1, 9):
        average.update()
        if number % 2 == 0:
            places.append(tmp_path / str(number))
            average.save_snapshot(places[-1])
    result = reconstruct_average(places, tmp_path / "result", 0.2)
    assert load_file(result.files[0])["mask"].tolist() == [[0.0, -math.inf], [0.0, 0.0]]


def test_average_of_an_earlier_step_uses_no_later_snapshot(tmp_path: Path) -> None:
    places, states = train(tmp_path)
    result = reconstruct_average(places, tmp_path / "result", 0.12, num_averaged=45)
    assert result.num_averages == 18
    errors = list_errors(load_file(result.files[0]), {name: each[:45] for name, each in states.items()}, 0.12)
    assert max(errors) <= result.error + 1e-5


def test_only_averaging_steps_count(tmp_path: Path) -> None:
    places, states = train(tmp_path, update_after=10, every=2)
    result = reconstruct_average(places, tmp_path / "result", 0.08)
    averaged = {name: each[11::2] for name, each in states.items()}
    assert len(averaged["2.weight"]) == 25
    assert max(list_errors(load_file(result.files[0]), averaged, 0.08)) <= result.error + 1e-5


def test_result_is_split_and_converted(tmp_path: Path) -> None:
    places, _ = train(tmp_path, interval=30)
    whole = load_file(reconstruct_average(places, tmp_path / "whole", 0.1).files[0])
    result = reconstruct_average(places, tmp_path / "parts", 0.1, dtype=torch.bfloat16, max_shard_size=16)
    assert [each.name for each in result.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    parts = {name: value for file in result.files[:-1] for name, value in load_file(file).items()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], value.bfloat16()) for name, value in whole.items())


def test_resumed_run_saves_the_same_averages(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net := make_model(), torch.optim.SGD(net.parameters(), lr=0.1))
    ema = ExponentialMovingAverage(model, decay=PowerDecay(0.1))

    def update_weights() -> None:
        accelerator.backward(model(torch.ones(1, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    update_weights()
    accelerator.save_state(tmp_path / "saved")
    update_weights()
    straight = {name: values.clone() for name, values in ema.state_dict()["average"].items()}
    accelerator.load_state(tmp_path / "saved")
    update_weights()
    assert all(torch.equal(values, straight[name]) for name, values in ema.state_dict()["average"].items())
    state = ema.state_dict()
    for key, value in (("sigma_rel", 0.05), ("every", 2), ("sigma_rel", None)):
        with pytest.raises(StateError, match="Create it with the settings of the saved run"):
            ema.load_state_dict({**state, key: value})


# -------------------------------------------------------------------- errors


def test_average_with_another_decay_has_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save_model\(model, folder, weights='ema'\)"):
        ExponentialMovingAverage(make_model(), decay=0.9).save_snapshot(tmp_path / "one")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    ExponentialMovingAverage(model, decay=0.9)
    accelerator.save_state(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="contains no average with a power-function decay"):
        reconstruct_average([tmp_path / "checkpoint"], tmp_path / "result", 0.1)


def test_snapshots_that_cannot_be_combined_are_named(tmp_path: Path) -> None:
    def write_snapshot(name: str, net: nn.Module, num_updates: int = 2, **options: Any) -> Path:
        ema = ExponentialMovingAverage(net, decay=PowerDecay(0.1), name=name, **options)
        for _ in range(num_updates):
            ema.update()
        ema.save_snapshot(tmp_path / name)
        return tmp_path / name

    one = write_snapshot("one", make_model())
    for other, message in (
        (write_snapshot("other", make_model(), every=2), "'other' in .*other has every=2, and 'one' in .*one 1"),
        (write_snapshot("deeper", nn.Linear(4, 3)), "differ in the tensors"),
        (tmp_path / "absent", "neither a checkpoint nor a snapshot"),
    ):
        with pytest.raises(ConfigError, match=message):
            reconstruct_average([one, other], tmp_path / "result", 0.1)
    with pytest.raises(ConfigError, match="no averaging step"):
        reconstruct_average([write_snapshot("early", make_model(), update_after=5)], tmp_path / "result", 0.1)
    with pytest.raises(ConfigError, match="allow 1 to 2"):
        reconstruct_average([one], tmp_path / "result", 0.1, num_averaged=3)
    with pytest.raises(ConfigError, match="first snapshot is that of averaging step 2"):
        reconstruct_average([one], tmp_path / "result", 0.1, num_averaged=1)
    with pytest.raises(ConfigError, match="is one of the snapshots"):
        reconstruct_average([one], one, 0.1)
    with pytest.raises(ConfigError, match="contains neither checkpoints nor snapshots"):
        reconstruct_average(one / "nothing", tmp_path / "result", 0.1)
    assert not (tmp_path / "result").exists()


def test_damaged_file_is_named(tmp_path: Path) -> None:
    places, _ = train(tmp_path, "checkpoints", interval=30)
    file = next(places[0].glob("custom*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=file.name):
        reconstruct_average(places, tmp_path / "result", 0.1)
    ExponentialMovingAverage(make_model(), decay=PowerDecay(0.1)).save_snapshot(tmp_path / "one")
    described = json.loads((tmp_path / "one" / "average.json").read_text())
    (tmp_path / "one" / "average.json").write_text(json.dumps({**described, "num_averaged": "many"}))
    with pytest.raises(CheckpointError, match="damaged"):
        reconstruct_average([tmp_path / "one"], tmp_path / "result", 0.1)
    (tmp_path / "one" / "average.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        reconstruct_average([tmp_path / "one"], tmp_path / "result", 0.1)
