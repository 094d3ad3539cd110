"""Padding for several ranks adds zeros and nothing else."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_plugins.tensor_parallel import channel_block, check_expert_ranks, check_ranks, fit, pad, share_channels
from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.widths import LayerWidths

HEAD_DIM = 4
HIDDEN_SIZE = 6


def widths(*query_heads_per_kv_head: int, intermediate_size: int = 17) -> LayerWidths:
    return LayerWidths(query_heads_per_kv_head=query_heads_per_kv_head, intermediate_size=intermediate_size)


@pytest.mark.parametrize(
    ("kept", "num_ranks", "expected"),
    [
        ((3, 2, 1), 1, (3, 3, 17)),  # one rank: groups are evened out for the kernel only
        ((3, 2, 1), 2, (4, 3, 18)),  # three KV heads over two ranks: one is added
        ((3,), 2, (1, 4, 18)),  # one KV head on both ranks, its query heads split in halves
        ((1, 1, 1), 4, (4, 1, 20)),  # fewer KV heads than ranks, and 3 does not divide 4
        ((2, 2), 8, (2, 4, 24)),  # two KV heads, four ranks each
        ((), 4, (0, 0, 20)),  # no attention: none is added
    ],
)
def test_fitted_widths_divide(kept: tuple[int, ...], num_ranks: int, expected: tuple[int, int, int]) -> None:
    fitted = fit(widths(*kept), num_ranks)
    assert (fitted.num_kv_heads, fitted.query_heads_per_kv_head, fitted.intermediate_size) == expected
    assert fitted.num_query_heads % num_ranks == 0


@given(st.lists(st.integers(1, 6), max_size=8), st.integers(0, 40), st.integers(1, 12))
def test_what_splits_evenly_is_what_needs_no_padding(kept: list[int], channels: int, num_ranks: int) -> None:
    """The rule that `prune --tp` and the card go by, against the widths that are really built."""
    layer = widths(*kept, intermediate_size=channels)
    fitted = fit(layer, num_ranks)
    same = (fitted.num_kv_heads, fitted.num_query_heads, fitted.intermediate_size) == (len(kept), sum(kept), channels)
    assert layer.splits_over(num_ranks) == (same or num_ranks == 1)


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])  # Phi-3 keeps q, k, v in one tensor
def test_each_query_head_stays_beside_its_kv_head(fused: bool) -> None:
    kept = widths(3, 1)
    q, k = torch.randn(4 * HEAD_DIM, HIDDEN_SIZE), torch.randn(2 * HEAD_DIM, HIDDEN_SIZE)
    num_ranks = 4  # two KV heads on two ranks each, so groups grow from 3 to 4
    if fused:
        qkv = pad("layers.0.self_attn.qkv_proj.weight", torch.cat([q, k, k]), kept, fit(kept, num_ranks), HEAD_DIM)
        padded = qkv[: 8 * HEAD_DIM].unflatten(0, (2, 4, HEAD_DIM))
        assert torch.equal(qkv[8 * HEAD_DIM :], torch.cat([k, k]))
    else:
        padded = pad("layers.0.self_attn.q_proj.weight", q, kept, fit(kept, num_ranks), HEAD_DIM).unflatten(
            0, (2, 4, HEAD_DIM)
        )
    heads = q.unflatten(0, (4, HEAD_DIM))
    assert torch.equal(padded[0, :3], heads[:3]) and torch.equal(padded[1, 0], heads[3])
    assert not padded[0, 3].any() and not padded[1, 1:].any()


@pytest.mark.parametrize(("num_ranks", "block", "expected"), [(4, 1, 8), (1, 16, 16), (2, 4, 8)])
def test_padded_mlp_computes_the_same(num_ranks: int, block: int, expected: int) -> None:
    kept, x = widths(1, intermediate_size=5), torch.randn(7, HIDDEN_SIZE)
    fitted = fit(kept, num_ranks, block)
    gate, bias, down = torch.randn(5, HIDDEN_SIZE), torch.randn(5), torch.randn(HIDDEN_SIZE, 5)
    gate_padded = pad("layers.0.mlp.gate_proj.weight", gate, kept, fitted, HEAD_DIM)
    bias_padded = pad("layers.0.mlp.gate_proj.bias", bias, kept, fitted, HEAD_DIM)
    down_padded = pad("layers.0.mlp.down_proj.weight", down, kept, fitted, HEAD_DIM)
    assert gate_padded.shape == (expected, HIDDEN_SIZE)
    fused = pad("layers.0.mlp.gate_up_proj.weight", torch.cat([gate, 2 * gate]), kept, fitted, HEAD_DIM)
    assert torch.equal(fused, torch.cat([gate_padded, 2 * gate_padded]))
    padded = (x @ gate_padded.T + bias_padded) @ down_padded.T
    torch.testing.assert_close(padded, (x @ gate.T + bias) @ down.T)


def test_tensors_that_pruning_leaves_alone_pass_through() -> None:
    kept, norm, bias = widths(3, 1), torch.randn(HEAD_DIM), torch.randn(HIDDEN_SIZE)
    assert pad("layers.0.self_attn.q_norm.weight", norm, kept, fit(kept, 2), HEAD_DIM) is norm
    assert pad("layers.0.self_attn.o_proj.bias", bias, kept, fit(kept, 2), HEAD_DIM) is bias  # of the hidden state
    gate = torch.randn(17, HIDDEN_SIZE)
    assert pad("layers.0.mlp.gate_proj.weight", gate, kept, fit(kept, 1), HEAD_DIM) is gate


@pytest.mark.parametrize(
    ("channels", "num_ranks", "block", "expected"),
    [
        (17, 1, 1, 17),
        (17, 1, 8, 24),
        (24, 1, 8, 24),
        (17, 2, 8, 32),
        (0, 2, 64, 0),
        (1, 1, 64, 64),
    ],
)
def test_every_rank_has_whole_blocks_of_channels(channels: int, num_ranks: int, block: int, expected: int) -> None:
    assert fit(widths(1, intermediate_size=channels), num_ranks, block).intermediate_size == expected


def test_which_block_channels_are_filled_up_to() -> None:
    """Ours where a model is large enough for it; the user's goes before; 1 where weights cannot be padded."""

    def choose(size: int, num_ranks: int = 1, *, can_pad: bool = True, on_cpu: bool = False, **config: Any) -> int:
        return channel_block({"intermediate_size": size, **config}, num_ranks, can_pad=can_pad, on_cpu=on_cpu)

    assert choose(1536) == 64 and choose(1536, on_cpu=True) == 128
    assert choose(1536, can_pad=False) == 1
    assert choose(1536, 2) == choose(1536, 2, on_cpu=True) == 1  # a share of 768 is too small
    assert choose(11008, 8) == 64 and choose(512) == 1
    assert choose(512, 4, ddp_pad_channels_to=16) == 16
    assert choose(1536, on_cpu=True, ddp_pad_channels_to=1) == 1
    for block in (0, -8, 2.0, "64", True):
        with pytest.raises(SettingError, match="ddp_pad_channels_to"):
            choose(512, ddp_pad_channels_to=block)


