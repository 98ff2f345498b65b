"""The scheduler's decisions that the rank-consensus checker records, all in one place.

One scheduler decides for all workers, so that nobody is compared with it here: its decisions are
the context in which a divergence is read. A storage answer of one worker is among them; answers
differ by nature, and what is decided on is their minimum.
"""

from typing import Any

from vllm_hicache.checked_calls import checked
from vllm_hicache.loads import Loads
from vllm_hicache.persists import Persists
from vllm_hicache.planner import Planner
from vllm_hicache.prefetch import Prefetcher
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.saves import Saves


def num_published(pages: list[HostPage]) -> int:
    """Pages that a save made visible."""
    return len(pages)


_REQUEST = "state.request_id"
_answers = checked(arguments=("worker_id", "event"), result=True)
_OUTCOME = ("outcome.op_id", "outcome.is_ok")

checked(arguments=(_REQUEST, "state.tokens.num_tokens"))(Planner.add_request)
checked(arguments=(_REQUEST, "num_local_tokens"), result=("result.num_tokens", "result.is_async"))(
    Planner.match
)
checked(arguments=_REQUEST)(Planner.admit)
checked(
    arguments=(_REQUEST, "num_tokens", "block_ids"),
    result=("result.first_token", "result.last_token", "result.is_async"),
)(Planner.begin_load)
checked(arguments=(_REQUEST, "num_tokens"))(Planner.collect_saves)
checked(arguments=_REQUEST)(Planner.preempt)
checked(arguments=_REQUEST)(Planner.finish)
checked(arguments="is_busy", result="result.number")(Planner.plan_step)
checked(arguments="namespace")(Planner.reset)
checked(arguments=_OUTCOME, result="result.state.request_id")(Loads.settle)
checked(arguments=_OUTCOME, result=num_published)(Saves.settle)
_answers(Prefetcher.handle)
_answers(Persists.handle)


def decision_makers(planner: Planner) -> list[Any]:
    """The objects whose marked calls are one engine's decisions."""
    owners = [planner, planner.loads, planner.saves, planner.prefetcher, planner.persists]
    return [owner for owner in owners if owner is not None]
