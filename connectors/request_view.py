"""vLLM's Request -> tokens, page hashes and notes for events."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from vllm.v1.utils import tensor_data

from vllm_hicache.connectors.model_identity import lora_identity
from vllm_hicache.hashing import PageExtra, PageHashChain, chain_root

if TYPE_CHECKING:
    from vllm.v1.request import Request

NoteMaker = Callable[["Request", int], object]


class RequestTokens:
    """The planner's view of one request. Page hashes grow with its tokens, never beyond them."""

    __slots__ = ("_chain", "_extras", "_make_note", "_num_prompt_tokens", "request", "request_id")

    def __init__(self, request: "Request", page_size: int, make_note: NoteMaker | None) -> None:
        self.request = request
        self.request_id: str = request.request_id
        lora = lora_identity(request.lora_request) if request.lora_request else None
        root = chain_root(cache_salt=request.cache_salt or None, lora=lora)
        self._make_note = make_note
        self._begin(PageHashChain(page_size, root))

    def _begin(self, chain: PageHashChain) -> None:
        self._chain = chain
        self._extras = page_extras(self.request, chain.page_size)
        self._num_prompt_tokens = self.request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens

    def page_hashes(self, num_pages: int) -> Sequence[bytes]:
        if self.request.num_prompt_tokens != self._num_prompt_tokens:
            # The next part of a streamed prompt: it may bring images, and has replaced the last
            # generated token, which vLLM never computed.
            self._begin(PageHashChain(self._chain.page_size, self._chain.root))
        chain = self._chain
        if len(chain.hashes) < num_pages:
            chain.extend(self.request.all_token_ids, num_pages * chain.page_size, self._extras)
        return chain.hashes

    def note(self, page_index: int) -> object:
        if self._make_note is None:
            return None
        return self._make_note(self.request, page_index)


def page_extras(request: "Request", page_size: int) -> list[PageExtra]:
    """What the token ids do not tell: multimodal items, and prompt embeddings page by page."""
    extras = [
        PageExtra(
            feature.mm_position.offset,
            feature.mm_position.offset + feature.mm_position.length,
            b"mm:" + str(feature.identifier).encode(),
        )
        for feature in request.mm_features or ()
    ]
    embeds = request.prompt_embeds
    if embeds is not None:
        for start in range(0, request.num_prompt_tokens, page_size):
            stop = min(start + page_size, request.num_prompt_tokens)
            digest = sha256(str(embeds.dtype).encode())
            digest.update(tensor_data(embeds[start:stop]))
            if request.prompt_is_token_ids is not None:
                # Which places are tokens: behind an embedding, too, vLLM shows us token id 0.
                digest.update(bytes(request.prompt_is_token_ids[start:stop]))
            extras.append(PageExtra(start, stop, b"embeds:" + digest.digest()))
    return extras
