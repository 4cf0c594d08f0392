"""KV memory: exact cases, models and their files, and allocator bugs that the state machine must find."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bench import workloads
from pagebench.properties.claims import budget
from pagebench.properties.kv_blocks_machine import EXAMPLES, STEPS, run_machine
from pagebench.properties.kv_blocks_store import ListStore
from pagebench.reference import kv_blocks_prefix, kv_blocks_sequence
from pagebench.reference.kv_blocks import (
    KV_FORMATS,
    kv_bytes,
    latent_kv_bytes,
    model_kv_bytes,
    naive_waste,
    paged_waste,
    token_bytes,
)
from pagebench.reference.kv_blocks_batching import (
    DEVICES,
    WEIGHT_FORMATS,
    decode_bytes,
    decode_flops,
    kv_memory,
    naive_capacity,
    paged_capacity,
    tokens_per_second,
    weight_bytes,
)
from pagebench.reference.kv_blocks_contiguous import ContiguousAllocator, OutOfSlotsError
from pagebench.reference.kv_blocks_paged import PagedAllocator
from pagebench.reference.kv_blocks_pairs import as_pairs
from pagebench.reference.kv_blocks_pool import BlockPool, OutOfBlocksError
from pagebench.reference.model_config import read_config
from pagebench.reference.models import DEEPSEEK_V3, GEMMA_2_9B, LLAMA_2_13B, LLAMA_3_8B, MISTRAL_7B, MODELS, Model

# -- bytes


def test_llama_2_13b_at_4096_tokens() -> None:
    assert kv_bytes(1, 4096, 40, 40, 128, 2) == 3_355_443_200
    assert model_kv_bytes(LLAMA_2_13B, 4096, KV_FORMATS["fp16"]) == 3_355_443_200


@budget(100)
@given(st.integers(0, 64), st.integers(0, 9000), st.integers(1, 80), st.integers(1, 64), st.integers(1, 64))
def test_kv_bytes_of_mha_are_the_textbook_formula(batch: int, seq_len: int, layers: int, heads: int, half: int) -> None:
    for bits, p in ((32, 4), (16, 2), (8, 1), (4, 0.5)):
        expected = 2 * batch * seq_len * layers * (heads * 2 * half) * bits // 8
        assert kv_bytes(batch, seq_len, layers, heads, 2 * half, p) == expected


def test_scales_of_quantised_caches() -> None:
    assert kv_bytes(1, 1, 1, 8, 128, 1, scale_bytes=4) == 2 * 8 * (128 + 4)
    assert kv_bytes(1, 1, 1, 8, 128, 0.5, scale_bytes=2, scale_group=32) == 2 * 8 * (64 + 4 * 2)
    assert kv_bytes(1, 1, 1, 1, 80, 0.5, scale_bytes=2, scale_group=32) == 2 * (40 + 3 * 2), "the last group is short"
    assert kv_bytes(1, 1, 1, 1, 5, 0.5) == 2 * 3, "a row ends on a whole byte"


def test_gqa_mla_and_windows() -> None:
    fp16 = KV_FORMATS["fp16"]
    assert token_bytes(LLAMA_3_8B, fp16) * 4 == token_bytes(MODELS["llama-2-7b"], fp16)
    assert token_bytes(DEEPSEEK_V3, fp16) == latent_kv_bytes(1, 1, 61, 512, 64, 2) == 61 * 576 * 2
    assert model_kv_bytes(MISTRAL_7B, 32768, fp16) == model_kv_bytes(MISTRAL_7B, 4096, fp16)
    full, windowed = 21 * 32768, 21 * 4096
    assert model_kv_bytes(GEMMA_2_9B, 32768, fp16) == (full + windowed) * 2 * 8 * 256 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 1, 1, 1, 2), "batch must be an integer >= 0, got -1"),
        ((1, 1.5, 1, 1, 1, 2), "seq_len must be an integer >= 0, got 1.5"),
        ((1, 1, 1, 0, 1, 2), "num_kv_heads must be an integer >= 1, got 0"),
        ((1, 1, 1, 1, 0, 2), "head_size must be an integer >= 1, got 0"),
        ((1, 1, 1, 1, 1, 0), "bytes_per_element must be a positive number, got 0"),
        ((1, 1, 1, 1, 1, float("nan")), "bytes_per_element must be a positive number, got nan"),
        ((1, 1, 1, 1, 1, True), "bytes_per_element must be a positive number, got True"),
        ((1, 1, 1, 1, 1, 0.3), "bytes_per_element must be a whole number of bits, got 0.3"),
    ],
)
def test_bad_sizes_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_bytes(*arguments)


# -- models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as their checkpoints hold them
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("gemma-2-9b", 9_241_705_984),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_419_200),
    ],
)
def test_parameter_counts(name: str, parameters: int) -> None:
    assert MODELS[name].parameters() == parameters


def test_workloads_and_models_agree() -> None:
    """bench/ keeps its own few numbers, so that what is measured cannot move the ruler; they must be the same."""
    for ours in (workloads.LLAMA_2_13B, workloads.LLAMA_3_8B, workloads.QWEN2_5_7B):
        model = MODELS[ours.name]
        for field in ("num_layers", "num_query_heads", "num_kv_heads", "head_size", "hidden_size", "intermediate_size"):
            assert getattr(model, field) == getattr(ours, field), f"{ours.name}: {field}"


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128, "vocab_size": 129280,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": LLAMA,
    "llama-2-7b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 32000,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
        "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": False, "sliding_window": None, "use_sliding_window": False,
    },
    "mistral-7b-v0.1": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": None,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
        "sliding_window": 4096,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16, "vocab_size": 102400,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    },
    "deepseek-v3": DEEPSEEK,
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_config_file_gives_the_shipped_model(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    assert read_config(folder) == MODELS[name]
    assert read_config(folder / "config.json") == MODELS[name]


def test_text_part_of_a_multimodal_config(tmp_path: Path) -> None:
    text = {
        "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32, "num_hidden_layers": 62,
        "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208, "sliding_window": 1024,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "_name_or_path": "gemma-3-27b"}))
    model = read_config(path)
    assert (model.name, model.num_windowed_layers, model.window) == ("gemma-3-27b", 52, 1024)
    assert model.cached_tokens(10_000) == 10 * 10_000 + 52 * 1024


def test_what_a_config_leaves_out_is_its_familys_default(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    model = read_config(path)
    assert (model.num_query_heads, model.num_kv_heads, model.head_size, model.vocab_size) == (8, 4, 256, 262_208)
    assert (model.num_windowed_layers, model.window) == (29, 1024)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of llama"),
        ({"hidden_size": None}, "hidden_size must be an integer >= 1, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer >= 1, got 0"),
        ({"head_dim": "128"}, "head_dim must be an integer >= 0, got '128'"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, got 'no'"),
        ({"num_key_value_heads": 5}, "num_query_heads must be a multiple of num_kv_heads"),
        ({"num_local_experts": 4}, "num_experts_per_tok must be an integer"),
    ],
)
def test_bad_configs_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | change))
    with pytest.raises(ValueError, match=message):
        read_config(path)


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="path must name a JSON file"):
        read_config(path)


# -- exact cases


@pytest.mark.parametrize(("seq_len", "naive", "paged"), [(100, 1948, 12), (32, 2016, 0), (1, 2047, 15)])
def test_waste_of_three_lengths(seq_len: int, naive: int, paged: int) -> None:
    assert naive_waste(seq_len, 2048) == naive
    assert paged_waste(seq_len, 16) == paged
    contiguous, blocks = ContiguousAllocator(4096), PagedAllocator(256, 16)
    contiguous.reserve(0, 2048)
    blocks.create(0, 0)
    for _ in range(seq_len):
        contiguous.append(0)
        blocks.append(0)
    assert contiguous.waste(0) == naive
    assert blocks.waste(0) == blocks.usage().internal_waste == paged


def test_one_system_prompt_is_held_once() -> None:
    allocator = PagedAllocator(100, 16)
    system = list(range(64))
    assert allocator.create(0, [*system, 1, 2, 3]) == 0
    assert allocator.create(1, [*system, 4, 5]) == 64
    usage = allocator.usage()
    assert (usage.held, usage.shared, usage.used) == (4 + 1 + 1, 4, 64 + 3 + 2)
    assert allocator.block_table(0)[:4] == allocator.block_table(1)[:4]


def test_a_prompt_outlives_its_request_until_memory_is_needed() -> None:
    allocator = PagedAllocator(4, 16)
    allocator.create(0, list(range(48)))
    allocator.free(0)
    assert allocator.usage().cached == 3
    assert allocator.create(1, [*range(32), 7]) == 32, "found again"
    allocator.create(2, 16)
    assert allocator.usage().cached == 0, "the last block of the old prompt gave way"
    with pytest.raises(OutOfBlocksError, match="1 blocks wanted, 0 available in the device pool"):
        allocator.create(3, 1)


def test_extra_keys_keep_equal_tokens_apart() -> None:
    allocator = PagedAllocator(100, 4)
    tokens = list(range(12))
    allocator.create(0, tokens, extras=("lora-1",))
    assert allocator.create(1, tokens, extras=("lora-1",)) == 12
    assert allocator.create(2, tokens, extras=("lora-2",)) == 0
    assert allocator.create(3, tokens) == 0
    assert allocator.create(4, tokens, placed_extras={5: "image"}) == 4, "shared up to the block of the image"
    for extras in ("lora", b"lora"):  # a key by itself would be taken for one per letter
        with pytest.raises(ValueError, match=r"extras must be several keys, not one, got b?'lora'"):
            allocator.create(5, tokens, extras=extras)


def test_a_forks_first_write_copies_exactly_one_block() -> None:
    allocator = PagedAllocator(100, 16)
    allocator.create(0, list(range(40)))
    before = allocator.block_table(0)
    allocator.fork(0, 1)
    ((source, target),) = allocator.append(1, 7)
    assert source == before[-1]
    assert allocator.block_table(1) == (*before[:-1], target)
    assert allocator.block_table(0) == before
    assert not allocator.append(0, 8), "the other side owns its block again"
    assert as_pairs([(source, target)]).shape == (1, 2)


def test_nothing_is_copied_when_the_last_block_is_full() -> None:
    allocator = PagedAllocator(100, 16)
    allocator.create(0, 32)
    allocator.fork(0, 1)
    assert not allocator.append(1)
    assert allocator.usage().held == 3


def test_a_refusal_changes_nothing() -> None:
    allocator = PagedAllocator(3, 16)
    before = allocator.snapshot()
    with pytest.raises(OutOfBlocksError, match="4 blocks wanted, 3 available"):
        allocator.create(0, 64)
    assert allocator.snapshot() == before


def test_one_block_freed_twice_in_one_call() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="referenced blocks only, got 3 at index 1"):
        pool.free([0, 3])
    with pytest.raises(ValueError, match="at index 1"):
        pool.free([block, block])
    pool.share([block])
    pool.free([block, block])
    pool.check()
    assert (pool.num_free, pool.num_references) == (4, 0)


@pytest.mark.parametrize("bad", [-1, 4, 1.0, "1", None])
def test_freeing_what_is_no_block_changes_nothing(bad: Any) -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    before = pool.snapshot()
    with pytest.raises(ValueError, match="referenced blocks only"):
        pool.free([*blocks, bad])
    assert pool.snapshot() == before


def test_the_null_block_is_never_handed_out_or_freed() -> None:
    pool = BlockPool(4, null_block=True)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    for call in (pool.free, pool.share):
        with pytest.raises(ValueError, match="must"):
            call([0])


def test_eviction_of_one_of_two_blocks_with_one_key_keeps_the_other() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.publish(block, b"key")
    pool.free([first, second])
    assert pool.evict(1) == [first]
    assert pool.lookup(b"key") == second
    pool.check()


def test_window_leaves_null_blocks_behind() -> None:
    allocator = PagedAllocator(10, 4, null_block=True)
    allocator.create(0, 14)
    assert allocator.drop_before(0, 9) == 2
    assert allocator.block_table(0)[:2] == (0, 0)
    assert allocator.usage().held == 2
    with pytest.raises(ValueError, match=r"position must be in \[8, 14\), got 7"):
        allocator.slot(0, 7)
    with pytest.raises(ValueError, match="null_block must be reserved"):
        PagedAllocator(10, 4).drop_before(0, 0)


def test_swapping_a_pair_that_shares_moves_each_block_once() -> None:
    allocator = PagedAllocator(10, 4, num_host_blocks=3)
    allocator.create(0, list(range(10)))
    allocator.fork(0, 1)
    assert len(allocator.swap_out([0, 1])) == 3
    assert allocator.usage().held == 0
    with pytest.raises(ValueError, match="on the device, not swapped out"):
        allocator.append(0)
    assert len(allocator.swap_in([1])) == 3
    assert len(allocator.append(1, 7)) == 0, "alone on the device now"
    assert allocator.create(2, list(range(8))) == 8, "what came back can be found again"
    allocator.check()


def test_external_fragmentation_is_told_apart() -> None:
    allocator = ContiguousAllocator(100)
    for seq_id, size in enumerate((30, 20, 30, 20)):
        allocator.reserve(seq_id, size)
    allocator.free(1)
    allocator.free(3)
    with pytest.raises(OutOfSlotsError, match="25 slots wanted in one piece, largest free extent 20, 40 free") as error:
        allocator.reserve(4, 25)
    assert error.value.fragmented
    with pytest.raises(OutOfSlotsError) as error:
        allocator.reserve(4, 41)
    assert not error.value.fragmented
    assert (allocator.refused, allocator.refused_fragmented) == (2, 1)


def test_positions_tokens_and_their_number_may_be_numpys() -> None:
    allocator = PagedAllocator(8, 4, null_block=True)
    allocator.create(0, np.arange(6))
    allocator.create(1, np.int64(3))
    assert allocator.append(0, np.int64(6)) == ()
    assert allocator.create(2, range(6)) == 4, "the same tokens as Python's"
    assert allocator.slot(0, np.int64(5)) == allocator.slot(0, 5)
    before = allocator.snapshot()
    for call in (
        lambda: allocator.slot(0, 1.5),  # type: ignore[arg-type]  # that is the point, here and below
        lambda: allocator.drop_before(0, 1.5),  # type: ignore[arg-type]
        lambda: allocator.append(0, 1.5),  # type: ignore[arg-type]
        lambda: allocator.create(3, 1.5),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"(position|tokens?) must "):
            call()
    assert allocator.snapshot() == before


def test_spare_blocks_stay_available() -> None:
    allocator = PagedAllocator(4, 4)
    before = allocator.snapshot()
    with pytest.raises(OutOfBlocksError) as error:
        allocator.create(0, range(12), spare=2)
    assert (error.value.wanted, error.value.available) == (5, 4)
    assert allocator.snapshot() == before, "nothing is held, nor can be found by its content"
    with pytest.raises(ValueError, match="spare must be an integer >= 0, got -1"):
        allocator.create(0, range(12), spare=-1)
    allocator.create(0, range(12), spare=1)
    assert allocator.pool.num_available == 1


def test_appending_costs_the_same_however_long_the_sequence() -> None:
    def seconds(length: int) -> float:
        allocator = PagedAllocator(40_000, 16)
        allocator.create(0, length)
        best = float("inf")
        for _ in range(7):
            start = time.process_time()
            for _ in range(2000):
                allocator.append(0)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(600_000) < 4 * seconds(16), "linear cost would be thousands of times as much"


# -- batching


@pytest.mark.parametrize("model", list(MODELS.values()), ids=list(MODELS))
def test_throughput_is_the_roofline(model: Model) -> None:
    device, weights, cache = DEVICES["h100-80gb"], WEIGHT_FORMATS["fp16"], KV_FORMATS["fp16"]
    rates = [tokens_per_second(model, device, batch, 1000, weights, cache) for batch in (1, 2, 8, 64, 512)]
    assert rates == sorted(rates), "a larger batch is never slower"
    for batch in (1, 64):
        step = batch / tokens_per_second(model, device, batch, 1000, weights, cache)
        assert step * device.bandwidth >= decode_bytes(model, batch, 1000, weights, cache) * (1 - 1e-12)
        assert step * device.flop_rate >= decode_flops(model, batch, 1000) * (1 - 1e-12)
    assert decode_flops(model, 64, 1000) == 64 * decode_flops(model, 1, 1000)


def test_decode_bytes_of_llama_2_13b_by_hand() -> None:
    weights = 2 * (13_015_864_320 - 32000 * 5120)  # all but the input embedding
    assert decode_bytes(LLAMA_2_13B, 4, 1000, WEIGHT_FORMATS["fp16"], KV_FORMATS["fp16"]) == (
        weights + 4 * 1000 * 819_200 + 4 * 819_200
    )


def test_capacity_of_an_80_gib_gpu() -> None:
    memory = kv_memory(LLAMA_2_13B, DEVICES["a100-80gb"], WEIGHT_FORMATS["fp16"])
    assert memory == int(0.9 * 80 * 2**30) - 2 * 13_015_864_320
    fp16 = KV_FORMATS["fp16"]
    assert naive_capacity(LLAMA_2_13B, memory, 2048, fp16) == memory // (2048 * 819_200) == 30
    assert paged_capacity(LLAMA_2_13B, memory, 100, 16, fp16) == memory // (112 * 819_200)
    assert kv_memory(MODELS["llama-2-70b"], DEVICES["a100-80gb"], WEIGHT_FORMATS["fp16"]) == 0, "the weights do not fit"
    assert weight_bytes(LLAMA_2_13B, WEIGHT_FORMATS["int4"]) < weight_bytes(LLAMA_2_13B, WEIGHT_FORMATS["fp8"]) / 1.8


# -- bugs that the machine must find


class _Planted(PagedAllocator):
    """PagedAllocator over a pool of another class."""

    pool_class: type[BlockPool] = BlockPool

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in ("pool", "host"):
            sound = getattr(self, name)
            setattr(self, name, self.pool_class(sound.num_blocks, null_block=sound.null_block == 0, name=sound.name))


class _InflatingPool(BlockPool):
    """Frees a block as often as one call lists it."""

    def _release(self, blocks: Sequence[int]) -> list[int]:
        released = super()._release(blocks)
        return [block for block in blocks if block in released]


class _LeakingPool(BlockPool):
    """Keeps what it had taken when the rest was not there."""

    def allocate(self, count: int) -> list[int]:
        if count > self.num_available:
            super().allocate(self.num_free)
        return super().allocate(count)


class _ForgetfulPool(BlockPool):
    """Evicting one block forgets all that hold the same."""

    def _forget_sibling(self, block: int, key: bytes) -> None:
        del self._by_key[key]
        del self._siblings[key]


class _StalePool(BlockPool):
    """An evicted block is still found by its key."""

    def _forget(self, blocks: list[int]) -> None:
        pass


class _FewReferencesPool(BlockPool):
    """Reviving a cached block adds no reference when it was shared before."""

    def share(self, blocks: Sequence[int]) -> None:
        super().share(list(dict.fromkeys(blocks)))


class _NullPool(BlockPool):
    """Hands out the null block like any other."""

    def __init__(self, num_blocks: int, *, null_block: bool = False, name: str = "device") -> None:
        super().__init__(num_blocks, null_block=null_block, name=name)
        if null_block:
            self._free.append(0)


class _NewestFirstPool(BlockPool):
    """Evicts what was used last."""

    def _evict_oldest(self, count: int) -> list[int]:
        for block in list(self._cached):
            self._cached.move_to_end(block, last=False)
        return super()._evict_oldest(count)


class _BeginningFirstPool(BlockPool):
    """Evicts the beginning of a sequence before its end."""

    def free(self, blocks: Sequence[int]) -> None:
        super().free(list(blocks)[::-1])


class _ForkForgetsImages(PagedAllocator):
    def fork(self, seq_id: int, new_id: int) -> None:
        super().fork(seq_id, new_id)
        self._sequences[new_id].open_placed = ()


def _with_pool(pool: type[BlockPool]) -> type[PagedAllocator]:
    return type(pool.__name__, (_Planted,), {"pool_class": pool})


class _NoCopyOnWrite(PagedAllocator):
    def _copy_on_write(self, sequence: Any) -> Any:
        return ()


class _CopiesBackwards(PagedAllocator):
    def append(self, seq_id: int, token: int | None = None) -> Any:
        return tuple((target, source) for source, target in super().append(seq_id, token))


class _Eager(PagedAllocator):
    """Takes the next block when one is full, rather than when it is needed."""

    def append(self, seq_id: int, token: int | None = None) -> Any:
        pairs = super().append(seq_id, token)
        sequence = self._sequences[seq_id]
        if sequence.length % self.block_size == 0 and self.pool.num_available:
            sequence.table += self.pool.allocate(1)
        return pairs


class _ForkForgetsReferences(PagedAllocator):
    def fork(self, seq_id: int, new_id: int) -> None:
        self._sequences[new_id] = self._get(seq_id).copy()


class _SharesPartialBlock(PagedAllocator):
    """Publishes the open block's key as if it were full of what the next token will be."""

    def append(self, seq_id: int, token: int | None = None) -> Any:
        pairs = super().append(seq_id, token)
        sequence = self._sequences[seq_id]
        if self.prefix_caching and sequence.open_tokens and self.block_size - len(sequence.open_tokens) == 1:
            key = kv_blocks_prefix.block_key(sequence.parent, [*sequence.open_tokens, 0], sequence.extras)
            if self.pool.key(sequence.table[-1]) is None:
                self.pool.publish(sequence.table[-1], key)
        return pairs


