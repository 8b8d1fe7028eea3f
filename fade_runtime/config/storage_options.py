"""In which form tokens are stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fade_runtime.config.validation import check_choice, check_whole, is_whole
from fade_runtime.storage.codebook import CodebookSet
from fade_runtime.storage.packed import Bits
from fade_runtime.storage.quant import PAGE, PAGE_TOKENS
from fade_runtime.storage.tiers import Tier
from predictor.errors import FadeError


@dataclass(frozen=True)
class StorageOptions:
    """In which form tokens are stored.

    Attributes:
        n_sink: first tokens of a sequence that stay in full precision (attention sinks).
        recent_window: newest tokens that stay in full precision.
        low_tier: "int2" (few bits, by default 4 for keys and 2 for values) or "pq" (product quantisation: a few bytes
            a token, but a quarter in 4 bits and the rest so lost KL .056 on SmolLM2-135M where int2 lost .002, no more
            than evicting it).
        middle_k_bits, middle_v_bits: bits of keys and values in the high tier: 2, 4 or 8.
        low_k_bits, low_v_bits: bits of keys and values in the low tier, no more than in the high tier; None: those of
            the high tier, at most 4.
        page_tokens: kept tokens of a kv head that share the scales of their keys, 8 to 64. Fewer are more exact and
            take more bytes, more are faster to read.
        codebook: for "pq": a directory written by `python -m pipelines.train_codebook`, or a loaded codebook.
        positions: "original": keys keep the rotation of their place in the text. "streaming": kept tokens are
            rotated to contiguous positions when they are read, so generation may run past the trained context.
        sliding: layers whose queries attend to a window of the newest tokens (Gemma, Mistral, Phi-3, Cohere 2):
            "packed": the window's tokens in 4 bits, sinks and newest exact; "exact": as transformers stores
            them.
        compression: "off": this cache keeps everything exact, for requests that must not be risked.
    """

    n_sink: int = 4
    recent_window: int = 64
    low_tier: str = "int2"
    middle_k_bits: int = 4
    middle_v_bits: int = 4
    low_k_bits: int | None = None
    low_v_bits: int = 2
    page_tokens: int = PAGE_TOKENS
    codebook: str | Path | CodebookSet | None = None
    positions: str = "original"
    sliding: str = "packed"
    compression: str = "on"

    def check_storage(self) -> None:
        """Refuse a value out of its range.

        Raises:
            FadeError: names the option, its value and the remedy.
        """
        check_whole("n_sink", self.n_sink, 0)
        check_whole("recent_window", self.recent_window, 1)
        check_choice("low_tier", self.low_tier, ("int2", "pq"))
        check_choice("positions", self.positions, ("original", "streaming"))
        check_choice("sliding", self.sliding, ("packed", "exact"))
        check_choice("compression", self.compression, ("on", "off"))
        for name in ("middle_k_bits", "middle_v_bits", "low_k_bits", "low_v_bits"):
            value = getattr(self, name)
            if value not in (2, 4, 8) and (name, value) != ("low_k_bits", None):
                raise FadeError(f"{name} {value!r} is not 2, 4 or 8")
        if not is_whole(self.page_tokens) or not 8 <= self.page_tokens <= PAGE:
            raise FadeError(f"page_tokens {self.page_tokens!r} is not a whole number from 8 to {PAGE}")

    @property
    def bits(self) -> Bits:
        """Bits of both tiers; keys of the low tier have those of the high tier, at most 4, unless told otherwise."""
        low_key = min(self.middle_k_bits, 4) if self.low_k_bits is None else self.low_k_bits
        return Bits(self.middle_k_bits, self.middle_v_bits, low_key, self.low_v_bits)

    @property
    def low(self) -> Tier:
        """What the low tier is."""
        return Tier.PQ if self.low_tier == "pq" else Tier.LOW
