"""What the policies' numbers are, against stock eager attention; what they keep."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, FadeError, TieredCache, create_tiered_cache
from fade_runtime.layer.attention import AttentionCall
from fade_runtime.transformers_api import forward_kwargs
from predictor.budgets import HeadBudgets
from predictor.bundle import Predictor, load_bundle
from predictor.features import FeatureSpec, prefill_features
from predictor.nets import BlockCNN, TokenMLP
from predictor.provenance import model_provenance
from predictor.rope import find_rotary
from tests.runtime.caches import decode, random_ids, reachable_bytes, save_bundle

PROMPT, STEPS = 90, 13


def _eager_attention(model: Any, ids: Tensor) -> list[Tensor]:
    """[B, H, S, S] of each layer, averaged over the query group, by the stock eager implementation."""
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True, **forward_kwargs(DynamicCache(config=model.config), model))
    return [a.unflatten(1, (2, -1)).mean(2) for a in out.attentions]


@pytest.mark.parametrize("policy", ["h2o", "ema"])
def test_state_equals_stock_attention_summed_up(model: Any, policy: str) -> None:
    """All tokens in full precision, so the numbers must be those of the eager implementation on one long forward."""
    ids = random_ids(2, PROMPT + STEPS, seed=5)
    cache = create_tiered_cache(model, FadeConfig(recent_window=500, int4_budget=9, eviction_policy=policy))
    decode(model, ids, PROMPT, cache)
    for layer, rows in zip(cache.tiered, _eager_attention(model, ids)):
        if policy == "h2o":
            expected = rows.sum(2)
        else:
            weights = 0.95 ** torch.arange(63, -1, -1.0)
            expected = (rows[:, :, PROMPT - 64 : PROMPT] * (weights / weights.sum())[:, None]).sum(2)
            for step in range(PROMPT, PROMPT + STEPS):
                expected = 0.95 * expected + 0.05 * rows[:, :, step]
        torch.testing.assert_close(layer.tokens.full.attention_stats, expected, atol=1e-4, rtol=1e-3)


def _kept(cache: TieredCache, layer: int = 0) -> list[Tensor]:
    packed = cache.tiered[layer].tokens.packed
    return [packed.slots()[packed.token_row() == row] for row in range(int(packed.page_row.max()) + 1)]


def test_position_keeps_the_newest(model: Any) -> None:
    config = FadeConfig(n_sink=2, recent_window=8, int4_budget=10, eviction_policy="position")
    cache = create_tiered_cache(model, config)
    decode(model, random_ids(1, PROMPT, seed=5), PROMPT, cache)
    assert all(slots.tolist() == list(range(72, 82)) for slots in _kept(cache))


@pytest.mark.parametrize("policy", ["h2o", "ema", "learned"])
def test_prompt_eviction_keeps_the_best_scored_of_each_head(model: Any, policy: str, tmp_path: Path) -> None:
    """Scores by brute force from eager attention (the untrained network: from the featuriser); heads differ."""
    ids = random_ids(1, PROMPT, seed=5)
    predictor = save_bundle(tmp_path, model) if policy == "learned" else None
    config = FadeConfig(n_sink=2, recent_window=8, int4_budget=0.25, eviction_policy=policy, predictor=predictor)
    cache = create_tiered_cache(model, config)
    captured = _capture(model, cache, ids)
    kept = _kept(cache)
    rows = _eager_attention(model, ids)[0][0]  # [H, S, S]
    if policy == "h2o":
        scores = rows.sum(1) / torch.arange(PROMPT, 0, -1)
    elif policy == "ema":
        scores = (rows[:, -64:] * (0.95 ** torch.arange(63, -1, -1.0))[:, None]).sum(1)
    else:
        query, key, value = captured
        spec = FeatureSpec(window=16, block=4, horizon=32)
        rotary = find_rotary(model)
        assert rotary is not None
        table = rotary.table(torch.arange(PROMPT + 32))
        tokens = prefill_features(query, key, value, scaling=16**-0.5, table=table, spec=spec).tokens
        scores = tokens[..., 0] + tokens[..., 1]
    for head, slots in enumerate(kept):
        best = scores[head, 2 : PROMPT - 8].topk(int(0.25 * PROMPT)).indices + 2
        assert slots.tolist() == best.sort().values.tolist()
    assert kept[0].tolist() != kept[1].tolist()


def _capture(model: Any, cache: TieredCache, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the prompt; return the first layer's query, key and value as the attention function saw them."""
    seen: list[tuple[Tensor, ...]] = []
    layer = cache.tiered[0]
    begin = layer._prefill

    def spy(call: AttentionCall) -> Tensor | None:
        seen.append((call.query[0], layer.tokens.full.key[0], layer.tokens.full.value[0]))
        return begin(call)

    layer._prefill = spy  # type: ignore[method-assign]
    model(ids, **forward_kwargs(cache, model))
    return seen[0]  # type: ignore[return-value]


