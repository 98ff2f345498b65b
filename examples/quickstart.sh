#!/usr/bin/env bash
# From a fresh checkout to a restored answer: `bash examples/quickstart.sh`.
# Makes a virtual environment, writes a tiny model, serves it with HiCacheConnector and file storage,
# holds a two-turn chat, drops vLLM's prefix cache and repeats (host restore), restarts the server
# and repeats (file restore), and prints where every cached token came from.
# Exit status 1: a restored answer differs or an expected hit is missing.
# Settings, all optional: MODEL (a real model, folder or hub name), SERVE_ARGS (more options for
# vLLM), HOST_MEMORY, START_TIMEOUT_S, and those of tests/setup_env.sh.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../tests/setup_env.sh"

WORK=$(mktemp -d)
LOG=$WORK/server.log
SERVER=

fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

stop_server() {
    [ -n "$SERVER" ] || return 0
    kill -TERM "$SERVER" 2>/dev/null || true
    for _ in $(seq 150); do
        kill -0 "$SERVER" 2>/dev/null || break
        sleep 0.2
    done
    kill -KILL -- "-$SERVER" 2>/dev/null || true # the whole process group
    wait "$SERVER" 2>/dev/null || true
    SERVER=
}

clean_up() {
    local status=$?
    trap - EXIT
    if [ "$status" -ne 0 ] && [ -s "$LOG" ]; then
        printf '\nfrom the server log:\n' >&2
        grep -E "[A-Za-z](Error|Exception): |HiCache: " "$LOG" | head -n 30 >&2 || true
        [ -z "$SERVER" ] || tail -n 15 "$LOG" >&2
    fi
    stop_server
    # The storage process finishes its queued writes before it goes.
    for _ in $(seq 40); do
        rm -rf "$WORK" 2>/dev/null && break
        sleep 0.25
    done
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [ -n "${MODEL:-}" ]; then
    MODEL_ARGS=(--max-model-len 8192)
else
    MODEL=$WORK/tiny-llama
    "$PY" "$ROOT/examples/tiny_model.py" "$MODEL"
    MODEL_ARGS=(--max-model-len 8192 --dtype float32 --block-size 32 --kv-cache-memory-bytes 67108864)
    export HF_HUB_OFFLINE=1
fi
[ "$FLAVOUR" = cpu ] && MODEL_ARGS+=(--enforce-eager)

# The vllm command of the CPU wheel cannot start: it looks for a distribution named vllm.
if "$PY" -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
    SERVE=("$VENV/bin/vllm" serve "$MODEL")
else
    SERVE=("$PY" -P -m vllm.entrypoints.openai.api_server --model "$MODEL")
fi

PORT=$("$PY" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
URL=http://127.0.0.1:$PORT
CONNECTOR='{
    "kv_connector": "HiCacheConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "host_memory": "'${HOST_MEMORY:-512MiB}'",
        "storage": "file://'$WORK/storage'",
        "page_size": 64,
        "min_object_bytes": 1,
        "prefetch_policy": "wait_complete"
    }
}'
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
export VLLM_SERVER_DEV_MODE=1 # for /reset_prefix_cache

start_server() {
    printf 'starting the server (%s)\n' "$1"
    setsid "${SERVE[@]}" --host 127.0.0.1 --port "$PORT" "${MODEL_ARGS[@]}" \
        --enable-prompt-tokens-details --kv-transfer-config "$CONNECTOR" ${SERVE_ARGS:-} \
        >>"$LOG" 2>&1 </dev/null &
    SERVER=$!
    local deadline=$((SECONDS + ${START_TIMEOUT_S:-600}))
    until is_healthy; do
        if ! kill -0 "$SERVER" 2>/dev/null; then
            local status=0
            wait "$SERVER" || status=$?
            fail "the server ended with status $status before it was ready"
        fi
        [ "$SECONDS" -lt "$deadline" ] || fail "the server was not ready in ${START_TIMEOUT_S:-600} s"
        sleep 0.5
    done
}

is_healthy() {
    "$PY" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' \
        "$URL/health" 2>/dev/null
}

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
