"""A peer that is always installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipelines.evaluation.peer import Peer


@dataclass(frozen=True)
class Plain(Peer):
    """transformers' own cache, as if it were a peer's."""

    package: ClassVar[str] = "transformers"
    install: ClassVar[str] = "transformers"
