"""`ExponentialMovingAverage` in every layout equals an average computed by plain PyTorch, also after a resume elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from headway import Accelerator, ExponentialMovingAverage, LocalSGD, PowerDecay, reconstruct_average
from headway.core.checkpoint.format.manifest import read_manifest
from headway.errors import HeadwayError, StateError, UnsupportedError
from tests.devices import ON_CPU
from tests.distributed.layouts import VOCABULARY, gpt
from tests.distributed.ranks import run_ranks
from tests.distributed.test_expert_parallel import mixtral

DECAY = 0.8
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": gpt, "mixtral": mixtral}


def make_model(name: str = "gpt") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def make_batch(number: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(number))


def compute_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    answers = model(ids)
    logits = getattr(answers, "logits", answers)
    return cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def evaluate(model: Any) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(compute_loss(model, make_batch(99)))
    model.train()
    return loss


def train_by_hand(num_updates: int, name: str = "gpt") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in plain PyTorch. Return the evaluation loss with the average after each update, and the final average."""
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    losses = []
    for number in range(num_updates):
        compute_loss(model, make_batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = [parameter.detach() for parameter in model.parameters()]
        average = [DECAY * old + (1 - DECAY) * new for old, new in zip(average, weights)]
        trained = [weight.clone() for weight in weights]
        with torch.no_grad():
            for parameter, values in zip(model.parameters(), average):
                parameter.copy_(values)
            losses.append(evaluate(model))
            for parameter, values in zip(model.parameters(), trained):
                parameter.copy_(values)
    return losses, {name: values for (name, _), values in zip(model.named_parameters(), average)}


def train(
    layout: str,
    begin: int,
    end: int,
    folder: Path | None = None,
    name: str = "gpt",
    device: str | None = None,
) -> tuple[list[float], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Train with a moving average from update `begin` to `end`. Above 0, `begin` continues from a checkpoint.

    With a `folder`, a run from update 0 saves a checkpoint at its end.

    Returns:
        Losses with the averages, the whole averages (on rank 0), and this rank's parts of trained weights and averages.
    """
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    ema = ExponentialMovingAverage(model, decay=DECAY, device=device)
    if begin:
        accelerator.load_state(folder)
    losses = []
    for number in range(begin, end):
        accelerator.forward_backward(make_batch(number), lambda ids: compute_loss(model, ids))
        optimizer.step()
        optimizer.zero_grad()
        with ema.swap_weights():
            losses.append(evaluate(model))
    if folder is not None and not begin:
        accelerator.save_state(folder)
    with ema.swap_weights():
        whole = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
    parts = [read_part(each) for each in (*model.parameters(), *ema.state_dict()["average"].values())]
    assert ema.num_updates == ema.num_averaged == end
    accelerator.end_training()
    return losses, whole, parts


def read_part(value: Any) -> torch.Tensor:
    local = getattr(value, "_local_tensor", value)
    return local.detach().clone() if isinstance(local, torch.Tensor) and not local.is_meta else torch.empty(0)


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        ("fsdp", 2),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp+tp=2", 4, marks=pytest.mark.slow),
        pytest.param("pp", 2, marks=pytest.mark.slow),
        *(pytest.param(*row, marks=pytest.mark.matrix) for row in (("tp", 2), ("hsdp=2", 4), ("pp=2+fsdp", 4))),
    ],
)
def test_average_equals_that_of_one_process(layout: str, num_ranks: int) -> None:
    losses, average = train_by_hand(4)
    results = run_ranks(train, num_ranks, layout, 0, 4)
    assert results[0][0] == pytest.approx(losses, rel=1e-4)
    whole = results[0][1]
    assert whole.keys() - {"head.weight"} == average.keys()
    for key, values in average.items():
        torch.testing.assert_close(whole[key], values, **CLOSE)
    assert torch.equal(whole["head.weight"], whole["tokens.weight"])  # tied weights


def average_unlike_weights(layout: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    torch.manual_seed(accelerator.process_index)  # prepare() gives all ranks the weights of rank 0
    model = nn.Linear(4, 2)
    ema = ExponentialMovingAverage(model, decay=0.5)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).mean())
    optimizer.step()
    return [read_part(parameter) for parameter in model.parameters()], [each.clone() for each in ema.list_tensors()]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_average_created_before_prepare_begins_with_the_weights_of_rank_0(layout: str) -> None:
    for weights, averages in run_ranks(average_unlike_weights, 2, layout):
        assert all(map(torch.equal, weights, averages))


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "num_ranks"), [("ep", 2), ("fsdp+ep=2", 4)])
def test_distributed_experts_are_averaged(layout: str, num_ranks: int) -> None:
    losses, average = train_by_hand(3, "mixtral")
    results = run_ranks(train, num_ranks, layout, 0, 3, None, "mixtral")
    assert results[0][0] == pytest.approx(losses, rel=1e-4)
    for key, values in average.items():
        torch.testing.assert_close(results[0][1][key], values, **CLOSE)


# -------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("layout", "num_ranks", "others"),
    [
        ("fsdp", 2, [("fsdp", 2), ("ddp", 1)]),
        pytest.param("ddp", 2, [("ddp", 2), ("fsdp", 2)], marks=pytest.mark.matrix),
        pytest.param("fsdp+tp=2", 4, [("fsdp+tp=2", 4), ("pp", 2), ("fsdp", 3)], marks=pytest.mark.matrix),
        pytest.param("pp", 2, [("pp", 2), ("fsdp+tp=2", 4)], marks=pytest.mark.matrix),
    ],
)
def test_average_continues_after_a_resume(
    tmp_path: Path, layout: str, num_ranks: int, others: list[tuple[str, int]]
) -> None:
    """In the same layout, the result is exactly equal. In other layouts, it matches one process."""
    losses, average = train_by_hand(4)
    run_ranks(train, num_ranks, layout, 0, 2, tmp_path)
    straight = run_ranks(train, num_ranks, layout, 0, 4)
    for other, count in others:
        results = run_ranks(train, count, other, 2, 4, tmp_path)
        assert results[0][0] == pytest.approx(losses[2:], rel=1e-4), other
        for key, values in average.items():
            torch.testing.assert_close(results[0][1][key], values, **CLOSE)
        if (other, count) == (layout, num_ranks):
            for mine, expected in zip(results, straight, strict=True):
                assert all(torch.equal(*pair) for pair in zip(mine[2], expected[2], strict=True))


def save_buffers_of_all_kinds(folder: Path) -> tuple[dict[str, str], int]:
    """Save averages of buffers under pp. Return the dtypes of the saved averages, and the updates after loading."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="pp")
    model = make_model()
    for block in model.blocks:  # type: ignore[union-attr]
        block.register_buffer("count", torch.ones(3, dtype=torch.int64))
        block.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
        block.register_buffer("scale", torch.ones(3, dtype=torch.float32))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ema = ExponentialMovingAverage(model, decay=DECAY, buffers="average", dtype=torch.float64)
    accelerator.forward_backward(make_batch(0), lambda ids: compute_loss(model, ids))
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(folder)
    tensors = read_manifest(folder).tensors
    accelerator.load_state(folder)
    dtypes = {key.rpartition(".blocks.")[2]: entry.dtype for key, entry in tensors.items() if ".average.blocks." in key}
    accelerator.end_training()
    return {key: dtype for key, dtype in dtypes.items() if key[2:] in ("count", "phase", "scale")}, ema.num_updates


@pytest.mark.slow
def test_averaged_buffers_of_all_kinds_are_saved_under_pp(tmp_path: Path) -> None:
    kinds = {"count": "int64", "phase": "complex64", "scale": "float64"}
    expected = {f"{block}.{name}": dtype for block in (0, 1) for name, dtype in kinds.items()}
    assert run_ranks(save_buffers_of_all_kinds, 2, tmp_path) == [(expected, 1)] * 2


def resume_with_other_weights(folder: Path) -> list[float]:
    """Save while the averages are swapped in, and train on from that checkpoint. Return the losses."""
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp")
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    ema = ExponentialMovingAverage(model, decay=DECAY)

    def update(number: int) -> float:
        loss = accelerator.forward_backward(make_batch(number), lambda ids: compute_loss(model, ids))
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    for number in range(2):
        update(number)
    with ema.swap_weights():
        before = evaluate(model)
        accelerator.save_state(folder)
        assert evaluate(model) == before
    losses = [update(number) for number in (2, 3)]
    accelerator.load_state(folder)
    assert ema.num_updates == 2
    with ema.swap_weights():
        assert evaluate(model) == before
    assert [update(number) for number in (2, 3)] == losses
    accelerator.end_training()
    return losses


# -------------------------------------------------------------------- averages of other widths, computed after training


def save_power_averages(folder: Path, layout: str, kind: str) -> None:
    """Train, and save snapshots or checkpoints of two power-function averages after every second update."""
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    averages = [ExponentialMovingAverage(model, decay=PowerDecay(width), name=f"{width}") for width in (0.05, 0.1)]
    for number in range(8):
        accelerator.forward_backward(make_batch(number), lambda ids: compute_loss(model, ids))
        optimizer.step()
        optimizer.zero_grad()
        if number % 2 and kind == "checkpoints":
            accelerator.save_state(folder / str(number))
        elif number % 2:
            for average in averages:
                average.save_snapshot(folder / f"{number}-{average.name}")
    accelerator.end_training()


def save_where_rank_0_fails(folder: Path) -> list[str]:
    accelerator = Accelerator(cpu=ON_CPU)
    model = nn.Linear(4, 2)
    average = ExponentialMovingAverage(accelerator.prepare(model), decay=PowerDecay(0.05))
    accelerator.save_state(folder / "checkpoint")
    if accelerator.is_main_process:
        (folder / "snapshot/average.json").mkdir(parents=True)  # a folder where the file has to be
    accelerator.wait_for_everyone()
    errors = []
    for name in ("checkpoint", "snapshot"):
        with pytest.raises((HeadwayError, OSError)) as exc_info:
            average.save_snapshot(folder / name)
        errors.append(type(exc_info.value).__name__)
    average.save_snapshot(folder / "other")
    return errors


def test_snapshot_that_rank_0_cannot_write_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(save_where_rank_0_fails, 2, tmp_path, timeout=60)
    assert first[0] == "ConfigError"
    assert second == ["CheckpointError"] * 2
    assert (tmp_path / "other/average.json").is_file()


@pytest.mark.parametrize(
    ("layout", "num_ranks", "kind"),
    [
        ("fsdp", 2, "checkpoints"),
        pytest.param("fsdp", 2, "snapshots", marks=pytest.mark.slow),
        pytest.param("ddp", 2, "snapshots", marks=pytest.mark.slow),
        *(
            pytest.param(*row, kind, marks=pytest.mark.matrix)
            for row in (("fsdp+tp=2", 4), ("pp", 2))
            for kind in ("checkpoints", "snapshots")
        ),
    ],
)
def test_average_of_another_width_is_reconstructed_from_any_layout(
    tmp_path: Path, layout: str, num_ranks: int, kind: str
) -> None:
    """The result equals the average computed from the weights of all updates in plain PyTorch, within the reported error."""
    run_ranks(save_power_averages, num_ranks, tmp_path / "saved", layout, kind)
    result = reconstruct_average(tmp_path / "saved", tmp_path / "result", 0.15)
    assert result.num_averages == 8
    found = load_file(result.files[0])
    states: dict[str, list[torch.Tensor]] = {}
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(8):
        compute_loss(model, make_batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            states.setdefault(name, []).append(parameter.detach().clone())
    assert found.keys() == states.keys()
    power = PowerDecay(0.15).gamma + 1
    for name, trajectory in states.items():
        expected = sum(((k / 8) ** power - ((k - 1) / 8) ** power) * state for k, state in enumerate(trajectory, 1))
        bound = result.error * torch.stack(trajectory).std(dim=0, correction=0)
        assert bool(((found[name] - expected).abs() <= bound + 1e-4).all()), name


# -------------------------------------------------------------------- errors, memory, and adapters


def swap_in_shards() -> None:
    accelerator = Accelerator(cpu=ON_CPU, strategy="fsdp", microbatching="auto")
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    ema = ExponentialMovingAverage(model, decay=DECAY)
    host = ExponentialMovingAverage(model, decay=DECAY, device="cpu", dtype=torch.float64, name="host")

    def read() -> list[torch.Tensor]:
        accelerator.strategy.free_gathered(model)
        return [read_part(each) for each in model.parameters()]

    failures = iter([accelerator.process_index == 1] + [False] * 99)

    def run(ids: torch.Tensor) -> torch.Tensor:
        loss = compute_loss(model, ids)
        if next(failures):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    def update(number: int) -> None:
        accelerator.forward_backward(make_batch(number), run)
        optimizer.step()
        optimizer.zero_grad()

    expected = read()
    for number in range(3):
        update(number)
        expected = [DECAY * old + (1 - DECAY) * new for old, new in zip(expected, read())]
    assert ema.num_updates == host.num_updates == 3
    trained = read()
    for each in (ema, host):
        with pytest.raises(ZeroDivisionError), each.swap_weights():  # noqa: PT012
            torch.testing.assert_close(read(), expected, **CLOSE)
            evaluate(model)
            with pytest.raises(StateError, match="cannot train the model"):
                update(9)
            model.train()
            model(make_batch(5)).sum()  # an evaluation that leaves a graph and gathered weights behind
            raise ZeroDivisionError
        assert all(map(torch.equal, read(), trained))
    update(3)
    with pytest.raises(UnsupportedError, match=r"headway\.ExponentialMovingAverage"):
        torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(UnsupportedError, match="LocalSGD cannot be combined"), LocalSGD(accelerator, model, 2):
        pass
    accelerator.end_training()


def test_swapping_and_saving_averages_of_shards(tmp_path: Path) -> None:
    run_ranks(swap_in_shards)
    run_ranks(resume_with_other_weights, 2, tmp_path)


def average_adapters(layout: str) -> dict[str, torch.Tensor]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    net = get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), LoraConfig(target_modules=["0", "1"], r=2))
    ema = ExponentialMovingAverage(net, decay=DECAY)  # before prepare(), from whole weights
    accelerator = Accelerator(cpu=ON_CPU, strategy=layout)
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=0.5)
    )
    for number in range(3):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    assert ema.num_updates == 3
    names = list(ema.state_dict()["average"])
    assert names
    assert all("lora_" in name for name in names)
    with ema.swap_weights():
        whole = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return whole


@pytest.mark.matrix
def test_only_adapters_are_averaged() -> None:
    pytest.importorskip("peft")
    expected = run_ranks(average_adapters, 1, "ddp")[0]
    for layout in ("ddp", "fsdp"):
        found = run_ranks(average_adapters, 2, layout)[0]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **CLOSE)
