"""Test `ExponentialMovingAverage` in one process: which updates count, what is averaged, and swapped weights."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headway import Accelerator, ExponentialMovingAverage, GradScalerKwargs, ProjectConfiguration, SpikePolicy
from headway.errors import CheckpointError, ConfigError, StateError
from headway.extras import average_exchange


def build_training(**settings: Any) -> tuple[Accelerator, nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **settings)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    return accelerator, model, optimizer


def update_weights(accelerator: Accelerator, model: nn.Module, *optimizers: Any, scale: float = 1.0) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((2, 4), scale)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def read_weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def read_average(ema: ExponentialMovingAverage) -> list[torch.Tensor]:
    return [values.clone() for values in ema.state_dict()["average"].values()]


def mix_weights(old: list[torch.Tensor], new: list[torch.Tensor], decay: float) -> list[torch.Tensor]:
    return [decay * one + (1 - decay) * other for one, other in zip(old, new)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], **more: float) -> None:
    torch.testing.assert_close(found, expected, **({"rtol": 1e-5, "atol": 1e-6} | more))


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert_equal(found, expected, rtol=0.0, atol=0.0)


# -------------------------------------------------------------------- which updates count, and by how much


@pytest.mark.parametrize(
    ("options", "decays"),
    [
        ({"decay": 0.5}, [0.5] * 6),
        ({"decay": 0.9, "warmup": True}, [2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16]),
        ({"decay": 0.3, "warmup": True}, [2 / 11, 3 / 12, 0.3, 0.3, 0.3, 0.3]),
        ({"decay": "mean"}, [0, 1 / 2, 2 / 3, 3 / 4, 4 / 5, 5 / 6]),
        ({"decay": lambda number: 1 - 1 / number}, [0, 1 / 2, 2 / 3, 3 / 4, 4 / 5, 5 / 6]),
        ({"decay": 0.5, "update_after": 2}, [0, 0, 0.5, 0.5, 0.5, 0.5]),
        ({"decay": 0.5, "every": 2}, [1, 0.5, 1, 0.5, 1, 0.5]),
        ({"decay": "mean", "update_after": 1, "every": 2}, [0, 1, 0, 1, 0.5, 1]),
    ],
)
@pytest.mark.parametrize("is_called", [False, True])
def test_each_update_is_averaged_once(options: dict[str, Any], decays: list[float], is_called: bool) -> None:
    accelerator, model, optimizer = build_training(gradient_accumulation_steps=2)
    ema = ExponentialMovingAverage(model, **options)
    expected = read_weights(model)
    for decay in decays:
        for _ in range(2):  # a window of two micro-batches
            update_weights(accelerator, model, optimizer)
            if is_called:  # as in timm and diffusers, in each micro-batch
                ema.update()
        expected = mix_weights(expected, read_weights(model), decay)
        assert_equal(read_average(ema), expected)
    assert ema.num_updates == 6


def test_average_equals_torchs_average_bit_for_bit() -> None:
    accelerator, model, optimizer = build_training()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.n_averaged += 1  # torch begins with the weights after the first update, and Headway with the initial ones
    ema = ExponentialMovingAverage(model, decay=0.9)
    for _ in range(4):
        update_weights(accelerator, model, optimizer)
        average.update_parameters(model)
    assert_same_bits(read_average(ema), read_weights(average.module))


@pytest.mark.parametrize("settings", [{"on_non_finite": "skip"}, {"mixed_precision": "fp16"}])
def test_skipped_update_does_not_count(settings: dict[str, Any]) -> None:
    handlers = [GradScalerKwargs(init_scale=4.0)] if "mixed_precision" in settings else []
    accelerator, model, optimizer = build_training(kwargs_handlers=handlers, **settings)
    ema = ExponentialMovingAverage(model, decay=0.5)
    expected = mix_weights(read_weights(model), [torch.zeros(())] * 4, 1.0)
    for number in range(4):
        update_weights(accelerator, model, optimizer, scale=float("inf") if number == 1 else 1.0)
        ema.update()
        if number != 1:
            expected = mix_weights(expected, read_weights(model), 0.5)
    assert ema.num_updates == accelerator.num_updates == 3
    assert_equal(read_average(ema), expected)


@pytest.mark.parametrize("is_function", [False, True])
def test_batch_that_runs_again_counts_once(is_function: bool) -> None:
    accelerator, model, optimizer = build_training(microbatching="auto")
    ema = ExponentialMovingAverage(model, decay=0.5)
    expected = read_weights(model)
    failures = iter([False, True, False, False, True] + [False] * 20)

    def compute_loss(rows: torch.Tensor) -> torch.Tensor:
        if next(failures):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(rows).square().mean()

    for _ in range(3):
        rows = torch.ones(4, 4)
        if is_function:
            accelerator.forward_backward(rows, compute_loss)
            optimizer.step()
            optimizer.zero_grad()
        for piece in () if is_function else accelerator.microbatches(rows):
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(piece))
                optimizer.step()
                optimizer.zero_grad()
        expected = mix_weights(expected, read_weights(model), 0.5)
    assert ema.num_updates == 3
    assert_equal(read_average(ema), expected)


@pytest.mark.parametrize("is_lagging", [False, True])
def test_two_optimizers_of_a_model_count_as_one_update(is_lagging: bool) -> None:
    accelerator, model, _ = build_training()
    accelerator.free_memory()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model, first, second = accelerator.prepare(model, first, second)
    ema = ExponentialMovingAverage(model, decay=0.5)
    expected = read_weights(model)
    for number in range(4):
        update_weights(accelerator, model, *([first] if is_lagging and number % 2 else [first, second]))
        expected = mix_weights(expected, read_weights(model), 0.5)
    assert ema.num_updates == 4
    assert_equal(read_average(ema), expected)


def test_average_updated_between_two_optimizers_counts_once() -> None:
    accelerator, model, _ = build_training()
    accelerator.free_memory()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model, first, second = accelerator.prepare(model, first, second)
    ema = ExponentialMovingAverage(model, decay=0.5)
    for number in range(1, 4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
            first.step()
            ema.update()
            assert ema.num_updates == number
            second.step()
            first.zero_grad()
            second.zero_grad()
        assert ema.num_updates == number


def test_optimizer_of_another_model_does_not_count() -> None:
    accelerator, model, optimizer = build_training()
    other = nn.Linear(2, 1)
    other, other_optimizer = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    ema = ExponentialMovingAverage(model, decay=0.5)
    for _ in range(3):
        update_weights(accelerator, model, optimizer)
        with accelerator.accumulate(other):
            accelerator.backward(other(torch.ones(2, 2)).square().mean())
            other_optimizer.step()
            other_optimizer.zero_grad()
    assert ema.num_updates == 3


def test_two_optimizers_count_as_one_update_beside_another_model() -> None:
    """Both models run backward before any optimizer steps, as docs/several_models.md shows."""
    accelerator, model, _ = build_training()
    accelerator.free_memory()
    other = nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model[0], model[2], other)]
    model, other, *optimizers = accelerator.prepare(model, other, *optimizers)
    ema = ExponentialMovingAverage(model, decay=0.5)
    expected = read_weights(model)
    for _ in range(3):
        for each in (model, other):
            with accelerator.accumulate(each):
                accelerator.backward(each(torch.ones(2, 4)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected = mix_weights(expected, read_weights(model), 0.5)
    assert ema.num_updates == 3
    assert_equal(read_average(ema), expected)


def test_run_that_is_joined_again_reports_each_update_once() -> None:
    accelerator, model, optimizer = build_training()
    ema = ExponentialMovingAverage(model, decay=0.5)
    later = Accelerator(cpu=True)
    later.prepare(model)
    later.free_memory()
    del later
    gc.collect()
    ema.update()  # joins the first run again
    before = ema.num_updates
    model, optimizer = accelerator.prepare(model, optimizer)
    update_weights(accelerator, model, optimizer)
    assert ema.num_updates == before + 1


def test_without_a_prepared_optimizer_each_call_counts() -> None:
    model = nn.Linear(2, 1)
    ema = ExponentialMovingAverage(model, decay=0.5)
    expected = read_weights(model)
    for number in range(3):
        nn.init.constant_(model.weight, float(number))
        ema.update()
        expected = mix_weights(expected, read_weights(model), 0.5)
    assert_equal(read_average(ema), expected)


# -------------------------------------------------------------------- which tensors are averaged, and where


@pytest.mark.parametrize("order", ["before", "with", "after"])
def test_average_may_be_created_before_the_model_is_prepared(order: str) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    ema = ExponentialMovingAverage(net, decay=0.5) if order != "after" else None
    accelerator = Accelerator(cpu=True)
    objects = (net, optimizer, ema) if order == "with" else (net, optimizer)
    model, optimizer, *_ = accelerator.prepare(*objects)
    ema = ema or ExponentialMovingAverage(model, decay=0.5)
    expected = read_weights(model)
    update_weights(accelerator, model, optimizer)
    expected = mix_weights(expected, read_weights(model), 0.5)
    assert_equal(read_average(ema), expected)
    accelerator.register_for_checkpointing(ema)  # it is registered already
    assert accelerator._run.custom == [ema]


def test_half_precision_weights_are_averaged_in_float32() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(4, 2).to(torch.bfloat16)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    ema = ExponentialMovingAverage(model, decay=0.999)
    coarse = ExponentialMovingAverage(model, decay=0.999, dtype=torch.bfloat16, name="coarse")
    expected = [each.float() for each in read_weights(model)]
    for _ in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        expected = mix_weights(expected, [each.float() for each in read_weights(model)], 0.999)
    assert_equal(read_average(ema), expected)
    assert {values.dtype for values in read_average(coarse)} == {torch.bfloat16}
    trained, averages = read_weights(model), read_average(ema)
    with ema.swap_weights():
        assert_same_bits(read_weights(model), [each.to(torch.bfloat16) for each in expected])
    assert_same_bits(read_weights(model), trained)
    assert_same_bits(read_average(ema), averages)


def test_frozen_weights_have_no_average_and_unfrozen_ones_get_one() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net[1].parameters(), lr=0.1))
    ema = ExponentialMovingAverage(model, decay=0.5)
    update_weights(accelerator, model, optimizer)
    assert list(ema.state_dict()["average"]) == ["1.weight", "1.bias"]
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    update_weights(accelerator, model, optimizer)
    start = read_weights(model[0])
    update_weights(accelerator, model, optimizer)
    found = ema.state_dict()["average"]
    assert sorted(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert_equal([found["0.weight"], found["0.bias"]], mix_weights(start, read_weights(model[0]), 0.5))


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_buffers_are_copied_or_averaged(buffers: str) -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    ema = ExponentialMovingAverage(model, decay=0.5, buffers=buffers)
    means = model[1].running_mean.clone()
    for number in range(3):
        with accelerator.accumulate(model):
            rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        means = 0.5 * means + 0.5 * model[1].running_mean
    own = model[1].running_mean.clone()
    with ema.swap_weights():
        assert_equal([model[1].running_mean], [means if buffers == "average" else own])
        assert int(model[1].num_batches_tracked) == 3
    assert_same_bits([model[1].running_mean], [own])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "options", [{"decay": 0.5}, {"decay": 0.9}, {"decay": "mean"}, {"decay": 0.5, "device": "cpu"}]
)
def test_elements_of_buffers_that_are_not_finite_are_copied(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.tensor([1.0, -torch.inf]).to(dtype))
    ema = ExponentialMovingAverage(model, buffers="average", **options)

    def average(*values: float) -> list[Any]:
        model.mask = torch.tensor(values).to(dtype)
        ema.update()
        found: list[Any] = ema.state_dict()["average"]["mask"].tolist()
        return found

    assert average(1.0, -torch.inf) == [1.0, -torch.inf]
    assert average(1.0, -torch.inf) == [1.0, -torch.inf]
    assert average(1.0, 3.0) == [1.0, 3.0]  # as in an observer, whose maximum begins at -inf
    assert average(torch.inf, 3.0) == [torch.inf, 3.0]
    assert average(2.0, torch.nan)[0] == 2.0
    assert average(2.0, 4.0) == [2.0, 4.0]


def test_float8_buffers_are_averaged_in_float32() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("scales", torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn))
    ema = ExponentialMovingAverage(model, decay=0.5, buffers="average")
    model.scales = torch.tensor([2.0, 2.0]).to(torch.float8_e4m3fn)
    ema.update()
    found = ema.state_dict()["average"]["scales"]
    assert found.dtype == torch.float32
    assert found.tolist() == [1.5, 2.0]


def test_trainable_parameters_with_infinite_elements_keep_them() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(4, 3))
    net.register_parameter("mask", nn.Parameter(torch.full((3,), -torch.inf)))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    ema = ExponentialMovingAverage(model, decay=0.5)
    weight = model[0].weight.detach().clone()
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).square().mean() + model.mask.exp().sum())
            optimizer.step()
            optimizer.zero_grad()
        weight = 0.5 * weight + 0.5 * model[0].weight.detach()
    with ema.swap_weights():
        assert model.mask.tolist() == [-torch.inf] * 3
        assert_equal([model[0].weight.detach()], [weight])


# -------------------------------------------------------------------- swapped weights


@pytest.fixture(params=[{}, {"device": "cpu"}, {"dtype": torch.float64}])
def trained(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Accelerator, model, optimizer and average after two updates, for several options of the average."""
    monkeypatch.setattr(average_exchange, "_BUCKET_BYTES", 40)  # several buckets
    accelerator, model, optimizer = build_training()
    ema = ExponentialMovingAverage(model, decay=0.5, **request.param)
    for _ in range(2):
        update_weights(accelerator, model, optimizer)
    return accelerator, model, optimizer, ema


