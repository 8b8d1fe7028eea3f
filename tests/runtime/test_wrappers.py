"""What may be given in place of a model of transformers, of a FadeConfig, and of the cache's argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache

from fade_runtime import FadeConfig, FadeError, create_tiered_cache
from fade_runtime import transformers_api as hf
from tests.runtime.caches import decode, random_ids

SMALL: dict[str, Any] = dict(n_sink=2, recent_window=16, int4_budget=20, reassign_every=8)
SHADOWED = FadeConfig(**SMALL, guard="warn", spill="host", shadow_every=4)


class Tuner(nn.Module):
    """As PEFT's: it calls ``forward`` of the model itself, past all hooks, and forwards attributes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)


class Adapted(nn.Module):
    """As a PeftModel: the model is ``base_model.model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = Tuner(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


WRAPPERS: dict[str, Callable[[Any], Any]] = {"adapters": Adapted, "data parallel": nn.DataParallel}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_model_may_be_wrapped(model: Any, wrap: Callable[[Any], Any]) -> None:
    tokens, plain = random_ids(1, 80), create_tiered_cache(model, SHADOWED)
    expected = decode(model, tokens, 60, plain)
    wrapper = wrap(model)
    cache = create_tiered_cache(wrapper, SHADOWED)
    assert cache.model is model
    assert torch.equal(decode(wrapper, tokens, 60, cache), expected)
    assert cache.monitor.report()["shadow"] == plain.monitor.report()["shadow"]  # its calls were seen
    assert cache.monitor.report()["shadow"]["seen"] == 80
    del plain, cache
    assert model.config._attn_implementation == "sdpa"
    assert not wrapper._forward_hooks
    assert not model._forward_pre_hooks


def test_adapters_generate_and_decode_again(model: Any) -> None:
    guard = dict(guard="rollback", spill="host", monitor_every=8, kl_alarm=0.051, on_rollback="redecode")
    config = FadeConfig(**SMALL, **guard)  # type: ignore[arg-type]
    outs = []
    for given in (model, Adapted(model)):
        cache = create_tiered_cache(given, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outs.append(given.generate(random_ids(1, 200), past_key_values=cache, max_new_tokens=24, do_sample=False))
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Linear(2, 2), "Linear neither is a model of transformers nor wraps one; give what from_pretrained"),
        ("org/name", "str neither is a model"),
    ],
    ids=["module", "name"],
)
def test_what_holds_no_model_is_refused(given: Any, message: str) -> None:
    with pytest.raises(FadeError, match=message):
        create_tiered_cache(given)


def test_what_holds_two_models_is_refused(model: Any, tiny_model: Any) -> None:
    with pytest.raises(FadeError, match="ModuleList holds several models, .*; give one of them"):
        create_tiered_cache(nn.ModuleList([model, tiny_model(seed=1)]))


TINY = dict(vocab_size=64, num_hidden_layers=1)
BERT = dict(**TINY, hidden_size=32, num_attention_heads=2, intermediate_size=32)
ENCODERS: dict[str, Callable[[], Any]] = {
    "BertModel": lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
    "BertForMaskedLM": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
    "DistilBertForMaskedLM": lambda: transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(vocab_size=64, n_layers=1, dim=32, n_heads=2, hidden_dim=32)
    ),
    "ModernBertForMaskedLM": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **BERT, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
        )
    ),
    "T5EncoderModel": lambda: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=64, num_layers=1, d_model=32, num_heads=2, d_kv=16, d_ff=32)
    ),
}


@pytest.mark.parametrize("make", ENCODERS.values(), ids=ENCODERS)
def test_encoders_are_refused_by_name(make: Callable[[], Any]) -> None:
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(FadeError, match=f"^{model.config.model_type} is an encoder, which has no next token"):
        create_tiered_cache(model)
    assert model.config._attn_implementation == before


def test_a_bert_that_decodes_is_no_encoder() -> None:
    model = transformers.BertLMHeadModel(transformers.BertConfig(**BERT, is_decoder=True)).eval()
    tokens = random_ids(1, 30) % 64
    expected = decode(model, tokens, 20, DynamicCache(config=model.config))
    ours = decode(model, tokens, 20, create_tiered_cache(model, FadeConfig(compression="off")))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_is_used_under_every_name_that_transformers_knows(model: Any, name: str) -> None:
    if name not in (hf.cache_name(model), "past_key_values"):
        pytest.skip("this transformers does not know it")
    cache = create_tiered_cache(model, FadeConfig(**SMALL))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model(random_ids(1, 30), **{name: cache})
    assert cache.get_seq_length() == 30


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_that_forward_took_for_something_else_is_refused(model: Any, name: str) -> None:
    """An argument that ``forward`` does not know travels on to each attention function, and nobody reads it."""
    cache, query = create_tiered_cache(model, FadeConfig(**SMALL)), torch.randn(1, 4, 3, 16)
    attention = model.model.layers[0].self_attn
    stock = {name: DynamicCache(config=model.config)}
    hf.fade_attention(attention, query, query[:, :2], query[:, :2], None, **stock)
    with pytest.raises(FadeError, match=f"does not know the argument '{name}'; give the cache as '"):
        hf.fade_attention(attention, query, query[:, :2], query[:, :2], None, **{name: cache})


def test_numbers_of_numpy_are_numbers() -> None:
    given = FadeConfig(
        n_sink=np.int64(3), int4_budget=np.float32(0.5), low_budget=np.int32(7), kl_alarm=np.float64(0.2),
        chunked_prefill=np.bool_(True), memory=None,
    )  # fmt: skip
    assert given == FadeConfig(n_sink=3, int4_budget=0.5, low_budget=7, kl_alarm=0.2, chunked_prefill=True)
    assert {type(value) for value in vars(given).values()} <= {int, float, bool, str, type(None)}
    assert FadeConfig(memory=np.int64(1 << 20)).memory == 1 << 20
    with pytest.raises(FadeError, match="recent_window 0 is not a whole number"):
        FadeConfig(recent_window=np.int64(0))


def test_a_config_may_be_named_or_be_a_dict(model: Any) -> None:
    assert create_tiered_cache(model).config == create_tiered_cache(model, "safe").config == FadeConfig.safe()
    assert create_tiered_cache(model, "aggressive").config == FadeConfig.aggressive()
    assert create_tiered_cache(model, dict(SMALL)).config == FadeConfig(**SMALL)
    with pytest.raises(FadeError, match="config 'brave' is not a FadeConfig, a dict of its options, or safe, balanced"):
        create_tiered_cache(model, "brave")
    with pytest.raises(FadeError, match="unknown option window"):
        create_tiered_cache(model, {"window": 3})
