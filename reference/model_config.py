"""Reading a model's geometry from a Hugging Face `config.json`: Llama, Qwen, Mistral, Gemma and DeepSeek families.

Defaults are those of the families' configuration classes in transformers, which omit from the file what is default.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagebench.reference.models import Experts, Latent, Model
from pagebench.reference.validation import require, require_int

Config = Mapping[str, Any]
FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text",
    "deepseek_v2", "deepseek_v3",
)  # fmt: skip
# Values that files of these families leave out where they are their configuration class's default.
DEFAULTS: dict[str, Config] = {
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "gemma2": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "vocab_size": 262208,
    },
}  # fmt: skip
REQUIRED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")


def read_config(path: str | Path) -> Model:
    """The model of a `config.json` (or of the folder that holds it), named after its folder unless it says itself.

    Raises ValueError for a file that is not JSON, another family, or a missing or impossible value.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"path must name a JSON file, got {str(file)!r}: {error}") from error
    require(isinstance(config, dict), "path", "name a file that holds a JSON object", str(file))
    return from_config(config, name=config.get("_name_or_path") or file.resolve().parent.name)


def from_config(config: Config, name: str) -> Model:
    """The model that `config` describes. A multimodal configuration's `text_config` is taken."""
    if isinstance(config.get("text_config"), Mapping):
        text = dict(config["text_config"])
        text.setdefault("model_type", f"{config.get('model_type')}_text")
        config = text
    family = config.get("model_type")
    require(family in FAMILIES, "model_type", f"be one of {', '.join(FAMILIES)}", family)
    family = str(family)
    config = _given({**DEFAULTS.get(family, {}), **config})
    _require_whole(config, *REQUIRED)
    windowed, window = _windows(config, family)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent = _latent(config) if family.startswith("deepseek") else None
    head_size = config.get("head_dim") or (256 if family.startswith("gemma") else hidden // heads)
    return Model(
        name=name,
        num_layers=config["num_hidden_layers"],
        num_query_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_size=head_size if latent is None else latent.nope_size + latent.rope_size,
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tied_embeddings=config.get("tie_word_embeddings", family.startswith("gemma")),
        qkv_bias=config.get("attention_bias", False) or family in ("qwen2", "qwen2_moe"),
        output_bias=config.get("attention_bias", False),
        query_key_norm=family.startswith(("qwen3", "gemma3")),
        norms_per_layer=4 if family in ("gemma2", "gemma3_text") else 2,
        num_windowed_layers=windowed,
        window=window,
        latent=latent,
        experts=_experts(config, family),
    )


def _require_whole(config: Config, *keys: str) -> None:
    for key in keys:
        require_int(key, config.get(key), low=1)


# What a file may leave out or set to null: whole numbers, and switches.
OPTIONAL = (
    "num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", "sliding_window_pattern", "q_lora_rank",
    "n_routed_experts", "num_experts", "num_local_experts", "moe_intermediate_size", "n_shared_experts",
    "shared_expert_intermediate_size", "first_k_dense_replace",
)  # fmt: skip
SWITCHES = ("tie_word_embeddings", "attention_bias", "use_sliding_window")


def _given(config: Config) -> Config:
    """The configuration without what is null; ValueError for an optional value of another kind."""
    given = {key: value for key, value in config.items() if value is not None}
    for key in OPTIONAL:
        if key in given:
            require_int(key, given[key], low=0)
    for key in SWITCHES:
        require(isinstance(given.get(key, False), bool), key, "be true or false", given.get(key))
    return given


def _windows(config: Config, family: str) -> tuple[int, int | None]:
    """(number of windowed layers, their window)."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if family.startswith("qwen") and not config.get("use_sliding_window", False):
        return 0, None
    if not window:
        return 0, None
    if isinstance(config.get("layer_types"), list):
        count = config["layer_types"].count("sliding_attention")
    elif family == "gemma2":
        count = -(-layers // 2)  # layers 0, 2, 4, ...
    elif family == "gemma3_text":
        count = layers - layers // (config.get("sliding_window_pattern") or 6)  # all but every sixth
    elif family.startswith("qwen"):
        count = max(0, layers - config.get("max_window_layers", layers))
    else:
        count = layers
    return (count, window) if count else (0, None)


def _latent(config: Config) -> Latent:
    _require_whole(config, "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return Latent(
        rank=config["kv_lora_rank"],
        rope_size=config["qk_rope_head_dim"],
        nope_size=config["qk_nope_head_dim"],
        value_size=config["v_head_dim"],
        query_rank=config.get("q_lora_rank"),
    )


def _experts(config: Config, family: str) -> Experts | None:
    count = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts")
    if not count:
        return None
    _require_whole(config, "num_experts_per_tok")
    # Layouts in which some layers are dense for another reason are not read as if they were not.
    every = config.get("decoder_sparse_step", 1) == 1 and config.get("moe_layer_freq", 1) == 1
    plain = every and not config.get("mlp_only_layers")
    require(
        plain, "decoder_sparse_step, moe_layer_freq, mlp_only_layers", "leave every layer with experts", dict(config)
    )
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = size * (config.get("n_shared_experts") or 0) or config.get("shared_expert_intermediate_size", 0)
    return Experts(
        num_experts=count,
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=size,
        shared_intermediate_size=shared,
        num_dense_layers=config.get("first_k_dense_replace", 0),
        router_bias=family == "deepseek_v3",
        shared_gate=family == "qwen2_moe",
    )
