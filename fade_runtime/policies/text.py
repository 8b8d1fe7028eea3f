"""What a cache knows of the words it holds: token ids, and the class of each by the model's own tokenizer."""

from __future__ import annotations

import functools
import unicodedata
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer

from predictor.errors import FadeError

OTHER, SPECIAL, PUNCTUATION = 0, 1, 2


class Assistant(Protocol):
    """A smaller model that reads prompts too (:class:`fade_runtime.cache.assistant.Assistant`)."""

    def importance(self, ids: Tensor) -> Tensor:
        """Attention [n] float32 of sum 1 that the newest n tokens of a prompt, ids [S], receive."""

    def fused(self, score: Tensor, importance: Tensor) -> Tensor:
        """A policy's scores [H, S] with the assistant's [n] mixed in: [H, S]."""


class SeenText:
    """The ids of a cache's tokens, in step with its layers, and what follows from them.

    Args:
        table: [vocabulary] int8 class of each token id (:func:`token_classes`), shared by copies; None: not needed.
        assistant: a smaller model that also says which tokens matter (:mod:`fade_runtime.cache.assistant`), or None.

    Attributes:
        ids: [B, S] int32 of the tokens seen.
    """

    def __init__(self, table: Tensor | None, assistant: Assistant | None = None) -> None:
        self.table, self.assistant = table, assistant
        self.ids = torch.zeros(0, 0, dtype=torch.int32)
        self._heard: dict[tuple[int, int, int], Tensor] = {}  # what the assistant said in this call

    def __deepcopy__(self, memo: object) -> SeenText:
        """Table and assistant are shared, the ids are the text's."""
        copied = SeenText(self.table, self.assistant)
        copied.ids = self.ids.clone()
        return copied

    def note(self, ids: Tensor | None, seen: int) -> None:
        """Take in the ids [B, Q] of the next call; what a crop or a refused call left behind is forgotten.

        Args:
            ids: of the tokens after the first ``seen``.
            seen: tokens that the cache holds.

        Raises:
            FadeError: no ids, or ids that the tokenizer does not have.
        """
        if ids is None:
            raise FadeError(
                "this cache reads the text (eviction_policy 'fastgen', or an assistant), and the model was called with "
                "inputs_embeds; call it with input_ids, or make a cache without"
            )
        if self.table is not None:
            # a GPU would be waited for
            largest = int(ids.max()) if ids.numel() and ids.device.type == "cpu" else 0
            if largest >= len(self.table):
                raise FadeError(
                    f"token id {largest} is beyond the tokenizer's {len(self.table)}; give FadeConfig(tokenizer=...) "
                    "the model's own"
                )
            self.table = self.table.to(ids.device)
        new = ids.to(torch.int32)
        self.ids = new.clone() if seen == 0 else torch.cat((self.ids[:, :seen], new), dim=1)
        self._heard = {}

    def upto(self, seen: int) -> Tensor:
        """Ids [B, seen] of the first tokens.

        Raises:
            FadeError: some of them came in a call whose ids this never saw.
        """
        if self.ids.shape[1] < seen:
            raise FadeError(
                f"this cache was told the ids of {self.ids.shape[1]} of {seen} tokens; call the model that "
                "create_tiered_cache was given, not its parts"
            )
        return self.ids[:, :seen]

    def classes(self, seen: int) -> Tensor:
        """Classes [B, seen] int8 of the first tokens; raises as :meth:`upto` does."""
        assert self.table is not None
        return self.table[self.upto(seen)]

    def helped(self, score: Tensor, row: int, columns: slice | Tensor) -> Tensor:
        """Scores of a prompt with the assistant's part in them; without an assistant as they are.

        Args:
            score: [H, S] of one sequence, shares of attention. row: of the batch. columns: where its S tokens are.
        """
        if self.assistant is None:
            return score
        key = row, self.ids.shape[1], score.shape[1]
        if key not in self._heard:  # once for all layers
            self._heard[key] = self.assistant.importance(self.ids[row, columns])
        return self.assistant.fused(score, self._heard[key])

    def crop(self, seen: int) -> None:
        """Forget what is beyond the first ``seen`` tokens."""
        self.ids = self.ids[:, :seen]

    def reset(self) -> None:
        """Forget the text."""
        self.ids = torch.zeros(0, 0, dtype=torch.int32)
        self._heard = {}

    def select(self, index: Tensor) -> None:
        """Keep rows of the batch, by number [n] or as a bool mask [B]."""
        if self.ids.numel():
            self.ids = self.ids[index.to(self.ids.device)]

    def repeat(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self.ids = self.ids.repeat_interleave(repeats, dim=0)

    def tensors(self) -> list[Tensor]:
        """What it holds: classes [vocabulary], ids [B, S], importance [n]; the assistant is a model of its own."""
        return [*([] if self.table is None else [self.table]), self.ids, *self._heard.values()]


@functools.lru_cache(maxsize=8)
def token_classes(tokenizer: Any) -> Tensor:
    """Class of each token id: special, punctuation, or other.

    Special are the tokens that the tokenizer itself calls so. Punctuation are those whose text, spaces aside, is made
    of punctuation and symbols only (Unicode categories P and S).

    Returns:
        [vocabulary] int8.

    Source: Ge et al. 2023, FastGen (arXiv 2310.01801), section 3.2, the policies of special tokens and punctuation.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"<s>": 0, "word": 1, ",": 2, "->": 3, "3": 4}, unk_token="<s>"))
        >>> token_classes(PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")).tolist()
        [1, 0, 2, 2, 0]
    """
    ids = range(len(tokenizer))
    texts = (tokenizer.decode([one], clean_up_tokenization_spaces=False) for one in ids)
    classes = torch.tensor([PUNCTUATION if _is_punctuation(text) else OTHER for text in texts], dtype=torch.int8)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(one for one, token in added.items() if token.special)}
    classes[[one for one in special if one is not None and one < len(ids)]] = SPECIAL
    return classes


def find_tokenizer(model: Any, given: Any = None) -> Any:
    """The tokenizer of a model: the one given, or the one that lies where the model was loaded from.

    Args:
        model: a language model of transformers.
        given: a tokenizer, a directory or an id whose files are on this machine already, or None.

    Raises:
        FadeError: there is none; nothing is downloaded.
    """
    if given is not None and not isinstance(given, str | Path):
        return given
    where = given or getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
    if not where:
        raise FadeError(
            f"the tokenizer of this {type(model).__name__} is not known, it was not loaded from a directory; give "
            "FadeConfig(tokenizer=...)"
        )
    try:
        return AutoTokenizer.from_pretrained(where, local_files_only=True)
    except Exception as error:  # transformers and its parsers raise many kinds
        raise FadeError(f"there is no tokenizer at {where}; give FadeConfig(tokenizer=...)") from error


def table_for(model: Any, tokenizer: Any) -> Tensor:
    """:func:`token_classes` with a place for each row of the model's embedding, [rows] int8."""
    classes = token_classes(tokenizer)
    spare = model.config.get_text_config(decoder=True).vocab_size - len(classes)
    return pad(classes, (0, max(spare, 0)), value=OTHER).to(next(model.parameters()).device)


def _is_punctuation(text: str) -> bool:
    marks = "".join(text.split())
    return bool(marks) and all(unicodedata.category(mark)[0] in "PS" for mark in marks)