def test_weights_are_restored_after_an_error(trained: Any) -> None:
    accelerator, model, optimizer, ema = trained
    before, averages = read_weights(model), read_average(ema)
    with pytest.raises(ZeroDivisionError), ema.swap_weights() as swapped:  # noqa: PT012
        assert swapped is model
        assert_equal(read_weights(model), [each.float() for each in averages])
        raise ZeroDivisionError
    assert_same_bits(read_weights(model), before)
    assert_same_bits(read_average(ema), averages)
    update_weights(accelerator, model, optimizer)
    assert ema.num_updates == 3


def test_error_during_the_swap_leaves_the_trained_weights(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _, ema = trained
    before, averages = read_weights(model), read_average(ema)
    exchange_bucket, calls = average_exchange._exchange_bucket, iter(range(9))

    def fail_at_second(bucket: Any) -> Any:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return exchange_bucket(bucket)

    monkeypatch.setattr(average_exchange, "_exchange_bucket", fail_at_second)
    with pytest.raises(torch.OutOfMemoryError), ema.swap_weights():
        pass
    assert_same_bits(read_weights(model), before)
    assert_same_bits(read_average(ema), averages)
    assert not ema.is_swapped


def test_training_and_nesting_are_refused_while_weights_are_swapped(trained: Any) -> None:
    accelerator, model, optimizer, ema = trained
    other = ExponentialMovingAverage(model, name="other")
    before = read_weights(model)
    with ema.swap_weights():
        for action in (ema.swap_weights, other.swap_weights):
            with (
                pytest.raises(StateError, match=r"enter swap_weights\(\) again: Sequential contains .* 'ema'"),
                action(),
            ):
                pass
        with pytest.raises(StateError, match="cannot train the model"):
            update_weights(accelerator, model, optimizer)
        with pytest.raises(StateError, match="cannot train the model"):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
        with pytest.raises(StateError, match="Leave the swap_weights"):
            ema.update()
    assert_same_bits(read_weights(model), before)
    update_weights(accelerator, model, optimizer)


def test_average_equals_the_model_before_averaging_begins() -> None:
    accelerator, model, optimizer = build_training()
    ema = ExponentialMovingAverage(model, decay=0.5, update_after=5)
    update_weights(accelerator, model, optimizer)
    before = read_weights(model)
    with ema.swap_weights():
        assert_same_bits(read_weights(model), before)
    assert_same_bits(read_average(ema), before)


def test_averages_may_replace_the_weights() -> None:
    accelerator, model, optimizer = build_training()
    ema = ExponentialMovingAverage(model, decay=0.5)
    update_weights(accelerator, model, optimizer)
    expected = read_average(ema)
    ema.copy_to_model()
    assert_same_bits(read_weights(model), expected)
    assert_same_bits(read_average(ema), expected)


# -------------------------------------------------------------------- checkpoints and files


def save_run(folder: Any, act: Callable[[Accelerator, Any, ExponentialMovingAverage], None]) -> list[torch.Tensor]:
    """Train three updates, save by `act`, and train two more. Return the weights and averages."""
    accelerator, model, optimizer = build_training(
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    )
    ema = ExponentialMovingAverage(model, decay=0.9, warmup=True)
    for _ in range(3):
        update_weights(accelerator, model, optimizer)
    act(accelerator, model, ema)
    for _ in range(2):
        update_weights(accelerator, model, optimizer)
    accelerator.wait_for_save()
    return [*read_weights(model), *read_average(ema)]


def save_inside(accelerator: Accelerator, model: Any, ema: ExponentialMovingAverage) -> None:
    """Save in the background while the averages are in the model."""
    before = read_average(ema)
    with ema.swap_weights():
        accelerator.save_state(blocking=False)
        assert_same_bits(read_weights(model), before)


@pytest.mark.parametrize(
    "act", [lambda accelerator, model, ema: accelerator.save_state(), save_inside], ids=["outside", "inside"]
)
def test_resumed_run_is_equal_bit_for_bit(tmp_path: Any, act: Any) -> None:
    straight = save_run(tmp_path, act)
    accelerator, model, optimizer = build_training(
        project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
    )
    ema = ExponentialMovingAverage(model, decay=0.9, warmup=True)
    assert accelerator.resume() is not None
    assert (ema.num_updates, ema.num_averaged) == (3, 3)
    for _ in range(2):
        update_weights(accelerator, model, optimizer)
    assert_same_bits([*read_weights(model), *read_average(ema)], straight)


def test_checkpoint_of_another_model_changes_nothing(tmp_path: Any) -> None:
    accelerator, model, _ = build_training()
    ema = ExponentialMovingAverage(model)
    accelerator.save_state(tmp_path / "first")
    state = ema.state_dict()
    with pytest.raises(StateError, match=r"only saved: 9\.weight"):
        ema.load_state_dict(state | {"average": {**state["average"], "9.weight": torch.ones(1)}})
    with pytest.raises(StateError, match=r"not saved: 0\.bias, 0\.weight, 2\.bias"):
        ema.load_state_dict(state | {"average": {}})
    before = read_weights(model)
    with ema.swap_weights(), pytest.raises(CheckpointError, match="nothing was changed"):
        accelerator.load_state(tmp_path / "first")
    assert_same_bits(read_weights(model), before)
    accelerator.load_state(tmp_path / "first")


def test_rollback_after_a_spike_restores_the_average() -> None:
    accelerator, model, optimizer = build_training(on_spike=SpikePolicy("go_back", warm_up=8, updates=4))
    ema = ExponentialMovingAverage(model, decay=0.5)
    seen: dict[int, list[torch.Tensor]] = {}
    for number in range(20):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).square().mean() * (1e6 if number == 16 else 1.0))
            optimizer.step()
            optimizer.zero_grad()
        assert ema.num_updates == accelerator.num_updates
        assert_same_bits(read_average(ema), seen.setdefault(ema.num_updates, read_average(ema)))
    assert accelerator.num_updates < 16


