#!/usr/bin/env bash
# One conversation moves over engines of different topologies: `bash examples/s3_shared_cache.sh`.
# Every turn is asked of a fresh `vllm serve`; what the engines share is one S3 bucket. Each but the
# first finds the conversation there, in its very first request. Prints where every cached token came
# from, and whether the answer is that of the same engine without any cache.
# Exit status 1: an expected hit is missing or an answer differs.
# Settings, all optional: S3_URL (s3://BUCKET/PREFIX?endpoint_url=..., with credentials as AWS clients
# find them; without it SeaweedFS is started here), TOPOLOGIES (each TPxPP; default "2x1 2x2 2x1"),
# and those of quickstart.sh. With GPUs each engine needs TP times PP of them (FLAVOUR=cpu: none).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

TOPOLOGIES=${TOPOLOGIES:-2x1 2x2 2x1}
# The fleet: engines of these parallel sizes read one another's objects.
fleet_sizes() {
    printf '%s\n' $TOPOLOGIES | cut -d x -f "$1" | sort -nu | paste -sd ,
}
if [ "$FLAVOUR" = cuda ]; then
    GPUS=$(nvidia-smi -L | grep -c GPU)
    for topology in $TOPOLOGIES; do
        [ $((${topology%x*} * ${topology#*x})) -le "$GPUS" ] ||
            fail "$topology does not fit $GPUS GPUs: choose TOPOLOGIES='2x1 1x2 2x1', or FLAVOUR=cpu"
    done
fi

[ -n "${S3_URL:-}" ] || start_service s3
RUN=$(basename "$WORK")
PLACE=${S3_URL%%\?*}
STORAGE_URL=${PLACE%/}/$RUN${S3_URL#"$PLACE"}

use_connector '{
    "host_memory": "'${HOST_MEMORY:-256MiB}'",
    "storage": {"url": "'$STORAGE_URL'", "exists_timeout_s": 10, "operation_timeout_s": 60,
                "shutdown_grace_s": 30},
    "fleet": {"tp": ['$(fleet_sizes 1)'], "pp": ['$(fleet_sizes 2)']},
    "page_size": 64,
    "skip_slow_loads": false,
    "min_object_bytes": 1,
    "prefetch_policy": "wait_complete"
}'

chat() {
    "$PY" "$ROOT/examples/tier_chat.py" --url "$URL" --notes "$WORK/notes.json" --label "$RUN" "$@"
}

number=0
for topology in $TOPOLOGIES; do
    tp=${topology%x*} pp=${topology#*x} number=$((number + 1))
    options=(--tensor-parallel-size "$tp" --pipeline-parallel-size "$pp")
    if [ "$FLAVOUR" = cpu ] && [ "$pp" -gt 1 ]; then
        options+=(--worker-cls cpu_pipeline_worker.Worker)
    fi
    start_server "TP$tp/PP$pp" "${options[@]}"
    [ "$number" -eq 1 ] && expected=none || expected=disk
    chat --name "turn $number" --engine "TP$tp/PP$pp" --expect "$expected" say
    stop_server
done
printf '\n'
chat --storage S3 --within "${LOGPROB_TOLERANCE:-0.1}" table
[ -n "$SERVICE" ] || printf '\nthe objects were left at %s\n' "${PLACE%/}/$RUN"
