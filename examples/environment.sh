# Source this from an example of the checkout. It makes the virtual environment once (see
# tests/setup_env.sh, which sets PY, ROOT, FLAVOUR and VENV), a folder WORK that goes at exit with all
# that was started, and the tiny model unless MODEL names another. It gives
#   use_connector OPTIONS                  what the connector is told, as JSON
#   start_server LABEL [options of vLLM]   returns when the server at URL is healthy
#   stop_server                            SIGTERM, and waits
#   start_service s3|redis                 a local server out of a wheel; exports where it is
#   stop_service                           kills it
#   fail MESSAGE
# shellcheck shell=bash
. "$(dirname "${BASH_SOURCE[0]}")/../tests/setup_env.sh"

WORK=$(mktemp -d)
LOG=$WORK/server.log
SERVER=
SERVICE=

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

stop_service() {
    [ -n "$SERVICE" ] || return 0
    kill -TERM "$SERVICE" 2>/dev/null || true
    wait "$SERVICE" 2>/dev/null || true
    SERVICE=
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
    stop_service
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
if [ "$FLAVOUR" = cpu ]; then
    MODEL_ARGS+=(--enforce-eager)
    SERVE=("$PY" -P "$ROOT/examples/cpu_server.py" --model "$MODEL")
else
    SERVE=("$VENV/bin/vllm" serve "$MODEL")
fi

PORT=$("$PY" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
URL=http://127.0.0.1:$PORT
export NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
export VLLM_SERVER_DEV_MODE=1 # for /reset_prefix_cache
# For what the examples share: with PYTHONSAFEPATH a script does not see the folder it lies in.
export PYTHONPATH=$ROOT/examples${PYTHONPATH:+:$PYTHONPATH}

use_connector() {
    CONNECTOR='{
    "kv_connector": "HiCacheConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": '$1'
}'
}

start_server() {
    printf 'starting the server (%s)\n' "$1"
    setsid "${SERVE[@]}" --host 127.0.0.1 --port "$PORT" "${MODEL_ARGS[@]}" "${@:2}" \
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
    (: <"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null && # nothing listens for most of the time
        "$PY" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' \
            "$URL/health" 2>/dev/null
}

start_service() {
    local said=$WORK/$1.sh
    setsid "$PY" "$ROOT/examples/local_server.py" "$1" "$WORK/$1" >"$said" 2>>"$LOG" </dev/null &
    SERVICE=$!
    until [ -s "$said" ]; do
        kill -0 "$SERVICE" 2>/dev/null || fail "the $1 server did not start"
        sleep 0.1
    done
    . "$said"
}
