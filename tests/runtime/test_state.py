"""All that is state is in one place: a reset cache is a new one, a session and a copy are the same one."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fade_runtime import FadeConfig, FadeError, TieredCache, create_tiered_cache, load_session, save_session
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_model, slow
from tests.runtime.kinds import GUARDED, KINDS, config_of, step, tokens

from .compare import differences

OLD = Path(__file__).parent / "data" / "session_v3"
STATEFUL: dict[str, dict[str, Any]] = {
    "guard": GUARDED,
    "guard and memory": dict(
        n_sink=2, recent_window=16, reassign_every=8, memory="20KiB", guard="rollback", spill="host", monitor_every=4
    ),
    "guard and global": dict(GUARDED, allocation="global"),
    "global and memory": dict(
        n_sink=2, recent_window=8, reassign_every=8, target_compression=3.0, min_budget=0.05, allocation="global"
    ),
    "memory": dict(n_sink=2, recent_window=8, reassign_every=8, memory="20KiB"),
    "prefetch": dict(GUARDED, prefetch=True, kl_alarm=9.0, kl_target=8.0),
    "shadow": dict(GUARDED, shadow_every=4),
}
# times, places, and what a layer computes anew in each call
BUT = frozenset({"ms", "time", "spill", "_model", "_hold_model", "resident", "running"})


def made(kind: str, model: Any, folder: Path) -> TieredCache:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = FadeConfig(**STATEFUL[kind]) if kind in STATEFUL else config_of(kind, model, folder)
        return create_tiered_cache(model, config)


def use(model: Any, cache: TieredCache, seed: int, steps: int = 30) -> None:
    step(model, cache, tokens(120 + seed, seed))
    for at in range(steps):
        step(model, cache, tokens(1, 10 * seed + at))
    step(model, cache, tokens(4, seed + 1))


@pytest.mark.parametrize("kind", [*KINDS, *STATEFUL])
def test_a_reset_cache_is_a_new_one(kind: str, tmp_path: Path) -> None:
    model = make_tiny_model()
    used, new = made(kind, model, tmp_path / "a"), made(kind, model, tmp_path / "a")
    if used.memory is not None:
        used.memory.limit(6.0)
    use(model, used, 3)
    assert differences(vars(used), vars(new), but=BUT) != []
    used.reset()
    assert differences(vars(used), vars(new), but=BUT) == []
    for cache in (used, new):
        use(model, cache, 5)
    assert differences(vars(used), vars(new), but=BUT) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *STATEFUL])
@pytest.mark.parametrize("way", ["session", *slow("copy")])
def test_a_session_and_a_copy_hold_all_that_is_state(kind: str, way: str, tmp_path: Path) -> None:
    model = make_tiny_model()
    cache = made(kind, model, tmp_path / "a")
    if cache.memory is not None:
        cache.memory.limit(6.0)
    use(model, cache, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "session":
            other = load_session(model, save_session(cache, tmp_path / "session"), cache.config)
        else:
            other = copy.deepcopy(cache)
    assert differences(vars(cache), vars(other), but=BUT) == []
    for at in range(40):
        assert torch.equal(step(model, cache, tokens(1, at)), step(model, other, tokens(1, at)))
    assert differences(vars(cache), vars(other), but=BUT) == []


@pytest.mark.parametrize("kind", ["ema", "streaming", "guard"])
def test_a_session_of_format_3_goes_on_as_it_would_have(kind: str) -> None:
    """Written by the release before 4, of two rows of which one is padded on the left."""
    model = AutoModelForCausalLM.from_pretrained(OLD / "model").eval().requires_grad_(False)
    ids = torch.randint(3, 60, (2, 60), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    ids[1, :11], mask[1, :11] = 63, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = load_session(model, OLD / kind)
        logits = [
            model(
                ids[:, at : at + 1],
                attention_mask=mask[:, : at + 1],
                position_ids=positions[:, at : at + 1],
                **forward_kwargs(cache, model),
            ).logits
            for at in range(43, 60)
        ]
    expected = load_file(OLD / "logits.safetensors")[kind]
    assert cache.tiered[0].tokens.sequences.counts == [60, 49]
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=0.05, rtol=1e-3)  # a code may round otherwise


def test_what_format_3_did_not_store_is_refused_by_name(tmp_path: Path) -> None:
    model = make_tiny_model()
    cache = create_tiered_cache(model, FadeConfig(**STATEFUL["memory"]))
    step(model, cache, tokens(80, 0))
    state = cache.cache_state_dict()
    state["facts"]["version"] = 3
    with pytest.raises(FadeError, match=r"an older release saved this session with memory=..., but not its budget"):
        cache.load_cache_state_dict(state)
