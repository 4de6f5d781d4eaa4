"""Test the search for the origin of a NaN: 30 causes are reported with module, line and rows."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, NonFinitePolicy
from headway.errors import NonFiniteError
from headway.extras import origin

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def run_in_folder_of_tests(monkeypatch):
    """Run in the folder of the tests, because reported paths are relative to the working directory."""
    monkeypatch.chdir(Path(__file__).parent)


class OddOperation(nn.Module):
    """Module that applies `function`, which produces values that are not finite."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Net(nn.Module):
    """Identity, an odd operation, and a linear layer."""

    def __init__(self, function):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.block = nn.ModuleDict({"odd": OddOperation(function), "dropout": nn.Dropout(0.1)})
        self.head = nn.Linear(4, 1)
        nn.init.eye_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x):
        return self.head(self.block["dropout"](self.block["odd"](self.inner(x))))


def make_rows(value):
    """Return eight rows of values from 0.5 to 1.5. Row 6 is all `value`."""
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    x[6] = value
    return x


def train(function, data, loss=lambda y: y.square().mean(), spoil=lambda model: None, **options):
    """Train on `data`. `spoil` changes the model first. Return the accelerator, the model and the number of batches."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **{"on_non_finite": "explain"} | options)
    model = Net(function)
    spoil(model)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(TensorDataset(data), batch_size=8)
    )
    num_batches = 0
    for (x,) in loader:
        num_batches += 1
        with accelerator.accumulate(model):
            accelerator.backward(loss(model(x)))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator, model, num_batches


FORWARD = {
    "log of 0": (lambda h: h.log(), 0.0, "aten.log"),
    "1 / 0": (lambda h: 1 / h, 0.0, "aten.reciprocal"),
    "0 / 0": (lambda h: h / h, 0.0, "aten.div"),
    "rsqrt of 0": (lambda h: h.rsqrt(), 0.0, "aten.rsqrt"),
    "a cast to fp16": (lambda h: h.half().float(), 1e5, "aten._to_copy"),
    "a product in fp16": (lambda h: (h.half() * 1000).float(), 100.0, "aten.mul"),
    "a matrix product in fp16": (lambda h: (h.half() @ torch.full((4, 4), 300.0).half()).float(), 300.0, "aten.mm"),
    "exp in bf16": (lambda h: h.bfloat16().exp().float(), 1e5, "aten.exp"),
    "a square in bf16": (lambda h: h.bfloat16().square().float(), 1e25, "aten.pow"),
    "exp": (lambda h: h.exp(), 1e5, "aten.exp"),
    "a power": (lambda h: h.pow(2.5), 1e30, "aten.pow"),
    "sqrt of a negative": (lambda h: (h - 0.1).sqrt(), 0.0, "aten.sqrt"),
    "log1p of -1": (lambda h: (h - 1).log1p(), 0.0, "aten.log1p"),
    "acos": (lambda h: (h / 2).acos(), 3.0, "aten.acos"),
    "a row that is all masked": (lambda h: h * h.masked_fill(h <= 0, -INF).softmax(1), 0.0, "aten._softmax"),
}  # fmt: skip

BACKWARD = {
    "sqrt at 0": (lambda h: h.sqrt(), "SqrtBackward0"),
    "a norm at 0": (lambda h: h / (1 + (h * h).sum(1, keepdim=True).sqrt()), "SqrtBackward0"),
    "log behind where": (lambda h: torch.where(h > 0, h.log(), 0.0), "LogBackward0"),
    "a root": (lambda h: h.pow(0.5), "PowBackward0"),
    "asin at 1": (lambda h: (1 - h * h / 9).asin(), "AsinBackward0"),
    "a logarithm's power": (lambda h: (h + 1).log().pow(0.5), "PowBackward0"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_operation_of_forward_is_named(name):
    function, value, operation = FORWARD[name]
    with pytest.raises(NonFiniteError, match="Run again with checks, it began in forward with") as error:
        train(function, make_rows(value))
    message = str(error.value)
    assert f"with {operation} in block.odd (test_origin.py:" in message
    assert "in <lambda>), row 6 of the batch, on rank 0" in message


@pytest.mark.parametrize("name", BACKWARD)
def test_operation_of_backward_is_named(name):
    function, operation = BACKWARD[name]
    with pytest.raises(NonFiniteError, match=r"gradients of .* are not .* it began in backward with") as error:
        train(function, make_rows(0.0))
    message = str(error.value)
    assert f" in {operation} in block.odd (test_origin.py:" in message
    assert "in <lambda>), row 6 of the batch, on rank 0" in message


def test_nan_hidden_by_forward_is_named_where_it_was_created():
    """`where` discards the inf of 1 / 0, and backward multiplies it by 0."""
    with pytest.raises(
        NonFiniteError, match=r"began in forward with aten.reciprocal in block.odd .*, row 6 of the batch"
    ):
        train(lambda h: torch.where(h > 0, 1 / h, 0.0), make_rows(0.0))


@pytest.mark.parametrize("value", [NAN, INF])
def test_row_of_the_batch_is_named(value):
    with pytest.raises(
        NonFiniteError, match=r"it began with the values that were given to the model \(Net\), row 6 of"
    ):
        train(lambda h: h, make_rows(value))


@pytest.mark.parametrize("name", ["inner.weight", "head.bias"])
def test_weight_is_named(name):
    def spoil(model):
        model.get_parameter(name).data.view(-1)[0] = NAN

    with pytest.raises(
        NonFiniteError, match=f"it began with {name}, which contains values that are not finite, on rank 0"
    ):
        train(lambda h: h, make_rows(1.0), spoil=spoil)


def test_buffer_is_named():
    def spoil(model):
        model.inner.register_buffer("scale", torch.tensor(NAN))
        model.block["odd"].function = lambda h: h * model.inner.scale

    with pytest.raises(NonFiniteError, match=r"it began with inner.scale, which contains"):
        train(None, make_rows(1.0), spoil=spoil)


def test_operation_beside_float8_tensors_is_named():
    def compute(h):
        codes = h.to(torch.float8_e4m3fn)  # torch has no isfinite() for this dtype, nor for the next one
        h.detach().to(torch.uint8).view(torch.float4_e2m1fn_x2).clone()
        return h.log() + 0 * codes.float().detach()

    with pytest.raises(NonFiniteError, match=r"aten\.log"):
        train(compute, make_rows(0.0))


def test_loss_outside_the_model_is_named():
    with pytest.raises(
        NonFiniteError, match=r"it began in forward with aten.log \(test_origin.py:\d+ in <lambda>\), row"
    ):
        train(lambda h: h, make_rows(1.0), loss=lambda y: (y.relu() * 0).log().mean())


def test_infinity_written_by_the_program_is_named_if_it_reaches_the_loss():
    with pytest.raises(NonFiniteError, match=r"it began in forward with aten.masked_fill \(.* in <lambda>\), row 6 of"):
        train(lambda h: h, make_rows(-9.0), loss=lambda y: -y.masked_fill(y == y.min(), -INF).mean())


def test_number_of_causes_is_limited():
    assert len(FORWARD) + len(BACKWARD) + 9 == 30


# ---------------------------------------------------------------- state after running again


def test_window_of_several_batches_is_run_again_whole():
    data = torch.cat([make_rows(1.0), make_rows(1.0), make_rows(1.0), make_rows(0.0), make_rows(1.0), make_rows(1.0)])
    accelerator, model, num_batches = train(
        lambda h: h.log(), data, on_non_finite=NonFinitePolicy("skip", explains=True), gradient_accumulation_steps=2
    )
    assert num_batches == 6 + 2
    assert accelerator.num_updates == 2
    assert accelerator.non_finite.num_skipped == 1
    origin = accelerator.non_finite.origin
    assert (origin.operation, origin.module, origin.rows) == ("aten.log", "block.odd", (6,))
    _, its_model, _ = train(
        lambda h: h.log(), torch.cat([data[:16], data[32:]]), on_non_finite="skip", gradient_accumulation_steps=2
    )
    assert all(map(torch.equal, model.parameters(), its_model.parameters()))  # including random numbers of dropout
    assert not torch.is_anomaly_enabled()


def test_only_the_first_skipped_update_is_run_again():
    data = torch.cat([make_rows(0.0), make_rows(1.0), make_rows(0.0)])
    accelerator, _, num_batches = train(lambda h: h.log(), data, on_non_finite=NonFinitePolicy("skip", explains=True))
    assert num_batches == 4
    assert accelerator.non_finite.num_skipped == 2


def test_position_in_the_data_counts_each_batch_once():
    accelerator = Accelerator(cpu=True, on_non_finite=NonFinitePolicy("skip", explains=True))
    model = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.tensor([[1.0], [NAN], [2.0], [3.0]])), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    seen = []
    for (x,) in loader:
        seen.append((x.item(), loader.num_consumed))
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert [consumed for _, consumed in seen] == [1, 2, 2, 3, 4]
    assert loader.epoch == 1


def test_models_that_train_on_one_batch_make_no_update_while_it_is_repeated():
    """The origin is traced in the model whose update was refused, although another one has learned from the batch."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, on_non_finite=NonFinitePolicy("skip", explains=True))
    data = torch.cat([make_rows(1.0), make_rows(0.0), make_rows(1.0)])
    loader = DataLoader(TensorDataset(data), batch_size=8)
    models = nn.Linear(4, 1), Net(lambda h: h.log()), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    *prepared, loader = accelerator.prepare(*models, *optimizers, *schedulers, loader)
    sets = list(zip(prepared[:3], prepared[3:6], prepared[6:]))
    num_batches = 0
    for (x,) in loader:
        num_batches += 1
        for model, optimizer, scheduler in sets:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert num_batches == 3 + 1
    assert [optimizer.num_updates for _, optimizer, _ in sets] == [3, 2, 3]
    assert [scheduler.last_epoch for *_, scheduler in sets] == [3, 2, 3]
    assert accelerator.non_finite.origin.operation == "aten.log"
    assert accelerator.non_finite.num_skipped == 1


