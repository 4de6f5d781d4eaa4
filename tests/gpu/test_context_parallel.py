"""torch's ring attention compared with attention over the whole sequence. Needs two GPUs."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from headway import Accelerator
from tests.distributed import cut_models
from tests.distributed.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: ring attention has no kernel for CPUs"),
]


def compare_attention(rotation: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    from headway.layouts.context import ring_attention, sequences
    from headway.layouts.context.attention import WholeSequenceAttention
    from headway.layouts.tensor.crossings import SplitAxis

    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
    rank = mesh.get_local_rank()
    torch.cuda.set_device(rank)
    axis = SplitAxis.from_mesh(mesh)
    found = ring_attention.find_ring_attention(mesh, rotation, ring_attention.RingDispatcher())
    assert found is not None, "Headway does not support ring attention of this torch version"
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(2, heads, 64, 32, generator=generator).to(f"cuda:{rank}", torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    weights = torch.randn(2, 4, 64, 32, generator=generator).to(f"cuda:{rank}", torch.bfloat16)
    out = scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad((out * weights).sum(), whole)
    differences = []
    for attend in (found.attend, None):
        with WholeSequenceAttention(axis, attend):
            parts = [sequences.split_sequence(each, axis, 2) for each in whole]
            part = scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        again = sequences.join_sequence(part, axis, 2, 64)
        grads = torch.autograd.grad((again * weights).sum(), whole)
        for grad in grads:
            dist.all_reduce(grad)
        differences.append(float((again - out).abs().max()))
        differences += [float((one - other).abs().max()) for one, other in zip(grads, expected)]
    return differences


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_ring_attention_is_whole_attention(rotation: str) -> None:
    for differences in run_ranks(compare_attention, 2, rotation, timeout=240):
        assert max(differences) < 0.1, differences  # bfloat16


def compare_training(precision: str, num_tokens: int) -> list[float]:
    """Train a Llama with context parallelism on two GPUs and as a whole on the CPU.

    Return the loss and the gradient norm of the former, each followed by that of the latter.
    """
    accelerator = Accelerator(strategy="cp", mixed_precision=precision)
    torch.manual_seed(0)
    plain = cut_models.llama(max_position_embeddings=128, use_cache=False)
    model = copy.deepcopy(plain)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    ids = torch.randint(0, 30, (4, num_tokens), generator=torch.Generator().manual_seed(0))
    here = ids.to(accelerator.device)
    loss = model(input_ids=here, labels=here).loss
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    expected = plain(input_ids=ids, labels=ids).loss
    expected.backward()
    expected_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    found = [float(each) for each in (loss, expected, norm, expected_norm)]
    accelerator.end_training()
    return found


@pytest.mark.parametrize(("precision", "num_tokens"), [("no", 128), ("bf16", 128), ("bf16", 100)])
def test_a_model_in_parts_is_the_whole_model(precision: str, num_tokens: int) -> None:
    """Compare context parallelism with the whole model for several precisions and sequence lengths.

    In float32, the memory-efficient kernel pads one of the results that torch's ring attention merges. With 100 tokens,
    a rank's part is no multiple of 64 tokens, so keys are gathered instead.
    """
    for loss, expected, norm, expected_norm in run_ranks(compare_training, 2, precision, num_tokens, timeout=240):
        assert loss == pytest.approx(expected, rel=1e-6 if precision == "no" else 1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-5 if precision == "no" else 1e-3)
