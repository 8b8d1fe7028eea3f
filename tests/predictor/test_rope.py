"""Tables, rotation and its inverse against the keys that real models put into transformers' own cache.

With one token, attention can look at nothing else: then every layer's key before rotation is the same at every
position, and the cached key at position 0 is that key times the scheme's attention scaling.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

from predictor.errors import FadeError
from predictor.rope import Rotary, Table, find_rotary, rotate, unrotate
from tests.conftest import make_tiny_model
from tests.families import FAMILIES, MIXED, _make

WINDOW = 64  # the length that schemes were "trained" for
FACTOR = 1.3  # attention scaling of yarn and longrope
SHORT, LONG = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
SCHEMES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": dict(factor=4.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=WINDOW),
    "dynamic": dict(factor=4.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=WINDOW, attention_factor=FACTOR),
    "longrope": dict(
        factor=4.0,
        original_max_position_embeddings=WINDOW,
        attention_factor=FACTOR,
        short_factor=SHORT,
        long_factor=LONG,
    ),
    "proportional": dict(partial_rotary_factor=0.5),
}
NONE = ("gpt2", "opt", "falcon_alibi")
MORE: dict[str, Callable[..., Any]] = {
    "glm": partial(_make, "Glm"),
    "glm4": partial(_make, "Glm4"),
    "cohere": partial(_make, "Cohere"),
    "ernie4_5": partial(_make, "Ernie4_5"),
    "helium": partial(_make, "Helium"),
    "stablelm": partial(_make, "StableLm"),
    "nanochat": partial(_make, "NanoChat"),  # turns the other way round
    "phi3_partial": partial(
        _make, "Phi3", rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    ),
    "exaone4": partial(_make, "Exaone4", **MIXED),
    "llama4": partial(
        _make,
        "Llama4TextConfig Llama4ForCausalLM",
        intermediate_size_mlp=96,
        num_local_experts=2,
        num_hidden_layers=4,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=False,
    ),
    "gpt_oss": partial(FAMILIES["gpt_oss"], rope_parameters=dict(rope_type="default", rope_theta=1e4)),
}
ROTATING = {**{name: make for name, make in FAMILIES.items() if name not in NONE}, **MORE}


def _scheme(name: str, **options: Any) -> Any:
    rope = dict(rope_type=name, rope_theta=10_000.0, **SCHEMES[name])
    return make_tiny_model(rope_parameters=rope, max_position_embeddings=WINDOW, **options)


def _keys(model: Any, tokens: Tensor, positions: Tensor) -> dict[int, Tensor]:
    """Run tokens [B, L] at positions [B, L]; the cached keys [B, H, L, D] of each layer that has some."""
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(input_ids=tokens, position_ids=positions, **{name: cache})
    kept = enumerate(cache.layers)
    return {i: layer.keys for i, layer in kept if getattr(layer, "keys", None) is not None}


def _close(got: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest element."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def _check(model: Any, at: int, scale: float = 1.0) -> set[bool]:
    """Compare all layers at one position; returns whether layers rotated."""
    rotary = find_rotary(model)
    assert rotary is not None
    token, positions = torch.tensor([[7]]), torch.tensor([[at]])
    there, here = _keys(model, token, positions), _keys(model, token, torch.tensor([[0]]))
    turned = set()
    for layer, key in there.items():
        table = rotary.table(positions[0], layer)
        plain = here[layer] / (1 if table is None else scale)
        _close(unrotate(key, table), plain)
        _close(rotate(plain, table), key)
        _close(rotate(unrotate(key, table), table), key)
        turned.add(table is not None)
        assert table is None or at == 0 or not torch.allclose(key, here[layer], atol=1e-2)
    return turned


@pytest.mark.parametrize("at", [0, 100, 1500])
@pytest.mark.parametrize("family", ROTATING)
def test_every_familys_rotation_is_its_own_and_inverts(family: str, at: int) -> None:
    turned = _check(ROTATING[family](), at)
    assert turned == ({True, False} if family in ("cohere2", "exaone4", "llama4") else {True})


@pytest.mark.parametrize("at", [0, 40, 100, 5000])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_inverts(scheme: str, at: int) -> None:
    _check(_scheme(scheme), at, FACTOR if "attention_factor" in SCHEMES[scheme] else 1.0)


@pytest.mark.parametrize("family", NONE)
def test_other_positions_are_none_and_a_no_op(family: str) -> None:
    assert find_rotary(FAMILIES[family]()) is None
    x = torch.randn(1, 2, 3, 4)
    assert rotate(x, None) is x
    assert unrotate(x, None) is x


def test_layers_without_rotation_have_no_table() -> None:
    model = FAMILIES["smollm3"](num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0])
    assert _check(model, 100) == {True, False}
    rotary = find_rotary(model)
    assert rotary is not None
    assert [rotary.table(torch.arange(3), layer) is None for layer in range(4)] == [False, True, False, True]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("lengths", [(20,), (WINDOW + 30,), (WINDOW + 30, 20), (WINDOW + 30, WINDOW + 10)], ids=str)
def test_prompts_of_any_length_one_after_the_other(scheme: str, lengths: tuple[int, ...]) -> None:
    """Layer 0's key before rotation depends on the token alone; the table is that of the pass just run."""
    model = _scheme(scheme)
    rotary = find_rotary(model)
    assert rotary is not None
    scale = FACTOR if "attention_factor" in SCHEMES[scheme] else 1.0
    plain = _keys(_scheme(scheme), torch.arange(100)[:, None], torch.zeros(100, 1).long())[0][:, :, 0] / scale
    for length in lengths:
        tokens = torch.arange(length).flip(0)
        table = rotary.table(torch.arange(length))  # asked before the pass, answered for that pass
        key = _keys(model, tokens[None], torch.arange(length)[None])[0]
        for ask in (table, rotary.table(torch.arange(length))):
            _close(unrotate(key, ask)[0].transpose(0, 1), plain[tokens])


