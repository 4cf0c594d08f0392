"""Decoder models as plain data: the geometry from which KV bytes, weight bytes and FLOPs follow.

The named models are from their public `config.json`; `from_config` reads such a file of the Llama, Qwen, Mistral,
Gemma and DeepSeek families (dense, mixture of experts, sliding windows, latent attention).
"""

from dataclasses import dataclass

from pagebench.reference.validation import require, require_int


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA): a token's cache is one vector of `rank + rope_size`, shared by all heads."""

    rank: int
    rope_size: int
    nope_size: int
    value_size: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts in every layer but the first `num_dense_layers`."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    num_dense_layers: int = 0
    router_bias: bool = False
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder. Sizes are elements; `window` is the keys a windowed layer's query sees, its own included.

    num_windowed_layers of the layers keep at most `window` tokens; the others keep all. norms_per_layer counts the
    hidden-size norms. Raises ValueError for a count below 1, query heads that are no multiple of the KV heads, or a
    window without windowed layers.
    """

    name: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int = 32000
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    query_key_norm: bool = False
    norms_per_layer: int = 2
    num_windowed_layers: int = 0
    window: int | None = None
    latent: Latent | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_query_heads", "num_kv_heads", "head_size", "hidden_size", "vocab_size"):
            require_int(field, getattr(self, field), low=1)
        whole = self.num_query_heads % self.num_kv_heads == 0
        rule = f"be a multiple of num_kv_heads = {self.num_kv_heads}"
        require(whole, "num_query_heads", rule, self.num_query_heads)
        require_int("num_windowed_layers", self.num_windowed_layers, low=0)
        few = self.num_windowed_layers <= self.num_layers
        rule = f"be at most num_layers = {self.num_layers}"
        require(few, "num_windowed_layers", rule, self.num_windowed_layers)
        windowed = self.num_windowed_layers > 0
        require(windowed == (self.window is not None), "window", "be set exactly if layers are windowed", self.window)
        if self.window is not None:
            require_int("window", self.window, low=1)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def cache_row(self) -> int:
        """Elements that one token adds to one layer's cache: K and V of every KV head, or the latent vector."""
        if self.latent is not None:
            return self.latent.rank + self.latent.rope_size
        return 2 * self.num_kv_heads * self.head_size

    def cached_tokens(self, seq_len: int) -> int:
        """Tokens held over all layers by a sequence of `seq_len`: windowed layers keep the last `window` only."""
        require_int("seq_len", seq_len, low=0)
        full = (self.num_layers - self.num_windowed_layers) * seq_len
        return full + self.num_windowed_layers * min(seq_len, self.window or seq_len)

    def attention_parameters(self) -> int:
        """Weights and biases of one layer's attention, its norms of queries and keys included."""
        if self.latent is not None:
            return self._latent_parameters(self.latent)
        query, keys = self.num_query_heads * self.head_size, self.num_kv_heads * self.head_size
        total = 2 * self.hidden_size * (query + keys)
        total += (query + 2 * keys) * self.qkv_bias + self.hidden_size * self.output_bias
        return total + 2 * self.head_size * self.query_key_norm

    def _latent_parameters(self, latent: Latent) -> int:
        heads, hidden = self.num_query_heads, self.hidden_size
        queries = heads * (latent.nope_size + latent.rope_size)
        total = hidden * queries
        if latent.query_rank is not None:
            total = hidden * latent.query_rank + latent.query_rank + latent.query_rank * queries
        total += hidden * (latent.rank + latent.rope_size) + latent.rank
        return total + latent.rank * heads * (latent.nope_size + latent.value_size) + heads * latent.value_size * hidden

    def layer_parameters(self, experts_read: float) -> tuple[float, int]:
        """(parameters of all layers with `experts_read` experts in each expert layer, number of expert layers)."""
        dense = 3 * self.hidden_size * self.intermediate_size
        common = self.num_layers * (self.attention_parameters() + self.norms_per_layer * self.hidden_size)
        if self.experts is None:
            return common + self.num_layers * dense, 0
        moe = self.experts
        layers = self.num_layers - moe.num_dense_layers
        expert = 3 * self.hidden_size * moe.intermediate_size
        always = self.hidden_size * moe.num_experts + moe.num_experts * moe.router_bias
        always += 3 * self.hidden_size * moe.shared_intermediate_size + self.hidden_size * moe.shared_gate
        return common + moe.num_dense_layers * dense + layers * (always + experts_read * expert), layers

    def parameters(self) -> int:
        """All weights and biases."""
        experts = self.experts.num_experts if self.experts is not None else 0
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return int(self.layer_parameters(experts)[0]) + embeddings + self.hidden_size

    def parameters_read(self, batch: int) -> float:
        """Weights that one decode step of `batch` tokens reads: all but the input embedding; of the experts, as many
        as `batch` tokens are expected to reach when each chooses uniformly."""
        require_int("batch", batch, low=1)
        reached = 0.0
        if self.experts is not None:
            share = self.experts.experts_per_token / self.experts.num_experts
            reached = self.experts.num_experts * (1 - (1 - share) ** batch)
        return self.layer_parameters(reached)[0] + self.vocab_size * self.hidden_size + self.hidden_size

    def flops_per_token(self, seq_len: int) -> float:
        """Operations of one decoded token that sees `seq_len` keys: 2 per weight used, and QK^T and PV."""
        used = self.parameters_read(1)  # one token reaches exactly the experts it uses
        if self.latent is not None:  # in latent space, as decoding kernels do it
            per_key = 2 * self.num_query_heads * (2 * self.latent.rank + self.latent.rope_size)
        else:
            per_key = 4 * self.num_query_heads * self.head_size
        return 2 * used + per_key * self.cached_tokens(seq_len)


