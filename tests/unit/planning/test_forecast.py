"""Test `headway.forecast` and the published table."""

import dataclasses

import pytest
import torch
from torch import nn

import headway
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.errors import ConfigError, UnsupportedError
from headway.extras.activation_checkpointing import checkpoint_activations
from headway.forecasting.device.devices import DEVICES, MIB, compute_allocator_limit, estimate_use, find_device


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def build_net():
    return nn.Sequential(*[Block() for _ in range(4)])


def make_batch(size):
    return torch.zeros(size, 64, 512), torch.zeros(size, 64, 512)


def forecast_net(**options):
    return headway.forecast(build_net, make_batch, **{"loss": nn.functional.mse_loss, "largest": False, **options})


def test_forecast_adds_up():
    found = forecast_net(batch_size=32, device="a100-40gb")
    assert sum(found.split.values()) == pytest.approx(found.allocated, rel=0.01)
    assert found.allocated <= found.reserved < found.least < found.total < found.most
    assert found.fits is True
    assert found.peak.startswith("step 2")
    assert "a100-40gb, batch 32" in found.describe() == str(found)
    assert len(repr(found)) < 2000  # does not contain the timeline
    assert found.as_dict()["allocated"] == found.allocated
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.allocated = 0


def test_recomputation_needs_less_memory():
    plain, recomputed = forecast_net(batch_size=256), forecast_net(batch_size=256, recompute=True)
    again = forecast_net(batch_size=256, recompute=ActivationCheckpointing())
    assert recomputed.allocated == again.allocated < 0.8 * plain.allocated


@pytest.mark.slow
def test_largest_batch_fits_and_the_next_does_not():
    options = {"device": "a100-40gb", "budget": "3GiB"}
    found = forecast_net(batch_size=8, **{**options, "largest": True})
    assert found.largest_batch > 8
    assert found.num_traces <= 4
    at = forecast_net(batch_size=found.largest_batch, **options)
    above = forecast_net(batch_size=found.largest_batch + 1, **options)
    assert at.fits is True
    assert above.most > above.budget


@pytest.mark.slow
def test_longest_sequence_fits_and_a_longer_one_does_not():
    def make_sized_batch(size, length):
        return torch.zeros(size, length, 512), torch.zeros(size, length, 512)

    options = {"device": "a100-40gb", "budget": "3GiB", "batch_size": 16}
    found = forecast_net(**options, longest=headway.LongestSequence(make_sized_batch, multiple=8))
    assert found.longest_sequence % 8 == 0
    assert f"longest sequence in a batch of 16: {found.longest_sequence:,}" in found.describe()

    def measure_most(length):
        at = headway.forecast(
            build_net,
            lambda size: make_sized_batch(size, length),
            loss=nn.functional.mse_loss,
            largest=False,
            **options,
        )
        return at.most

    assert measure_most(found.longest_sequence) <= found.budget < measure_most(found.longest_sequence + 8)
    short = forecast_net(**options, longest=headway.LongestSequence(make_sized_batch, limit=24, multiple=8))
    assert short.longest_sequence == 24
    with pytest.raises(ConfigError, match="no smaller"):
        headway.LongestSequence(make_sized_batch, limit=4, multiple=8)


@pytest.mark.slow
def test_timeline_and_curve_match_the_numbers():
    found = forecast_net(batch_size=32, device="a100-40gb", budget="3GiB", largest=True)
    assert max(found.timeline.totals) == pytest.approx(found.allocated, rel=0.01)
    assert [phase for phase, _ in found.timeline.phases][1:4] == ["step 1 forward", "step 1 backward", "step 1 update"]
    batches, sizes = zip(*found.by_batch)
    assert batches[0] < found.largest_batch < batches[-1]
    assert sizes[0] < found.budget < sizes[-1]
    assert forecast_net(batch_size=32).by_batch == ()


class PeakInForward(nn.Module):
    """Model whose forward needs the most memory, for a temporary of 16 MiB."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        torch.zeros(4 * MIB) + 1
        return self.linear(x).sum()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_peak_in_forward_is_not_attributed_to_an_earlier_backward(accumulation):
    found = headway.forecast(
        PeakInForward, lambda size: torch.zeros(size, 64), accumulation=accumulation, largest=False
    )
    assert found.peak.endswith("forward")
    assert [phase for phase, _ in found.timeline.phases if phase.startswith("step 1")] == [
        *["step 1 forward", "step 1 backward"] * accumulation, "step 1 update",
    ]  # fmt: skip


def test_autocast_leaves_a_requested_float32_softmax_unchanged():
    """The attention requests float32 from softmax itself, so CUDA's autocast changes nothing there."""

    def compute_scores(x):
        return torch.softmax(x @ x.transpose(1, 2), -1, dtype=torch.float32)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(512, 512)

        def forward(self, x):
            x = self.inner(x)
            return compute_scores(x).to(x.dtype) @ x

    sizes = [
        headway.forecast(
            Attention, make_batch, loss=nn.functional.mse_loss, largest=False, batch_size=64, precision=precision
        )
        for precision in ("no", "bf16")
    ]
    assert sizes[1].allocated != sizes[0].allocated


