"""Page hashes: chained SHA-256 over token ids, page by page, equal in every process and engine.

root      = SHA-256("hicache-root-1", salt, LoRA), each with a presence byte and its length
page hash = SHA-256(hash of the page before, or root
                    + page_size token ids as little-endian uint32
                    + per extra that touches the page, sorted: start and stop relative to the
                      page (int64), length of its identity (uint32), identity)
"""

import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from struct import Struct
from typing import NamedTuple

from vllm_hicache.errors import InvariantBroken

HASH_VERSION = 1
_TOKEN_BYTES = 4
_LENGTH = Struct("<?I")
_EXTRA = Struct("<qqI")


class PageExtra(NamedTuple):
    """Content behind the tokens ``[start, stop)`` that their ids do not tell: an image, embeds."""

    start: int
    stop: int
    identity: bytes


def chain_root(*, cache_salt: str | None = None, lora: bytes | None = None) -> bytes:
    """Start of a chain. Requests share pages only under one root; absent is not empty.

    >>> chain_root().hex()[:16], chain_root(cache_salt="").hex()[:16]
    ('4fc495437d688399', '4ef80e2669609d14')
    """
    # A client may send half of a surrogate pair: a key like any other, never an error.
    salt = None if cache_salt is None else cache_salt.encode("utf-8", "surrogatepass")
    parts = [b"hicache-root-1"]
    for part in (salt, lora):
        parts += _LENGTH.pack(part is not None, len(part or b"")), part or b""
    return sha256(b"".join(parts)).digest()


class PageHashChain:
    """Hashes of the whole pages of one request, extended as tokens become known.

    ``hashes[i]`` covers the tokens ``[0, (i + 1) * page_size)``; read only.
    """

    __slots__ = ("hashes", "page_size", "root")

    def __init__(self, page_size: int, root: bytes) -> None:
        self.page_size = page_size
        self.root = root
        self.hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that ``hashes`` cover."""
        return len(self.hashes) * self.page_size

    def extend(self, token_ids: Sequence[int], upto: int, extras: Sequence[PageExtra] = ()) -> int:
        """Hash the new whole pages of ``token_ids[:upto]``; return how many. O(new tokens).

        ``extras`` are all extras of the request, also old ones; every extra that touches a page
        must be known when that page is hashed.
        """
        known, stop = self.num_tokens, upto - upto % self.page_size
        if stop <= known:
            return 0
        if upto > len(token_ids):
            raise InvariantBroken(f"cannot hash {upto} tokens of {len(token_ids)}")
        # Slicing first turns any sequence into a list, which array() reads at full speed.
        tokens = array("I", token_ids[known:stop])
        if sys.byteorder == "big":
            tokens.byteswap()
        touched = _extras_by_page(extras, known, stop, self.page_size) if extras else {}
        data, step = memoryview(tokens).cast("B"), self.page_size * _TOKEN_BYTES
        previous = self.hashes[-1] if self.hashes else self.root
        append = self.hashes.append
        for page, offset in enumerate(range(0, len(data), step)):
            state = sha256(previous)
            state.update(data[offset : offset + step])
            if page in touched:
                state.update(touched[page])
            previous = state.digest()
            append(previous)
        return (stop - known) // self.page_size


def _extras_by_page(
    extras: Iterable[PageExtra], known: int, stop: int, page_size: int
) -> dict[int, bytes]:
    """Encoded extras of each page of ``[known, stop)`` that has any; pages count from ``known``."""
    touched: defaultdict[int, bytearray] = defaultdict(bytearray)
    for extra in sorted(extras):
        first, last = max(extra.start, known), min(extra.stop, stop)
        if first >= last:
            continue
        for start in range(first - first % page_size, last, page_size):
            head = _EXTRA.pack(extra.start - start, extra.stop - start, len(extra.identity))
            touched[(start - known) // page_size] += head + extra.identity
    return {page: bytes(encoded) for page, encoded in touched.items()}