@pytest.mark.parametrize("family", ["llama", "glm", "gpt_neox", "gemma3"])
def test_positions_of_a_left_padded_batch(family: str) -> None:
    model = ROTATING[family]()
    rotary = find_rotary(model)
    assert rotary is not None
    tokens = torch.tensor([[257, 257, 3, 4, 5], [1, 2, 3, 4, 5]])
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    table = rotary.table(positions)
    assert table is not None
    assert table.cos.shape[:2] == (2, 5)
    plain = unrotate(_keys(model, tokens, positions)[0], table[:, None])
    _close(plain[0, :, 2:], plain[1, :, 2:])
    empty = rotary.table(positions[:, :0])
    assert empty is not None
    assert empty.cos.shape == (2, 0, table.cos.shape[-1])


@pytest.mark.parametrize("scheme", [*SCHEMES])
@pytest.mark.parametrize("before", [10, WINDOW + 30])
@pytest.mark.parametrize("asked", [10, WINDOW + 60])
def test_asking_changes_nothing_in_the_model(scheme: str, before: int, asked: int) -> None:
    model = _scheme(scheme)
    module = model.model.rotary_emb
    _keys(model, torch.arange(before)[None], torch.arange(before)[None])
    state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(module).items() if k != "_buffers"}
    buffers = {name: (x, x.clone()) for name, x in module.named_buffers()}
    rotary = find_rotary(model)
    assert rotary is not None
    rotary.table(torch.arange(asked))
    assert vars(module).keys() - {"_buffers"} == state.keys()
    assert all(torch.equal(v, state[k]) if isinstance(v, Tensor) else v is state[k]
               for k, v in vars(module).items() if k != "_buffers")  # fmt: skip
    assert dict(module.named_buffers()).keys() == buffers.keys()
    for name, now in module.named_buffers():
        assert now is buffers[name][0]
        assert torch.equal(now, buffers[name][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "glm", "stablelm"])
def test_half_precision_tables_are_rounded_like_the_models(family: str, dtype: torch.dtype) -> None:
    model = ROTATING[family]().to(dtype)
    rotary = find_rotary(model)
    assert rotary is not None
    positions = torch.tensor([[100]])
    table = rotary.table(positions[0])
    assert table is not None
    for values in (table.cos, table.sin):
        assert values.dtype == torch.float32
        assert torch.equal(values, values.to(dtype).float())
    here = _keys(model, torch.tensor([[7]]), torch.tensor([[0]]))[0]
    assert torch.equal(rotate(here, table), _keys(model, torch.tensor([[7]]), positions)[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_table_turns_pairs_and_leaves_the_rest_alone(interleaved: bool) -> None:
    """Against complex multiplication."""
    angle, x = torch.rand(5, 3), torch.randn(2, 5, 10)
    wide = angle.repeat_interleave(2, -1) if interleaved else angle.repeat(1, 2)
    table = Table(wide.cos(), wide.sin(), interleaved)
    turned = rotate(x, table)
    pairs = (x[..., 0:6:2], x[..., 1:6:2]) if interleaved else (x[..., :3], x[..., 3:6])
    complex_ = torch.complex(*pairs) * torch.polar(torch.ones_like(angle), angle)
    got = (turned[..., 0:6:2], turned[..., 1:6:2]) if interleaved else (turned[..., :3], turned[..., 3:6])
    torch.testing.assert_close(torch.complex(*got), complex_)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    torch.testing.assert_close(unrotate(turned, table), x)
    picked = rotate(x[:, [3, 1]], table[torch.tensor([3, 1])])
    torch.testing.assert_close(picked, turned[:, [3, 1]])


def test_a_rotary_does_not_keep_its_model_alive() -> None:
    model = _scheme("default")
    rotary, gone = find_rotary(model), weakref.ref(model.model)
    assert rotary is not None
    rotary.table(torch.arange(3))
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(FadeError, match="llama model is gone; keep it"):
        rotary.table(torch.arange(3))


class OddRotary(nn.Module):
    """Angles in a form that only its own model understands."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines."""
        angle = position_ids[..., None] * torch.ones(4)
        return angle.cos(), angle.sin()


def _odd(modules: int) -> Any:
    decoder = nn.Module()
    decoder.config = transformers.PreTrainedConfig()
    decoder.config.model_type = "odd"
    decoder.parts = nn.ModuleList([OddRotary() for _ in range(modules)])
    return decoder


def _sideways(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + q.roll(2, -1) * sin + q.roll(1, -1) * sin, k


@pytest.mark.parametrize(
    ("modules", "apply", "why"),
    [
        (1, None, "no apply_rotary_pos_emb"),
        (2, None, "2 rotary modules"),
        (1, _sideways, "pairs channels in another way"),
        (1, lambda cos, sin: 1, "TypeError"),
    ],
    ids=["unnamed", "two", "sideways", "wrong call"],
)
def test_what_is_not_understood_is_refused_by_name(modules: int, apply: Any, why: str) -> None:
    decoder = _odd(modules)
    rotary = find_rotary(decoder)
    assert isinstance(rotary, Rotary)
    rotary._apply = apply
    with pytest.raises(FadeError, match=f"rotation of model type odd: .*{why}"):
        rotary.table(torch.arange(3))