def test_too_small_budget_is_reported():
    found = forecast_net(budget="100MiB", largest=True)
    assert found.fits is False
    assert found.largest_batch == 0
    assert "does not fit" in found.describe()


def test_cpu_rounds_nothing_and_has_no_overhead():
    found = forecast_net(device="cpu")
    assert found.allocated == found.reserved == found.least == found.total == found.most
    assert found.budget is None
    assert found.fits is None


@pytest.mark.parametrize(("options", "num_ranks"), [({}, 1), ({"strategy": "fsdp", "ranks": 2}, 2)])
def test_averages_are_counted(options, num_ranks):
    without, found = (forecast_net(device="cpu", averages=number, **options) for number in (0, 2))
    size = sum(parameter.numel() * 4 for parameter in build_net().parameters()) // num_ranks
    assert found.split["averages"] == 2 * size
    assert found.allocated - without.allocated == 2 * size
    halves = headway.forecast(
        lambda: build_net().bfloat16(), lambda size: tuple(each.bfloat16() for each in make_batch(size)), loss=nn.functional.mse_loss,
        device="cpu", averages=1, largest=False, **options,
    )  # fmt: skip
    assert halves.split["averages"] == size  # averages are in float32


def select_matrices(parameters):
    return [parameter for parameter in parameters if parameter.ndim == 2]


class Scaled(torch.optim.Optimizer):
    """Optimizer of an unknown class, which reads the norm of a whole parameter and keeps one moment of it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter)
                state["moment"].add_(parameter.grad)
                parameter.sub_(state["moment"] / (state["moment"].norm() + 1e-6), alpha=0.01)


@pytest.mark.parametrize(
    ("optimizer", "per_element"),
    [
        ("muon", 4),
        (lambda given: Scaled(list(given)), 4),
        (lambda given: torch.optim.Adafactor(select_matrices(given)), 0),
    ],
)
def test_updates_by_owners_are_part_of_the_peak(optimizer, per_element):
    """Each of two ranks owns four of eight matrices, and gathers them and their gradients."""
    found = forecast_net(device="cpu", optimizer=optimizer, strategy="fsdp", ranks=2)
    size = 4 * 512 * 2048 * 4
    assert found.split["buckets"] > 2 * size
    assert found.split["optimizer state"] == pytest.approx(size * per_element / 4, rel=0.02, abs=100_000)
    assert not any("are not counted" in line for line in found.caveats)
    assert "buckets" not in forecast_net(device="cpu", optimizer="adamw", strategy="fsdp", ranks=2).split


def test_elementwise_optimizer_gathers_nothing():
    found = forecast_net(device="cpu", optimizer=lambda given: Odd(given), strategy="fsdp", ranks=2)
    assert "buckets" not in found.split


def test_forecast_is_for_the_rank_that_owns_most():
    def make_rows(size):
        return torch.zeros(size, 256), torch.zeros(size, 256)

    class Model(nn.Module):
        """The large matrix costs most to update. The small ones together have more elements."""

        def __init__(self):
            super().__init__()
            self.large = nn.Linear(256, 256, bias=False)
            self.small = nn.ModuleList(nn.Linear(256, 32, bias=False) for _ in range(20))

        def forward(self, x):
            return self.large(x) + torch.cat([part(x) for part in self.small], -1)[:, :256]

    found = headway.forecast(
        Model,
        make_rows,
        loss=nn.functional.mse_loss,
        optimizer="muon",
        strategy="fsdp",
        ranks=2,
        device="cpu",
        largest=False,
    )
    planned = headway.plan(Model, "fsdp", 2, step=lambda model: model(torch.zeros(8, 256)).sum(), optimizer="muon")
    states = [planned.shares.get_share(rank).optimizer_state for rank in range(2)]
    assert states[1] > states[0]
    assert found.split["optimizer state"] == states[1]
    assert any("for rank 1 of 2" in line for line in found.caveats)


@pytest.mark.parametrize("name", ["ASGD", "Adafactor", "NAdam", "RAdam", "Rprop"])
def test_optimizers_of_torch_may_read_values(name):
    for options in ({}, {"strategy": "ddp", "ranks": 2}, {"strategy": "fsdp", "ranks": 2}):
        found = forecast_net(device="cpu", optimizer=lambda given: getattr(torch.optim, name)(list(given)), **options)
        assert sum(found.split.values()) == pytest.approx(found.allocated, rel=0.01)


def test_given_loop_updates_by_owners():
    def loop(model, batches, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for inputs, targets in batches:
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    options = {"device": "cpu", "optimizer": "adafactor", "strategy": "fsdp", "ranks": 2}
    found, plain = forecast_net(**options, loop=loop, loss=None), forecast_net(**options, loop="loss_function")
    assert found.split["buckets"] == plain.split["buckets"]
    assert found.allocated == pytest.approx(plain.allocated, rel=0.01)


@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp", "ranks": 2}])
def test_given_loop_gets_the_loss_of_its_closure(options):
    def loop(model, batches, optimizer):
        for inputs, targets in batches:

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                return loss

            assert optimizer.step(closure).shape == ()

    assert forecast_net(device="cpu", optimizer="muon", loop=loop, loss=None, **options).split["optimizer state"] > 0


@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp", "ranks": 2}])
def test_optimizer_that_decides_by_a_value_is_refused(options):
    """LBFGS creates no state in a step in which it has converged."""

    def loop(model, batches, optimizer):
        for inputs, targets in batches:

            def closure(inputs=inputs, targets=targets):
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)

    with pytest.raises(UnsupportedError, match="_local_scalar_dense"):
        forecast_net(
            device="cpu", optimizer=lambda given: torch.optim.LBFGS(list(given)), loop=loop, loss=None, **options
        )


class Odd(torch.optim.Optimizer):
    """Optimizer of an unknown class, which may need whole parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad)


