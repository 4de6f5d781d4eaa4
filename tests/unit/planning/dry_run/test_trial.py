"""Dry run of one rank: numbers, fast chunking compared with torch, and refused steps."""

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
from headway.planning.dry_run.fake_group import SharedChunks, pretend_ranks
from headway.planning.dry_run.meter import MeteredCollective, Volume
from headway.planning.dry_run.trial import dry_run_rank, run_update
from headway.planning.outcome import RankShares
from tests.unit.planning.models import Chain, chain, chain_loss, llama, loss, num_parameters, tied


def adamw(parameters):
    return torch.optim.AdamW(parameters)


def test_a_chain_of_matrices_by_hand():
    found = dry_run_rank(chain, parse_layout("fsdp").resolve(4), 0, chain_loss, adamw)
    matrix, batch = 24 * 24, 5
    assert found.weights == found.gradients == 3 * matrix * 4 // 4
    assert found.optimizer_state == 2 * found.weights + 3 * 4  # two moments, and a count of steps for each matrix
    gather, scatter = (
        MeteredCollective(phase, kind, "shard", 4)
        for phase, kind in (("forward", "all_gather"), ("backward", "reduce_scatter"))
    )
    assert found.volumes[gather] == found.volumes[scatter] == Volume(3, 3 * matrix * 4, matrix * 4)
    forward = 3 * 2 * batch * matrix
    # The first matrix needs no gradient of its input.
    assert (found.flops["forward"], found.flops["backward"]) == (forward, 2 * forward - forward // 3)
    assert found.activations == 3 * batch * 24 * 4  # the input of each layer


def test_a_residual_stream_in_half_precision_keeps_less():
    stream = 16 * 32 * (4 - 2)  # the input of a block, with two bytes a number instead of four

    def kept(*options):
        return plan(llama, "fsdp", 4, step=loss, precision="bf16", kwargs_handlers=options).activations

    assert kept() - kept(AutocastKwargs(half_residual=True)) >= 2 * stream


def test_replicas_reduce_all_gradients():
    found = dry_run_rank(chain, parse_layout("ddp").resolve(8), 0, chain_loss, adamw)
    whole = 3 * 24 * 24 * 4
    assert (found.weights, found.gradients) == (whole, whole)
    assert found.volumes == {MeteredCollective("backward", "all_reduce", "replicate", 8): Volume(1, whole, whole)}


def test_hybrid_shards_send_along_both_axes():
    found = dry_run_rank(chain, parse_layout("hsdp=2").resolve(8), 0, chain_loss, adamw)
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
def test_the_short_way_of_cutting_changes_nothing(make, strategy, num_ranks, monkeypatch):
    layout = parse_layout(strategy).resolve(num_ranks)
    ranks = 0, num_ranks // 2 - 1, num_ranks - 1
    short = [dry_run_rank(make, layout, rank, loss, adamw) for rank in ranks]
    monkeypatch.setattr(fake_group, "SharedChunks", nullcontext)
    assert short == [dry_run_rank(make, layout, rank, loss, adamw) for rank in ranks]


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
def test_every_ranks_share_follows_from_one_rank(strategy):
    layout = parse_layout(strategy).resolve(6)
    first = dry_run_rank(llama, layout, 0, loss, adamw)
    shares = RankShares(layout, first.pieces, first.states, [first.buffers])
    for rank in range(6):
        own, share = dry_run_rank(llama, layout, rank, loss, adamw), shares.get_share(rank)
        assert (own.weights + own.buffers, own.gradients, own.optimizer_state) == (
            share.weights,
            share.gradients,
            share.optimizer_state,
        )


@pytest.mark.slow
def test_a_tied_parameter_is_one():
    found = dry_run_rank(tied, parse_layout("fsdp").resolve(3), 0, loss, adamw)
    assert sum(torch.Size(piece.shape).numel() for piece in found.pieces) == num_parameters(tied)
    assert len(found.states) == len(found.pieces)


def test_without_values_as_with_values():
    """On one process the same update with real tensors gives the same numbers."""
    model = llama()
    assert run_update(model, Layout(), loss, adamw) == dry_run_rank(llama, Layout(), 0, loss, adamw)


@pytest.mark.slow
def test_checkpointed_activations_are_fewer_and_computed_twice():
    layout = parse_layout("fsdp").resolve(2)
    plain = dry_run_rank(llama, layout, 0, loss, adamw)
    fewer = dry_run_rank(llama, layout, 0, loss, adamw, options=EngineOptions(checkpointing=ActivationCheckpointing()))
    assert fewer.activations < plain.activations / 2
    assert plain.flops["backward"] < fewer.flops["backward"] <= plain.flops["backward"] + plain.flops["forward"]


@pytest.mark.slow
def test_selective_checkpointing_keeps_what_it_says():
    sizes = [
        dry_run_rank(llama, Layout(), 0, loss, adamw, options=EngineOptions(checkpointing=plan)).activations
        for plan in (None, ActivationCheckpointing(policy="keep_matmul"), ActivationCheckpointing())
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] - sizes[2] > 2 * 16 * (32 + 2 * 16 + 32 + 2 * 56 + 32) * 4  # what two layers' matrix products give


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_another_layer_takes_its_share_and_no_more(device):
    """Whole gradients go once they are reduced, and so does what DTensors work shapes out on."""
    peaks = [
        dry_run_rank(
            partial(Chain, 256, depth),
            parse_layout("fsdp").resolve(64),
            0,
            wide_loss,
            adamw,
            device=find_device(device),
        ).peak
        for depth in (4, 8)
    ]
    share, kept = 256 * 256 * 4 // 64, 8 * 256 * 4
    # Weight, gradient, and Adam's two moments; of the layer's input what is left of it at the peak.
    assert 4 * 4 * share <= peaks[1] - peaks[0] <= 4 * (4 * share + kept)


def wide_loss(model):
    return model(torch.zeros(8, 256)).sum()


def test_a_dry_run_leaves_nothing_behind():
    dry_run_rank(chain, parse_layout("fsdp").resolve(4), 0, chain_loss, adamw)
    assert not dist.is_initialized()


def test_a_process_with_a_group_is_left_alone():
    with pretend_ranks(2, 0), pytest.raises(StateError, match="has not joined a process group"):
        dry_run_rank(chain, parse_layout("fsdp").resolve(4), 0, None, None)


def test_a_step_that_reads_values_is_refused():
    def reading(model):
        return model(torch.zeros(5, 24)).sum() * (1 if model(torch.zeros(5, 24)).sum().item() > 0 else 2)

    with pytest.raises(UnsupportedError, match="without values"):
        dry_run_rank(chain, parse_layout("fsdp").resolve(4), 0, reading, adamw)


def test_a_step_without_a_loss_is_refused():
    with pytest.raises(UnsupportedError, match="must return the loss"):
        dry_run_rank(chain, parse_layout("fsdp").resolve(4), 0, lambda model: model(torch.zeros(5, 24)), adamw)


def test_a_model_that_cannot_be_sharded_is_refused():
    class Scalar(Chain):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

    with pytest.raises(PrepareError, match="scale"):
        dry_run_rank(Scalar, parse_layout("fsdp").resolve(4), 0, None, None)
    assert not dist.is_initialized()
