"""What finished copies mean for vLLM and for those who listen."""

from dataclasses import dataclass

from vllm_hicache.loads import RunningLoad
from vllm_hicache.prefix_index import HostPage


@dataclass(frozen=True, slots=True)
class Settled:
    """Copies that every worker has finished: loads by their outcome, pages that are in host now."""

    loaded: tuple[RunningLoad, ...] = ()
    failed: tuple[RunningLoad, ...] = ()
    published: tuple[HostPage, ...] = ()


NOTHING_SETTLED = Settled()
