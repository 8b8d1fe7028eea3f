"""The study of head budgets against brute force, on traces of a tiny model."""

from pathlib import Path

import pytest
import torch

from data.datamodule import TraceDataModule
from pipelines.budget_study import budget_study, expected_loss, learned
from pipelines.cli import run
from predictor.nets import TokenMLP
from predictor.scorenet import token_scores


def test_expected_loss_is_what_was_dropped(tiny_traces: Path) -> None:
    module = TraceDataModule(str(tiny_traces))
    module.setup("validate")
    batches = [{**batch, "scores": token_scores(TokenMLP(), batch, in_cache=True)} for batch in module.val_dataloader()]
    shares = [[0.1, 0.3], [0.0, 0.5]]
    lost = []
    for batch in batches:
        for row in range(len(batch["length"])):
            mine = batch["eligible"][row].nonzero().flatten().tolist()
            mine.sort(key=lambda t: (-float(batch["scores"][row, t]), t))
            kept = int(batch["length"][row] * shares[int(batch["layer"][row])][int(batch["head"][row])])
            lost.append(float(batch["target_max"][row, mine[kept:]].sum()))
    assert expected_loss(shares, batches) == pytest.approx(sum(lost) / len(lost), rel=1e-3)


def test_a_head_that_looks_everywhere_gets_what_the_other_does_not_need() -> None:
    spread, peaked = torch.full((100,), 0.01), torch.zeros(100)
    peaked[7] = 1.0
    row = {
        "scores": torch.stack((spread, peaked)), "target_max": torch.stack((spread, peaked)),
        "eligible": torch.ones(2, 100, dtype=torch.bool), "length": torch.tensor([100, 100]),
        "layer": torch.tensor([0, 0]), "head": torch.tensor([0, 1]), "doc": torch.tensor([3, 3]),
    }  # fmt: skip
    shares = learned(iter([row])).allocate(0.25)
    assert expected_loss([[0.25, 0.25]], [row]) == pytest.approx(0.75 / 2, abs=1e-5)
    assert expected_loss(shares, [row]) == pytest.approx(0.515 / 2, abs=0.01)  # 1.5 % for one, the rest for the other


def test_the_tables_hold_what_was_computed(
    tiny_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "study.md"
    command = [f"--traces={tiny_traces}", "--sizes=[1,100]", "--budgets=[0.2]", "--parts=2", f"--out={out}"]
    assert run(budget_study, command) == 0
    rows = [line.split("|")[1:-1] for line in out.read_text().splitlines() if line.startswith("| ")][1:]
    assert [int(row[0]) for row in rows] == [1, 2]  # what the collection has
    module = TraceDataModule(str(tiny_traces))
    module.setup("fit")
    read = lambda loader: [{**batch, "scores": token_scores(TokenMLP(), batch, in_cache=True)} for batch in loader]
    train, validation = read(module.train_dataloader()), read(module.val_dataloader())
    uniform, by_sum, by_max = (float(cell) for cell in rows[-1][1:])
    assert uniform == pytest.approx(expected_loss([[0.2, 0.2]] * 2, validation), abs=2e-3)
    for found, target in ((by_sum, "target_sum"), (by_max, "target_max")):
        shares = learned(iter(train), target).allocate(0.2)
        assert found == pytest.approx(expected_loss(shares, validation), abs=2e-3)
    assert out.read_text() in capsys.readouterr().out + "\n"
    assert -1 <= float(out.read_text().splitlines()[-1].split(": ")[1]) <= 1


def test_too_few_documents_are_refused(tiny_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(budget_study, [f"--traces={tiny_traces}", "--parts=3"]) == 2
    assert "parts 3 cannot be made of 2 training documents" in capsys.readouterr().err
