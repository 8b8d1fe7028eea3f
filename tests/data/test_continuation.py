"""The model's own text against transformers' generate and its samplers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from data.continuation import continue_prompt, nucleus
from tests.data.drawn import tokens_of


def test_greedy_is_what_generate_writes(model: Any) -> None:
    tokens = tokens_of(63)
    expected = model.generate(tokens[None], max_new_tokens=20, do_sample=False)[0]
    assert torch.equal(continue_prompt(model, tokens, 20), expected)


def test_a_text_never_ends(model: Any) -> None:
    tokens = tokens_of(40)
    written = continue_prompt(model, tokens, 12)
    model.generation_config.eos_token_id = [int(written[40]), 10_000]
    model.config.eos_token_id = int(written[41])
    again = continue_prompt(model, tokens, 12)
    assert len(again) == 52
    assert not {int(written[40]), int(written[41])} & set(again[40:].tolist())
    longest = model.generate(tokens[None], min_new_tokens=12, max_new_tokens=12, eos_token_id=written[40:42].tolist())
    assert torch.equal(again, longest[0])


def test_a_seed_decides_a_sample(model: Any) -> None:
    tokens = tokens_of(40)
    first, same, other = (continue_prompt(model, tokens, 30, sample=True, seed=seed) for seed in ("a", "a", "b"))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not torch.equal(first, continue_prompt(model, tokens, 30))
    assert torch.equal(first[:40], tokens)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_the_nucleus_is_that_of_transformers(top_p: float) -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(3)) * 3
    expected = TopPLogitsWarper(top_p)(None, logits[None])[0]
    kept = nucleus(logits.softmax(-1), top_p)
    assert torch.equal(kept > 0, expected > -torch.inf)
    torch.testing.assert_close(kept / kept.sum(), expected.softmax(-1))


def test_samples_follow_temperature_and_top_p(tiny_model: Any) -> None:
    model, tokens = tiny_model("llama", initializer_range=0.05), tokens_of(20)
    with torch.no_grad():
        logits = model(tokens[None]).logits[:, -1]
    shares = TopPLogitsWarper(0.3)(None, TemperatureLogitsWarper(0.5)(None, logits)).softmax(-1)[0]
    draws = 400
    options: Any = dict(sample=True, temperature=0.5, top_p=0.3)
    counts = Counter(int(continue_prompt(model, tokens, 1, seed=seed, **options)[-1]) for seed in range(draws))
    possible = {i for i, share in enumerate(shares.tolist()) if share > 0}
    assert set(counts) <= possible
    assert 5 < len(possible) < 100
    found = torch.tensor([counts[i] / draws for i in range(len(shares))])
    assert (found - shares).abs().max() < 4 * (shares.max() / draws).sqrt()
