"""Fit a predictor, or the budgets of heads, to traces or through a model: `lightning fit --config CONFIG`."""

from __future__ import annotations

import copy
import csv
import io
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from data.datamodule import TraceDataModule
from data.documents import DocumentDataModule
from data.trace import Traces
from pipelines.checkpoints import BEST, read_facts, refuse_other_traces, trace_facts
from pipelines.cli import guarded
from pipelines.distil import DistilModule
from pipelines.plots.head_budgets import draw_head_budgets, format_lost
from predictor.budgets import HeadBudgets
from predictor.bundle import Predictor
from predictor.errors import FadeError
from predictor.features import FeatureSpec
from predictor.files import write_aside
from predictor.module import HEADS, LAYERS, HeadBudgetModule, PredictorModule, Rows, TraceModule
from predictor.nets import ScoreNet
from predictor.registry import open_experiment, quiet_mlflow

CONFIG, PICTURE = "config.yaml", "heads.png"
Facts = dict[str, Any]
# what a config without a class_path trains, and reads
DEFAULT = f"{PredictorModule.__module__}.{PredictorModule.__name__}"
DEFAULT_DATA = f"{TraceDataModule.__module__}.{TraceDataModule.__name__}"


@dataclass
class Candidate:
    """A network as it was after ``epoch`` epochs, with its numbers, tables, head budgets, offsets and their layers."""

    net: ScoreNet
    metrics: dict[str, float]
    tables: dict[str, Rows]
    epoch: int
    budgets: HeadBudgets | None = None
    offsets: tuple[Tensor, list[int]] | None = None

    def value(self, monitor: str) -> float:
        """What it reached."""
        return self.metrics[monitor.removeprefix("val/")]

    def beats(self, other: Candidate, monitor: str, mode: str) -> bool:
        """Whether it reached more, or less where less is better; what is no number beats nothing."""
        mine, theirs = self.value(monitor), other.value(monitor)
        return not math.isnan(mine) and (math.isnan(theirs) or (mine > theirs if mode == "max" else mine < theirs))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it: all but head budgets, whose sums are the module's own state."""
        net = {name: tensor.detach().cpu().clone() for name, tensor in self.net.state_dict().items()}
        stored = {"net": net, "metrics": self.metrics, "tables": self.tables, "epoch": self.epoch}
        return stored if self.offsets is None else {**stored, "offsets": self.offsets}