LLAMA_2_7B = Model("llama-2-7b", 32, 32, 32, 128, 4096, 11008)
LLAMA_2_13B = Model("llama-2-13b", 40, 40, 40, 128, 5120, 13824)
LLAMA_2_70B = Model("llama-2-70b", 80, 64, 8, 128, 8192, 28672)
LLAMA_3_8B = Model("llama-3-8b", 32, 32, 8, 128, 4096, 14336, 128256)
LLAMA_3_70B = Model("llama-3-70b", 80, 64, 8, 128, 8192, 28672, 128256)
QWEN2_5_7B = Model("qwen2.5-7b", 28, 28, 4, 128, 3584, 18944, 152064, qkv_bias=True)
QWEN3_8B = Model("qwen3-8b", 36, 32, 8, 128, 4096, 12288, 151936, query_key_norm=True)
MISTRAL_7B = Model("mistral-7b-v0.1", 32, 32, 8, 128, 4096, 14336, num_windowed_layers=32, window=4096)
MIXTRAL_8X7B = Model("mixtral-8x7b", 32, 32, 8, 128, 4096, 14336, experts=Experts(8, 2, 14336))
GEMMA_2_9B = Model(
    "gemma-2-9b", 42, 16, 8, 256, 3584, 14336, 256000,
    tied_embeddings=True, norms_per_layer=4, num_windowed_layers=21, window=4096,
)  # fmt: skip
DEEPSEEK_V2_LITE = Model(
    "deepseek-v2-lite", 27, 16, 16, 192, 2048, 10944, 102400,
    latent=Latent(512, 64, 128, 128), experts=Experts(64, 6, 1408, 2 * 1408, num_dense_layers=1),
)  # fmt: skip
DEEPSEEK_V3 = Model(
    "deepseek-v3", 61, 128, 128, 192, 7168, 18432, 129280,
    latent=Latent(512, 64, 128, 128, query_rank=1536),
    experts=Experts(256, 8, 2048, 2048, num_dense_layers=3, router_bias=True),
)  # fmt: skip

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        LLAMA_2_7B, LLAMA_2_13B, LLAMA_2_70B, LLAMA_3_8B, LLAMA_3_70B, QWEN2_5_7B, QWEN3_8B, MISTRAL_7B, MIXTRAL_8X7B,
        GEMMA_2_9B, DEEPSEEK_V2_LITE, DEEPSEEK_V3,
    )
}  # fmt: skip
