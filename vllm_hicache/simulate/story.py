"""One seed's story: an engine, its workers and its storage, and everything that befalls them."""

from collections import Counter
from collections.abc import Callable
from random import Random

from vllm_hicache.metrics import Metrics
from vllm_hicache.planner import Planner
from vllm_hicache.prefix_index import HostPage
from vllm_hicache.request_state import RequestState
from vllm_hicache.simulate.channels import VirtualChannels
from vllm_hicache.simulate.clock import Clock
from vllm_hicache.simulate.contents import Violation, namespace_of
from vllm_hicache.simulate.device_pool import DevicePool
from vllm_hicache.simulate.engine import VirtualEngine
from vllm_hicache.simulate.invariants import Invariants
from vllm_hicache.simulate.requests import Status, Tokens
from vllm_hicache.simulate.script import Script, StorageTrouble, draw_script
from vllm_hicache.simulate.storage import Stores, VirtualProcess
from vllm_hicache.simulate.truth import Truth
from vllm_hicache.simulate.workers import VirtualWorker
from vllm_hicache.storage_link import StorageLink
from vllm_hicache.tiers import Direction, SlotOwner

MAX_REQUESTS = 8
MAX_PROMPT = 60
PIN_TIMES_S = (0.0, 0.0, 0.0, 0.1)
MAX_REST_STEPS = 1_500
"""A story that has not come to rest by then hangs."""

Tell = Callable[[str], None]


