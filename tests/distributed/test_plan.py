"""`headway plan` compared with real gloo ranks: planned memory and communication equal what each rank holds and sends."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor

from headway import Accelerator, PipelineOptions
from headway.core.config.engines import EngineOptions
from headway.core.config.mesh import parse_layout
from headway.forecasting.tracing.attention_masks import skip_causal_mask
from headway.planning.dry_run.meter import StepMeter
from headway.planning.dry_run.rank_update import dry_run_rank, dry_run_stages, run_update
from headway.planning.dry_run.step_drivers import ContextParallelDriver, PipelineDriver
from headway.planning.dry_run.updates import DryRunUpdates
from headway.planning.outcome import build_plan
from headway.planning.plan import plan
from tests.distributed.ranks import run_ranks

LENGTH = 24


def make_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 42,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }
    # None of 31, 42, 50 and 14 rows is divisible by four, so the last rank has fewer rows and is padded.
    return skip_causal_mask(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=31, use_cache=False)))


def make_tied_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=12, n_layer=2, n_head=2, vocab_size=31, n_positions=LENGTH, use_cache=False)
    return skip_causal_mask(GPT2LMHeadModel(config))


def compute_loss(model):
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    return model(input_ids=tokens, labels=tokens).loss


def adamw(parameters):
    return torch.optim.AdamW(parameters)


def sgd(parameters):
    return torch.optim.SGD(parameters, momentum=0.9)


def measure_rank(make, strategy, precision, make_optimizer, is_owned=False):
    """Make one real update. Return the plan meter's counts, and bytes of weights, gradients and state measured by torch alone."""
    accelerator = Accelerator(cpu=True, strategy=strategy, mixed_precision=precision)
    layout = parse_layout(strategy).resolve(accelerator.num_processes)
    model = accelerator.prepare(make())
    made = []

    def keep(parameters):
        made.append(make_optimizer(parameters))
        return made[-1]

    drive = ContextParallelDriver(accelerator.strategy, model) if layout.cp > 1 else None
    updates = DryRunUpdates(accelerator.strategy) if is_owned else None
    trial = run_update(model, layout, compute_loss, keep, precision, driver=drive, updates=updates)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    state = [value for held in made[0].state.values() for value in held.values() if isinstance(value, torch.Tensor)]
    state = [value.to_local() if isinstance(value, DTensor) else value for value in state]
    return trial, [sum(t.nbytes for t in tensors) for tensors in (local, grads, state)]