@pytest.mark.parametrize("policy", ["h2o", "ema", "learned"])
def test_tokens_that_came_after_the_prompt_are_scored_too(model: Any, policy: str, tmp_path: Path) -> None:
    """A later reassignment must not drop the newest middle tokens for want of a prompt score."""
    predictor = save_bundle(tmp_path, model) if policy == "learned" else None
    cache = create_tiered_cache(
        model,
        FadeConfig(
            n_sink=2, recent_window=8, int4_budget=24, eviction_policy=policy, predictor=predictor, reassign_every=8
        ),
    )
    decode(model, random_ids(1, 200, seed=5), 60, cache)
    young = sum(int((slots >= 60).sum()) for slots in _kept(cache))
    assert young >= 6  # of 48, where 80 % of the candidates are young
    assert sum(len(slots) for slots in _kept(cache)) == 48


@pytest.mark.parametrize("net", [TokenMLP(), BlockCNN(window=16, block=4)], ids=["mlp", "cnn"])
def test_learned_row_of_a_padded_batch_equals_its_unbatched_run(model: Any, net: Any, tmp_path: Path) -> None:
    bundle = save_bundle(tmp_path, model, net)
    config = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, eviction_policy="learned", predictor=bundle)
    short, long = random_ids(1, 53, seed=5), random_ids(1, 80, seed=5)
    ids = torch.cat((torch.nn.functional.pad(short, (27, 0), value=257), long))
    mask = (ids != 257).long()
    batched = create_tiered_cache(model, config)
    model.generate(ids, attention_mask=mask, max_new_tokens=1, past_key_values=batched)
    for row, prompt in enumerate((short, long)):
        alone = create_tiered_cache(model, config)
        model.generate(prompt, max_new_tokens=1, past_key_values=alone)
        for head in range(2):
            assert torch.equal(_kept(batched)[2 * row + head], _kept(alone)[head])


def test_scores_of_any_scale_rank_alike(model: Any, tmp_path: Path) -> None:
    """A softmax of large scores would underflow to ties, and the newest would win."""
    kept = []
    for name, factor in (("mild", 1.0), ("wild", 1000.0)):
        torch.manual_seed(3)
        net = TokenMLP()
        torch.nn.init.normal_(net.head.weight)
        forward = net.forward
        net.forward = lambda *given, forward=forward, factor=factor, **more: factor * forward(*given, **more)  # type: ignore[method-assign]
        loaded = load_bundle(save_bundle(tmp_path / name, model))
        loaded.net = net
        config = FadeConfig(n_sink=2, recent_window=8, int4_budget=12, eviction_policy="learned", predictor=loaded)
        cache = create_tiered_cache(model, config)
        model(random_ids(1, PROMPT, seed=5), **forward_kwargs(cache, model))
        kept.append([slots.tolist() for slots in _kept(cache)])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("padded", [False, True])
