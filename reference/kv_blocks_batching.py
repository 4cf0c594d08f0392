"""What memory is worth: decoding reads all weights for every token of a step, however many there are.

tokens/s = B / max(bytes(B) / bandwidth, flops(B) / rate). The weights are read once a step, so a larger batch costs
little until the KV reads or the FLOPs catch up; how large it can be depends on how many requests fit. Naive and paged
layouts do the same FLOPs and read the same bytes per request: the only difference is B.
"""

from dataclasses import dataclass

from pagebench.reference.kv_blocks import KVFormat, blocks_for, model_kv_bytes
from pagebench.reference.models import Model
from pagebench.reference.validation import require, require_int


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: memory in bytes, memory bandwidth in bytes/s, dense 16-bit matrix rate in FLOP/s (2 per multiply-add)."""

    name: str
    memory: int
    bandwidth: float
    flop_rate: float

    def __post_init__(self) -> None:
        require_int("memory", self.memory, low=1)
        for name in ("bandwidth", "flop_rate"):
            rate = getattr(self, name)
            require(isinstance(rate, int | float) and rate > 0, name, "be positive", rate)


GIB = 1 << 30
# Vendors' data sheets; a measured bandwidth is 5 to 15 % lower, so give it where it is known.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40gb", 40 * GIB, 1.555e12, 312e12),
        Device("a100-80gb", 80 * GIB, 2.039e12, 312e12),
        Device("h100-80gb", 80 * GIB, 3.35e12, 989e12),
        Device("h200-141gb", 141 * 10**9, 4.8e12, 989e12),
        Device("l4-24gb", 24 * GIB, 0.3e12, 121e12),
        Device("rtx4090-24gb", 24 * GIB, 1.008e12, 165e12),
    )
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bytes per weight of the layers' matrices, scales included. Embeddings and the output head stay at 16 bits."""

    name: str
    bytes_per_weight: float


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    item.name: item
    for item in (
        WeightFormat("fp16", 2),
        WeightFormat("fp8", 1),
        WeightFormat("int4", 0.5 + 2.5 / 128),  # a float16 scale and a 4-bit zero point per 128 weights
    )
}


def weight_bytes(model: Model, form: WeightFormat) -> int:
    """Bytes of all weights in memory."""
    layers = model.layer_parameters(model.experts.num_experts if model.experts else 0)[0]
    return round(layers * form.bytes_per_weight + 2 * (model.parameters() - layers))


def decode_bytes(model: Model, batch: int, seq_len: int, weights: WeightFormat, cache: KVFormat) -> float:
    """Bytes of one decode step of `batch` sequences that hold `seq_len` tokens, the new one included: the weights read
    once, every sequence's cache read once, one token written to each. 0 sequences move nothing."""
    require_int("batch", batch, low=0)
    if batch == 0:
        return 0.0
    head = model.vocab_size * model.hidden_size + model.hidden_size
    layers = model.parameters_read(batch) - head
    read = layers * weights.bytes_per_weight + 2 * head
    return read + model_kv_bytes(model, seq_len, cache, batch) + model_kv_bytes(model, 1, cache, batch)


def decode_flops(model: Model, batch: int, seq_len: int) -> float:
    """Operations of the same step; they do not depend on layout or formats."""
    require_int("batch", batch, low=0)
    return batch * model.flops_per_token(seq_len)


def tokens_per_second(
    model: Model, device: Device, batch: int, seq_len: int, weights: WeightFormat, cache: KVFormat
) -> float:
    """Decode throughput at the roofline: B / max(bytes(B) / bandwidth, flops(B) / rate). An upper bound."""
    if batch == 0:
        return 0.0
    memory_time = decode_bytes(model, batch, seq_len, weights, cache) / device.bandwidth
    return batch / max(memory_time, decode_flops(model, batch, seq_len) / device.flop_rate)


def kv_memory(model: Model, device: Device, weights: WeightFormat, utilization: float = 0.9) -> int:
    """Bytes left for KV: `utilization` of the memory less the weights, 0 if they do not fit."""
    share = isinstance(utilization, int | float) and 0 < utilization <= 1
    require(share, "utilization", "be in (0, 1]", utilization)
    return max(0, int(device.memory * utilization) - weight_bytes(model, weights))


def naive_capacity(model: Model, memory: int, max_len: int, cache: KVFormat) -> int:
    """Requests that fit `memory` bytes when each reserves max_len tokens, however long it is."""
    require_int("memory", memory, low=0)
    require_int("max_len", max_len, low=1)
    return memory // model_kv_bytes(model, max_len, cache)


def paged_capacity(model: Model, memory: int, seq_len: int, block_size: int, cache: KVFormat) -> int:
    """Requests of `seq_len` tokens that fit `memory` bytes in blocks of block_size tokens."""
    require_int("memory", memory, low=0)
    require_int("seq_len", seq_len, low=1)
    return memory // model_kv_bytes(model, blocks_for(seq_len, block_size) * block_size, cache)
