"""Keys and values as features: from traces and in the cache alike, and a network that learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data.collect import collect
from data.datamodule import TraceDataModule
from data.lm import load_tokenizer
from data.plan import CollectSettings, prepare
from data.trace import Traces
from fade_runtime import FadeConfig, create_tiered_cache
from pipelines.train import main
from predictor.batches import hidden_of
from predictor.bundle import Predictor, load_bundle
from predictor.errors import FadeError
from predictor.features import FEATURES, FeatureSpec, Hidden, PrefillFeatures
from predictor.module import PredictorModule
from predictor.nets import HiddenMLP, TokenMLP, build_net
from predictor.scorenet import token_scores

SIZES = dict(layers=2, kv_heads=2, dim=16)


@pytest.fixture(scope="module")
def settings(prose: Path, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> CollectSettings:
    return CollectSettings(
        text=str(prose), model=str(tiny_model_dir), out=str(tmp_path_factory.mktemp("hidden") / "traces"),
        train_documents=3, validation_documents=2, min_prompt=150, max_prompt=190, future=20, window=16,
        accelerator="cpu", record_hidden=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def hidden_traces(settings: CollectSettings) -> str:
    collect(settings)
    return settings.out


def trained(seed: int = 0, **options: Any) -> HiddenMLP:
    """No zero layer left, as after training."""
    torch.manual_seed(seed)
    net = HiddenMLP(**SIZES, hidden=8, depth=1, **options)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return net


def test_the_cache_sees_what_traces_hold(hidden_traces: str, settings: CollectSettings) -> None:
    """Features and scores of a prompt in the cache against those of its trace rows."""
    model = AutoModelForCausalLM.from_pretrained(settings.model)
    traces = Traces(hidden_traces)
    assert traces.spec.hidden
    assert traces.manifest["schema_version"] == 2
    net, seen = trained().eval(), []
    predictor = Predictor(net, traces.spec, traces.provenance)
    forecast = predictor.forecast
    predictor.forecast = lambda features: seen.append(features) or forecast(features)  # type: ignore[method-assign]
    for task in prepare(settings, load_tokenizer(settings.model))[:2]:
        seen.clear()
        cache = create_tiered_cache(model, FadeConfig(int4_budget=0.2, eviction_policy="learned", predictor=predictor))
        with torch.no_grad():
            model(task.tokens[None, : task.prompt], past_key_values=cache)
        rows = [row for row in traces.read(task.shard) if row["doc"] == task.document.id]
        assert len(seen) == 2
        for layer, features in enumerate(seen):
            assert features.hidden is not None
            assert features.hidden.layer.tolist() == [layer] * 2
            assert features.hidden.head.tolist() == [0, 1]
            mine = [row for row in rows if row["layer"] == layer]
            names = ("tokens", "history_mean", "history_max", "key", "value")
            stored = {name: torch.stack([torch.tensor(row[name]).float() for row in mine]) for name in names}
            for name in ("key", "value"):
                torch.testing.assert_close(getattr(features.hidden, name), stored[name], rtol=2e-3, atol=1e-3)
            torch.testing.assert_close(features.tokens, stored["tokens"], rtol=2e-3, atol=1e-2)
            place = {"layer": torch.full((2,), layer), "head": torch.arange(2)}
            again = PrefillFeatures(*(stored[name] for name in names[:3]), hidden=hidden_of(stored | place))
            torch.testing.assert_close(net.log_importance(features), net.log_importance(again), rtol=1e-2, atol=2e-2)


def test_padding_and_company_change_nothing(hidden_traces: str) -> None:
    data = TraceDataModule(hidden_traces, batch_size=6)
    data.setup("fit")
    batch, net = next(iter(data.train_dataloader())), trained()
    net.calibrate(batch)
    assert len(batch["length"].unique()) > 1
    padded, alone = net.logits(batch), token_scores(net, batch)
    for row, length in enumerate(batch["length"].tolist()):
        torch.testing.assert_close(padded[row, :length], alone[row, :length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", [True, False])
def test_it_is_rebuilt_from_its_config(attention: bool) -> None:
    net = trained(attention=attention)
    again = build_net(net.kind, net.config())
    again.load_state_dict(net.state_dict())
    tokens, vector = torch.randn(2, 9, len(FEATURES)), torch.randn(2, 9, 16)
    vectors = Hidden(vector, vector, torch.tensor([0, 1]), torch.tensor([1, 1]))
    assert torch.equal(net(tokens, vectors), again(tokens, vectors))
    assert torch.equal(net(tokens + 1, vectors), net(tokens, vectors)) == (not attention)


@pytest.mark.parametrize("attention", [True, False])
def test_each_head_learns_a_direction_of_its_own(hidden_traces: str, attention: bool) -> None:
    """What is kept is told by one channel of the key in head 0, by the opposite of it in head 1."""
    data = TraceDataModule(hidden_traces, batch_size=12)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    sign = 1 - 2 * batch["head"][:, None].float()
    batch["target_sum"] = (2 * sign * batch["key"][..., 3] / batch["key"][..., 3].std()).softmax(-1) * batch["mask"]
    torch.manual_seed(0)
    module = PredictorModule(HiddenMLP(**SIZES, hidden=16, attention=attention), loss="kl")
    blind = PredictorModule(TokenMLP(hidden=16), loss="kl")
    left = {}
    for name, one in (("hidden", module), ("blind", blind)):
        one.net.calibrate(batch)
        optimizer = torch.optim.AdamW(one.net.parameters(), lr=0.02)
        for _ in range(60):
            optimizer.zero_grad()
            loss = one.loss_of(batch)
            loss.backward()
            optimizer.step()
        left[name] = float(loss)
    assert left["hidden"] < 0.3 * left["blind"]


def test_it_is_fitted_and_spent(hidden_traces: str, settings: CollectSettings, tmp_path: Path) -> None:
    net = [f"--model.net.{name}={value}" for name, value in SIZES.items()]
    quiet = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    given = [f"--data.traces={hidden_traces}", f"--output={tmp_path / 'out'}", "--trainer.max_epochs=2"]
    assert main(["fit", "--model.net=predictor.nets.HiddenMLP", *net, *given, *quiet]) == 0
    bundle = load_bundle(tmp_path / "out" / "best")
    assert bundle.spec.hidden
    model = AutoModelForCausalLM.from_pretrained(settings.model)
    cache = create_tiered_cache(model, FadeConfig.balanced(predictor=str(tmp_path / "out" / "best")))
    prompt = torch.randint(3, 250, (1, 300), generator=torch.Generator().manual_seed(0))
    model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert cache.memory_report()["compression"] > 1
    assert main(["fit", "--model.net=predictor.nets.TokenMLP", *given, *quiet]) == 0
    assert not load_bundle(tmp_path / "out" / "best").spec.hidden  # nobody needs to turn keys back for it


def test_a_spec_without_keys_is_refused(tiny_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = [f"--model.net.{name}={value}" for name, value in SIZES.items()]
    given = [f"--data.traces={tiny_traces}", f"--output={tmp_path}", "--trainer.logger=false"]
    assert main(["fit", "--model.net=predictor.nets.HiddenMLP", *net, *given]) == 2
    assert "collect them with record_hidden: true" in capsys.readouterr().err
    with pytest.raises(FadeError, match="feature spec with hidden=True"):
        trained().log_importance(PrefillFeatures(torch.zeros(2, 5, 9), torch.zeros(2, 4, 1), torch.zeros(2, 4, 1)))


@pytest.mark.parametrize(("name", "wrong"), [("layers", 1), ("kv_heads", 1), ("dim", 8)])
def test_another_model_is_refused(name: str, wrong: int, hidden_traces: str) -> None:
    data = TraceDataModule(hidden_traces, batch_size=12)
    data.setup("fit")
    net = HiddenMLP(**{**SIZES, name: wrong})
    with pytest.raises(FadeError, match=r"and meets 2, 2 and 16; set layers, kv_heads and dim"):
        net.logits(next(iter(data.train_dataloader())))


def test_specs_are_read_by_older_releases_unless_they_ask_for_keys() -> None:
    assert "hidden" not in FeatureSpec().to_dict()
    for spec in (FeatureSpec(), FeatureSpec(window=16, hidden=True)):
        assert FeatureSpec.from_dict(spec.to_dict()) == spec