class _SwapForgetsWhereTo(PagedAllocator):
    def swap_in(self, seq_ids: Sequence[int]) -> Any:
        return super().swap_in(seq_ids)[:-1]


BUGS: dict[str, Callable[..., PagedAllocator]] = {
    "one block freed twice in one call": _with_pool(_InflatingPool),
    "a failed allocation leaks": _with_pool(_LeakingPool),
    "fork, then both write": _NoCopyOnWrite,
    "siblings of an evicted block are lost": _with_pool(_ForgetfulPool),
    "an evicted block is still found": _with_pool(_StalePool),
    "a shared block is referenced once": _with_pool(_FewReferencesPool),
    "the null block is handed out": _with_pool(_NullPool),
    "copies from the new block to the old": _CopiesBackwards,
    "a block taken too early": _Eager,
    "a fork without references": _ForkForgetsReferences,
    "a partial block is shared": _SharesPartialBlock,
    "one block is not swapped": _SwapForgetsWhereTo,
    "the block used last is evicted": _with_pool(_NewestFirstPool),
    "a sequence is evicted from its beginning": _with_pool(_BeginningFirstPool),
    "a fork forgets the image in its open block": _ForkForgetsImages,
}
# The machine's own budget, without the search for a shorter failure.
DEFAULT = settings(budget(EXAMPLES), stateful_step_count=STEPS, phases=[Phase.generate], database=None)


