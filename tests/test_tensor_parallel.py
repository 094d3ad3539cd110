"""The rule for tensor-parallel sizes, and its error message. Padding adds nothing, as test_dense.py shows."""

import pytest

from ddp_vllm.errors import SettingError
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.tensor_parallel import check_tensor_parallel, padded_widths, tensor_parallel_sizes

DENSE = {
    "model_type": "llama", "num_attention_heads": 12, "num_hidden_layers": 1, "hidden_size": 96, "intermediate_size": 32
}  # fmt: skip
EXPERTS = DENSE | {
    "model_type": "qwen3_moe", "num_attention_heads": 16, "num_experts": 8, "moe_intermediate_size": 64, "head_dim": 8
}  # fmt: skip


def layer(*query_heads_per_kv_head: int, intermediate_size: int = 32) -> LayerWidths:
    return LayerWidths(query_heads_per_kv_head=query_heads_per_kv_head, intermediate_size=intermediate_size)


def test_the_dense_models_query_heads_divide() -> None:
    assert tensor_parallel_sizes(DENSE) == [1, 2, 3, 4, 6, 12]
    check_tensor_parallel(6, DENSE)
    with pytest.raises(SettingError, match=r"size 5 does not divide the 12 query heads .*sizes: 1, 2, 3, 4, 6, 12;"):
        check_tensor_parallel(5, DENSE)
    with pytest.raises(SettingError, match="is 0; it must be at least 1"):
        check_tensor_parallel(0, DENSE)


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
    fitted = padded_widths(layer(*kept, intermediate_size=17), num_ranks)
    assert (fitted.query_heads_per_kv_head, fitted.intermediate_size) == expected
    assert fitted.num_query_heads % num_ranks == 0


def test_where_nothing_may_be_padded_the_first_layer_that_does_not_split_is_named() -> None:
    config, layers = DENSE | {"num_attention_heads": 8}, [layer(2, 2, 2, 2), layer(2, 2)]
    assert tensor_parallel_sizes(config, layers) == [1, 2, 4]
    with pytest.raises(SettingError, match=r"size 8 does not split layer 1 .*2 KV heads .*: 1, 2, 4; prune again"):
        check_tensor_parallel(8, config, layers, remedy="prune again")
    layers += [layer(2, 1)]
    check_tensor_parallel(1, config, layers)
    with pytest.raises(SettingError, match=r"size 2 does not split layer 2 .*valid sizes: 1; choose"):
        check_tensor_parallel(2, config, layers)


def test_experts_are_split_or_distributed() -> None:
    assert tensor_parallel_sizes(EXPERTS) == [1, 2, 4, 8, 16]
    assert tensor_parallel_sizes(EXPERTS | {"num_attention_heads": 6}) == [1, 2]  # 3 divides no 64 channels
    assert tensor_parallel_sizes(EXPERTS | {"num_attention_heads": 6}, expert_parallel=True) == [1, 2, 3, 6]
    with pytest.raises(SettingError, match=r"size 3 does not divide the 64 channels of a dense expert.*sizes: 1, 2;"):
        check_tensor_parallel(3, EXPERTS | {"num_attention_heads": 6})
    with pytest.raises(SettingError, match=r"size 16 requires an expert for each device, and a layer has 8; .* 4, 8;"):
        check_tensor_parallel(16, EXPERTS, expert_parallel=True)