class CountedMetrics(Metrics):
    """Counts also how often each counter grew: tokens and bytes say little of that."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def count(self, name: str, value: float = 1, label: str = "") -> None:
        super().count(name, value, label)
        if value:
            self._counts[f"{name}/{label}" if label else name] += 1


class Story:
    """Everything random comes from ``seed``; ``tell`` is given a line for each step.

    With a ``script``, the seed decides only what happens, not under which circumstances.
    """

    def __init__(
        self, seed: int, tell: Tell | None = None, *, script: Script | None = None
    ) -> None:
        self.rng = Random(seed)
        script = script or draw_script(self.rng)
        self.first_script = self.script = script
        self.counts: Counter[str] = Counter()
        self.clock = Clock()
        self.num_steps = 0
        self._tell = tell
        self.pool = DevicePool(script.num_blocks, script.has_prefix_cache)
        self.stores = Stores()
        self.workers = [
            VirtualWorker(worker_id, script, self.rng, self, self.counts)
            for worker_id in range(script.world_size)
        ]
        self.truth = Truth(script.page_size, min(script.page_size, script.block_size))
        self.processes: list[VirtualProcess] = []
        self.channels = self._open_storage() if script.trouble is not None else None
        link = StorageLink(self.channels, script.world_size) if self.channels else None
        self.planner = Planner(
            script.options,
            self.pool,
            CountedMetrics(self.counts),
            link=link,
            namespace=namespace_of(1),
            on_evict=self._note_eviction,
            queue=self.pool,
        )
        self.invariants = Invariants(
            self.planner, self.pool, self.workers, self.truth, self.stores, self.channels
        )
        self.engine = VirtualEngine(
            self.planner,
            self.pool,
            self.clock,
            self.rng,
            script.step_tokens,
            self.invariants,
            self.counts,
        )
        self._prefixes = [[self.rng.randrange(3) for _ in range(32)] for _ in range(3)]
        self._num_storages = 1
        self._num_ready = script.options.first_slots
        if self.channels is not None and script.has_earlier_pages:
            self._fill_store()

    # Ownership, as workers and storage check it -----------------------------------------------

    def slot_owner(self, slot: int) -> SlotOwner:
        return self.planner.host.slots.owner(slot)

    def is_held(self, block_id: int) -> bool:
        return self.pool.refs[block_id] > 0

    def is_readable_by_others(self, block_id: int) -> bool:
        return self.pool.is_readable_by_others(block_id)

    # Before ------------------------------------------------------------------------------------

    def _open_storage(self) -> VirtualChannels:
        trouble = self.script.trouble or StorageTrouble()
        for worker in self.workers:
            process = VirtualProcess(worker, self.clock, self.rng, self, self.counts)
            process.connect(self.stores, self.truth.expected, trouble)
            process.start()
            self.processes.append(process)
        return VirtualChannels(self.processes, self.rng, self.counts)

    def _fill_store(self) -> None:
        """What an earlier engine has left: the shared prefixes, with a hole here and there."""
        namespace = namespace_of(1)
        for number, prefix in enumerate(self._prefixes):
            tokens = Tokens(f"earlier-{number}", prefix, self.script.page_size)
            self.truth.tokens.append(tokens)
            for page_hash in tokens.page_hashes(tokens.num_tokens // tokens.page_size):
                for worker in self.workers:
                    if self.rng.random() < 0.97:
                        key = (namespace, page_hash, worker.worker_id)
                        self.stores.put(1, key, self.truth.expected(namespace, page_hash))

    def _note_eviction(self, page: HostPage) -> None:
        self.counts["pages left host"] += 1

    # The story ---------------------------------------------------------------------------------

    def run(self, num_steps: int) -> Counter[str]:
        """What happened, counted. The rules hold after each step, and nothing is left at rest."""
        for _ in range(num_steps):
            self.clock.advance(self.rng.choice((0.0005, 0.002, 0.01)))
            self._grow_pools()
            self._act()
            self._check()
        self._come_to_rest()
        self.invariants.check_ledger(self.engine.num_local_tokens, self.engine.num_landed_tokens)
        return self._summary()

    def _grow_pools(self) -> None:
        if self.script.growth is not None:
            for worker in self.workers:
                worker.grow()

    def _check(self) -> None:
        self.num_steps += 1
        num_ready = self.planner.host.slots.num_ready
        self.counts["host slots ready"] += num_ready > self._num_ready
        self._num_ready = num_ready
        self.invariants.check_step()
        self.invariants.check_fetches(r.state for r in self.engine.requests.values())

    def _say(self, what: str) -> None:
        if self._tell is not None:
            self._tell(f"{self.num_steps:5d} {self.clock.now:9.4f} s  {what}")

    def _act(self) -> None:
        chance = self.rng.random()
        script = self.script
        rare = (
            (script.reset_rate * (20 if self.planner.loads.num_running else 1), self._reset),
            (script.loss_rate, self._lose_objects),
            (script.switch_rate, self._switch_storage),
            (0.03, self._abort),
            (0.08, self._lose_blocks),
            (0.16, self._arrive_together),
            (0.25, self._tick_storage),
            (0.15, self._copy),
        )
        for share, action in rare:
            if chance < share:
                action()
                return
            chance -= share
        self._step()

    # Requests ----------------------------------------------------------------------------------

    def _arrive_together(self) -> None:
        room = MAX_REQUESTS - len(self.engine.requests)
        prefix = self.rng.choice(self._prefixes)
        for _ in range(min(room, self.rng.choice((1, 1, 2, 3)))):
            self._arrive(prefix)
        if room <= 0:
            self._step()

    def _arrive(self, prefix: list[int]) -> None:
        rng = self.rng
        known = self.truth.tokens
        # Prompts grow, so that host has the beginning of what storage has.
        ids = prefix[: min(rng.choice((4, 8, 12, 16, 20, 24, 32, 32)), 8 + 2 * len(known))]
        ids = ids + [rng.randrange(3) for _ in range(rng.choice((1, 2, 5, 9, 20)))]
        if known and rng.random() < 0.4:
            ids = rng.choice(known).ids[:]
            ids += [rng.randrange(3) for _ in range(rng.choice((0, 1, 4)))]
        tokens = Tokens(f"r{len(known)}", ids[:MAX_PROMPT], self.script.page_size)
        known.append(tokens)
        state = RequestState(tokens, priority=rng.choice((0, 0, 1)))
        state.pin_s = rng.choice(PIN_TIMES_S)
        state.tenant = rng.choice(("", "", "one", "other"))
        hint = rng.random()
        if hint < 0.06:
            state.may_load, state.why_not = False, "skip_reading"
        elif hint < 0.12:
            state.may_load, state.why_not = False, "not_wanted"
        elif hint < 0.16:
            state.may_save = False
        self._say(f"{tokens.request_id} arrives with {tokens.num_tokens} tokens")
        self.engine.add(tokens, rng.choice((1, 2, 6, 12)), state)

    def _abort(self) -> None:
        live = self.engine.live
        if live:
            loading = [request for request in live if request.status is Status.LOADING]
            refused = [
                request
                for request in live
                if request.status is Status.WAITING and request.offered_end
            ]
            request = self.rng.choice(self.rng.choice([loading, refused]) or loading or live)
            self._say(f"{request.request_id} is aborted while {request.status.value}")
            self.engine.abort(request)

    # Trouble -----------------------------------------------------------------------------------

    def _reset(self) -> None:
        preempts = self.rng.random() < 0.5
        keeps = self.rng.random() < 0.3
        planner = self.planner
        self.counts["reset under copies"] += planner.saves.num_running + planner.loads.num_running
        self._say(f"reset, preempts={preempts}, keeps its namespace={keeps}")
        self.engine.reset(preempts=preempts, keeps_namespace=keeps)

    def _lose_blocks(self) -> None:
        """As if other requests had needed the device's blocks."""
        num_lost = self.pool.lose_cached(self.rng, self.rng.choice((0.3, 1.0)))
        self.counts["cached blocks lost"] += num_lost
        self._say(f"the device loses {num_lost} cached blocks")

    def _lose_objects(self) -> None:
        if self.processes:
            number = self.rng.choice(self.processes).attachment
            num_lost = self.stores.lose(number, self.rng)
            self.counts["objects lost"] += num_lost
            self._say(f"storage {number} loses {num_lost} objects")

    def _switch_storage(self) -> None:
        """All workers get another storage, or none, each process in its own time."""
        if not self.processes:
            return
        self._num_storages += 1
        number = 0 if self.rng.random() < 0.3 else self._num_storages
        if number and self.rng.random() < 0.5:
            self.stores.objects[number] = dict(self.stores.objects[1])
            self.stores.ever[number] = set(self.stores.objects[number])
        self.counts["storage detached" if not number else "storage attached"] += 1
        self._say(f"storage is changed to {number}")
        for process in self.processes:
            process.switch(number)

    # Time and chance ---------------------------------------------------------------------------

    def _burst(self, most: int) -> int:
        """How many things happen at once: more where there are more workers."""
        return self.rng.randint(1, most * self.script.world_size)

    def _tick_storage(self) -> None:
        if not self.processes:
            self._step()
            return
        self._say("storage works")
        for _ in range(self._burst(8)):
            self.rng.choice(self.processes).tick()
        if self.rng.random() < 0.3:
            self.planner.settle_storage(self.clock.now)

    def _copy(self) -> None:
        busy = [worker for worker in self.workers if worker.has_copies]
        if not busy:
            self._step()
            return
        self._say("copies go on")
        for _ in range(self._burst(3)):
            worker = self.rng.choice(busy)
            if not self._is_held_up(worker):
                worker.copy_next(self.rng.choice((Direction.SAVE, Direction.LOAD)))

    def _is_held_up(self, worker: VirtualWorker) -> bool:
        is_slow = worker.worker_id == self.script.slow_worker and self.rng.random() < 0.8
        self.counts["worker held up"] += is_slow
        return is_slow

    def _step(self) -> None:
        """The next things that a pipeline of workers can do, in any order that is allowed."""
        for _ in range(self.rng.choice((1, 2, 4, 8))):
            self._move()

    def _move(self) -> None:
        engine = self.engine
        able = [worker for worker in self.workers if worker.steps]
        choices: list[Callable[[], None]] = [lambda: self._run_workers(able)] * min(len(able), 4)
        if engine.steps and engine.steps[0].num_runs == self.script.world_size:
            choices += [self._finish_step] * 2
        if len(engine.steps) < self.script.depth and engine.has_work:
            choices.append(self._schedule)
        if choices:
            self.rng.choice(choices)()

    def _run_workers(self, able: list[VirtualWorker]) -> None:
        for worker in self.rng.sample(able, self.rng.randint(1, len(able))):
            if not self._is_held_up(worker):
                self._say(f"worker {worker.worker_id} runs step {worker.steps[0].plan.number}")
                worker.run_step()

    def _schedule(self) -> None:
        step = self.engine.schedule()
        self.counts["steps scheduled"] += 1
        plan = step.plan
        self._say(
            f"step {plan.number}: {[(i.request.request_id, i.num_tokens) for i in step.items]}, "
            f"loads {[op.op_id for op in (*plan.sync_loads, *plan.loads)]}, "
            f"saves {[op.op_id for op in plan.saves]}, failed {list(plan.failed_requests)}"
        )
        for worker in self.workers:
            worker.steps.append(step)

    def _finish_step(self) -> None:
        self._say(f"output of step {self.engine.steps[0].plan.number}")
        self.engine.finish_step(self._report)

    def _report(self) -> None:
        done = [worker.num_done for worker in self.workers]
        self.counts["surplus of a fast worker"] += min(done) < max(done)
        for worker in self.workers:
            if self.rng.random() < self.script.dropped_report:
                self.counts["report dropped"] += 1
                continue
            if self.rng.random() < self.script.late_report:
                self.counts["report late"] += 1
                self.planner.join.update(worker.worker_id, worker.late_progress())
            self.planner.join.update(worker.worker_id, worker.progress())
        self.planner.costs.prefilled(self.rng.choice((8, 256)), self.script.prefill_s)

    # The end -----------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        """Every request ends and storage comes to rest, then nothing may be left."""
        self.script = self.script.calm()
        for process in self.processes:
            process.trouble = self.script.trouble or StorageTrouble()
        for _ in range(MAX_REST_STEPS):
            self.clock.advance(0.02)
            self._grow_pools()
            self._step()
            self._copy()
            self._tick_storage()
            self._check()
            if self._is_quiet():
                break
        else:
            raise Violation(f"no rest: {self._what_runs()}")
        self.invariants.check_all(is_idle=True)
        self._check_rest()

    def _is_quiet(self) -> bool:
        planner = self.planner
        if self.engine.has_work or not all(worker.is_quiet for worker in self.workers):
            return False
        planner.settle_storage(self.clock.now)
        if planner.persists is None or planner.prefetcher is None:
            return True
        return not (planner.persists.num_running or planner.prefetcher.num_reading)

    def _what_runs(self) -> str:
        planner = self.planner
        parts = [
            f"requests {[(r.request_id, r.status.value) for r in self.engine.requests.values()]}",
            f"{planner.saves.num_running} saves and {planner.loads.num_running} loads run",
        ]
        if planner.persists is not None and planner.prefetcher is not None:
            parts += [
                f"{planner.persists.num_running} persists and "
                f"{planner.prefetcher.num_reading} fetches run"
            ]
        return ", ".join(parts)

    def _check_rest(self) -> None:
        host = self.planner.host
        self.clock.advance(2 * max(PIN_TIMES_S))
        self.planner.settle_copies(self.clock.now)
        if host.num_pinned:
            raise Violation(f"{host.num_pinned} pages are pinned at rest")
        if host.slots.num_used != len(host.index):
            raise Violation(f"{host.slots.num_used} slots in use, {len(host.index)} pages in host")
        if self.pool.num_free != len(self.pool.refs):
            raise Violation(f"{self.pool.num_free} device blocks of {len(self.pool.refs)} are free")

    def _summary(self) -> Counter[str]:
        counts = self.counts
        counts["blocks reused"] += self.pool.num_reused
        return +counts
