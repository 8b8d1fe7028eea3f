"""Four threads, one model, every kind of cache at once: each request gives what it gives alone."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from tests.conftest import make_tiny_model, make_tiny_tokenizer
from tests.runtime.caches import make_codebook, save_bundle

REQUESTS, THREADS, STEPS = 300, 4, 10
LOSSY: dict[str, Any] = dict(n_sink=2, recent_window=16, int4_budget=20, low_budget=10, reassign_every=8)
GUARDED: dict[str, Any] = dict(LOSSY, guard="rollback", spill="host", monitor_every=4, kl_alarm=0.06)


def kinds(model: Any, folder: Path) -> dict[str, FadeConfig | None]:
    """A config for each kind of cache; None: transformers' own, with attention maps or hidden states asked for."""
    tokenizer = make_tiny_tokenizer()
    pq: dict[str, Any] = dict(LOSSY, low_tier="pq", codebook=make_codebook(model))
    return {
        **dict.fromkeys(("stock", "stock, hidden states"), None),
        "safe": FadeConfig.safe(recent_window=16, reassign_every=8),
        "off": FadeConfig(compression="off"),
        **{policy: FadeConfig(**LOSSY, eviction_policy=policy) for policy in ("position", "h2o", "ema", "adaptive")},
        "learned": FadeConfig(**LOSSY, eviction_policy="learned", predictor=save_bundle(folder, model)),
        "fastgen": FadeConfig(n_sink=2, recent_window=16, eviction_policy="fastgen", tokenizer=tokenizer, recover=0.7),
        "assistant": FadeConfig(**LOSSY, assistant=1),
        "rollback, host": FadeConfig(**GUARDED),
        "rollback, disk": FadeConfig(**{**GUARDED, "spill": "disk"}, spill_dir=folder / "spill"),
        "redecode": FadeConfig(**GUARDED, on_rollback="redecode"),
        "shadow": FadeConfig(**{**GUARDED, "guard": "warn"}, shadow_every=4),
        "streaming": FadeConfig(**LOSSY, positions="streaming"),
        "pq": FadeConfig(**pq),
        "chunks": FadeConfig(**LOSSY, chunked_prefill=True),
        "memory": FadeConfig(memory=12_000, recent_window=16, n_sink=2, reassign_every=8),
    }


def answer(model: Any, kind: str, config: FadeConfig | None, length: int) -> tuple[list[int], Any]:
    """The tokens that a request gives, and what its cache then holds."""
    ids = torch.randint(3, 250, (1, length), generator=torch.Generator().manual_seed(length))
    if config is None:
        cache: Any = DynamicCache(config=model.config)
        model(ids, output_hidden_states="hidden" in kind)  # hooks that transformers sets when they are first needed
    else:
        cache = create_tiered_cache(model, config)
    given = forward_kwargs(cache, model)
    if kind == "chunks":
        for piece in ids[:, :-1].split(30, dim=1):
            model(piece, **given)
    out: Tensor = model.generate(ids, max_new_tokens=STEPS, do_sample=False, **given)
    shadow = None if config is None or cache.guard is None else cache.guard.report().get("shadow")
    return out[0].tolist(), None if config is None else (cache.memory_report(), shadow)


@pytest.fixture(autouse=True)
def one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning")
def test_requests_of_many_threads_give_what_each_gives_alone(tmp_path: Path) -> None:
    model = make_tiny_model()
    configs, lengths = kinds(model, tmp_path), (64, 97)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = {(kind, n): answer(make_twin(model), kind, configs[kind], n) for kind in configs for n in lengths}
    requests = [(kind, length) for kind in configs for length in lengths]
    requests = (requests * (REQUESTS // len(requests) + 1))[:REQUESTS]
    random.Random(0).shuffle(requests)
    wrong: list[str] = []
    before, number = vars(model).keys() - {"_output_capturing_hooks_installed"}, iter(range(REQUESTS))

    def work() -> None:
        for at in number:
            kind, length = requests[at]
            try:
                if answer(model, kind, configs[kind], length) != alone[kind, length]:
                    wrong.append(f"{kind} of {length}: another answer")
            except BaseException as error:
                wrong.append(f"{kind} of {length}: {error!r}")

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert next(number, None) is None
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
    assert vars(model).keys() - {"_output_capturing_hooks_installed"} == before


def make_twin(model: Any) -> Any:
    """The same model, of which nobody has asked anything yet."""
    twin = make_tiny_model()
    twin.load_state_dict(model.state_dict())
    return twin
