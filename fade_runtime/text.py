"""What a cache knows of the words it holds: the class of each token, by the model's own tokenizer."""

from __future__ import annotations

import functools
import unicodedata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from predictor.errors import FadeError

OTHER, SPECIAL, PUNCTUATION = 0, 1, 2


class SeenText:
    """The classes of a cache's tokens, in step with its layers.

    Args:
        table: [vocabulary] int8 class of each token id (:func:`token_classes`); shared by copies.

    Attributes:
        classes: [B, S] int8 of the tokens seen.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.classes = table.new_zeros(0, 0)

    def __deepcopy__(self, memo: object) -> SeenText:
        """The table is the tokenizer's, the classes are the text's."""
        copied = SeenText(self.table)
        copied.classes = self.classes.clone()
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
                "eviction_policy 'fastgen' needs token ids, and the model was called with inputs_embeds; call it with "
                "input_ids, or use another policy"
            )
        largest = int(ids.max()) if ids.numel() and ids.device.type == "cpu" else 0  # a GPU would be waited for
        if largest >= len(self.table):
            raise FadeError(
                f"token id {largest} is beyond the tokenizer's {len(self.table)}; give FadeConfig(tokenizer=...) the "
                "model's own"
            )
        self.table = self.table.to(ids.device)
        new = self.table[ids]
        self.classes = new if seen == 0 else torch.cat((self.classes[:, :seen], new), dim=1)

    def upto(self, seen: int) -> Tensor:
        """Classes [B, seen] of the first tokens.

        Raises:
            FadeError: some of them came in a call whose ids this never saw.
        """
        if self.classes.shape[1] < seen:
            raise FadeError(
                f"eviction_policy 'fastgen' was told the ids of {self.classes.shape[1]} of {seen} tokens; call the "
                "model that create_tiered_cache was given, not its parts"
            )
        return self.classes[:, :seen]

    def select(self, index: Tensor) -> None:
        """Keep rows of the batch, by number or as a bool mask."""
        if self.classes.numel():
            self.classes = self.classes[index.to(self.classes.device)]

    def repeat(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        self.classes = self.classes.repeat_interleave(repeats, dim=0)

    def tensors(self) -> list[Tensor]:
        """Everything it holds."""
        return [self.table, self.classes]


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
    from transformers import AutoTokenizer

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
