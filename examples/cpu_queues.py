"""Import this where vLLM has more processes than the machine has cores: they nap, and do not spin.

Who reads vLLM's queues between processes spins for a second after each message. On few cores that
starves everything else on the machine, for minutes: storage, the server of a store, a shell.
"""

import time

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

NAP_S = 0.0005


def nap_or_wait(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    """Wait for a message. Naps are no longer than that: vLLM's writers leave out notices then."""
    if time.monotonic() > condition.last_read + condition.busy_loop_s:
        wait(condition, timeout_ms)
    else:
        time.sleep(NAP_S)


wait = SpinCondition.wait
if wait.__name__ != nap_or_wait.__name__:
    SpinCondition.wait = nap_or_wait
