"""Product quantisation: a token in a few bytes, each the number of a centroid for one part of its key or value.

Keys are coded un-rotated, so that one codebook serves all positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fade_runtime.storage.packed import PackedTokens
from fade_runtime.storage.tiers import Tier
from predictor.errors import FadeError

DISTANCE_BYTES = 16 << 20  # what encoding may take for distances at a time
MAX_ITER = 25  # of k-means: more changes the error by less than 1 %
REMEDY = "train one for this model with `python -m pipelines.train_codebook`"


@dataclass(frozen=True)
class PQCodebook:
    """Centroids for each part of a vector.

    Source: Jegou et al. 2011, Product quantization for nearest neighbor search (IEEE TPAMI 33:1), section II.B.

    Attributes:
        centroids: [n_sub, C, sub_dim] float16; C is at most 256, so that a code is one byte.

    Example:
        >>> vectors = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
        >>> book = PQCodebook.train(vectors, sub_dim=4, num_centroids=16)
        >>> codes = book.encode(vectors)
        >>> codes.shape, codes.dtype, bool((book.decode(codes) - vectors).square().mean() < 0.5)
        (torch.Size([300, 2]), torch.uint8, True)
    """

    centroids: Tensor

    @classmethod
    def train(cls, vectors: Tensor, sub_dim: int = 32, num_centroids: int = 256, seed: int = 0) -> PQCodebook:
        """Cluster each part of the vectors by k-means (scikit-learn).

        Args:
            vectors: [T, D] in any float dtype, at least one for each centroid.
            sub_dim: channels of a part; D / sub_dim bytes for each vector.
            num_centroids: of each part, 2 to 256.
            seed: of the first centroids; the same seed gives the same codebook.

        Raises:
            FadeError: sizes that do not fit, too few vectors, or numbers that are not finite in float16.
        """
        from sklearn.cluster import KMeans  # heavy, and needed only here

        count, dim = vectors.shape
        check_sizes(dim, sub_dim, num_centroids)
        if count < num_centroids:
            raise FadeError(
                f"{count} vectors are too few for num_centroids {num_centroids}; give more text, or lower it"
            )
        if not bool(vectors.half().isfinite().all()):
            raise FadeError("a codebook cannot be trained on NaN, or numbers beyond float16; check the model's dtype")
        means = KMeans(num_centroids, init="random", n_init=1, max_iter=MAX_ITER, random_state=seed)
        parts = vectors.float().cpu().unflatten(1, (-1, sub_dim)).unbind(1)
        found = [torch.from_numpy(means.fit(part.contiguous().numpy()).cluster_centers_) for part in parts]
        return cls(torch.stack(found).half())

    @property
    def dim(self) -> int:
        """Channels of the vectors that are coded."""
        return self.centroids.shape[0] * self.centroids.shape[2]

    @property
    def width(self) -> int:
        """Bytes of a code."""
        return self.centroids.shape[0]

    def encode(self, vectors: Tensor) -> Tensor:
        """Number of the nearest centroid of each part: [..., D] to [..., n_sub] uint8.

        Raises:
            FadeError: vectors of another head dim.
        """
        if vectors.shape[-1] != self.dim:
            raise FadeError(other_dim("the codebook", self.dim, vectors.shape[-1]))
        parts, size, sub_dim = self.centroids.shape
        centroids = self.centroids.float().transpose(1, 2)  # [n_sub, sub_dim, C]
        less = -centroids.square().sum(1, keepdim=True) / 2  # nearest: the largest x c - c c / 2
        flat = vectors.reshape(-1, parts, sub_dim)
        codes = torch.empty(flat.shape[:2], dtype=torch.uint8, device=flat.device)
        step = max(1, DISTANCE_BYTES // (4 * parts * size))
        for at in range(0, len(flat), step):
            some = flat[at : at + step].float().transpose(0, 1)  # [n_sub, t, sub_dim]
            codes[at : at + step] = torch.baddbmm(less, some, centroids).argmax(-1).T
        return codes.view(*vectors.shape[:-1], parts)

    def decode(self, codes: Tensor) -> Tensor:
        """The centroids that codes [..., n_sub] stand for: [..., D] float32."""
        parts, size, sub_dim = self.centroids.shape
        first = torch.arange(0, parts * size, size, dtype=torch.int32, device=codes.device)  # row of a part's first
        return embedding(codes + first, self.centroids.view(-1, sub_dim)).flatten(-2).float()


@dataclass(frozen=True)
class LayerCodebook:
    """The codebooks of one layer, which its kv heads share."""

    key: PQCodebook
    value: PQCodebook

    @property
    def width(self) -> int:
        """Bytes of a token: first those of its key, then those of its value."""
        return self.key.width + self.value.width

    def encode(self, key: Tensor, value: Tensor) -> Tensor:
        """Code tokens: un-rotated keys [T, D] and values [T, D] to [T, width] uint8."""
        return torch.cat((self.key.encode(key), self.value.encode(value)), dim=-1)

    def tensors(self) -> list[Tensor]:
        """Centroids [n_sub, C, sub_dim] of keys, then of values."""
        return [self.key.centroids, self.value.centroids]

    def to(self, device: torch.device | str) -> LayerCodebook:
        """The same codebooks on a device."""
        return LayerCodebook(*(PQCodebook(centroids.to(device)) for centroids in self.tensors()))


@dataclass(frozen=True)
class PQTokens:
    """Product-quantised tokens of all rows (batch x kv head), row after row.

    Attributes:
        codes: [T, width] uint8. slot: [T] logical slots, in the smaller of int16 and int32 that holds them.
        row_len: [R] int32 tokens of each row.
        codebook: of the layer.
        attention_stats: [T] float32 statistics of the policy, or None.
    """

    codes: Tensor
    slot: Tensor
    row_len: Tensor
    codebook: LayerCodebook
    attention_stats: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, codebook: LayerCodebook, device: torch.device, *, keeps_stats: bool) -> PQTokens:
        """No tokens in ``rows`` rows, with or without statistics."""
        codes = torch.zeros(0, codebook.width, dtype=torch.uint8, device=device)
        none = torch.zeros(0, dtype=torch.long, device=device)
        return cls.make(codes, none, none, rows, codebook, none.float() if keeps_stats else None)

    @classmethod
    def make(
        cls,
        codes: Tensor,
        rows: Tensor,
        slots: Tensor,
        count: int,
        codebook: LayerCodebook,
        stats: Tensor | None,
    ) -> PQTokens:
        """Put coded tokens into ``count`` rows.

        Args:
            codes: [T, width] uint8. rows: [T] sorted ascending. slots: [T]. stats: [T] statistics or None.
            count: R. codebook: what the codes are of.
        """
        row_len = torch.bincount(rows, minlength=count).to(torch.int32)
        short = not len(slots) or int(slots.max()) <= torch.iinfo(torch.int16).max
        return cls(codes, slots.to(torch.int16 if short else torch.int32), row_len, codebook, stats)

    def __len__(self) -> int:
        """Tokens over all rows."""
        return self.codes.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor by its name, [T, ...] or [R]; not the codebook, which all tokens of the layer share."""
        stored = {
            "codes": self.codes,
            "slot": self.slot,
            "row_len": self.row_len,
            "attention_stats": self.attention_stats,
        }
        return {name: tensor for name, tensor in stored.items() if tensor is not None}

    def token_row(self) -> Tensor:
        """[T] int64: the row of each token."""
        rows = torch.arange(len(self.row_len), device=self.row_len.device)
        return rows.repeat_interleave(self.row_len.long(), output_size=len(self))

    def slots(self) -> Tensor:
        """[T] int64: the logical slot of each token."""
        return self.slot.long()

    def tiers(self) -> Tensor:
        """[T] int64 tier of each token: PQ."""
        return torch.full_like(self.slots(), Tier.PQ)

    def key_decoder(self) -> Callable[[slice], Tensor]:
        """Function from a slice of t tokens to their keys [t, D] float32, un-rotated by position."""
        book = self.codebook.key
        return lambda tokens: book.decode(self.codes[tokens, : book.width])

    def value_decoder(self) -> Callable[[slice], Tensor]:
        """Function from a slice of t tokens to their values [t, D] float32."""
        book, start = self.codebook.value, self.codebook.key.width
        return lambda tokens: book.decode(self.codes[tokens, start:])

    def keep(self, kept: Tensor) -> PQTokens:
        """Return the tokens of a [T] bool mask."""
        row_len = torch.bincount(self.token_row()[kept], minlength=len(self.row_len))
        return self._take(kept, row_len)

    def select_rows(self, rows: Tensor) -> PQTokens:
        """Return rows by index [R'] int64, in that order and as often as named (beam search, batch selection)."""
        old, new = self.row_len.long(), self.row_len.long()[rows]
        begins = (old.cumsum(0) - old)[rows] - (new.cumsum(0) - new)  # [R'] how far a row's tokens move
        index = torch.arange(int(new.sum()), device=new.device)
        return self._take(index + begins.repeat_interleave(new), new)

    def join(self, other: PQTokens) -> PQTokens:
        """Return the union: within each row the tokens of ``self`` first, then those of ``other``."""
        order = torch.cat((self.token_row(), other.token_row())).argsort(stable=True)
        slot = torch.cat((self.slot, other.slot))  # in the wider type of both
        stats = None
        if self.attention_stats is not None and other.attention_stats is not None:
            stats = torch.cat((self.attention_stats, other.attention_stats))
        codes = torch.cat((self.codes, other.codes))
        return replace(self, codes=codes, slot=slot, attention_stats=stats)._take(order, self.row_len + other.row_len)

    def add(self, key: Tensor, value: Tensor, rows: Tensor, slots: Tensor, stats: Tensor | None) -> PQTokens:
        """Encode tokens and join them.

        Args:
            key, value: [T, D] in any float dtype, keys un-rotated. rows: [T] sorted ascending. slots: [T].
            stats: [T] statistics or None.
        """
        return self._join_coded(self.codebook.encode(key, value), rows, slots, stats)

    def absorb(self, packed: PackedTokens, demoted: Tensor) -> PQTokens:
        """Join packed tokens that are demoted, by the codes that they have kept for it.

        Args:
            packed: T tokens with ``pq_codes``. demoted: [T] bool.
        """
        assert packed.pq_codes is not None
        stats = None if packed.attention_stats is None else packed.attention_stats[demoted]
        rows, slots = packed.token_row()[demoted], packed.slots()[demoted]
        return self._join_coded(packed.pq_codes[demoted], rows, slots, stats)

    def _join_coded(self, codes: Tensor, rows: Tensor, slots: Tensor, stats: Tensor | None) -> PQTokens:
        return self.join(PQTokens.make(codes, rows, slots, len(self.row_len), self.codebook, stats))

    def _take(self, index: Tensor, row_len: Tensor) -> PQTokens:
        """Tokens by index or mask, which leaves ``row_len`` of them in each row."""
        stats = None if self.attention_stats is None else self.attention_stats[index]
        return PQTokens(self.codes[index], self.slot[index], row_len.to(torch.int32), self.codebook, stats)


def other_dim(what: str, made: int, here: int) -> str:
    """What is said of a codebook for another head dim."""
    return f"{what} is for head dim {made}, the model has {here}; {REMEDY}"


def check_sizes(dim: int, sub_dim: int, num_centroids: int) -> None:
    """Refuse sizes that vectors of a head dim cannot be coded with.

    Raises:
        FadeError: names the size.
    """
    if sub_dim < 1 or dim % sub_dim:
        divisors = ", ".join(str(size) for size in range(1, dim + 1) if dim % size == 0)
        raise FadeError(f"sub_dim {sub_dim} does not divide head dim {dim}; use one of {divisors}")
    if not 2 <= num_centroids <= 256:
        raise FadeError(f"num_centroids {num_centroids} is not between 2 and 256; a code is one byte")
