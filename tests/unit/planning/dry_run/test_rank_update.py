"""Test the dry run of one rank: numbers, fast chunking against torch's, and refused steps."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from headway import ActivationCheckpointing, AutocastKwargs, plan
from headway.core.config.engines import EngineOptions
from headway.core.config.mesh import Layout, parse_layout
from headway.errors import PrepareError, StateError, UnsupportedError
from headway.forecasting.device.devices import find_device
from headway.planning.dry_run import fake_group
from headway.planning.dry_run.fake_group import join_fake_group
from headway.planning.dry_run.meter import MeteredCollective, Volume
from headway.planning.dry_run.rank_update import dry_run_rank, run_update
from headway.planning.dry_run.tensor_modes import SharedChunks
from headway.planning.rank_shares import RankShares
from tests.unit.planning.models import Chain, chain, chain_loss, count_parameters, llama, loss, tied


def build_adamw(parameters):
    return torch.optim.AdamW(parameters)


def test_chain_of_matrices_equals_numbers_by_hand():
    found = dry_run_rank(chain, parse_layout("fsdp").resolve(4), 0, chain_loss, build_adamw)
    matrix, batch = 24 * 24, 5
    assert found.weights == found.gradients == 3 * matrix * 4 // 4
    assert found.optimizer_state == 2 * found.weights + 3 * 4  # two moments and a step count for each matrix
    gather, scatter = (
        MeteredCollective(phase, kind, "shard", 4)
        for phase, kind in (("forward", "all_gather"), ("backward", "reduce_scatter"))
    )
    assert found.volumes[gather] == found.volumes[scatter] == Volume(3, 3 * matrix * 4, matrix * 4)
    forward = 3 * 2 * batch * matrix
    # The first matrix needs no gradient of its input.
    assert (found.flops["forward"], found.flops["backward"]) == (forward, 2 * forward - forward // 3)
    assert found.activations == 3 * batch * 24 * 4  # the input of each layer


def test_half_precision_residual_stream_keeps_less():
    stream = 16 * 32 * (4 - 2)  # input of a block, with two bytes per number instead of four

    def measure_activations(*options):
        return plan(llama, "fsdp", 4, step=loss, precision="bf16", kwargs_handlers=options).activations

    assert measure_activations() - measure_activations(AutocastKwargs(half_residual=True)) >= 2 * stream


def test_replicas_reduce_all_gradients():
    found = dry_run_rank(chain, parse_layout("ddp").resolve(8), 0, chain_loss, build_adamw)
    whole = 3 * 24 * 24 * 4
    assert (found.weights, found.gradients) == (whole, whole)
    assert found.volumes == {MeteredCollective("backward", "all_reduce", "replicate", 8): Volume(1, whole, whole)}


def test_hybrid_shards_send_along_both_axes():
    found = dry_run_rank(chain, parse_layout("hsdp=2").resolve(8), 0, chain_loss, build_adamw)
    whole = 3 * 24 * 24 * 4
    by_axis = {
        (exchange.kind, exchange.axis): (exchange.num_ranks, volume.num_bytes)
        for exchange, volume in found.volumes.items()
    }
    assert by_axis["all_reduce", "replicate"] == (4, whole // 2)
    assert by_axis["reduce_scatter", "shard"] == (2, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "strategy", "num_ranks"), [(tied, "fsdp", 64), (llama, "fsdp", 256), (llama, "hsdp=32", 64)]
)
def test_fast_chunking_changes_nothing(make, strategy, num_ranks, monkeypatch):
    layout = parse_layout(strategy).resolve(num_ranks)
    ranks = 0, num_ranks // 2 - 1, num_ranks - 1
    short = [dry_run_rank(make, layout, rank, loss, build_adamw) for rank in ranks]
    monkeypatch.setattr(fake_group, "SharedChunks", nullcontext)
    assert short == [dry_run_rank(make, layout, rank, loss, build_adamw) for rank in ranks]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16])
@pytest.mark.parametrize("chunks", [1, 4, 8])
def test_chunks_have_the_shapes_of_torchs(size, chunks):
    whole = torch.empty(size, 3, device="meta")
    own = list(torch.chunk(whole, chunks))
    with SharedChunks():
        short = torch.chunk(whole, chunks)
    assert [part.shape for part in short[: len(own)]] == [part.shape for part in own]
    assert [part.numel() for part in short[len(own) :]] == [0] * (chunks - len(own))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp=3", "tp=2+fsdp", "ddp"])
def test_share_of_every_rank_follows_from_one_rank(strategy):
    layout = parse_layout(strategy).resolve(6)
    first = dry_run_rank(llama, layout, 0, loss, build_adamw)
    shares = RankShares(layout, first.parameters, first.states, [first.buffers])
    for rank in range(6):
        own, share = dry_run_rank(llama, layout, rank, loss, build_adamw), shares.get_share(rank)
        assert (own.weights + own.buffers, own.gradients, own.optimizer_state) == (
            share.weights,
            share.gradients,
            share.optimizer_state,
        )


@pytest.mark.slow
def test_tied_parameter_counts_once():
    found = dry_run_rank(tied, parse_layout("fsdp").resolve(3), 0, loss, build_adamw)
    assert sum(torch.Size(piece.shape).numel() for piece in found.parameters) == count_parameters(tied)
    assert len(found.states) == len(found.parameters)


def test_run_without_values_equals_one_with_values():
    """The same update on one process with real tensors gives the same numbers."""
    model = llama()
    assert run_update(model, Layout(), loss, build_adamw) == dry_run_rank(llama, Layout(), 0, loss, build_adamw)


@pytest.mark.slow
def test_checkpointed_activations_are_fewer_and_computed_twice():
    layout = parse_layout("fsdp").resolve(2)
    plain = dry_run_rank(llama, layout, 0, loss, build_adamw)
    fewer = dry_run_rank(
        llama, layout, 0, loss, build_adamw, options=EngineOptions(checkpointing=ActivationCheckpointing())
    )
    assert fewer.activations < plain.activations / 2
    assert plain.flops["backward"] < fewer.flops["backward"] <= plain.flops["backward"] + plain.flops["forward"]


@pytest.mark.slow
def test_selective_checkpointing_keeps_the_selected_activations():
    sizes = [
        dry_run_rank(llama, Layout(), 0, loss, build_adamw, options=EngineOptions(checkpointing=plan)).activations
        for plan in (None, ActivationCheckpointing(policy="keep_matmul"), ActivationCheckpointing())
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert (
        sizes[1] - sizes[2] > 2 * 16 * (32 + 2 * 16 + 32 + 2 * 56 + 32) * 4
    )  # results of the matrix products of two layers


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_further_layer_adds_its_share_only(device):
    """Whole gradients are freed once they are reduced, and so are temporary tensors of DTensor."""
    peaks = [
        dry_run_rank(
            partial(Chain, 256, depth),
            parse_layout("fsdp").resolve(64),
            0,
            compute_wide_loss,
            build_adamw,
            device=find_device(device),
        ).peak
        for depth in (4, 8)
    ]
    share, kept = 256 * 256 * 4 // 64, 8 * 256 * 4
    # weight, gradient and two moments of Adam, and the layer's input if it still exists at the peak
    assert 4 * 4 * share <= peaks[1] - peaks[0] <= 4 * (4 * share + kept)


def compute_wide_loss(model):
    return model(torch.zeros(8, 256)).sum()


def test_dry_run_leaves_no_process_group():
    dry_run_rank(chain, parse_layout("fsdp").resolve(4), 0, chain_loss, build_adamw)
    assert not dist.is_initialized()


def test_process_with_a_group_is_refused():
    with join_fake_group(2, 0), pytest.raises(StateError, match="has not joined a process group"):
        dry_run_rank(chain, parse_layout("fsdp").resolve(4), 0, None, None)


def test_step_that_reads_values_is_refused():
    def step_reading(model):
        return model(torch.zeros(5, 24)).sum() * (1 if model(torch.zeros(5, 24)).sum().item() > 0 else 2)

    with pytest.raises(UnsupportedError, match="without values"):
        dry_run_rank(chain, parse_layout("fsdp").resolve(4), 0, step_reading, build_adamw)


def test_step_without_a_loss_is_refused():
    with pytest.raises(UnsupportedError, match="must return the loss"):
        dry_run_rank(chain, parse_layout("fsdp").resolve(4), 0, lambda model: model(torch.zeros(5, 24)), build_adamw)


def test_model_that_cannot_be_sharded_is_refused():
    class StridedParameter(Chain):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4, 6).T)

    with pytest.raises(PrepareError, match="'scale' of StridedParameter is not contiguous"):
        dry_run_rank(StridedParameter, parse_layout("fsdp").resolve(4), 0, None, None)
    assert not dist.is_initialized()
