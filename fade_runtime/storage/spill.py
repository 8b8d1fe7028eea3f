"""Where evicted tokens go, in their packed form, so that they can come back.

A :class:`Spill` belongs to one cache and its copies, and keeps chunks of tokens in host memory or in files
(:mod:`fade_runtime.storage.spillfiles`). Every layer has a :class:`SpilledTokens`: the chunks with its evicted tokens.
What cannot be stored is not evicted, and what cannot be read as it was written is lost and said to be: files are
checked on each read. Host memory is trusted as the cache's own is.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fade_runtime.storage.spillfiles import SpillError, SpillFile, SpillFolder
from fade_runtime.storage.tokens import StoredTokens, joined, none_of

LARGEST = 8  # a chunk of more than the limit divided by this is not merged with others
FAILURES = (OSError, MemoryError, RuntimeError, SafetensorError)  # torch says RuntimeError when memory is short


class Chunk:
    """Tokens of one layer, in host memory or in a file; it never changes, and copies of a cache share it.

    Args:
        forms: the same kinds of tokens, none of them: what the stored tensors are of.
        stored: tensors by name, or the file that they are in.
        nbytes, tokens: what is stored.

    Attributes:
        shared: a copy of the cache has it too.
    """

    def __init__(
        self, forms: Sequence[StoredTokens], stored: dict[str, Tensor] | SpillFile, nbytes: int, tokens: int
    ) -> None:
        self.forms, self.stored, self.nbytes, self.tokens = forms, stored, nbytes, tokens
        self.shared = False

    def __deepcopy__(self, memo: object) -> Chunk:
        """The same chunk."""
        self.shared = True
        return self

    def drop(self) -> None:
        """Forget the tokens; their file goes once nobody reads it."""
        self.tokens = self.nbytes = 0
        self.stored = {}

    def read(self, device: torch.device) -> list[StoredTokens]:
        """The tokens, on a device; of a chunk that was dropped, none.

        Raises:
            SpillError: their file is gone or is not as it was written.
            FadeError: the file is another process's.
        """
        stored = self.stored
        if isinstance(stored, SpillFile):
            stored = load(stored.read())
        if not self.tokens:  # dropped, maybe by a copy's thread just now
            return list(self.forms)
        found: list[StoredTokens] = []
        for at, form in enumerate(self.forms):
            named = {name: stored[f"{at}.{name}"] for name in form.tensors()}
            held: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in named.items()}
            found.append(replace(form, **held))
        return found


class Spill:
    """Host memory or a directory for the evicted tokens of one cache and its copies.

    Args:
        where: "host" or "disk".
        directory: for "disk"; a folder is made in it, for this cache only, and removed with it. Folders there whose
            process has died are removed now.
        limit: most bytes held; then the oldest tokens are dropped for good. None: no limit. While chunks are merged,
            both forms are there.

    Attributes:
        dropped: tokens that the limit cost.
        lost: tokens whose storage failed them. why_lost: what happened to the first of them, or None.
        broken: why nothing can be stored any more, or None; from then on nothing is evicted.

    Raises:
        FadeError: the directory cannot be written.
    """

    def __init__(self, where: str, directory: str | Path | None = None, limit: int | None = None) -> None:
        self.where, self.limit = where, limit
        self.dropped = self.lost = 0
        self.broken: str | None = None
        self.why_lost: str | None = None
        self._live: list[weakref.ref[Chunk]] = []
        self._lock = threading.RLock()  # copies of a cache may run in threads of their own
        self._folder: SpillFolder | None = None
        if where == "disk":
            assert directory is not None
            self._folder = SpillFolder(Path(directory))

    @property
    def folder(self) -> Path | None:
        """Where its files are."""
        return None if self._folder is None else self._folder.path

    def __deepcopy__(self, memo: object) -> Spill:
        """Copies of a cache spill to the same place."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(chunk.nbytes for chunk in self._chunks())

    def report(self) -> dict[str, Any]:
        """What is held, and what was dropped or lost."""
        held = self._chunks()
        return {
            "where": self.where,
            "tokens": sum(chunk.tokens for chunk in held),
            "bytes": sum(chunk.nbytes for chunk in held),
            "dropped": self.dropped,
            "lost": self.lost,
            "why_lost": self.why_lost,
            "broken": self.broken,
        }

    def _chunks(self) -> list[Chunk]:
        with self._lock:
            self._live = [each for each in self._live if each() is not None]
            return [chunk for each in self._live if (chunk := each()) is not None]

    def write(self, bodies: Sequence[StoredTokens], instead: Sequence[Chunk] = ()) -> Chunk:
        """Store tokens, among them those of chunks that are to go afterwards.

        Raises:
            SpillError: no room for them; nothing is stored, and nothing will be from now on.
            FadeError: the directory is another process's.
        """
        held = {f"{at}.{name}": t.detach() for at, body in enumerate(bodies) for name, t in body.tensors().items()}
        nbytes, tokens = _nbytes(bodies), sum(map(len, bodies))
        forms = [none_of(body) for body in bodies]
        with self._lock:
            if not self._make_room(nbytes, instead):
                self.dropped += tokens
                return Chunk(forms, {}, 0, 0)
            try:
                chunk = Chunk(forms, self._stored(held), nbytes, tokens)
            except FAILURES as error:
                self.fail(f"the spill store ({self.folder or 'host memory'}) takes no more tokens: {error}")
                raise SpillError(str(self.broken)) from error
            self._live.append(weakref.ref(chunk))
        return chunk

    def _stored(self, held: dict[str, Tensor]) -> dict[str, Tensor] | SpillFile:
        if self._folder is None:
            return {name: _to_host(tensor) for name, tensor in held.items()}
        return self._folder.write(save({name: tensor.cpu().contiguous() for name, tensor in held.items()}))

    def fail(self, why: str) -> None:
        """Note that nothing more is to be evicted, and say it once."""
        if self.broken is None:
            self.broken = why
            warnings.warn(f"{why}; tokens are kept in the cache from here on", RuntimeWarning, stacklevel=2)

    def lose(self, chunk: Chunk, why: str) -> None:
        """Note that the tokens of a chunk cannot be read, and that nothing more is to be evicted; say the first."""
        with self._lock:
            if not chunk.tokens:  # dropped before, and counted then
                return
            first, self.lost = not self.lost, self.lost + chunk.tokens
            why = f"{chunk.tokens:,} evicted tokens are lost: {why}"
            chunk.drop()
        if first:
            self.why_lost, self.broken = why, self.broken or why
            warnings.warn(
                f"{why}; tokens are kept in the cache from here on, and monitor.report() counts what is lost",
                RuntimeWarning,
                stacklevel=2,
            )

    def _make_room(self, nbytes: int, instead: Sequence[Chunk]) -> bool:
        """Drop the oldest tokens until ``nbytes`` more fit in place of some chunks; whether they do."""
        going = [chunk for chunk in instead if not chunk.shared]
        others = [chunk for chunk in self._chunks() if chunk not in going]
        if self.limit is None or sum(chunk.nbytes for chunk in others) + nbytes <= self.limit:
            return True
        if not self.dropped:
            warnings.warn(
                f"the spill store is full ({self.limit:,} bytes): its oldest tokens are dropped and cannot be "
                "restored; raise spill_limit",
                RuntimeWarning,
                stacklevel=2,
            )
        if nbytes > self.limit:
            return False
        for chunk in others:
            if sum(each.nbytes for each in others) + nbytes > self.limit:
                self.dropped += chunk.tokens
                chunk.drop()
        return True


