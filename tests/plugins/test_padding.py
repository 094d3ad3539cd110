"""Widths that several ranks can share; that padding adds nothing is tested by what vLLM computes (test_dense.py)."""

import pytest

from ddp_plugins.padding import share_channels
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.tensor_parallel import fit


def widths(*query_heads_per_kv_head: int, intermediate_size: int = 17) -> LayerWidths:
    return LayerWidths(query_heads_per_kv_head=query_heads_per_kv_head, intermediate_size=intermediate_size)


@pytest.mark.parametrize(
    ("kept", "num_ranks", "expected"),
    [
        ((3, 2, 1), 1, ((3, 3, 3), 17)),  # one rank: query heads are evened out for the kernel only
        ((3, 2, 1), 2, ((3, 3, 3, 3), 18)),  # three KV heads over two ranks: one is added
        ((3,), 2, ((4,), 18)),  # one KV head on both ranks, its query heads split in halves
        ((1, 1, 1), 4, ((1, 1, 1, 1), 20)),  # fewer KV heads than ranks, and 3 does not divide 4
        ((2, 2), 8, ((4, 4), 24)),  # two KV heads, four ranks each
        ((), 4, ((), 20)),  # no attention: none is added
    ],
)
def test_fitted_widths_divide(kept: tuple[int, ...], num_ranks: int, expected: tuple[tuple[int, ...], int]) -> None:
    fitted = fit(widths(*kept), num_ranks)
    assert (fitted.query_heads_per_kv_head, fitted.intermediate_size) == expected
    assert fitted.num_query_heads % num_ranks == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_ranks_share_the_channels_of_experts_evenly_and_pad_no_more_than_one_rank(num_ranks: int) -> None:
    expert_widths = [0, 1, 2, 5, 17, 31, 33, 64, 16, 48, 15, 512, 0]
    shares = [share_channels(expert_widths, rank, num_ranks, 16) for rank in range(num_ranks)]
    for expert, width in enumerate(expert_widths):
        assert sorted(channel for share in shares for channel in share[expert]) == list(range(width))
    blocks = [sum(-(-len(share) // 16) for share in of_rank) for of_rank in shares]
    assert sum(blocks) == sum(-(-width // 16) for width in expert_widths)
    assert max(blocks) - min(blocks) <= 1
