"""A tiny random model of each family of language models: ``FAMILIES["gemma2"]()``.

2 to 4 layers with a full-attention layer first where the family allows it, grouped heads of 16 where it has them,
peaked attention (``initializer_range`` .2), no begin or end token, pad token 257, the same weights each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers

VOCABULARY = 260
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    initializer_range=0.2,  # the usual .02 makes attention so flat that a wrong cache is not seen
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=257,
)
FULL_THEN_SLIDING = ["full_attention", "sliding_attention"] * 2
FULL_THEN_LINEAR = ["full_attention", "linear_attention"] * 2
FULL_THEN_CONV = ["full_attention", "conv"] * 2


def _make(names: str, common: tuple[str, ...] = tuple(COMMON), seed: int = 0, **options: Any) -> Any:
    """Build ``names`` ("Config Model", or "Llama" for LlamaConfig and LlamaForCausalLM) or skip the test by name."""
    config_name, _, model_name = names.partition(" ")
    if not model_name:
        config_name, model_name = f"{names}Config", f"{names}ForCausalLM"
    for name in (config_name, model_name):
        if not hasattr(transformers, name):
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, config_name)(**{**{key: COMMON[key] for key in common}, **options})
    torch.manual_seed(seed)
    return getattr(transformers, model_name)(config).eval().requires_grad_(False)


TOKENS = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
PLAIN = (*TOKENS, "hidden_size", "num_hidden_layers", "num_attention_heads")  # head dim = 64 / 4
MIXED = dict(num_hidden_layers=4, layer_types=FULL_THEN_SLIDING, sliding_window=24)
GATED_DELTA = dict(
    num_hidden_layers=4,
    layer_types=FULL_THEN_LINEAR,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=256, truncate=False)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def _gemma4(layers: list[str], **options: Any) -> Callable[..., Any]:
    """Full layers have other heads and dims than sliding ones, and the last layer is made full."""
    return partial(
        _make,
        "Gemma4TextConfig Gemma4ForCausalLM",
        num_hidden_layers=len(layers),
        layer_types=layers,
        sliding_window=24,
        global_head_dim=32,
        num_global_key_value_heads=1,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        **{"num_kv_shared_layers": 0, **options},
    )


def _with_sinks(names: str, **options: Any) -> Any:
    """Learned sinks that take a large share in some heads and next to none in others."""
    model = _make(names, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".sinks"):
                parameter.normal_(mean=4.0, std=2.0)
    return model


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": partial(_make, "Llama"),
    "qwen2": partial(_make, "Qwen2"),
    "qwen3": partial(_make, "Qwen3"),
    "qwen3_moe": partial(_make, "Qwen3Moe", **EXPERTS),
    "mistral": partial(_make, "Mistral", sliding_window=None),
    "gemma2": partial(_make, "Gemma2", attn_logit_softcapping=5.0, query_pre_attn_scalar=16, **MIXED),
    "gemma3": partial(_make, "Gemma3TextConfig Gemma3ForCausalLM", query_pre_attn_scalar=16, **MIXED),
    "gemma4": _gemma4(["sliding_attention", "full_attention"] * 2),
    "gemma4_shared": _gemma4(["full_attention", "sliding_attention"] * 3, num_kv_shared_layers=3),
    "gemma3n": partial(
        _make,
        "Gemma3nTextConfig Gemma3nForCausalLM",
        num_hidden_layers=6,
        layer_types=["full_attention", "sliding_attention"] * 3,
        sliding_window=24,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 6,
    ),
    "phi": partial(_make, "Phi", hidden_size=80, head_dim=20),  # head dims that are no power of two, as in Phi-2
    "phi3": partial(_make, "Phi3", hidden_size=96, head_dim=24),  # and Phi-3
    "gpt_neox": partial(_make, "GPTNeoX", (*PLAIN, "intermediate_size", "max_position_embeddings"), rotary_pct=0.5),
    "gpt2": partial(_make, "GPT2Config GPT2LMHeadModel", TOKENS, n_embd=64, n_layer=2, n_head=4, n_positions=1024),
    "opt": partial(
        _make,
        "OPT",
        (*TOKENS, "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        init_std=0.2,
        ffn_dim=96,
        word_embed_proj_dim=64,
    ),
    "falcon": partial(_make, "Falcon", PLAIN, alibi=False, multi_query=True, new_decoder_architecture=False),
    "falcon_grouped": partial(_make, "Falcon", PLAIN, alibi=False, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_alibi": partial(_make, "Falcon", PLAIN, alibi=True, multi_query=False, new_decoder_architecture=False),
    "olmo2": partial(_make, "Olmo2"),
    "cohere2": partial(_make, "Cohere2", **MIXED),
    "smollm3": partial(_make, "SmolLM3"),
    "granite": partial(_make, "Granite", attention_multiplier=0.2, embedding_multiplier=2.0, residual_multiplier=0.7),
    "gpt_oss": partial(
        _with_sinks, "GptOss", num_local_experts=4, num_experts_per_tok=4, rope_parameters=YARN, **MIXED
    ),
    "mimo_v2_flash": partial(  # sinks in sliding layers, which have twice the kv heads; values wider than keys
        _with_sinks,
        "MiMoV2Flash",
        num_hidden_layers=4,
        layer_types=FULL_THEN_SLIDING,
        sliding_window=24,
        v_head_dim=24,
        n_routed_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
    ),
    "starcoder2": partial(_make, "Starcoder2"),
    "mistral_sliding": partial(_make, "Mistral", sliding_window=24),
    "qwen3_next": partial(_make, "Qwen3Next", shared_expert_intermediate_size=32, **EXPERTS, **GATED_DELTA),
    "qwen3_5": partial(_make, "Qwen3_5TextConfig Qwen3_5ForCausalLM", **GATED_DELTA),
    "lfm2": partial(_make, "Lfm2", num_hidden_layers=4, layer_types=FULL_THEN_CONV, block_ff_dim=96),
}

TIERED = [name for name in FAMILIES if name != "mistral_sliding"]  # it has no full-attention layer

LATENT = dict(
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    num_key_value_heads=4,
)
RECURRENT = (*TOKENS, "hidden_size", "num_hidden_layers")
NO_HEAD_DIM = tuple(key for key in COMMON if key != "head_dim")

# Families that the tiered cache says no to.
REFUSED: dict[str, Callable[..., Any]] = {
    "deepseek_v2": partial(_make, "DeepseekV2", NO_HEAD_DIM, **LATENT),
    "deepseek_v3": partial(_make, "DeepseekV3", NO_HEAD_DIM, **LATENT),
    "mamba": partial(_make, "Mamba", RECURRENT, state_size=8),
    "mamba2": partial(_make, "Mamba2", RECURRENT, state_size=8, num_heads=8, head_dim=16, n_groups=1),
    "rwkv": partial(_make, "Rwkv", RECURRENT),
    "falcon_h1": partial(_make, "FalconH1", mamba_d_state=16, mamba_n_heads=8, mamba_d_head=16, mamba_d_ssm=128),
    "falcon_eager": partial(_make, "Falcon", PLAIN, attn_implementation="eager"),
    "bloom": partial(_make, "Bloom", TOKENS, hidden_size=64, n_layer=2, n_head=4),
    "t5": partial(
        _make,
        "T5Config T5ForConditionalGeneration",
        ("vocab_size",),
        d_model=64,
        num_layers=2,
        num_heads=4,
        d_kv=16,
    ),
}
