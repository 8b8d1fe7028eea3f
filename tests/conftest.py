"""What many tests share: tiny random models with grouped heads, a byte tokenizer, the demo's real model."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pipelines  # noqa: F401, I001  its variables must be set before libraries are imported

import pytest
import torch
from hypothesis import settings

settings.register_profile("repo", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("repo")

ROOT = Path(__file__).parent.parent
REAL_MODEL = ROOT / "artefacts" / "models" / "smollm2-135m-instruct"
VOCABULARY = 260  # 256 bytes, and four spare ids of which two are special


@pytest.fixture(autouse=True, scope="module")
def _collect_garbage_of_this_module_alone() -> None:
    """Or each collection walks through all that is imported: a second, which some tests pay a dozen times."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What is frozen would be reported as leaked."""
    gc.unfreeze()


def slow(*values: Any) -> list[Any]:
    """Parameters that the fast lane leaves out; it runs others of their kind."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def make_tiny_model(kind: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A random causal LM: 2 layers, 4 query heads on 2 kv heads of 16, peaked attention, no end token."""
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2"}[kind]
    options = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.2,  # the usual .02 makes attention so flat that a wrong cache is not seen
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=257,
    )
    config = getattr(transformers, f"{name}Config")(**{**options, **overrides})
    torch.manual_seed(seed)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


def make_tiny_tokenizer() -> Any:
    """One token for each byte; `<|end|>` is 256 and `<|pad|>` is 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {**{char: i for i, char in enumerate(alphabet)}, "<|end|>": 256, "<|pad|>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


@pytest.fixture
def tiny_model() -> Callable[..., Any]:
    """Maker of tiny models: ``tiny_model("qwen2", seed=1, num_hidden_layers=3)``."""
    return make_tiny_model


@pytest.fixture(params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> Any:
    """A tiny random Llama, then a tiny random Qwen2: a fresh one for each test."""
    return make_tiny_model(request.param)


@pytest.fixture
def tiny_tokenizer() -> Any:
    """A byte tokenizer."""
    return make_tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama and its byte tokenizer, as `from_pretrained` reads them."""
    path = tmp_path_factory.mktemp("tiny-llama")
    make_tiny_model("llama").save_pretrained(path)
    make_tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """The demo's SmolLM2-135M-Instruct, as `python -m pipelines.demo_model` stores it."""
    if not (REAL_MODEL / "config.json").is_file():
        pytest.skip("needs the demo model: run `python -m pipelines.demo_model` (make test does)")
    return REAL_MODEL