def make_even_llama():
    """Return a Llama that tensor parallelism can split evenly in each dimension, and FSDP cannot."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    return skip_causal_mask(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=30, use_cache=False)))


CASES = [
    (make_even_llama, "fsdp+tp=2", 4, "bf16", adamw),
    (make_llama, "fsdp", 2, "no", adamw),
    (make_llama, "fsdp", 4, "bf16", adamw),
    (make_llama, "hsdp=2", 4, "no", sgd),
    (make_tied_gpt2, "hsdp=2", 4, "bf16", adamw),
    (make_llama, "cp", 2, "no", adamw),
    (make_tied_gpt2, "fsdp+cp=2", 4, "bf16", sgd),
]


@pytest.mark.parametrize(("make", "strategy", "num_ranks", "precision", "make_optimizer"), CASES)
def test_rank_holds_and_sends_what_the_plan_predicts(make, strategy, num_ranks, precision, make_optimizer):
    real = run_ranks(measure_rank, num_ranks, make, strategy, precision, make_optimizer)
    planned = plan(make, strategy, num_ranks, step=compute_loss, optimizer=make_optimizer, precision=precision)
    layout = parse_layout(strategy).resolve(num_ranks)
    for rank, (trial, (weights, gradients, state)) in enumerate(real):
        share = planned.shares.get_share(rank)
        # measured by torch alone, without padding and buffers
        assert share.weights - share.padding - trial.buffers == weights
        assert share.gradients - share.padding == gradients
        assert share.optimizer_state == state
        # with padding, and everything that was sent
        assert (share.weights - trial.buffers, share.gradients) == (trial.weights, trial.gradients)
        assert planned.exchanges == trial.volumes
        # a dry run of the same rank
        assert dry_run_rank(make, layout, rank, compute_loss, make_optimizer, precision) == trial


def adafactor(parameters):
    return torch.optim.Adafactor(parameters)


def muon(parameters):
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2])


@pytest.mark.parametrize(
    ("make", "strategy", "num_ranks", "make_optimizer"),
    [
        (make_llama, "fsdp", 2, adafactor),
        (make_tied_gpt2, "hsdp=2", 4, muon),
        (make_even_llama, "fsdp+tp=2", 4, adafactor),
    ],
)
def test_owners_hold_and_send_what_the_plan_predicts(make, strategy, num_ranks, make_optimizer):
    """For optimizers of whole parameters, each parameter's state is on the rank that updates it."""
    real = run_ranks(measure_rank, num_ranks, make, strategy, "no", make_optimizer, True)
    planned = plan(make, strategy, num_ranks, step=compute_loss, optimizer=make_optimizer)
    layout = parse_layout(strategy).resolve(num_ranks)
    for rank, (trial, (*_, state)) in enumerate(real):
        assert planned.shares.get_share(rank).optimizer_state == state
        dry = dry_run_rank(make, layout, rank, compute_loss, make_optimizer)
        assert (dry.states, dry.optimizer_state) == (trial.states, trial.optimizer_state)
        sent, expected = (
            {each: volume for each, volume in volumes.items() if each.kind == "all_to_all"}
            for volumes in (trial.volumes, dry.volumes)
        )
        assert sent == expected
        assert [each.phase for each in expected] == ["update"]


@dataclass(frozen=True)
class TokenBatch:
    """Training step on a batch that can be split."""

    rows: int

    def inputs(self):
        tokens = torch.zeros(self.rows, LENGTH, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    def loss(self, model, inputs):
        return model(**inputs).loss

    def __call__(self, model):
        return self.loss(model, self.inputs())


def make_four_layers():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 3, "num_key_value_heads": 1}
    return skip_causal_mask(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=31, use_cache=False)))


PIPELINES = {
    2: [
        (make_tied_gpt2, "pp", PipelineOptions(num_microbatches=2), adamw),
        (make_four_layers, "pp", PipelineOptions("1f1b", num_microbatches=4), sgd),
        (make_four_layers, "pp", PipelineOptions("interleaved", num_microbatches=4), sgd),
        (make_four_layers, "pp", PipelineOptions("zbv", num_microbatches=4), sgd),
    ],
    4: [
        (make_four_layers, "ddp=2+pp=2", PipelineOptions("1f1b", num_microbatches=3), adamw),
        (make_four_layers, "pp", PipelineOptions("1f1b", num_microbatches=6), sgd),
    ],
}


def measure_stages(num_ranks):
    """Make real updates with each schedule. Return the plan meter's counts and the bytes measured without it."""
    found = []
    for make, strategy, options, make_optimizer in PIPELINES[num_ranks]:
        accelerator = Accelerator(cpu=True, strategy=strategy, kwargs_handlers=[options])
        layout = parse_layout(strategy).resolve(num_ranks)
        model = accelerator.prepare(make())
        made = []

        def keep(parameters, made=made, make_optimizer=make_optimizer):
            made.append(make_optimizer(parameters))
            return made[0]

        drive = PipelineDriver(accelerator.strategy, options.schedule, TokenBatch(6))
        trial = run_update(model, layout, TokenBatch(6), keep, driver=drive)
        held = [p for p in model.parameters() if not p.is_meta]
        state = [value for each in made[0].state.values() for value in each.values() if isinstance(value, torch.Tensor)]
        measured = [sum(t.nbytes for t in tensors) for tensors in (held, [p.grad for p in held], state)]
        found.append((trial, measured))
        accelerator.end_training()
    return found


