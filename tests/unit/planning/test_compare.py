"""Test the comparison of layouts: memory, cost, order and invalid use."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from headway import ActivationCheckpointing, ShardingOptions
from headway.core.config.mesh import Layout, parse_layout
from headway.errors import ConfigError, StateError, UnsupportedError
from headway.planning import compare
from headway.planning.cluster import ClusterRates
from headway.planning.compare import compare_layouts, list_candidates
from headway.planning.costs import compute_cost
from headway.planning.dry_run.fake_collectives import ObjectNotReady
from headway.planning.dry_run.meter import MeteredCollective, PlanEvent, name_axes
from headway.planning.dry_run.rank_update import dry_run_stages
from headway.planning.optimizers import resolve_optimizer
from headway.planning.pipeline_simulation import StageTimeline, simulate_stages
from headway.planning.plan import plan
from tests.unit.planning.models import chain, chain_loss, count_parameters, llama, loss


def bind_plan(make, num_ranks, **options):
    return partial(plan, make, num_ranks=num_ranks, **options)


def test_axes_are_named_after_the_ranks_they_connect():
    layout = Layout(replicate=2, shard=3, tp=4)
    assert name_axes([0, 1, 2, 3], layout) == "tp"
    assert name_axes([1, 5, 9], layout) == "shard"
    assert name_axes([2, 14], layout) == "replicate"
    assert name_axes(list(range(24)), layout) == "replicatexshardxtp"


def test_collectives_send_the_bytes_of_a_ring():
    assert MeteredCollective("forward", "all_gather", "shard", 4).count_sent_bytes(400) == 300
    assert MeteredCollective("backward", "all_reduce", "replicate", 4).count_sent_bytes(400) == 600


@pytest.mark.parametrize(
    ("strategy", "axis", "rate"),
    [
        ("fsdp", "shard", 300),  # eight GPUs of a machine, limited by its own links
        ("hsdp=8", "shard", 300),
        ("hsdp=8", "replicate", 50),  # one rank of each machine
        ("fsdp+tp=2", "shard", 200),  # four ranks of each machine
        ("fsdp+tp=8", "tp", 300),
    ],
)
def test_ranks_of_a_machine_send_through_all_its_network_cards(strategy, axis, rate):
    layout = parse_layout(strategy).resolve(64, 8)
    assert ClusterRates(intra=300, inter=50).get_rate(axis, layout) == rate


def test_short_parameters_leave_ranks_empty():
    found = plan(chain, "fsdp", 100, step=chain_loss)
    # 24 rows: one for each of 24 ranks, and none for the others, which still allocate memory for one.
    assert found.shares.num_empty == 76
    assert found.shares.num_with_gaps == 3
    assert found.shares.rarest.num_ranks == 24
    assert (found.rank0.weights, found.rank0.padding) == (3 * 24 * 4, 0)
    assert (found.last_rank.weights, found.last_rank.padding) == (3 * 24 * 4, 3 * 24 * 4)
    assert (found.last_rank.optimizer_state, found.rank0.optimizer_state) == (3 * 4, 3 * 24 * 8 + 3 * 4)
    assert found.saved.num_files == 24
    # 24 rows are gathered as 100, of which each rank sends all but its own.
    assert found.sent()["shard", "all_gather"] >= 3 * 99 * 24 * 4
    assert "76 ranks have no part of any parameter" in str(found)


@pytest.mark.parametrize(
    ("optimizer", "factor"), [("sgd", 0), ("momentum", 1), ("adamw", 2), ("none", 0), (torch.optim.Adadelta, 2)]
)
def test_optimizer_state_has_the_size_of_each_optimizer(optimizer, factor):
    found = plan(chain, "fsdp", 4, step=chain_loss, optimizer=optimizer)
    assert found.rank0.optimizer_state // (3 * 24 * 24) == factor


class Reading(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("it reads its gradients")


def test_optimizer_that_cannot_step_is_named():
    with pytest.raises(
        UnsupportedError, match=r"Reading .*reads its gradients.*give a function that makes another optimizer"
    ):
        plan(chain, "fsdp", 4, step=chain_loss, optimizer=Reading)


@pytest.mark.slow
def test_plan_does_not_compile_a_compiled_optimizer():
    """Dynamo never retries code that it refused once, so a later run in this process would fail."""
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    found = plan(chain, "fsdp", 4, step=chain_loss, optimizer="adamw8bit")
    assert found.rank0.optimizer_state > 0
    own = nn.Linear(64, 64)
    optimizer = resolve_optimizer("adamw8bit")(own.parameters())
    own(torch.ones(1, 64)).sum().backward()
    before = own.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, own.weight)


@pytest.mark.slow
def test_checkpoint_contains_each_element_once():
    whole = count_parameters(llama)
    for strategy in ("ddp", "fsdp", "hsdp=2", "fsdp+tp=2"):
        found = plan(llama, strategy, 4, step=loss)
        assert found.saved.num_bytes == pytest.approx(whole * 4 * 3, rel=1e-3)
        assert found.num_parameters == whole


def test_groups_within_a_machine_are_recognized():
    cluster = ClusterRates(machine_ranks=8)
    assert cluster.is_within_machine("shard", parse_layout("hsdp=8").resolve(64))
    assert not cluster.is_within_machine("replicate", parse_layout("hsdp=8").resolve(64))
    assert not cluster.is_within_machine("shard", parse_layout("fsdp").resolve(64))
    assert cluster.is_within_machine("shard", parse_layout("fsdp").resolve(6))
    assert not cluster.is_within_machine(
        "tp", parse_layout("fsdp+tp=6").resolve(24)
    )  # ranks 6 to 11 are on two machines


def test_costs_equal_numbers_by_hand():
    found = plan(chain, "hsdp=2", 4, step=chain_loss, tokens=5)
    cluster = ClusterRates(machine_ranks=2, intra=1000.0, inter=10.0, flops=1000.0)
    spent = compute_cost(found, cluster)
    whole = 3 * 24 * 24 * 4
    assert spent.compute == found.flops / 1000
    assert spent.by_axis["replicate"] == pytest.approx(2 * 0.5 * whole / 2 / 10)
    assert spent.bottleneck == "replicate"
    assert spent.seconds == pytest.approx(spent.by_axis["replicate"])
    assert spent.tokens_per_second == pytest.approx(4 * 5 / spent.seconds)


@pytest.mark.slow
def test_computation_waits_for_tensor_parallelism():
    found = plan(llama, "fsdp+tp=2", 4, step=loss)
    spent = compute_cost(found, ClusterRates(machine_ranks=2, intra=1e3, inter=1e9, flops=1e4))
    assert spent.seconds == pytest.approx(spent.compute + spent.by_axis["tp"])


@pytest.mark.slow
def test_cheapest_layout_that_fits_is_first():
    cluster = ClusterRates(machine_ranks=2, intra=1e6, inter=1e3, flops=1e6, memory=300_000)
    found = compare_layouts(
        bind_plan(llama, 12, step=loss, tokens=16), ["ddp", "hsdp=3", "fsdp", "hsdp=2", "hsdp=5"], cluster
    )
    order = [row.strategy for row in found.rows]
    fitting = [row for row in found.rows if not row.reason]
    assert [row.cost.per_unit for row in fitting] == sorted(row.cost.per_unit for row in fitting)
    assert order[-1] == "hsdp=5"  # does not divide 12
    assert "12" in found.rows[-1].reason
    assert order[-2] == "ddp"
    assert "more than available" in found.rows[-2].reason
    assert found.best is found.rows[0]
    said = str(found)
    assert "does not fit" in said
    assert "ddp: needs" in said


def test_heads_that_do_not_divide_are_reported():
    row = compare_layouts(bind_plan(llama, 8, step=loss), ["tp=8"]).rows[0]
    assert row.plan is None
    assert "heads" in row.reason or "divide" in row.reason


def test_stages_that_wait_for_each_other_are_a_row(monkeypatch):
    """A dry run or a simulation that cannot end is the reason of its layout. Others are still planned."""

    def plan_layout(strategy):
        if strategy == "pp":
            return plan(chain, "ddp", 2, step=chain_loss)
        return dry_run_stages(Layout(pp=2), wait_for_peers) if strategy == "pp=2" else plan(chain, strategy, 2)

    def wait_for_peers(rank, peer_objects):
        raise ObjectNotReady

    def compute(found, cluster):
        if found.exchanges is None:
            return compute_cost(found, cluster)
        lanes = [StageTimeline([PlanEvent("recv", 0, "pp", (1 - rank,))], rank) for rank in range(2)]
        return simulate_stages(lanes, lambda event: 0.0)

    monkeypatch.setattr(compare, "compute_cost", compute)  # a plan whose stages wait is a bug of a schedule
    found = compare_layouts(plan_layout, ["pp=2", "pp", "fsdp"])
    assert [row.strategy for row in found.rows] == ["fsdp", "pp=2", "pp"]
    assert found.best.strategy == "fsdp"
    assert all("wait for each other" in row.reason for row in found.rows[1:])


def test_process_group_is_an_error_and_no_row():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(StateError, match="has not joined a process group"):
            compare_layouts(bind_plan(chain, 4), ["ddp", "fsdp"])
    finally:
        dist.destroy_process_group()


def test_without_a_step_only_weights_are_known():
    found = plan(llama, "fsdp", 4)
    assert (found.exchanges, found.flops, found.activations) == (None, None, None)
    assert "not counted" in str(found)
    assert str(compare_layouts(bind_plan(llama, 4), ["fsdp"]))


def test_candidates_divide_the_ranks_evenly():
    assert list_candidates(64, 8, has_tp_plan=True) == ["ddp", "fsdp", "hsdp=8", "hsdp=16", "fsdp+tp=8"]
    assert list_candidates(6, 8) == ["ddp", "fsdp"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"strategy": "hsdp=3"}, "takes 3 ranks at a time"),
        ({"strategy": "fdsp"}, "is unknown"),
        ({"num_ranks": 0}, "1 or more"),
        ({"machine_ranks": 0}, "machine_ranks=0; give a number of 1 or more"),
        ({"tokens": -1}, "tokens=-1"),
        ({"optimizer": "adamv"}, "did you mean adam"),
        ({"precision": "fp8"}, "allowed: no, bf16, fp16"),
    ],
)
def test_invalid_use_is_refused(wrong, said):
    given = {"strategy": "fsdp", "num_ranks": 4, "optimizer": "adamw", "precision": "no"} | wrong
    with pytest.raises(ConfigError, match=said):
        plan(chain, given.pop("strategy"), given.pop("num_ranks"), **given)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_offloaded_activations_are_not_counted(strategy):
    """Each of eight checkpointed blocks keeps its input of 1 MiB. With offloading, only the one that is being copied counts."""

    def count_activations(**options):
        handlers = [ActivationCheckpointing(**options)]
        return plan(
            lambda: nn.Sequential(*(Block() for _ in range(8))), strategy, 2,
            step=lambda model: model(torch.zeros(1024, 256)).sum(), kwargs_handlers=handlers,
        ).activations  # fmt: skip

    mebibyte = 1 << 20
    assert count_activations() == 8 * mebibyte
    assert count_activations(offload=True) == mebibyte


def test_offloaded_parameters_are_refused():
    with pytest.raises(UnsupportedError, match="cpu_offload=True"):
        plan(chain, "fsdp", 2, step=chain_loss, kwargs_handlers=[ShardingOptions(cpu_offload=True)])


@pytest.mark.parametrize("engine", ["zero1", "zero3", "DeepSpeed"])
def test_deepspeed_is_not_planned_as_another_engine(engine):
    with pytest.raises(UnsupportedError, match=f"{engine} is DeepSpeed's engine, which cannot be planned"):
        plan(chain, engine, 4)
    found = compare_layouts(bind_plan(chain, 4), [engine, "fsdp"])
    assert [row.plan is None for row in found.rows] == [False, True]


def test_hsdp_shards_within_machines():
    assert plan(chain, "hsdp", 8, machine_ranks=4).layout == Layout(replicate=2, shard=4)
    assert compare_layouts(bind_plan(chain, 8, machine_ranks=2), ["hsdp"]).rows[0].plan.layout == Layout(
        replicate=4, shard=2
    )


def test_invalid_cluster_is_refused():
    with pytest.raises(ConfigError, match="above 0"):
        ClusterRates(intra=0)