def test_averages_are_saved_by_name(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    accelerator, model, optimizer = build_training()
    ema = ExponentialMovingAverage(model, decay=0.5)
    slow = ExponentialMovingAverage(model, decay=0.99, name="slow")
    update_weights(accelerator, model, optimizer)
    before = read_weights(model)
    for each in (ema, slow):
        accelerator.save_model(model, tmp_path / each.name, weights=each.name)
        found = load_file(tmp_path / each.name / "model.safetensors")
        expected = each.state_dict()["average"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    assert_same_bits(read_weights(model), before)
    with pytest.raises(ConfigError, match="has the averages 'ema', 'slow'"):
        accelerator.save_model(model, tmp_path / "no", weights="fast")
    with pytest.raises(ConfigError, match="another name="):
        ExponentialMovingAverage(model)


# -------------------------------------------------------------------- invalid arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.5}, "decay=1.5; give a number from 0 to 1"),
        ({"decay": "swa"}, "decay='swa'; allowed"),
        ({"decay": None}, "decay=None"),
        ({"decay": "mean", "warmup": True}, "warmup=True needs a number"),
        ({"update_after": -1}, "update_after=-1; give a number of updates, 0 or more"),
        ({"every": 0}, "every=0; give a number of updates, 1 or more"),
        ({"dtype": torch.int32}, "dtype=torch.int32"),
        ({"buffers": "no"}, "buffers='no'; allowed"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExponentialMovingAverage(nn.Linear(1, 1), **options)


def test_parameters_instead_of_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="got a list; give the model"):
        ExponentialMovingAverage(list(nn.Linear(1, 1).parameters()))  # type: ignore[arg-type]


def test_copy_of_the_model_is_not_averaged() -> None:
    accelerator, model, optimizer = build_training()
    ema = ExponentialMovingAverage(model)
    twin = copy.deepcopy(model)
    update_weights(accelerator, model, optimizer)
    assert ema.num_updates == 1
    with ema.swap_weights():
        assert not torch.equal(twin[0].weight, model[0].weight)