def test_a_size_that_cannot_be_padded_names_the_layer_and_the_sizes_that_work() -> None:
    layers = [widths(2, 2, 2, 2, intermediate_size=32), widths(2, 2, intermediate_size=32)]
    config = {"num_attention_heads": 8}
    check_ranks(layers, 2, config, "LoRA adapters")
    layers += [widths(2, 1, intermediate_size=32)]
    with pytest.raises(SettingError, match=r"tensor_parallel_size=2 does not divide layer 2 .*one of \[1\]"):
        check_ranks(layers, 2, config, "LoRA adapters")
    with pytest.raises(SettingError, match=r"divide layer 1 .*one of \[1, 2, 4\]"):
        check_ranks(layers[:2], 8, config, "quantised weights")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_ranks_share_the_channels_of_experts_evenly_and_pad_no_more_than_one_rank(num_ranks: int) -> None:
    expert_widths = [0, 1, 2, 5, 17, 31, 33, 64, 16, 48, 15, 512, 0]
    shares = [share_channels(expert_widths, rank, num_ranks, 16) for rank in range(num_ranks)]
    for expert, width in enumerate(expert_widths):
        assert sorted(channel for share in shares for channel in share[expert]) == list(range(width))
    blocks = [sum(-(-len(share) // 16) for share in of_rank) for of_rank in shares]
    assert sum(blocks) == sum(-(-width // 16) for width in expert_widths)
    assert max(blocks) - min(blocks) <= 1


def test_ranks_that_cannot_share_experts_are_refused_with_what_works() -> None:
    check_expert_ranks(3, num_experts=8, dense_width=64, is_expert_parallel=True)  # 3, 3 and 2 experts
    check_expert_ranks(16, num_experts=8, dense_width=64, is_expert_parallel=False)  # 4 channels each
    with pytest.raises(SettingError, match=r"over 16 ranks .* a layer has 8; use at most 8 ranks"):
        check_expert_ranks(16, num_experts=8, dense_width=64, is_expert_parallel=True)
    with pytest.raises(SettingError, match=r"tensor_parallel_size=3 .* 64 channels .*one of \[1, 2\]"):
        check_expert_ranks(3, num_experts=8, dense_width=64, is_expert_parallel=False)
