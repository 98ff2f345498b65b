"""write_back: pages are saved ahead of the reuse of their blocks, and never with wrong bytes."""

from collections import Counter, deque
from random import Random

import pytest
from free_queue import FreeQueue
from planner_rig import Rig

from vllm_hicache.errors import InvariantBroken
from vllm_hicache.request_state import RequestState
from vllm_hicache.saves import MAX_PAGES_PER_SAVE
from vllm_hicache.simulate.requests import Tokens
from vllm_hicache.storage_messages import Persist, unpack_hashes

CHAIN = list(range(100, 124))  # six pages of four tokens
OTHER = list(range(200, 224))


def _rig(num_blocks: int = 12, ahead: int = 4, **options) -> tuple[Rig, FreeQueue]:
    queue = FreeQueue(num_blocks)
    policy = {"write_policy": "write_back", "num_ahead_blocks": ahead}
    return Rig(queue=queue, **policy | options), queue


def _compute(rig: Rig, queue: FreeQueue, name: str, token_ids, **fields) -> RequestState:
    """A request that computes all its tokens in one step, and is still running."""
    state = rig.request(name, token_ids, **fields)
    state.block_ids = queue.take(-(-len(token_ids) // rig.block))
    rig.planner.admit(state)
    rig.planner.collect_saves(state, len(token_ids), rig.now)
    rig.planner.write_back.count_taken(len(state.block_ids))
    return state


def _end(rig: Rig, queue: FreeQueue, state: RequestState) -> None:
    rig.planner.finish(state, rig.now)
    queue.give_back(state.block_ids)


def _slots_of(plan) -> list[list[int]]:
    return [op.copies[:, 2].tolist() for op in plan.saves]


# Which pages, and when ---------------------------------------------------------------------------


def test_nothing_is_saved_while_its_blocks_are_far_from_reuse():
    rig, queue = _rig()
    state = _compute(rig, queue, "a", CHAIN)
    assert rig.plan().saves == ()
    _end(rig, queue, state)  # six free blocks are ahead of its own in the queue
    assert rig.plan().saves == ()
    assert rig.total("saved_tokens") == 0


def test_a_chain_is_saved_from_its_beginning_when_its_end_is_about_to_be_reused():
    rig, queue = _rig()
    state = _compute(rig, queue, "a", CHAIN)
    _end(rig, queue, state)
    running = _compute(rig, queue, "b", OTHER[:16])  # takes four of the six blocks before it
    plan = rig.plan()
    assert _slots_of(plan) == [state.block_ids]
    rig.finish_saves()
    assert rig.in_host(state) == 6
    assert rig.in_host(running) == 0


def test_no_block_is_held_and_vllms_order_of_reuse_stays():
    rig, queue = _rig(num_blocks=6, ahead=6)
    state = _compute(rig, queue, "a", CHAIN)
    _end(rig, queue, state)
    order = list(queue.free)
    rig.plan()
    assert rig.blocks.num_held == 0
    assert queue.free == order


def test_a_page_is_saved_once():
    rig, queue = _rig(num_blocks=6, ahead=6)
    _end(rig, queue, _compute(rig, queue, "a", CHAIN))
    assert len(rig.plan().saves) == 1
    rig.planner.write_back.count_taken(6)
    assert rig.plan().saves == ()
    rig.finish_saves()
    rig.planner.write_back.count_taken(6)
    assert rig.plan().saves == ()


def test_a_page_that_host_has_lost_is_saved_again_when_it_was_used_on_the_device():
    rig, queue = _rig(num_blocks=6, ahead=6)
    state = _compute(rig, queue, "a", CHAIN)
    _end(rig, queue, state)
    rig.plan()
    rig.finish_saves()
    rig.planner.host.discard(rig.page_of(state, 4))
    again = rig.request("b", CHAIN)
    queue.use(state.block_ids)
    again.block_ids = state.block_ids
    rig.planner.collect_saves(again, len(CHAIN), rig.now)
    _end(rig, queue, again)
    rig.planner.write_back.count_taken(6)
    assert _slots_of(rig.plan()) == [state.block_ids[4:]]


def test_one_step_saves_a_bounded_number_of_pages_and_the_next_one_goes_on():
    long = list(range(1000, 1000 + 4 * (MAX_PAGES_PER_SAVE + 10)))
    rig, queue = _rig(num_blocks=MAX_PAGES_PER_SAVE + 10, ahead=8, num_slots=200)
    _end(rig, queue, _compute(rig, queue, "a", long))
    planned = [sum(len(op.copies) for op in rig.plan().saves) for _ in range(3)]
    assert planned == [MAX_PAGES_PER_SAVE, 10, 0]


def test_the_queue_is_looked_at_again_only_when_half_of_what_was_clean_has_been_taken():
    rig, queue = _rig(num_blocks=100, ahead=20)
    _end(rig, queue, _compute(rig, queue, "a", CHAIN))
    rig.plan()
    looks = queue.num_looks
    assert looks == 20
    for _ in range(9):
        rig.planner.write_back.count_taken(1)
        rig.plan()
    assert queue.num_looks == looks
    rig.planner.write_back.count_taken(1)
    rig.plan()
    assert queue.num_looks == 2 * looks


def test_a_short_queue_is_not_looked_at_in_every_step_either():
    rig, queue = _rig(num_blocks=6, ahead=1000)
    _end(rig, queue, _compute(rig, queue, "a", CHAIN))
    _compute(rig, queue, "b", OTHER[:4])
    rig.plan()
    assert queue.num_looks == 5
    _compute(rig, queue, "c", OTHER[4:8])
    rig.plan()
    rig.plan()
    assert queue.num_looks == 5


def test_pages_of_one_device_block_are_saved_together():
    rig, queue = _rig(num_blocks=3, ahead=3, page=4, block=8)
    state = _compute(rig, queue, "a", CHAIN)
    _end(rig, queue, state)
    (op,) = rig.plan().saves
    assert op.copies[:, 2].tolist() == [b for b in state.block_ids for _ in range(2)]
    assert op.copies[:, 3].tolist() == [0, 1] * 3
    rig.finish_saves()
    assert rig.in_host(state) == 6


def test_a_page_of_several_blocks_is_saved_when_the_first_of_them_is_due():
    rig, queue = _rig(num_blocks=8, ahead=1, page=8, block=4)
    state = _compute(rig, queue, "a", CHAIN[:16])
    _end(rig, queue, state)
    _compute(rig, queue, "b", OTHER[:16])
    assert queue.free[0] == state.block_ids[3]
    assert _slots_of(rig.plan()) == [state.block_ids]


# What may go wrong -------------------------------------------------------------------------------


def test_a_page_whose_block_is_reused_during_the_copy_is_not_published_nor_what_hangs_on_it():
    rig, queue = _rig(num_blocks=6, ahead=6)
    state = _compute(rig, queue, "a", CHAIN)
    _end(rig, queue, state)
    rig.plan()
    assert queue.take(2) == state.block_ids[:3:-1]  # pages 5 and 4
    rig.finish_saves()
    assert rig.in_host(state) == 4
    assert rig.planner.host.slots.num_used == 4
    assert rig.total("save_skipped_tokens/reused") == 8


def test_a_page_whose_block_was_reused_before_it_was_saved_is_counted():
    rig, queue = _rig(num_blocks=6, ahead=0)
    state = _compute(rig, queue, "a", CHAIN)
    _end(rig, queue, state)
    rig.plan()
    queue.take(1)
    assert rig.total("save_skipped_tokens/reused") == 4
    assert len(rig.planner.write_back) == 5


def test_a_page_under_a_hole_is_not_saved():
    rig, queue = _rig(num_blocks=12, ahead=4)
    state = _compute(rig, queue, "a", CHAIN)
    queue.give_back(state.block_ids[1:2])  # page 1 leaves the device before its descendants
    queue.take(7)
    rig.planner.write_back.count_taken(12)
    _end(rig, queue, state)
    saved = _slots_of(rig.plan())
    assert saved in ([], [state.block_ids[:1]])
    assert rig.total("save_skipped_tokens/chain_broken") > 0


def test_pages_of_a_host_that_is_full_are_tried_again():
    rig, queue = _rig(num_blocks=12, ahead=12, num_slots=6, max_pinned_share=1.0)
    _end(rig, queue, _compute(rig, queue, "a", OTHER, pin_s=10.0))
    rig.plan()
    rig.finish_saves()
    _end(rig, queue, _compute(rig, queue, "b", CHAIN))
    assert rig.plan().saves == ()
    assert not rig.planner.holds_device_blocks  # an idle engine does not step for it
    rig.now = 10.0
    rig.finish_saves()
    assert len(rig.plan().saves) == 1


def test_a_copy_that_fails_leaves_nothing_in_host():
    rig, queue = _rig(num_blocks=6, ahead=6)
    state = _compute(rig, queue, "a", CHAIN)
    _end(rig, queue, state)
    rig.plan()
    rig.finish_saves(failed=[1])
    assert rig.in_host(state) == 0
    assert rig.planner.host.slots.num_used == 0


def test_pages_computed_on_a_load_that_failed_are_not_saved():
    rig, queue = _rig(num_blocks=30, ahead=30, num_slots=32, sync_load_max_s=1.0)
    first = _compute(rig, queue, "a", CHAIN[:8])
    _end(rig, queue, first)
    rig.plan()
    rig.finish_saves()
    state = rig.request("b", [*CHAIN[:8], *OTHER])
    match = rig.match(state)
    assert (match.num_tokens, match.is_async) == (8, False)
    state.block_ids = queue.take(8)
    rig.planner.begin_load(state, 8, state.block_ids, rig.now)
    rig.planner.collect_saves(state, 32, rig.now)
    _end(rig, queue, state)
    rig.plan()
    saves_before = rig.total("saved_tokens")
    rig.finish_loads(failed=[1])
    rig.finish_saves()
    rig.planner.write_back.count_taken(30)
    rig.plan()
    rig.finish_saves()
    assert rig.total("saved_tokens") == saves_before


def test_a_reset_forgets_what_is_on_the_device():
    rig, queue = _rig(num_blocks=6, ahead=6)
    state = _compute(rig, queue, "a", CHAIN)
    rig.planner.reset("hc1-fedcba9876543210", [state])
    _end(rig, queue, state)
    assert rig.plan().saves == ()
    assert len(rig.planner.write_back) == 0


def test_a_request_that_wants_nothing_stored_leaves_nothing_to_save():
    rig, queue = _rig(num_blocks=6, ahead=6)
    _end(rig, queue, _compute(rig, queue, "a", CHAIN, may_save=False))
    assert rig.plan().saves == ()


def test_without_a_prefix_cache_pages_are_saved_at_once():
    rig = Rig(write_policy="write_back", shares_device_pages=False)
    state = rig.fill_host(CHAIN)
    assert rig.in_host(state) == 6


def test_write_back_without_the_order_of_reuse_is_refused():
    with pytest.raises(InvariantBroken, match="which blocks vLLM reuses next"):
        Rig(write_policy="write_back")


def test_storage_gets_whole_chains_ancestors_first():
    rig, queue = _rig(num_blocks=6, ahead=1, has_storage=True)
    state = _compute(rig, queue, "a", CHAIN)
    _end(rig, queue, state)
    rig.plan()
    rig.finish_saves()
    sent = [
        h for m in rig.channels.sent[0] if isinstance(m, Persist) for h in unpack_hashes(m.hashes)
    ]
    assert sent == list(state.tokens.page_hashes(6)[:6])


# Random stories ----------------------------------------------------------------------------------


class _Story:
    """Random requests on a small device. Copies run late, when their blocks may hold something
    else; whatever is in host must hold the bytes of its own tokens all the same."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        page, block = rng.choice(((4, 4), (8, 4), (4, 8), (8, 2)))
        num_blocks = rng.choice((96, 160)) // block
        self.rig, self.queue = _rig(
            num_blocks,
            rng.choice((1, 4, num_blocks // 2)),
            page=page,
            block=block,
            num_slots=rng.choice((80, 240)) // page,
        )
        self.host: dict[int, tuple] = {}
        self.cached: dict[tuple, int] = {}
        self.running: list[tuple[RequestState, int]] = []
        self.copies: deque = deque()
        self.num_requests = 0
        self.pages: dict[bytes, tuple] = {}
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        actions = (self.arrive, self.end, self.step, self.step, self.copy, self.copy)
        for _ in range(250):
            self.rng.choice(actions)()
            self.check()
        totals = self.rig.metrics.totals()
        return self.counts + Counter({k: int(v) for k, v in totals.items() if v > 0})

    def arrive(self) -> None:
        rng, rig = self.rng, self.rig
        ids = [rng.randrange(2) for _ in range(rng.choice((8, 16, 24, 40)))]
        num_blocks = len(ids) // rig.block
        hits = []
        for i in range(num_blocks):
            block_id = self.cached.get(tuple(ids[: (i + 1) * rig.block]))
            if block_id is None:
                break
            hits.append(block_id)
        free = len(self.queue.free) - sum(b in self.queue.free for b in hits)
        if free < num_blocks - len(hits):
            return
        self.queue.use(hits)
        taken = self.queue.take(num_blocks - len(hits))
        for key in [k for k, b in self.cached.items() if b in taken]:
            del self.cached[key]
        self.num_requests += 1
        tokens = Tokens(f"r{self.num_requests}", ids, rig.page)
        state = RequestState(tokens, block_ids=hits + taken)
        for i, page_hash in enumerate(tokens.page_hashes(len(ids) // rig.page)):
            self.pages[page_hash] = tuple(ids[: (i + 1) * rig.page])
        rig.planner.admit(state)
        rig.planner.collect_saves(state, num_blocks * rig.block, rig.now)
        rig.planner.write_back.count_taken(len(taken))
        self.running.append((state, num_blocks))
        self.step()  # its forward writes the blocks

    def end(self) -> None:
        if self.running:
            state, _ = self.running.pop(self.rng.randrange(len(self.running)))
            self.rig.planner.finish(state, self.rig.now)
            self.queue.give_back(state.block_ids)

    def step(self) -> None:
        plan = self.rig.plan()
        for state, num_blocks in self.running:  # the forward comes before the copies
            ids, size = state.tokens.ids, self.rig.block
            for i in range(num_blocks):
                key = tuple(ids[: (i + 1) * size])
                self.queue.contents[state.block_ids[i]] = key
                self.cached.setdefault(key, state.block_ids[i])
        self.copies += plan.saves

    def copy(self) -> None:
        if not self.copies:
            return
        op = self.copies.popleft()
        granule = min(self.rig.page, self.rig.block)
        for slot, at, block_id, within in op.copies.tolist():
            whole = self.queue.contents[block_id] or ()
            first = len(whole) - self.rig.block + within * granule
            pieces = self.host.setdefault(slot, {})
            pieces[at] = (whole[: first + granule], granule)
        self.rig.finish_saves(op.op_id)

    def check(self) -> None:
        self.rig.audit()
        size = self.rig.page
        for page in self.rig.planner.host.index.pages():
            ids = self.pages[page.page_hash]
            pieces = self.host[page.slot]
            for at, (held, granule) in pieces.items():
                expected = ids[: len(ids) - size + (at + 1) * granule]
                assert held == expected, f"slot {page.slot} holds the KV of other tokens"
            self.counts["pages looked at"] += 1


def test_whatever_is_in_host_is_right_and_has_its_ancestors_in_random_stories():
    total: Counter[str] = Counter()
    for seed in range(24):
        total += _Story(seed).run()
    assert total["saved_tokens"] > 2000
    assert total["save_skipped_tokens/reused"] > 200
    assert total["pages looked at"] > 20_000