@pytest.mark.parametrize("has_evaluation", [False, True])
def test_window_of_too_many_batches_is_not_run_again(caplog, monkeypatch, has_evaluation):
    """Batches of other loaders do not count."""
    monkeypatch.setattr(origin, "_MAX_BATCHES", 3)
    accelerator = Accelerator(
        cpu=True,
        on_non_finite=NonFinitePolicy("skip", explains=True),
        gradient_accumulation_steps=3 + (not has_evaluation),
    )
    model = nn.Linear(1, 1)
    rows = torch.ones(12, 1)
    rows[0] = NAN
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows, batch_size=1)
    model, optimizer, loader, other = accelerator.prepare(model, optimizer, loader, DataLoader(rows, batch_size=1))
    if has_evaluation:
        list(other)
    num_batches = 0
    for x in loader:
        num_batches += 1
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert num_batches == 12 + (3 if has_evaluation else 0)
    assert (accelerator.non_finite.origin is not None) == has_evaluation
    assert ("more than 3 batches" in caplog.text) != has_evaluation


def test_without_a_loader_the_error_is_raised_at_once():
    accelerator = Accelerator(cpu=True, on_non_finite="explain")
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.tensor([[NAN]])).sum())
    with pytest.raises(NonFiniteError, match=r"no update was made \(docs/troubleshooting.md#the-loss-is-nan\)$"):
        optimizer.step()
