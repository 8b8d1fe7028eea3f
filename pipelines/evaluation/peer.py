"""What another project's cache must offer to be compared, and how its failures are named.

A peer works the way its own documentation shows: it compresses what it compresses while the prompt is read, or after
it, and then decodes. Its bytes are counted by walking what is reachable from its cache, not taken from its own report.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import DynamicCache

from fade_runtime.transformers_api import forward_kwargs
from predictor.errors import FadeError


@dataclass(frozen=True)
class Peer:
    """A cache of another project.

    Attributes:
        package: what must be importable. install: how pip names it.
        stride: tokens that may come in one call and leave the cache as they would one at a time.
        stores: the cache stores a prompt's keys and values, whoever reads it, and does the rest by :meth:`listen`.
        keeps_positions: after it has evicted, tokens go on at their place in the text, and the caller must say so.
    """

    package: ClassVar[str]
    install: ClassVar[str]
    stride: ClassVar[int] = 64
    stores: ClassVar[bool] = False
    keeps_positions: ClassVar[bool] = False

    def imported(self, name: str = "") -> Any:
        """The package, or a module in it.

        Raises:
            MissingPeer: it is not installed.
        """
        try:
            return importlib.import_module(f"{self.package}{name}")
        except ImportError as error:
            raise MissingPeer(
                f"{self.package} cannot be imported ({error}); pip install {self.install}, or leave its caches out"
            ) from error

    def cache(self, model: Any) -> Any:
        """An empty cache for the model."""
        return DynamicCache(config=model.config)

    def read(self, model: Any, tokens: Tensor, cache: Any) -> Tensor:
        """Read a prompt [1, S] into the cache, compress; the logits after its last token: [1, V]."""
        return model(tokens, logits_to_keep=1, use_cache=True, **forward_kwargs(cache, model)).logits[0]

    def listen(self, model: Any, cache: Any) -> AbstractContextManager[None]:
        """While this lasts, the model reads a prompt, and the cache stores it."""
        return nullcontext()

    def copied(self, cache: Any) -> Any:
        """A copy of a cache, to go on in another way."""
        return copy.deepcopy(cache)


class MissingPeer(FadeError):
    """A peer's package is not installed, or does not work here."""


class PeerError(FadeError):
    """A peer failed, in one line.

    Attributes:
        peer: which one.
    """

    def __init__(self, peer: Peer, tokens: int, error: Exception) -> None:
        message = " ".join(str(error).split()) or "no message"
        super().__init__(f"{peer.package} failed on {tokens} tokens: {type(error).__name__}: {message[:300]}")
        self.peer = peer


@contextmanager
def peer_errors(peer: Peer, tokens: int) -> Iterator[None]:
    """Whatever another project's code raises while it reads ``tokens`` becomes a :class:`PeerError`."""
    try:
        yield
    except Exception as error:
        raise PeerError(peer, tokens, error) from error