@pytest.mark.parametrize(
    "blocks", [np.array([0, 9]), [0, 9], [0, True], (0, -1), [np.int64(0)], iter([0, 9]), [0, None]]
)
def test_freeing_blocks_of_which_some_are_none_changes_nothing(blocks: Any) -> None:
    pool = BlockPool(8)
    pool.allocate(3)
    before = pool.snapshot()
    with pytest.raises(ValueError, match="blocks must list referenced blocks only"):
        pool.free(blocks)
    assert pool.snapshot() == before
    pool.check()


def test_blocks_are_freed_from_any_iterable() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.free(iter(blocks))
    assert pool.num_free == 8
    for count in (1.0, True):
        with pytest.raises(ValueError, match="count"):
            pool.allocate(count)  # type: ignore[arg-type]
    pool.check()


@pytest.mark.parametrize("bug", list(BUGS))
def test_the_machine_finds(bug: str) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011  # which check sees it first depends on the bug
        run_machine(BUGS[bug], ListStore, DEFAULT)
    assert not isinstance(error.value, TypeError | AttributeError | NameError), "the planted bug itself is broken"


@pytest.mark.parametrize("ignored", ["parent", "extras", "placed"])
def test_the_machine_finds_a_hash_that_ignores(ignored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = kv_blocks_prefix.block_key

    def blind(parent: Any, tokens: Any, extras: Any = (), placed: Any = ()) -> bytes:
        sound(parent, tokens, extras, placed)  # bad ones are still rejected
        return sound(
            b"" if ignored == "parent" else parent,
            tokens,
            () if ignored == "extras" else extras,
            () if ignored == "placed" else placed,
        )

    monkeypatch.setattr(kv_blocks_prefix, "block_key", blind)
    monkeypatch.setattr(kv_blocks_sequence, "block_key", blind)
    with pytest.raises(AssertionError):
        run_machine(PagedAllocator, ListStore, DEFAULT)
