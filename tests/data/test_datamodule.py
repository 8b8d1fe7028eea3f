"""Batches against the rows on disk, slot by slot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from data.collect import collect
from data.datamodule import TraceDataModule
from data.dataset import TraceDataset, collate
from data.plan import CollectSettings
from data.trace import Traces
from predictor.errors import FadeError


@pytest.fixture
def module(collected: Path) -> TraceDataModule:
    module = TraceDataModule(str(collected), batch_size=3)
    module.setup("fit")
    return module


def keys(batches: list[dict[str, torch.Tensor]]) -> list[tuple[int, int, int]]:
    return [key for b in batches for key in zip(b["doc"].tolist(), b["layer"].tolist(), b["head"].tolist())]


def test_batches_hold_the_rows_on_disk(module: TraceDataModule, collected: Path) -> None:
    traces = Traces(collected)
    ids = [one["id"] for one in traces.manifest["documents"]]
    stored = {
        (ids.index(row["doc"]), row["layer"], row["head"]): row
        for name in traces.shards("validation")
        for row in traces.read(name)
    }
    batches = list(module.val_dataloader())
    assert sorted(keys(batches)) == sorted(stored)
    assert {one["id"] for one in traces.manifest["documents"] if one["split"] == "validation"} == {
        ids[doc] for doc, _, _ in keys(batches)
    }
    for batch in batches:
        for i, key in enumerate(keys([batch])):
            row, slots = stored[key], int(batch["length"][i])
            assert slots == row["length"]
            for name in ("tokens", "h2o"):
                np.testing.assert_array_equal(batch[name][i, :slots], row[name])
            for name in ("target_sum", "target_max"):
                np.testing.assert_allclose(batch[name][i, :slots], np.exp(row[name].astype(np.float32)), rtol=1e-5)
            for name in ("history_mean", "history_max", "future_mean", "future_max"):
                part = row[name]
                np.testing.assert_array_equal(batch[name][i, :, : part.shape[1]], part)
                assert not batch[name][i, :, part.shape[1] :].any()
            for name in ("tokens", "h2o", "target_sum", "target_max", "mask", "eligible"):
                assert not batch[name][i, slots:].any(), name


def test_masks_and_block_sizes_by_hand(module: TraceDataModule) -> None:
    for batch in module.train_dataloader():
        for i, slots in enumerate(batch["length"].tolist()):
            width = batch["mask"].shape[1]
            assert batch["mask"][i].tolist() == [slot < slots for slot in range(width)]
            assert batch["eligible"][i].tolist() == [4 <= slot < slots - 64 for slot in range(width)]
            sizes = [sum(1 for s in range(n * 16, n * 16 + 16) if s < slots) for n in range(-(-width // 16))]
            assert batch["block_size"][i].tolist() == sizes
            assert batch["block_mask"][i].tolist() == [size > 0 for size in sizes]
            attended = (batch["history_mean"][i] * batch["block_size"][i]).sum(-1)
            torch.testing.assert_close(attended, torch.ones(11), rtol=0, atol=5e-3)
            total = batch["future_mean"].shape[1]
            assert total == 13


def test_every_train_row_comes_once_a_pass_in_an_order_that_the_seed_decides(collected: Path) -> None:
    def passes(seed: int) -> list[list[tuple[int, int, int]]]:
        module = TraceDataModule(str(collected), batch_size=5, seed=seed)
        module.setup()
        loader = module.train_dataloader()
        assert len(loader) == 4
        return [keys(list(loader)) for _ in range(2)]

    first, second = passes(0)
    everything = sorted((doc, layer, head) for doc in range(4) for layer in (0, 1) for head in (0, 1))
    assert sorted(first) == sorted(second) == everything
    assert first != second
    assert first != everything
    assert passes(0) == [first, second]
    assert passes(1)[0] != first


def test_margins_are_options(collected: Path) -> None:
    module = TraceDataModule(str(collected), batch_size=1, n_sink=0, recent_window=0)
    module.setup()
    for batch in module.val_dataloader():
        assert torch.equal(batch["eligible"], batch["mask"])


def test_worker_processes_share_the_rows(collected: Path) -> None:
    traces = Traces(collected)
    dataset = TraceDataset(traces, "train", shuffle=True)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=lambda rows: collate(rows, traces.spec))
    found = keys(list(loader))
    assert len(found) == len(set(found)) == 16


def test_without_h2o_the_batch_has_none(small: Callable[..., CollectSettings], tmp_path: Path) -> None:
    collect(small(tmp_path / "bare", h2o=False, train_documents=1, validation_documents=1))
    module = TraceDataModule(str(tmp_path / "bare"))
    module.setup()
    (batch,) = module.val_dataloader()
    assert "h2o" not in batch
    assert "tokens" in batch


def test_mistakes_are_named(collected: Path, tmp_path: Path) -> None:
    with pytest.raises(FadeError, match="batch_size 0"):
        TraceDataModule(str(collected), batch_size=0)
    with pytest.raises(FadeError, match="recent_window -1"):
        TraceDataModule(str(collected), recent_window=-1)
    with pytest.raises(FadeError, match="no traces in"):
        TraceDataModule(str(tmp_path)).setup()
    with pytest.raises(FadeError, match="no test documents"):
        TraceDataset(Traces(collected), "test")
