"""Batches of traces for Lightning."""

from __future__ import annotations

from functools import partial

from lightning.pytorch import LightningDataModule

from data.dataset import TraceDataset, TraceLoader, collate
from data.trace import Traces
from predictor.errors import FadeError


class TraceDataModule(LightningDataModule):
    """Streams padded batches of trace rows; the split is the collection's own, by document.

    Args:
        traces: folder of a collection (``python -m pipelines.collect_traces``).
        batch_size: rows in a batch; a row is one kv head of one layer over one document.
        n_sink: first tokens of a prompt that are always kept, so not trained on.
        recent_window: last tokens of a prompt that are always kept, so not trained on.
        seed: of the order of the train rows.
    """

    def __init__(
        self, traces: str, batch_size: int = 8, n_sink: int = 4, recent_window: int = 64, seed: int = 0
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("n_sink", n_sink, 0),
            ("recent_window", recent_window, 0),
        ):
            if value < least:
                raise FadeError(f"{name} {value} is too small; use at least {least}")
        self.folder, self.batch_size, self.seed = traces, batch_size, seed
        self.n_sink, self.recent_window = n_sink, recent_window
        self.traces: Traces

    def setup(self, stage: str | None = None) -> None:
        """Open the collection.

        Raises:
            FadeError: there is none, or it is unfinished or of another version.
        """
        self.traces = Traces(self.folder)
        # by the epoch, so that a fit that is resumed goes on with the order that it would have had
        number = None if self.trainer is None else lambda trainer=self.trainer: trainer.current_epoch
        self._train = TraceDataset(self.traces, "train", shuffle=True, seed=self.seed, number=number)
        self._validation = TraceDataset(self.traces, "validation")

    def train_dataloader(self) -> TraceLoader:
        """Batches of the train documents in a new order each epoch."""
        return self._loader(self._train)

    def val_dataloader(self) -> TraceLoader:
        """Batches of the validation documents in the order of the shards."""
        return self._loader(self._validation)

    def _loader(self, dataset: TraceDataset) -> TraceLoader:
        into_batch = partial(collate, spec=self.traces.spec, n_sink=self.n_sink, recent_window=self.recent_window)
        return TraceLoader(dataset, batch_size=self.batch_size, collate_fn=into_batch, num_workers=0)
