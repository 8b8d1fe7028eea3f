"""Distillation through a frozen language model: `lightning fit --config configs/fit_distil.yaml`."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from data.documents import DocumentDataModule, Item, tokens_of
from data.gated import GatedModel, ReadPrompt
from data.generated import GENERATED
from data.lm import load_model, refuse_too_long
from predictor.budgets import HeadBudgets
from predictor.distil import divergence, kept, kept_by_head, level_offsets, log_gates, relative
from predictor.errors import FadeError
from predictor.features import block_sizes
from predictor.module import Rows, TraceModule, check_fractions
from predictor.registry import load_predictor
from predictor.scorenet import ScoreNet, check_size

SHARES = (0.43, 0.3, 0.2, 0.2, 0.15, 0.1)
LEVEL = 0.2  # share of the context at which offsets reproduce the budgets of heads before training
FASTER = 3.0  # rate of offsets and gains, which no layer norm stands behind, in rates of the other parameters
LEAST_KL = 1e-4  # nats that the geometric mean takes for none
KINDS = ("text", "retrieval")


class DistilModule(TraceModule):
    """Train scores and head offsets on KL(full || gated), through the language model that they are for.

    The model and its text come from :class:`data.documents.DocumentDataModule`. Each document is read without gradient;
    what follows it is read twice, in full and through gates (:mod:`predictor.distil`), and only that is differentiated.

    Args:
        net: the network, for example ``class_path: predictor.nets.TokenMLP``.
        warm_start: bundle, reference or shipped name: its network, if it is of the same kind and size, and its head
            budgets, which offsets reproduce before training; null for the closed form with all heads alike.
        shares: of the context that is kept besides sinks and window; one of them is drawn for each document.
        measured: shares at which validation evicts.
        hot, cold: temperature of the gates in the beginning and in the end; it falls geometrically.
        lr: peak learning rate of Adam, reached after ``warmup`` steps; it falls along a cosine.
        warmup: steps.
        sinks, recent: first and last tokens of a prompt that are always kept.
        level_documents: train documents that offsets and input scaling are set from.
        seed: of the shares that are drawn.
    """

    monitor: ClassVar[str | None] = "val/kl"
    mode: ClassVar[str] = "min"

    def __init__(
        self,
        net: ScoreNet,
        warm_start: str | None = None,
        shares: tuple[float, ...] = SHARES,
        measured: tuple[float, ...] = (0.43, 0.2, 0.1),
        hot: float = 0.7,
        cold: float = 0.2,
        lr: float = 3e-3,
        warmup: int = 20,
        sinks: int = 4,
        recent: int = 64,
        level_documents: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_fractions((*shares, *measured))
        check_size(net)
        if not 0 < cold <= hot:
            raise FadeError(f"temperatures hot {hot:g}, cold {cold:g}: use hot >= cold > 0")
        self.save_hyperparameters(ignore=["net"])
        self.net, self.shares, self.measured, self.hot, self.cold = net, shares, measured, hot, cold
        self.lr, self.warmup, self.kept_always, self.seed = lr, warmup, (sinks, recent), seed
        self.level_documents = level_documents
        self.head_budgets: HeadBudgets | None = None
        if warm_start is not None:
            start = load_predictor(warm_start)
            self.head_budgets = start.budgets
            if (start.net.kind, start.net.config()) == (net.kind, net.config()):
                net.load_state_dict(start.net.state_dict())
        self._warm_offsets = None if warm_start is None else start.offsets
        self._warm_net = warm_start is not None and start.net.config() == net.config()
        self.started: Tensor
        self.register_buffer("started", torch.tensor(False))
        self.baseline: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._held: list[GatedModel] = []  # a list, so that Lightning neither registers, moves nor saves the model
        self._clock = (0.0, 0)

    @property
    def budgets(self) -> HeadBudgets | None:
        return self.head_budgets

    @property
    def documents(self) -> DocumentDataModule:
        """The data module of the running fit."""
        found = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(found, DocumentDataModule):
            raise FadeError("distillation reads text; set data.class_path to data.documents.DocumentDataModule")
        return found

    @property
    def language_model(self) -> GatedModel:
        """The frozen model, from ``setup`` on."""
        return self._held[0]

    def setup(self, stage: str) -> None:
        """Load the language model, and make room for an offset of each of its heads."""
        if self._held:
            return
        settings = self.documents.settings
        model = load_model(settings.model, settings.dtype)
        refuse_too_long(
            model, settings.max_prompt + settings.future, f"max_prompt {settings.max_prompt} passes", "lower it"
        )
        self._held.append(GatedModel(model, self.documents.spec(self.net.reads_hidden)))
        layers, heads = self.language_model.layers, self.language_model.kv_heads
        if self.head_budgets is not None:
            self.head_budgets.refuse_other_heads("warm_start", layers, heads)
        self.offsets = nn.Parameter(torch.zeros(len(layers), heads))

    def on_fit_start(self) -> None:
        """Bring the model to the device; before the first step set input scaling and offsets."""
        self.language_model.to(self.device)
        if not self.started:
            self._start()
            self.started.fill_(True)

    @torch.no_grad()
    def _start(self) -> None:
        prompts = [
            self.language_model.read(document["prompt"].to(self.device))
            for document in self.documents.first(self.level_documents)
        ]
        if not self._warm_net:
            self.net.calibrate(_as_batch(prompts, self.language_model.spec.block))
        if self._warm_net and self._warm_offsets is not None:
            self.offsets.copy_(self._warm_offsets)
            return
        self.offsets.zero_()
        shares = self._head_shares(LEVEL)
        found = [level_offsets(self._body(prompt), shares, prompt.length) for prompt in prompts]
        self.offsets.copy_(torch.stack(found).mean(0))

    def _head_shares(self, share: float) -> Tensor:
        """Share [L, H] of the context that each head keeps by the table of head budgets."""
        if self.head_budgets is None:
            return torch.full_like(self.offsets, share)
        return torch.tensor(list(self.head_budgets.allocate(share).values()), device=self.device)

    def _body(self, prompt: ReadPrompt) -> Tensor:
        """Comparable scores [L, H, E] of the tokens that may be evicted."""
        scores = self.net.log_importance(prompt.features).float().unflatten(0, prompt.shape)
        first, last = self.kept_always
        if prompt.length <= first + last:
            raise FadeError(f"a prompt of {prompt.length} tokens has none to evict; raise min_prompt")
        return scores[..., first : prompt.length - last] + self.offsets[..., None]

    def _loss(self, prompt: ReadPrompt, following: Tensor, full: Tensor, gates: Tensor) -> Tensor:
        """Mean KL [] of what follows, the body's tokens being gated by [L, H, E] logarithms."""
        gated = self.language_model.logits(prompt, following, pad(gates, self.kept_always))
        return divergence(full, gated).mean()

    def training_step(self, batch: Item, batch_idx: int) -> Tensor:
        """Return the relative loss [] of one document at one budget."""
        prompt, following, full = self._read(batch)
        scores = self._body(prompt)
        if not bool(scores.isfinite().all()):
            raise FadeError(f"a score of document {batch['id']} is not a finite number; lower the learning rate")
        share = random.Random(f"{self.seed} {self.current_epoch} {batch_idx} {self.global_rank}").choice(self.shares)
        budget = min(share * prompt.length / scores.shape[-1], 0.98)
        temperature = self.hot * (self.cold / self.hot) ** self.progress
        kl = self._loss(prompt, following, full, log_gates(scores, budget, temperature))
        if not bool(kl.isfinite()):
            raise FadeError(f"the loss of document {batch['id']} is {kl.item()}; lower the learning rate")
        self.log("train/kl", kl.detach(), batch_size=1, prog_bar=True, on_step=True, on_epoch=True)
        self._log_speed(batch)
        return relative(kl)

    def _log_speed(self, batch: Item) -> None:
        began, tokens = self._clock
        now, tokens = time.perf_counter(), tokens + tokens_of(batch) * self.trainer.world_size
        self._clock = (began or now, tokens if began else 0)
        if began and now > began:
            self.log("tokens/s", round(tokens / (now - began)), batch_size=1, prog_bar=True)

    def _read(self, batch: Item) -> tuple[ReadPrompt, Tensor, Tensor]:
        """A document's prompt, what follows it [T], and the logits [T, V] in full."""
        prompt, following = self.language_model.read(batch["prompt"]), batch["following"]
        with torch.no_grad():
            return prompt, following, self.language_model.logits(prompt, following)

    @torch.no_grad()
    def validation_step(self, batch: Item, batch_idx: int, by_heads: bool = False) -> None:
        """Add the KL of one document at each measured share, evicted, to the sums.

        Args:
            batch: the document. batch_idx: its number.
            by_heads: evict by the closed form and the head budgets instead.
        """
        prompt, following, full = self._read(batch)
        scores = self._closed(prompt) if by_heads else self._body(prompt)
        kind = KINDS[batch["source"].startswith(GENERATED)]
        for share in self.measured:
            if by_heads:
                keep = kept_by_head(scores, (self._head_shares(share) * prompt.length).long())
            else:
                keep = kept(scores, int(share * prompt.length * self.offsets.numel()))
            loss = self._loss(prompt, following, full, torch.where(keep, 0.0, -torch.inf))
            sums = self._sums.setdefault(f"{kind}/kl_at_{share:g}", torch.zeros(2, device=self.device))
            sums += torch.stack((loss, torch.ones_like(loss)))

    def _closed(self, prompt: ReadPrompt) -> Tensor:
        """The closed form's scores [L, H, E]."""
        tokens = prompt.features.tokens[..., :2].sum(-1).unflatten(0, prompt.shape)
        return tokens[..., self.kept_always[0] : prompt.length - self.kept_always[1]]

    def on_validation_epoch_end(self) -> None:
        self._clock = (0.0, 0)
        for name, value in self._measured().items():
            self.log(f"val/{name}", value, prog_bar=name == "kl")

    def _measured(self) -> dict[str, float]:
        """Means over the documents of all processes, and over these the geometric mean, ``kl``; start anew."""
        names = [f"{kind}/kl_at_{share:g}" for kind in KINDS for share in self.measured]
        none = torch.zeros(2, device=self.device)
        sums = torch.stack([self._sums.get(name, none) for name in names])
        total, count = self.trainer.strategy.reduce(sums, reduce_op="sum").unbind(-1)
        self._sums = {}
        means = {name: (total[i] / count[i]).item() for i, name in enumerate(names) if count[i]}
        logs = [math.log(max(mean, LEAST_KL)) for mean in means.values()]
        return {"kl": math.exp(sum(logs) / max(len(logs), 1)), **means, **self.baseline}

    def first_metrics(self, batches: Iterable[Item]) -> dict[str, float]:
        """Validation numbers before training, and those of closed form and head budgets, which are kept."""
        documents = list(batches)
        for number, batch in enumerate(documents):
            self.validation_step(batch, number, by_heads=True)
        self.baseline = {f"heads/{name}": value for name, value in self._measured().items()}
        for number, batch in enumerate(documents):
            self.validation_step(batch, number)
        return self._measured()

    def tables(self) -> dict[str, Rows]:
        return {}

    def facts(self) -> dict[str, Any]:
        """What a bundle says of how it was trained."""
        return {"shares": f"{min(self.shares):g} to {max(self.shares):g}", "steps": self.global_step}

    def head_offsets(self) -> tuple[Tensor, list[int]]:
        return self.offsets.detach().cpu().clone(), self.language_model.layers

    @property
    def progress(self) -> float:
        """How much of the training is done, from 0 to 1."""
        return min(self.global_step / max(float(self.trainer.estimated_stepping_batches), 1.0), 1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fast = [self.offsets, *([self.net.gain] if isinstance(getattr(self.net, "gain", None), nn.Parameter) else [])]
        others = [each for each in self.net.parameters() if all(each is not one for one in fast)]
        groups = [{"params": fast, "factor": FASTER}, {"params": others, "factor": 1.0}]
        return torch.optim.Adam([group for group in groups if group["params"]], lr=self.lr)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the rates from the step alone: a fit that is resumed goes on with those it would have had."""
        rate = self.lr * min(1.0, (self.global_step + 1) / max(self.warmup, 1))
        rate *= (1 + math.cos(math.pi * self.progress)) / 2
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate * group["factor"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["baseline"] = self.baseline

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        self.baseline = dict(checkpoint["baseline"])


def _as_batch(prompts: list[ReadPrompt], block: int) -> dict[str, Tensor]:
    """Features of several prompts as the batch that networks set their input scaling from: rows of R heads."""
    tokens = torch.cat([prompt.features.tokens for prompt in prompts], dim=1)  # [R, all S, F]
    first = prompts[0].features
    sizes = block_sizes(prompts[0].length, block).to(first.history_mean).expand(len(tokens), -1)
    return {
        "tokens": tokens,
        "mask": torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device),
        "history_mean": first.history_mean,
        "block_size": sizes,
        "block_mask": sizes > 0,
    }