class SpilledTokens:
    """The evicted tokens of one layer.

    Args:
        spill: where they are.
        device: of the layer.
    """

    def __init__(self, spill: Spill, device: torch.device) -> None:
        self.spill, self.device = spill, device
        self.chunks: list[Chunk] = []

    def __len__(self) -> int:
        """Tokens over all rows."""
        return sum(chunk.tokens for chunk in self.chunks)

    def tensors(self) -> list[Tensor]:
        """Every tensor in memory; shapes are those of the tokens' own `tensors()`."""
        return [tensor for chunk in self.chunks if isinstance(chunk.stored, dict) for tensor in chunk.stored.values()]

    def add(self, bodies: Sequence[StoredTokens]) -> bool:
        """Take in tokens of each kind; small chunks are merged. False: they were not stored."""
        if self.spill.broken is not None:
            return False
        last, bodies = len(self.chunks), list(bodies)
        nbytes = _nbytes(bodies)
        most = None if self.spill.limit is None else self.spill.limit // LARGEST
        try:
            while last and self.chunks[last - 1].nbytes <= 2 * nbytes and (most is None or 3 * nbytes <= most):
                last -= 1
                bodies = joined(self._read(self.chunks[last]), bodies)
                nbytes = _nbytes(bodies)
            chunk = self.spill.write(bodies, self.chunks[last:])
        except FAILURES as error:  # also of memory for joining them
            self.spill.fail(f"the spill store takes no more tokens: {error}")
            return False
        except SpillError:
            return False
        self.chunks = [*self.chunks[:last], chunk]
        return True

    def read(self) -> list[list[StoredTokens]]:
        """All tokens that are there, chunk by chunk, each kind by itself."""
        found = [self._read(chunk) for chunk in self.chunks if chunk.tokens]
        self.chunks = [chunk for chunk in self.chunks if chunk.tokens]
        return [bodies for bodies in found if bodies]

    def take(self, chosen: Callable[[StoredTokens], Tensor] | None = None) -> list[StoredTokens]:
        """Take out tokens, those that a function of each kind chooses, [T] bool, or all; an empty list without any."""

        def parts(bodies: list[StoredTokens]) -> tuple[list[StoredTokens], list[StoredTokens]]:
            if chosen is None:
                return bodies, []
            mine = [chosen(body) for body in bodies]
            if not any(bool(mask.any()) for mask in mine):
                return [], bodies
            return (
                [body.keep(mask) for body, mask in zip(bodies, mine)],
                [body.keep(~mask) for body, mask in zip(bodies, mine)],
            )

        return self._rewrite(parts)

    def select_rows(self, rows: Tensor) -> list[StoredTokens]:
        """Keep rows by index [R'], in that order, as often as named; returns tokens that could not be stored so."""
        return self._rewrite(lambda bodies: ([], [body.select_rows(rows) for body in bodies]))

    def _rewrite(
        self, parts: Callable[[list[StoredTokens]], tuple[list[StoredTokens], list[StoredTokens]]]
    ) -> list[StoredTokens]:
        """Replace each chunk by a part of it, all chunks at once at the end.

        Args:
            parts: gives what is to come out of a chunk and what is to stay; the same bodies are not written again.

        Returns:
            what came out, and what could not be stored again: better back in the cache than lost.
        """
        out: list[StoredTokens] = []
        chunks: list[Chunk] = []
        replaced: list[Chunk] = []
        for chunk in self.chunks:
            bodies = self._read(chunk)
            if not any(map(len, bodies)):
                continue
            leaving, staying = parts(bodies)
            out = joined(out, leaving)
            if staying is bodies:
                chunks.append(chunk)
                continue
            replaced.append(chunk)
            if any(map(len, staying)):
                try:
                    chunks.append(self._write(staying, replaced))
                except SpillError:
                    out = joined(out, staying)
        self.chunks = chunks
        return out

    def _write(self, bodies: Sequence[StoredTokens], instead: Sequence[Chunk]) -> Chunk:
        if self.spill.broken is not None:
            raise SpillError(self.spill.broken)
        return self.spill.write(bodies, instead)

    def _read(self, chunk: Chunk) -> list[StoredTokens]:
        try:
            return chunk.read(self.device)
        except SpillError as error:
            self.spill.lose(chunk, str(error))
            return []


def _nbytes(bodies: Sequence[StoredTokens]) -> int:
    return sum(t.numel() * t.element_size() for body in bodies for t in body.tensors().values())


def _to_host(tensor: Tensor) -> Tensor:
    """A dense copy in host memory, pinned if it comes from a GPU."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True).contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)
