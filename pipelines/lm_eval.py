"""lm-eval with a compressed cache: `python -m pipelines.lm_eval --model fade --model_args pretrained=...,config=safe`.

What follows the module's name is lm-eval's own command line. lm-eval looks for models in its own package only: this
command makes "fade" known to it first, as :func:`register` does in Python.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from data.lm import copy_off_memory_map
from fade_runtime import FadeConfig, create_tiered_cache
from fade_runtime.transformers_api import forward_kwargs
from pipelines import cli
from pipelines.evaluation.runs import Run
from pipelines.integrations.presets import read_config
from predictor.bundle import Predictor
from predictor.errors import FadeError

NAME = "fade"
OPTIONS = {each.name for each in fields(FadeConfig)} - {"tokenizer"}  # which lm-eval takes
_log = logging.getLogger("lm_eval.fade")  # shown as lm-eval's own lines are


def score(
    model: Any, config: FadeConfig, context: Sequence[int], continuations: Sequence[Sequence[int]]
) -> tuple[list[tuple[float, bool]], dict[str, Any]]:
    """Score continuations of one context, every token of them predicted over the compressed cache.

    The context less its last token is read as a prompt is, and compressed. Its last token and the continuation follow
    as if they had been generated, so that a continuation of a single token sees the compressed cache too.

    Args:
        model: the language model; it is switched to tiered attention. config: of the cache.
        context: token ids; of a single one nothing is compressed until the continuation is longer than the window.
        continuations: token ids, at least one each.

    Returns:
        For each continuation its log-probability in nats, and whether greedy decoding would have generated it; the
        memory report of the cache that read the last one.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> tiny = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16,
        ...                    vocab_size=8)
        >>> answers, _ = score(LlamaForCausalLM(tiny).eval(), FadeConfig.safe(), [1, 2, 3], [[4], [5, 6]])
        >>> [-3 * n < nats < -n for n, (nats, _) in enumerate(answers, 1)]
        [True, True]
    """

    def batch(tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=model.device)  # [1, n]

    with torch.inference_mode():
        run = Run(model, config)
        *prompt, last = context
        if prompt:
            run.feed(batch(prompt))
            run.seen = len(prompt)
        first = run.follow(batch([last])) if prompt else run.feed(batch([last]))  # [1, V]
        answers, branch = [], run
        for tokens in continuations:
            branch = run.copied() if len(tokens) > 1 else run
            rest = branch.follow(batch(tokens[:-1])) if len(tokens) > 1 else first[:0]
            logits, target = torch.cat((first, rest)), batch(tokens)[0]  # [n, V], [n]
            logprob = logits.float().log_softmax(-1).gather(1, target[:, None]).sum()
            answers.append((float(logprob), bool((logits.argmax(-1) == target).all())))
        return answers, branch.cache.memory_report()


class Tiered:
    """What a model of lm-eval does otherwise when its cache is compressed; :func:`fade_lm` puts it before ``HFLM``.

    Contexts are scored one by one, each read once for all its continuations; texts are generated in batches of
    lm-eval's ``batch_size``.

    Args:
        pretrained: directory, hub id, or a loaded model.
        config: safe, balanced, aggressive, a YAML file of FadeConfig's options, or a FadeConfig; by default balanced
            with a predictor, else safe.
        predictor: `models:/NAME@alias`, `models:/NAME/3`, a bundle directory or a hub id.
        device: by default a GPU if there is one.
        options: of FadeConfig in place of the config's, such as ``int4_budget=0.2``; all others are HFLM's.
    """

    model: Any  # from here on HFLM's
    max_length: int
    cache_hook: Any

    def __init__(
        self,
        pretrained: Any,
        config: str | FadeConfig | None = None,
        predictor: str | Predictor | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        own = {name: options.pop(name) for name in OPTIONS & set(options)}
        self.fade_config = read_config(config, predictor, **own)
        self._resident = self._full = 0
        if isinstance(pretrained, str) and Path(pretrained).is_dir():
            pretrained = str(Path(pretrained).resolve())  # a name that lm-eval does not look up on the hub
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained=pretrained, device=device, **options)  # type: ignore[call-arg]
        if self.model.device.type == "cpu":
            copy_off_memory_map(self.model)
        create_tiered_cache(self.model, self.fade_config)  # a model that is refused is refused now

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Score (name, context, continuation) requests; too long a context loses its first tokens, as HFLM's.

        Raises:
            FadeError: a continuation of no token, or of more than ``max_length``, which HFLM refuses too.
        """
        for _, _, continuation in requests:  # before any is scored
            if not 1 <= len(continuation) <= self.max_length:
                raise FadeError(
                    f"a continuation of {len(continuation)} tokens cannot be scored; it needs 1 to max_length "
                    f"{self.max_length}: leave its task out, or raise max_length if the model reads more"
                )
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)
            if len(context) > room:
                _log.warning("context of %d tokens is cut to its last %d", len(context), room)
            by_context.setdefault(tuple(context[-room:]), []).append(index)
        answers: list[Any] = [None] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring over the tiered cache") as bar:
            for cut, indices in by_context.items():
                scored, report = score(self.model, self.fade_config, cut, [requests[i][2] for i in indices])
                self._count(report)
                for index, answer in zip(indices, scored):
                    answers[index] = answer
                    if requests[index][0] is not None:  # a window of a rolling request has no name
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                bar.update(len(indices))
        return answers

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Generate for a batch of prompts [B, S] with a cache of its own: [B, S + new]."""
        cache = create_tiered_cache(self.model, self.fade_config)
        generated = super()._model_generate(  # type: ignore[misc]
            context, max_length, stop, **forward_kwargs(cache, self.model), **options
        )
        self._count(cache.memory_report())
        return generated

    def _count(self, report: dict[str, Any]) -> None:
        self._resident += report["resident_bytes"]
        self._full += report["full_bytes"]

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's facts for the results file, and what the caches did: their options, and how much smaller they were."""
        facts = {name: getattr(self.fade_config, name) for name in sorted(OPTIONS)}
        stated = {name: value for name, value in facts.items() if value != getattr(FadeConfig, name)}
        smaller = self._full / max(self._resident, 1)
        _log.info("all caches together were %.2fx smaller than full ones", smaller)
        return {
            **super().get_model_info(),  # type: ignore[misc]
            "fade_config": {name: str(getattr(value, "name", value)) for name, value in stated.items()},
            "fade_compression": smaller,
        }


def fade_lm() -> type:
    """The model class, on top of lm-eval's HFLM.

    Raises:
        FadeError: lm-eval is not installed.
    """
    try:
        from lm_eval.models.huggingface import HFLM  # the extra eval
    except ImportError as error:
        raise FadeError(f"lm-eval cannot be imported ({error}); pip install 'fade-predictor[eval]'") from error
    return type("FadeLM", (Tiered, HFLM), {"__doc__": Tiered.__doc__})


def register() -> type:
    """Make the model "fade" known to lm-eval, once; returns its class.

    Raises:
        FadeError: lm-eval is not installed.
    """
    kind = fade_lm()
    from lm_eval.api.registry import get_model, model_registry  # the extra eval

    if NAME not in model_registry:
        model_registry.register(NAME, target=kind)
    return get_model(NAME)


def main(argv: list[str] | None = None) -> int:
    """Entry point: lm-eval's own."""

    def body(args: list[str]) -> None:
        register()
        from lm_eval.__main__ import cli_evaluate  # the extra eval

        sys.argv = ["lm_eval", *args]
        cli_evaluate()

    return cli.guarded(body, argv)


if __name__ == "__main__":
    sys.exit(main())
