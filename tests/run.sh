#!/usr/bin/env bash
# Run the tests: `bash tests/run.sh` before a push (under 15 minutes on 2 cores), `--full` for all
# of them, a new docs/test-report.md and README's table of models, `--again` for those that failed
# in the last full run here: the report then tells both. Sets up its own environment
# (tests/setup_env.sh). Fails on a failed test and on any skip that tests/allowed_skips.txt does not
# allow.
set -euo pipefail
case "$*" in
"") TIER=push ;;
--full) TIER=full ;;
--again) TIER=again ;;
*)
    printf 'usage: bash tests/run.sh [--full | --again]    (for a selection: pytest tests/...)\n' >&2
    exit 2
    ;;
esac
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
export HF_HUB_OFFLINE=1

UNIT_LIMIT_S=60
RESULTS=$ROOT/.cache/results
LOGS=()

# part NAME MARKERS [pytest options]: one pytest process; its status is judged at the end.
part() {
    local name=$1 markers=$2 started=$SECONDS
    shift 2
    printf '\n== %s: tests that are %s\n' "$name" "$markers"
    LOGS+=("$RESULTS/$name.jsonl")
    "$PY" -m pytest tests -q -m "$markers" --result-log "$RESULTS/$name.jsonl" \
        --durations=8 --durations-min=2 "$@" </dev/null || true
    PART_S=$((SECONDS - started))
}

if [ "$TIER" = again ]; then
    LOGS=("$RESULTS"/{units,services,engines}.jsonl)
    mapfile -t FAILED < <("$PY" tests/run_summary.py --failed "${LOGS[@]}")
    if [ "${#FAILED[@]}" -eq 0 ]; then
        printf 'nothing failed in the last full run here\n'
        exit 0
    fi
    "$PY" -m pytest -q --result-log "$RESULTS/again.jsonl" "${FAILED[@]}" </dev/null || true
    "$PY" tests/model_table.py
    exec "$PY" tests/run_summary.py --report docs/test-report.md --again "$RESULTS/again.jsonl" \
        "${LOGS[@]}"
fi
rm -rf "$RESULTS"
mkdir -p "$RESULTS"
if [ "$TIER" = push ]; then
    part units "not e2e and not services and not full" -n 2
    if [ "$PART_S" -gt "$UNIT_LIMIT_S" ]; then
        printf 'units took %d s, they should take at most %d s\n' "$PART_S" "$UNIT_LIMIT_S"
    fi
    part services "services and not e2e and not full"
    part engines "e2e and not full"
    "$PY" tests/run_summary.py "${LOGS[@]}"
else
    part units "not e2e and not services" -n 2 --hypothesis-profile=full
    part services "services and not e2e" --hypothesis-profile=full
    part engines "e2e"
    "$PY" tests/model_table.py
    "$PY" tests/run_summary.py --report docs/test-report.md "${LOGS[@]}"
fi
