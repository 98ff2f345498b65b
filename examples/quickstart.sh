#!/usr/bin/env bash
# From a fresh checkout to a restored answer: `bash examples/quickstart.sh`.
# Makes a virtual environment, writes a tiny model, serves it with HiCacheConnector and file storage,
# holds a two-turn chat, drops vLLM's prefix cache and repeats (host restore), restarts the server
# and repeats (file restore), and prints where every cached token came from.
# Exit status 1: a restored answer differs or an expected hit is missing.
# Settings, all optional: MODEL (a real model, folder or hub name), SERVE_ARGS (more options for
# vLLM), HOST_MEMORY, START_TIMEOUT_S, and those of tests/setup_env.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

use_connector '{
    "host_memory": "'${HOST_MEMORY:-512MiB}'",
    "storage": {"url": "file://'$WORK/storage'", "exists_timeout_s": 10, "operation_timeout_s": 60,
                "shutdown_grace_s": 30},
    "page_size": 64,
    "skip_slow_loads": false,
    "min_object_bytes": 1,
    "prefetch_policy": "wait_complete"
}'

chat() {
    "$PY" "$ROOT/examples/quickstart_chat.py" --url "$URL" --notes "$WORK/notes.json" "$@"
}

start_server "empty caches"
chat first
chat reset
chat again host
stop_server
start_server "only the files are left"
chat again disk
stop_server
printf '\n'
chat table
