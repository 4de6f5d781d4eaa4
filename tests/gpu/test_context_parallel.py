"""torch's ring attention beside whole attention: needs two GPUs."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from tests.distributed.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: ring attention has no kernel for CPUs"),
]


def attended(rotation: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    from headway.strategies import ring, zigzag
    from headway.strategies.crossings import Axis
    from headway.strategies.cut_attention import Door

    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
    rank = mesh.get_local_rank()
    torch.cuda.set_device(rank)
    axis = Axis.of(mesh)
    found = ring.find(mesh, rotation, ring.Rings())
    assert found is not None, "this torch has another form of context parallelism"
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(2, heads, 64, 32, generator=generator).to(f"cuda:{rank}", torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    weights = torch.randn(2, 4, 64, 32, generator=generator).to(f"cuda:{rank}", torch.bfloat16)
    out = scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad((out * weights).sum(), whole)
    off = []
    for attend in (found.attend, None):
        with Door(axis, attend):
            parts = [zigzag.part_of(each, axis, 2) for each in whole]
            part = scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        again = zigzag.join(part, axis, 2, 64)
        grads = torch.autograd.grad((again * weights).sum(), whole)
        for grad in grads:
            dist.all_reduce(grad)
        off.append(float((again - out).abs().max()))
        off += [float((one - other).abs().max()) for one, other in zip(grads, wanted)]
    return off


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_ring_attention_is_whole_attention(rotation: str) -> None:
    for off in run_ranks(attended, 2, rotation, timeout=240):
        assert max(off) < 0.1, off  # bfloat16
