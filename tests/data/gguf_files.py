"""Tiny GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, model: Any, tokenizer: Any) -> Path:
    """A Llama and its byte tokenizer in one file, all values in float32."""
    import gguf

    config = model.config
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("name of a training run")
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    words = {index: word for word, index in tokenizer.get_vocab().items()}
    words = [words.get(index, "ab" if index == 258 else f"<|spare {index}|>") for index in range(config.vocab_size)]
    out.add_tokenizer_model("gpt2")
    out.add_token_list(words)
    out.add_token_types([1] * 256 + [3, 3, 1, 3])
    out.add_token_merges(["a b"])  # a reader wants one
    out.add_eos_token_id(256)
    out.add_pad_token_id(257)
    for name, value in model.state_dict().items():
        out.add_tensor(*as_llama_cpp(name, value.numpy(), config))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def as_llama_cpp(name: str, value: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """Name and value of a weight as the file has them: pairs of rotated channels lie side by side there."""
    if name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        short = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
        return f"{short[name.split('.')[-2]]}.weight", value
    _, _, layer, rest = name.split(".", 3)
    short = NAMES[rest.removesuffix(".weight")]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short)
    if heads:
        halves = value.reshape(heads, 2, -1, value.shape[-1])  # [heads, half, pair, hidden]
        value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
    return f"blk.{layer}.{short}.weight", value


def write_wheel(folder: Path, name: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> Path:
    """A wheel of one package that holds files as its data."""
    package, version = name.replace("-", "_"), "1.0.0"
    about = f"{package}-{version}.dist-info"
    lines = "".join(f"Requires-Dist: {one}\n" for one in requires)
    held = {f"{package}/data/{file}": content for file, content in files.items()}
    held[f"{package}/__init__.py"] = b"raise RuntimeError('imported')\n"
    held[f"{about}/METADATA"] = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{lines}".encode()
    held[f"{about}/RECORD"] = "".join(f"{file},,\n" for file in (*held, f"{about}/RECORD")).encode()
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, content in held.items():
            archive.writestr(file, content)
    return wheel