class KeepBest(SaveConfigCallback):
    """Keeps what belongs to the best validation: a bundle, the resolved config, tables by layer and head, a picture.

    The best is that of the whole run: it is part of every checkpoint, and a fit that goes on from one begins with it.
    What anybody's checkpoint callback saves, and when, changes nothing. The config goes to the tracking run at once.
    """

    best: Candidate | None = None
    written = False  # whether the best is in the output folder
    _restored: dict[str, Any] | None = None

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the resolved config as an artefact of the run."""
        self._log_text(trainer, CONFIG, self._resolved())

    def state_dict(self) -> dict[str, Any]:
        """The best so far, for a checkpoint."""
        return {} if self.best is None else self.best.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the best of the run that is continued."""
        self._restored = state_dict or None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the first candidate, which later ones must beat: the best so far, or else the network as it is now.

        That is the closed form when it is untrained. It is written at the end, if nothing beats it.
        """
        assert isinstance(pl_module, TraceModule)
        if pl_module.monitor is None or _only_tried(trainer):  # there is nothing to be better than
            return
        if self._restored is not None:
            net = copy.deepcopy(pl_module.net)
            net.load_state_dict(self._restored["net"])
            self.best = Candidate(**{**self._restored, "net": net, "budgets": pl_module.budgets})
            return
        batches = trainer.datamodule.val_dataloader()  # type: ignore[attr-defined]
        limit = sum(trainer.num_val_batches) or len(batches)
        chosen = islice(batches, int(min(limit, len(batches))))
        values = pl_module.first_metrics(map(trainer.strategy.batch_to_device, chosen))
        self.best = _candidate(pl_module, values, trainer.current_epoch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the network if it is the best so far, or the newest head budgets."""
        assert isinstance(pl_module, TraceModule)
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or _only_tried(trainer):
            return
        candidate, monitor = _candidate(pl_module, _measured(trainer), pl_module.epochs), pl_module.monitor
        if monitor is None or self.best is None or candidate.beats(self.best, monitor, pl_module.mode):
            self._keep(trainer, candidate)

    def _keep(self, trainer: Trainer, candidate: Candidate) -> None:
        self.best, self.written = candidate, True
        if not trainer.is_global_zero:
            return
        folder, module = Path(self.config["output"]), cast("TraceModule", trainer.lightning_module)
        spec, provenance, facts = _origin(trainer.datamodule, module)  # type: ignore[attr-defined]
        offsets, layers = candidate.offsets or (None, ())
        Predictor(
            candidate.net,
            spec=replace(spec, hidden=candidate.net.reads_hidden),
            provenance=provenance,
            metrics=candidate.metrics,
            manifest={**facts, "epoch": candidate.epoch},
            budgets=candidate.budgets,
            offsets=offsets,
            layers=layers,
        ).save(folder / BEST)
        tables = {name: _csv(rows) for name, rows in candidate.tables.items()}
        for name, text in {CONFIG: self._resolved(), **tables}.items():
            with write_aside(folder / name) as aside:
                aside.write_text(text, encoding="utf-8")
        if candidate.budgets is not None and isinstance(module, HeadBudgetModule):
            draw_head_budgets(folder / PICTURE, candidate.budgets, candidate.metrics)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the first candidate if no validation beat it; log the tables and the picture of what was kept."""
        if self.best is not None and not self.written:
            self._keep(trainer, self.best)
        if isinstance(pl_module, HeadBudgetModule) and pl_module.budgets is not None:  # rows since the last validation
            self._keep(trainer, _candidate(pl_module, _measured(trainer), pl_module.epochs))
        for kept in (Path(self.config["output"]) / name for name in (LAYERS, HEADS, PICTURE)):
            if trainer.is_global_zero and kept.is_file() and isinstance(trainer.logger, MLFlowLogger):
                trainer.logger.experiment.log_artifact(trainer.logger.run_id, str(kept))

    def _resolved(self) -> str:
        return self.parser.dump(self.config, skip_none=False)

    @staticmethod
    def _log_text(trainer: Trainer, name: str, text: str) -> None:
        if isinstance(trainer.logger, MLFlowLogger):
            trainer.logger.experiment.log_text(trainer.logger.run_id, text, name)


class FitCLI(LightningCLI):
    """LightningCLI with our modules filled in, a tracking logger, and the best epoch kept under ``output``."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Offer what a predictor can do: fit, and validate a checkpoint."""
        offered = LightningCLI.subcommands()
        return {name: offered[name] for name in ("fit", "validate")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options that are not the trainer's, the model's or the data's; by default a network is trained."""
        parser.set_defaults({"model": {"class_path": DEFAULT}, "data": {"class_path": DEFAULT_DATA}})
        parser.add_argument("--output", type=str, default="artefacts/fit/predictor", help="folder for the best epoch")
        parser.add_argument("--experiment", type=str, default="fade-fit", help="MLflow experiment of the run")
        parser.add_argument(
            "--tracking_uri",
            type=str | None,
            default=None,
            help="MLflow tracking URI; null for MLFLOW_TRACKING_URI, else sqlite under artefacts/",
        )
        parser.add_argument("--patience", type=int, default=5, help="validations without a gain before training stops")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the logger, unless the config has one or says false, and when fitting the callbacks."""
        options = self._get(self.config_init, "trainer")
        output = Path(self._get(self.config_init, "output"))
        if options["logger"] in (None, True):
            experiment = self._get(self.config_init, "experiment")
            uri, location = open_experiment(experiment, self._get(self.config_init, "tracking_uri"))
            about = f"{self.subcommand}: {type(self.model.net).__name__} on {self.datamodule.folder}"
            kwargs["logger"] = MLFlowLogger(
                experiment,
                run_name=output.name,
                tracking_uri=uri,
                artifact_location=location,
                tags={"mlflow.note.content": about},  # what the run's page shows as its description
            )
        if self.subcommand == "fit" and not options["fast_dev_run"]:
            callbacks, monitor = options["callbacks"] or [], self.model.monitor
            patience = self._get(self.config_init, "patience")
            kwargs["callbacks"] = [
                *(callbacks if isinstance(callbacks, list) else [callbacks]),
                *([EarlyStopping(monitor, mode=self.model.mode, patience=patience)] if monitor else []),
                ModelCheckpoint(output, BEST, monitor, mode=self.model.mode, enable_version_counter=False),
            ]
        return super().instantiate_trainer(**kwargs)

    def before_fit(self) -> None:
        """Refuse what the network was not built for, or traces it was not trained on, before anything is written."""
        if isinstance(self.datamodule, DocumentDataModule) != isinstance(self.model, DistilModule):
            raise FadeError(
                f"{type(self.model).__name__} does not learn from {type(self.datamodule).__name__}; DistilModule goes "
                "with DocumentDataModule, the others with TraceDataModule (data.class_path)"
            )
        if isinstance(self.datamodule, DocumentDataModule):
            self.model.net.check_spec(self.datamodule.spec(self.model.net.reads_hidden))
            return
        traces, manifest = Traces(self.datamodule.folder), self.model.manifest
        self.model.net.check_spec(traces.spec)
        if manifest is not None:
            refuse_other_traces(manifest, "the scorer", traces)

    def _keeper(self) -> KeepBest:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return next(each for each in callbacks if isinstance(each, KeepBest))

    def after_fit(self) -> None:
        """Say what was reached and where it lies."""
        module, keeper = self.model, self._keeper()
        folder = Path(self._get(self.config_init, "output"))
        if not keeper.written or keeper.best is None or not self.trainer.is_global_zero:
            return
        if module.monitor is None:
            print(f"{format_lost(keeper.best.metrics)}\nkept in {folder}")
        else:
            print(f"{module.monitor} {keeper.best.value(module.monitor):.4f} at the best epoch, kept in {folder}")
        if isinstance(self.datamodule, TraceDataModule):
            print(f"next: python -m pipelines.register --checkpoint {folder} --traces {self.datamodule.folder}")


def _only_tried(trainer: Trainer) -> bool:
    """Whether some batches are run to see that they do, and nothing is to be written."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def _measured(trainer: Trainer) -> dict[str, float]:
    """The numbers of the last validation."""
    found = trainer.callback_metrics.items()
    return {name.removeprefix("val/"): float(value) for name, value in found if name.startswith("val/")}


def _candidate(module: TraceModule, metrics: dict[str, float], epoch: int) -> Candidate:
    """What a module has come to."""
    return Candidate(copy.deepcopy(module.net), metrics, module.tables(), epoch, module.budgets, module.head_offsets())


def _origin(data: TraceDataModule | DocumentDataModule, module: TraceModule) -> tuple[FeatureSpec, Facts, Facts]:
    """Features, language model and text of what was trained on."""
    if isinstance(data, TraceDataModule):
        traces = Traces(data.folder)
        return traces.spec, traces.provenance, trace_facts(traces)
    assert isinstance(module, DistilModule)
    facts = read_facts(data.manifest()) | {"recorded": "distilled through the model", **module.facts()}
    return data.spec(), module.language_model.provenance(data.tokenizer), facts


def _csv(rows: Sequence[dict[str, float]]) -> str:
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def _cause(error: BaseException | None) -> FadeError | None:
    """The mistake that made jsonargparse say that no subtype fits."""
    while error is not None and not isinstance(error, FadeError):
        error = error.__cause__ or error.__context__
    return error


def main(argv: Sequence[str] | None = None) -> int:
    """Run LightningCLI; a mistake becomes one line and exit status 2."""
    quiet_mlflow()
    warnings.filterwarnings("ignore", ".*args parameter is intended to run from within Python.*")
    strict = {"exit_on_error": False}

    def body(args: list[str]) -> None:
        try:
            run(args)
        except ValueError as error:
            raise _cause(error) or error from None

    def run(args: list[str]) -> None:
        FitCLI(
            TraceModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=KeepBest,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults={
                "deterministic": "warn",
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
            },
            seed_everything_default=1,
            parser_kwargs={**strict, **dict.fromkeys(FitCLI.subcommands(), strict)},
            auto_configure_optimizers=False,
            args=args,
        )

    return guarded(body, argv, again="--ckpt_path OUTPUT/best.ckpt goes on with the best epoch")


if __name__ == "__main__":
    sys.exit(main())