def measure_context_stages():
    """Make one 1F1B update with sequences split in two."""
    options = PipelineOptions("1f1b", num_microbatches=3)
    accelerator = Accelerator(cpu=True, strategy="pp=2+cp=2", kwargs_handlers=[options])
    model = accelerator.prepare(make_four_layers())
    drive = PipelineDriver(accelerator.strategy, "1f1b", TokenBatch(6))
    trial = run_update(model, parse_layout("pp=2+cp=2").resolve(4), TokenBatch(6), sgd, driver=drive)
    held = [p.to_local() for p in model.parameters() if not p.is_meta]
    return trial, sum(t.nbytes for t in held)


def test_stages_with_split_sequences_hold_and_send_what_the_plan_predicts():
    options = EngineOptions(pipeline=PipelineOptions("1f1b", num_microbatches=3))
    layout = parse_layout("pp=2+cp=2").resolve(4)
    dry_run = partial(dry_run_rank, make_four_layers, layout, step=TokenBatch(6), make_optimizer=sgd, options=options)
    planned = build_plan(
        "pp=2+cp=2",
        layout,
        dry_run_stages(layout, lambda rank, answers: dry_run(rank, peer_objects=answers)),
        0,
    )
    for rank, (trial, weights) in enumerate(run_ranks(measure_context_stages, 4)):
        share, stage = planned.shares.get_share(rank), planned.stages[layout.find_coordinates(rank)["pp"]]
        assert share.weights - share.padding - trial.buffers == weights
        assert stage.activations == trial.activations
        sent, expected = (
            {each: volume for each, volume in volumes.items() if each.kind != "all_gather" or each.axis == "cp"}
            for volumes in (trial.volumes, stage.exchanges)
        )
        assert sent == expected
        assert {each.kind for each in expected if each.axis == "cp"} >= {"all_gather", "reduce_scatter"}


def remove_handshakes(volumes):
    """Return the volumes without all-gathers. In a pipeline, only Headway's handshakes use them, with a few numbers each."""
    gathers = [volume for exchange, volume in volumes.items() if exchange.kind == "all_gather"]
    assert all(volume.largest < 20_000 for volume in gathers)
    return {exchange: volume for exchange, volume in volumes.items() if exchange.kind != "all_gather"}


@pytest.mark.parametrize("num_ranks", PIPELINES)
def test_stage_holds_and_sends_what_the_plan_predicts(num_ranks):
    real = run_ranks(measure_stages, num_ranks, num_ranks)
    for index, (make, strategy, options, make_optimizer) in enumerate(PIPELINES[num_ranks]):
        layout = parse_layout(strategy).resolve(num_ranks)
        given = {"step": TokenBatch(6), "make_optimizer": make_optimizer, "options": EngineOptions(pipeline=options)}
        dry_run = partial(dry_run_rank, make, layout, **given)  # with CPU kernels, as on these ranks
        trials = dry_run_stages(layout, lambda rank, answers, dry_run=dry_run: dry_run(rank, peer_objects=answers))
        planned = build_plan(strategy, layout, trials, 0)
        for rank, results in enumerate(real):
            trial, (weights, gradients, state) = results[index]
            share = planned.shares.get_share(rank)
            stage = planned.stages[planned.layout.find_coordinates(rank)["pp"]]
            assert share.weights - trial.buffers == weights == trial.weights
            assert share.gradients == gradients
            assert share.optimizer_state == state
            assert stage.activations == trial.activations
            assert stage.exchanges == remove_handshakes(trial.volumes)
            assert stage.flops == sum(trial.flops.values())


def measure_replicas():
    Accelerator(cpu=True)
    wrapped = torch.nn.parallel.DistributedDataParallel(make_llama())
    with StepMeter(parse_layout("ddp").resolve(2)) as meter:
        result = compute_loss(wrapped)
        meter.phase = "backward"
        result.backward()
    return meter.volumes


def test_replicas_reduce_their_gradients_once():
    planned = plan(make_llama, "ddp", 2, step=compute_loss)
    for volumes in run_ranks(measure_replicas, 2):
        reduced = [volume.num_bytes for exchange, volume in volumes.items() if exchange.kind == "all_reduce"]
        assert [sum(reduced)] == [volume.num_bytes for volume in planned.exchanges.values()]
