"""Where evicted tokens go, in their packed form, so that they can come back.

A :class:`Spill` belongs to one cache and keeps chunks of tokens in host memory or in files of a directory of its own.
Every layer has a :class:`SpilledTokens`: the chunks with its evicted tokens. What cannot be stored is not evicted.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fade_runtime.packed import PackedTokens
from predictor.errors import FadeError

if TYPE_CHECKING:
    from fade_runtime.pq import PQTokens

Body = Union[PackedTokens, "PQTokens"]
PREFIX, LOCK = "fade-spill-", "lock"
WHERE = ("none", "host", "disk")
LARGEST = 8  # a chunk of more than the limit divided by this is not merged with others
FAILURES = (OSError, MemoryError, RuntimeError, SafetensorError)  # torch says RuntimeError when memory is short


class SpillError(FadeError):
    """Evicted tokens could not be stored, or are not there any more."""


class Chunk:
    """Tokens of one layer, in host memory or in a file; it never changes, and copies of a cache share it.

    Args:
        forms: the same kinds of tokens, none of them: what the stored tensors are of.
        tensors: by name; None: they are in the file.
        path: of the file, which goes when the chunk does.
        nbytes, tokens: what is stored.
    """

    def __init__(
        self,
        forms: Sequence[Body],
        tensors: dict[str, Tensor] | None,
        path: Path | None,
        nbytes: int,
        tokens: int,
    ) -> None:
        self.forms, self.tensors, self.path, self.nbytes, self.tokens = forms, tensors, path, nbytes, tokens
        self._size = path.stat().st_size if path is not None else 0
        self._ahead: dict[str, Tensor] | None = None  # read before it is asked for
        self._remove = None if path is None else weakref.finalize(self, path.unlink, missing_ok=True)

    def __deepcopy__(self, memo: object) -> Chunk:
        """The same chunk."""
        return self

    def drop(self) -> None:
        """Forget the tokens."""
        self.tensors, self.tokens, self.nbytes, self._ahead = {}, 0, 0, None
        if self._remove is not None:
            self._remove()

    def read_ahead(self) -> None:
        """Read the file now, for the next :meth:`read`; may run in another thread. A failure waits until then."""
        try:
            self._ahead = self._stored()
        except SpillError:
            self._ahead = None

    def _stored(self) -> dict[str, Tensor]:
        if self.tensors is not None:
            return self.tensors
        assert self.path is not None
        try:
            size = self.path.stat().st_size
            if size != self._size:
                raise SpillError(f"spill file {self.path} has {size} bytes of {self._size}")
            return {name: tensor.clone() for name, tensor in load_file(self.path).items()}
        except FAILURES as error:
            raise SpillError(f"spill file {self.path} cannot be read ({error})") from error

    def read(self, device: torch.device) -> list[Body]:
        """The tokens, on a device.

        Raises:
            SpillError: their file is gone or was cut.
        """
        ahead, self._ahead = self._ahead, None
        stored = self._stored() if ahead is None else ahead
        if not self.tokens:
            return list(self.forms)
        found: list[Body] = []
        for at, form in enumerate(self.forms):
            named = {name: stored[f"{at}.{name}"] for name in form.tensors()}
            held: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in named.items()}
            found.append(replace(form, **held))
        return found


class Spill:
    """Host memory or a directory for the evicted tokens of one cache.

    Args:
        where: "host" or "disk".
        directory: for "disk"; a folder is made in it, for this cache only, and removed with it. Folders there whose
            process has died are removed now.
        limit: most bytes held; then the oldest tokens are dropped for good. None: no limit.

    Attributes:
        dropped: tokens that the limit cost.
        lost: tokens whose storage failed them.
        threads: read ahead.
        broken: why nothing can be stored any more, or None; from then on nothing is evicted.

    Raises:
        FadeError: the directory cannot be written.
    """

    def __init__(self, where: str, directory: str | Path | None = None, limit: int | None = None) -> None:
        self.where, self.limit = where, limit
        self.dropped = self.lost = self._written = 0
        self.broken: str | None = None
        self._live: list[weakref.ref[Chunk]] = []
        self.folder: Path | None = None
        self.threads = ThreadPoolExecutor(1, "fade-spill")  # its thread begins with the first read ahead
        if where == "disk":
            assert directory is not None
            self.folder, lock = _own_folder(Path(directory))
            weakref.finalize(self, _remove_folder, self.folder, lock)

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
            "broken": self.broken,
        }

    def _chunks(self) -> list[Chunk]:
        self._live = [each for each in self._live if each() is not None]
        return [chunk for each in self._live if (chunk := each()) is not None]

    def write(self, bodies: Sequence[Body], instead: Sequence[Chunk] = ()) -> Chunk:
        """Store tokens, among them those of chunks that are to go afterwards.

        Raises:
            SpillError: no room for them; nothing is stored, and nothing will be from now on.
        """
        held = {f"{at}.{name}": t.detach() for at, body in enumerate(bodies) for name, t in body.tensors().items()}
        nbytes, tokens = sum(t.numel() * t.element_size() for t in held.values()), sum(map(len, bodies))
        forms = [body.keep(torch.zeros(len(body), dtype=torch.bool, device=body.slots().device)) for body in bodies]
        if not self._make_room(nbytes, instead):
            self.dropped += tokens
            return Chunk(forms, {}, None, 0, 0)
        try:
            if self.folder is None:
                chunk = Chunk(forms, {name: _to_host(t) for name, t in held.items()}, None, nbytes, tokens)
            else:
                self._written += 1
                path = self.folder / f"{self._written}.safetensors"
                try:
                    save_file({name: t.cpu().contiguous() for name, t in held.items()}, path)
                except FAILURES:
                    path.unlink(missing_ok=True)
                    raise
                chunk = Chunk(forms, None, path, nbytes, tokens)
        except FAILURES as error:
            self.fail(f"the spill store ({self.folder or 'host memory'}) takes no more tokens: {error}")
            raise SpillError(str(self.broken)) from error
        self._live.append(weakref.ref(chunk))
        return chunk

    def fail(self, why: str) -> None:
        """Note that nothing more is to be evicted, and say it once."""
        if self.broken is None:
            self.broken = why
            warnings.warn(f"{why}; tokens are kept in the cache from here on", RuntimeWarning, stacklevel=2)

    def _make_room(self, nbytes: int, instead: Sequence[Chunk]) -> bool:
        """Drop the oldest tokens until ``nbytes`` more fit in place of some chunks; whether they do."""
        others = [chunk for chunk in self._chunks() if chunk not in instead]
        if self.limit is None or sum(chunk.nbytes for chunk in others) + nbytes <= self.limit:
            return True
        if not self.dropped:
            warnings.warn(
                f"the spill store is full ({self.limit:,} bytes): its oldest tokens are dropped and cannot be "
                "restored; raise spill_limit",
                RuntimeWarning,
                stacklevel=2,
            )
        for chunk in others:
            if sum(each.nbytes for each in others) + nbytes > self.limit:
                self.dropped += chunk.tokens
                chunk.drop()
        return nbytes <= self.limit


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
        """Every tensor in memory."""
        return [tensor for chunk in self.chunks for tensor in (chunk.tensors or {}).values()]

    def add(self, bodies: Sequence[Body]) -> bool:
        """Take in tokens of each kind; small chunks are merged, so that there are few. False: they were not stored."""
        if self.spill.broken is not None:
            return False
        last, bodies = len(self.chunks), list(bodies)
        nbytes = _nbytes(bodies)
        most = None if self.spill.limit is None else self.spill.limit // LARGEST
        try:
            while last and self.chunks[last - 1].nbytes <= 2 * nbytes and (most is None or 3 * nbytes <= most):
                last -= 1
                bodies = _joined(self._read(self.chunks[last]), bodies)
                nbytes = _nbytes(bodies)
            chunk = self.spill.write(bodies, self.chunks[last:])
        except FAILURES as error:  # also of memory for joining them
            self.spill.fail(f"the spill store takes no more tokens: {error}")
            return False
        except SpillError:
            return False
        self.chunks[last:] = [chunk]
        return True

    def read(self) -> list[list[Body]]:
        """All tokens that are there, chunk by chunk, each kind by itself."""
        found = [self._read(chunk) for chunk in self.chunks if chunk.tokens]
        self.chunks = [chunk for chunk in self.chunks if chunk.tokens]
        return [bodies for bodies in found if bodies]

    def take(self, chosen: Callable[[Body], Tensor] | None = None) -> list[Body]:
        """Take out tokens, those that a function of each kind chooses, [T] bool, or all; an empty list without any."""
        found: list[Body] = []
        for bodies in self.read():
            found = _joined(found, bodies) if found else bodies
        if not found:
            return []
        rest: list[Body] = []
        if chosen is not None:
            mine = [chosen(body) for body in found]
            rest = [body.keep(~mask) for body, mask in zip(found, mine)]
            found = [body.keep(mask) for body, mask in zip(found, mine)]
        self.chunks = []
        if any(map(len, rest)) and not self.add(rest):
            found = _joined(found, rest)  # better back in the cache than lost
        return found

    def read_ahead(self) -> Future[None]:
        """Read what is on disk in another thread, for the next :meth:`take` or :meth:`read`."""
        return self.spill.threads.submit(_read_ahead, list(self.chunks))

    def select_rows(self, rows: Tensor) -> list[Body]:
        """Keep rows by index, in the given order and as often as named; returns tokens that could not be stored so."""
        chosen = [[body.select_rows(rows) for body in bodies] for bodies in self.read()]
        self.chunks = []
        return [body for bodies in chosen if not self.add(bodies) for body in bodies]

    def _read(self, chunk: Chunk) -> list[Body]:
        try:
            return chunk.read(self.device)
        except SpillError as error:
            self.spill.lost += chunk.tokens
            self.spill.fail(f"{chunk.tokens:,} evicted tokens are lost: {error}")
            chunk.drop()
            return []


def _read_ahead(chunks: Sequence[Chunk]) -> None:
    for chunk in chunks:
        chunk.read_ahead()


def _joined(first: Sequence[Any], second: Sequence[Any]) -> list[Body]:
    """Tokens of two chunks, kind by kind."""
    return [ours.join(theirs) for ours, theirs in zip(first, second)] if first else list(second)


def _nbytes(bodies: Sequence[Body]) -> int:
    return sum(t.numel() * t.element_size() for body in bodies for t in body.tensors().values())


def _to_host(tensor: Tensor) -> Tensor:
    """A dense copy in host memory, pinned if it comes from a GPU."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True).contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)


def _own_folder(directory: Path) -> tuple[Path, Any]:
    """Make a folder that dies with this process, and remove those of dead ones."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for other in directory.glob(f"{PREFIX}*"):
            if (lock := _locked(other / LOCK)) is not None:
                _remove_folder(other, lock)
        new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=directory))  # for its owner only
        lock = _locked(new / LOCK)
        folder = new.rename(directory / new.name[1:])  # nobody finds it before it is locked
    except OSError as error:
        raise FadeError(f"spill_dir {directory} cannot be written ({error.strerror}); name another folder") from error
    return folder, lock


def _locked(path: Path) -> Any:
    """An open file with a lock that ends with the process; None where another process has it."""
    import fcntl

    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _remove_folder(folder: Path, lock: Any) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()
