"""Which model something was made for: every value of every tensor counts, and older fingerprints still hold."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from predictor import provenance
from predictor.errors import FadeError
from predictor.provenance import (
    ALL_VALUES,
    check_provenance,
    first_values_fingerprint,
    model_provenance,
    weights_fingerprint,
)
from tests.conftest import make_tiny_model
from tests.families import FAMILIES


class Quantised(nn.Module):
    """A layer whose weights are codes in a buffer, with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.arange(5000, dtype=torch.int32))
        self.register_buffer("table", torch.ones(9), persistent=False)
        self.scale = nn.Parameter(torch.linspace(-3, 3, 900))


def changed(model: nn.Module, name: str, place: int) -> nn.Module:
    """A copy with one value changed: to a neighbour that bfloat16 tells apart, or another code."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        flat = dict([*other.named_parameters(), *other.named_buffers()])[name].view(-1)
        flat[place] = flat[place] * 1.25 + 0.125 if flat.is_floating_point() else flat[place] + 1
    return other


@given(data=st.data())
def test_any_value_of_any_parameter_counts(data: st.DataObject) -> None:
    model = make_tiny_model(num_hidden_layers=1)
    name, parameter = data.draw(st.sampled_from(list(model.named_parameters())))
    other = changed(model, name, data.draw(st.integers(0, parameter.numel() - 1)))
    assert weights_fingerprint(other) != weights_fingerprint(model)


@pytest.mark.parametrize(("name", "place"), [("codes", 0), ("codes", 4999), ("scale", 899)])
def test_buffers_that_a_checkpoint_holds_count_too(name: str, place: int) -> None:
    model = Quantised()
    assert weights_fingerprint(changed(model, name, place)) != weights_fingerprint(model)
    assert weights_fingerprint(changed(model, "table", 3)) == weights_fingerprint(model)  # made anew by every load


def test_it_is_that_of_the_checkpoint_in_any_dtype_and_layout(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    fingerprint = weights_fingerprint(model)
    assert fingerprint.startswith(ALL_VALUES)
    assert weights_fingerprint(copy.deepcopy(model).to(torch.bfloat16)) == fingerprint
    turned = copy.deepcopy(model)
    for parameter in turned.parameters():
        parameter.data = parameter.data.t().contiguous().t() if parameter.ndim == 2 else parameter.data
    assert weights_fingerprint(turned) == fingerprint
    assert weights_fingerprint(tiny_model(seed=1)) != fingerprint


def test_values_are_read_in_pieces_that_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Quantised()
    fingerprint = weights_fingerprint(model)
    monkeypatch.setattr(provenance, "CHUNK", 7)
    assert weights_fingerprint(copy.deepcopy(model)) == fingerprint


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "one value in place": lambda p: p.view(-1)[777].add_(1),
    "around the count of writes": lambda p: p.data.view(-1)[256:].mul_(1.5),
    "other memory": lambda p: setattr(p, "data", p.data + 1),
    "through numpy": lambda p: p.detach().numpy().__imul__(1.5),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_known_model_that_is_written_to_is_another(tiny_model: Callable[..., Any], write: Any) -> None:
    model = tiny_model()
    before = weights_fingerprint(model)
    with torch.no_grad():
        write(model.model.layers[1].mlp.down_proj.weight)
    assert weights_fingerprint(model) != before
    assert weights_fingerprint(model) == weights_fingerprint(copy.deepcopy(model))


def test_tensors_whose_writes_are_not_counted_are_read_each_time() -> None:
    with torch.inference_mode():
        model = nn.Linear(70, 90)
        before = weights_fingerprint(model)
        model.weight.view(-1)[4321] += 1
        assert weights_fingerprint(model) != before


def test_a_known_model_is_not_read_again(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, real, read = tiny_model(), provenance._bytes, []
    monkeypatch.setattr(provenance, "_bytes", lambda values: read.append(values.numel()) or real(values))
    first, count = weights_fingerprint(model), sum(p.numel() for p in model.parameters())
    assert sum(read) >= count
    read.clear()
    assert weights_fingerprint(model) == first
    assert sum(read) <= 2 * provenance.SAMPLE_SIZE * len(list(model.parameters())) < count / 2


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(FadeError, match="weight of the model is on the meta device"):
        weights_fingerprint(nn.Linear(2, 2, device="meta"))


def of_before(model: Any) -> dict[str, Any]:
    """The provenance that earlier releases wrote."""
    return {**model_provenance(model), "weights": first_values_fingerprint(model)}


def test_what_an_earlier_release_wrote_holds_for_its_model(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    stored = of_before(model)
    assert ALL_VALUES not in stored["weights"]
    assert model_provenance(model, like=stored) == stored
    with pytest.warns(UserWarning, match="the bundle knows its model by the first 256 values of each parameter"):
        check_provenance(stored, model, "the bundle")
    with pytest.raises(FadeError, match="another model: weights"):
        check_provenance(stored, tiny_model(seed=1), "the bundle")


def test_a_model_that_shares_the_first_values_is_another(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.view(-1)[256:] *= 1.5
    assert first_values_fingerprint(other) == first_values_fingerprint(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_provenance(model_provenance(model), model, "the bundle")
        with pytest.raises(FadeError, match="another model: weights"):
            check_provenance(model_provenance(model), other, "the bundle")


def test_heads_are_those_of_the_layers_that_tokens_are_evicted_from() -> None:
    """Gemma 4: full attention has heads and dims of its own."""
    model = FAMILIES["gemma4"](num_global_key_value_heads=1, attention_k_eq_v=True)
    key = model.model.layers[1].self_attn.k_proj.weight
    facts = model_provenance(model)
    assert (facts["kv_heads"], facts["head_dim"], len(key)) == (1, 32, 32)
    assert len(model.model.layers[0].self_attn.k_proj.weight) == 2 * 16
