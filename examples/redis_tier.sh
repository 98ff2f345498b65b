#!/usr/bin/env bash
# A conversation that outlives host memory, and its Redis: `bash examples/redis_tier.sh`.
# Serves with Redis (Valkey) behind host memory and holds a two-turn chat. Then empties device and host
# memory: the answer comes from Redis, whose TTLs are shown. Then Redis is killed and both are emptied
# again: the answer is computed, the same, and no later than the deadline for a fetch allows.
# Exit status 1: an expected hit is missing, an answer differs, or the dead Redis is waited for.
# Settings, all optional: REDIS_URL (a server of yours, which is not killed; without it one is started
# here), and those of quickstart.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

DEADLINE_S=3
[ -n "${REDIS_URL:-}" ] || start_service redis
KEY_PREFIX=hicache-example:$(basename "$WORK"):
export HICACHE_STORAGE_URL=$REDIS_URL # a password in it stays out of the command line

use_connector '{
    "host_memory": "'${HOST_MEMORY:-256MiB}'",
    "storage": {"key_prefix": "'$KEY_PREFIX'", "ttl_s": "10min", "exists_timeout_s": 2},
    "fixed_weights": true,
    "page_size": 64,
    "skip_slow_loads": false,
    "min_object_bytes": 1,
    "prefetch_timeout_base_s": '$DEADLINE_S',
    "prefetch_timeout_per_1k_tokens_s": 0
}'

chat() {
    "$PY" "$ROOT/examples/tier_chat.py" --url "$URL" --notes "$WORK/notes.json" "$@"
}

start_server "an empty Redis"
chat --warm-up --name "turn 1" --expect none say
chat --name "turn 2, contains turn 1" --expect device say
chat drop
chat --name "turn 2, device and host emptied" --expect disk again
"$PY" "$ROOT/examples/redis_ttl.py" "$KEY_PREFIX" >"$WORK/ttl"
if [ -n "$SERVICE" ]; then
    stop_service
    chat drop
    chat --name "turn 2, Redis killed, emptied" --expect none --deadline-s "$DEADLINE_S" again
fi
stop_server
printf '\n'
chat --storage Redis --within "${LOGPROB_TOLERANCE:-0.1}" table
cat "$WORK/ttl"
