"""What is in a collection, against its manifest and plain loops; the command that prints and draws it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from data.collect import collect
from data.contents import contents_of, far_attention
from data.trace import Traces
from pipelines.collect_traces import main
from predictor.errors import FadeError
from tests.data.collecting import Make, stop_after


def test_contents_are_those_of_the_manifest_and_the_files(collected: Path) -> None:
    found = contents_of(str(collected))
    documents = Traces(collected).manifest["documents"]
    assert [(one.source, one.split, one.documents) for one in found.groups] == [
        ("prose", "train", 4),
        ("prose", "validation", 2),
    ]
    for group in found.groups:
        prompts = sorted(one["prompt"] for one in documents if one["split"] == group.split)
        assert (group.shortest, group.longest) == (prompts[0], prompts[-1])
        assert group.median == np.median(prompts)
    assert (found.shards, found.rows) == (3, 24)
    assert found.bytes == sum(file.stat().st_size for file in collected.glob("*.parquet"))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_far_attention_by_hand(split: str, collected: Path) -> None:
    traces = Traces(collected)
    rows = [row for name in traces.shards(split) for row in traces.read(name)]
    heads = far_attention(traces, split, n_sink=3, recent_window=20)
    assert sorted((one.layer, one.head) for one in heads) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.looked_up for one in heads] == sorted((one.looked_up for one in heads), reverse=True)
    for one in heads:
        looked_up, share = [], []
        for row in rows:
            if (row["layer"], row["head"]) == (one.layer, one.head):
                far = range(3, row["length"] - 20)
                looked_up.append(sum(float(np.exp(np.float64(row["target_max"][s]))) for s in far))
                share.append(sum(float(np.exp(np.float64(row["target_sum"][s]))) for s in far))
        assert one.looked_up == pytest.approx(np.mean(looked_up))
        assert one.fraction == pytest.approx(np.mean(share))
        assert one.fraction <= one.looked_up <= 13
    assert far_attention(traces, split, recent_window=10_000)[0].looked_up == 0


def test_the_command_prints_tables_and_draws(
    collected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "new" / "map.png"
    assert main(["inspect", str(collected), "--layer=1", "--head=0", f"--out={picture}", "--top=3"]) == 0
    out = capsys.readouterr().out
    assert f"{collected}: complete, 3 of 3 shards, 24 rows, " in out
    assert "llama of 2 layers x 2 kv heads, weights " in out
    assert "continuation text" in out
    table = [line.split() for line in out.splitlines() if line.startswith("prose")]
    assert [(cells[1], cells[2]) for cells in table] == [("train", "4"), ("validation", "2")]
    best = far_attention(Traces(collected))[:3]
    listed = [line.split() for line in out.splitlines() if line.endswith("%")]
    assert [cells[:3] for cells in listed] == [[f"{h.layer}", f"{h.head}", f"{h.looked_up:.2f}"] for h in best]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_an_unfinished_collection_says_so(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "traces"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(RuntimeError, match="power cut"):
            collect(small(out))
    assert main(["inspect", str(out)]) == 0
    assert "unfinished, 1 of 3 shards, 8 rows" in capsys.readouterr().out
    assert main(["inspect", str(out), "--layer", "0"]) == 2
    assert "are unfinished" in capsys.readouterr().err


def test_mistakes_are_one_line(collected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, words in (
        ([str(tmp_path / "nowhere")], "no traces in"),
        ([str(collected), "--layer=2"], "layer 2, head 0 is not in the traces; they hold layers 0 to 1"),
        ([str(collected), "--layer=0", "--head=2"], "layer 0, head 2 is not in the traces"),
    ):
        assert main(["inspect", *args]) == 2
        assert words in capsys.readouterr().err
    broken = Path(shutil.copytree(collected, tmp_path / "broken"))
    (broken / "manifest.json").write_text("{")
    with pytest.raises(FadeError, match="is damaged"):
        contents_of(str(broken))