def test_heads_keep_what_their_budgets_say_and_memory_follows(model: Any, tmp_path: Path, padded: bool) -> None:
    """Layer 0: the first head needs all, the second nothing; layer 1: both the same."""
    all_of_it, nothing, middling = [1.0, 0.9, 0.0], [0.0, 0.0, 0.0], [0.2, 0.1, 0.0]
    budgets = HeadBudgets(torch.tensor([[all_of_it, nothing], [middling, middling]]), fractions=(0.0, 0.5, 1.0))
    bundle = save_bundle(tmp_path, model, budgets=budgets)
    config = FadeConfig(n_sink=2, recent_window=8, int4_budget=0.25, eviction_policy="learned", predictor=bundle)
    cache = create_tiered_cache(model, config)
    uniform = create_tiered_cache(model, config.with_options(head_budgets=False))
    ids = random_ids(1, 100, seed=5)
    mask = torch.ones_like(ids)
    if padded:
        ids, mask = (torch.cat((torch.full_like(t[:, :30], v), t), 1) for t, v in ((ids, 257), (mask, 0)))
    for each in (cache, uniform):
        model(ids, attention_mask=mask, **forward_kwargs(each, model))
        for step in range(40):
            mask_now = torch.nn.functional.pad(mask, (0, step + 1), value=1)
            model(ids[:, -1:], attention_mask=mask_now, **forward_kwargs(each, model))
    layer = cache.tiered[0].tokens.packed
    counts = torch.bincount(layer.token_row(), minlength=2).tolist()
    assert counts[1] == 0
    assert counts[0] == 100 - 2 - 8  # all of the body
    assert [len(slots) for slots in _kept(uniform)] == [25, 25]
    report = cache.memory_report()
    assert report["tokens"]["HIGH"] <= 4 * 26
    assert report["resident_bytes"] == reachable_bytes(cache)


def test_predictor_of_another_model_is_refused(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    bundle = save_bundle(tmp_path, tiny_model(seed=0))
    other = tiny_model(seed=1)
    with pytest.raises(FadeError, match="was made for another model: weights"):
        create_tiered_cache(other, FadeConfig.balanced(predictor=bundle))
    assert other.config._attn_implementation != "fade"  # refused before anything was changed
    with pytest.warns(UserWarning, match="allowed by strict=False"):
        create_tiered_cache(other, FadeConfig.balanced(predictor=bundle, strict=False))


@pytest.mark.parametrize(
    ("shape", "layers"),
    [((1, 2), (1,)), ((2, 3), (0, 1)), ((2, 2), (0, 2)), ((3, 2), (0, 1, 2))],
    ids=["a layer too few", "heads of another model", "another layer", "a layer too many"],
)
def test_budgets_of_other_layers_or_heads_are_refused_when_the_cache_is_made(
    tiny_model: Callable[..., Any], shape: tuple[int, int], layers: tuple[int, ...]
) -> None:
    model, lost = tiny_model(), torch.rand(*shape, 2).sort(-1, descending=True).values
    table = HeadBudgets(lost, fractions=(0.0, 1.0), layers=layers)
    predictor = Predictor(TokenMLP(), FeatureSpec(), model_provenance(model), budgets=table)
    for policy in ("learned", "fastgen"):
        config = FadeConfig(int4_budget=0.5, eviction_policy=policy, predictor=predictor)
        with pytest.raises(
            FadeError, match="head budgets for .* kv heads., and its .* from layers 0 to 1 .2.; .*False"
        ):
            create_tiered_cache(model, config)
        assert model.config._attn_implementation != "fade"  # refused before anything was changed
    config = FadeConfig(int4_budget=0.5, eviction_policy="learned", predictor=predictor, head_budgets=False)
    decode(model, random_ids(1, PROMPT + STEPS, seed=5), PROMPT, create_tiered_cache(model, config))


def test_presets_choose_the_predictor_when_there_is_one(tmp_path: Path) -> None:
    assert FadeConfig.balanced().eviction_policy == "h2o"
    assert FadeConfig.aggressive(predictor="x").eviction_policy == "learned"
    assert not FadeConfig.safe().ranks
    assert FadeConfig.balanced(n_sink=7).n_sink == 7