@pytest.mark.parametrize(
    "options",
    [
        {"device": "rtx3090"},
        {"device": None},
        {"precision": "fp8"},
        {"batch_size": 0},
        {"accumulation": 0},
        {"optimizer": "adan"},
        {"recompute": "full"},
        {"max_norm": -1.0},
        {"max_norm": "1"},
        {"lengths": (8, 16.5)},
        {"longest": 4096},
    ],
    ids=str,
)
def test_invalid_arguments_are_reported(options):
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        forecast_net(**options)


def test_objects_in_place_of_functions_are_reported():
    net = build_net()
    with pytest.raises(ConfigError, match="model_fn is a Sequential; give a function"):
        headway.forecast(net, make_batch)
    with pytest.raises(ConfigError, match="make is a Sequential; give a function"):
        headway.plan(net, "ddp", 2)
    with pytest.raises(ConfigError, match="optimizer is a SGD with parameters of its own"):
        forecast_net(optimizer=torch.optim.SGD(net.parameters()))


def test_allocator_limit_keeps_the_upper_bound_within_the_budget():
    for device in DEVICES.values():
        for budget in (3000 * MIB, 40_000 * MIB):
            most = estimate_use(device, compute_allocator_limit(device, budget))[2]
            assert budget - 2 <= most <= budget
    assert compute_allocator_limit(find_device("rtx-3090"), 0) < 0


@pytest.mark.matrix  # eight traces of BERT-large
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_published_table_is_met():
    from benchmarks.forecast.published import PUBLISHED, estimate_memory, find_largest_batch

    for (size, is_checkpointed), published in PUBLISHED.items():
        least, likely, most = (value / MIB for value in estimate_memory(size, is_checkpointed))
        assert likely == pytest.approx(published, rel=0.05)
        assert least < published < most
    assert 100 <= find_largest_batch() <= 120


@pytest.mark.slow
def test_every_eighth_block_is_counted_among_all_blocks():
    """The setting counts all blocks, not only the few that are traced."""

    def measure_allocated(recompute):
        return headway.forecast(
            lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(17))),
            lambda size: (torch.zeros(size, 64), torch.zeros(size, 64)),
            loss=nn.functional.mse_loss,
            batch_size=4096,
            largest=False,
            recompute=recompute,
        ).allocated

    every = ActivationCheckpointing(every=8)
    assert measure_allocated(every) == measure_allocated(
        lambda model: checkpoint_activations(model, every, torch.device("cuda"))
    )
    assert measure_allocated(ActivationCheckpointing()) < measure_allocated(every) < measure_allocated(False)
