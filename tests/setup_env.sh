# Source this from a script of the checkout. It makes the virtual environment once and sets
#   PY       its interpreter, with vLLM, this project (editable), pytest and the linters
#   FLAVOUR  cuda where nvidia-smi shows a GPU, else cpu
# Settings, all optional: VENV (folder, default .venv), PYTHON (the interpreter to make it with),
# FLAVOUR, NO_INSTALL=1 (take VENV as it is). A second run with nothing changed installs nothing.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$(realpath -m "${VENV:-$ROOT/.venv}")
PY=$VENV/bin/python
SETUP_LOG=$ROOT/.cache/setup.log
PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

if [ -z "${FLAVOUR:-}" ]; then
    if nvidia-smi -L 2>/dev/null | grep -q GPU; then FLAVOUR=cuda; else FLAVOUR=cpu; fi
fi

setup_fail() {
    [ -s "$SETUP_LOG" ] && tail -n 15 "$SETUP_LOG" >&2
    printf '\nset-up failed: %s\n' "$*" >&2
    exit 1
}

setup_base_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python3.12}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

# Everything that decides what is installed.
setup_digest() {
    printf '%s ' "$FLAVOUR" "$ROOT"
    cat "$ROOT/pyproject.toml" "$ROOT/requirements/cpu.txt" "${BASH_SOURCE[0]}" | sha256sum
}

# Add packages with uv, which is three times as fast; with pip where uv is missing or fails,
# since uv knows nothing of pip's configuration (mirrors, certificates, find-links).
setup_add() {
    local links=()
    [ -n "${PIP_FIND_LINKS:-}" ] && links=(--find-links "$PIP_FIND_LINKS")
    if [ -x "$VENV/bin/uv" ]; then
        "$VENV/bin/uv" pip install --python "$PY" --compile-bytecode "${links[@]}" "$@" \
            >>"$SETUP_LOG" 2>&1 && return
    fi
    "$PY" -m pip install "$@" >>"$SETUP_LOG" 2>&1
}

# vLLM's CPU wheel wants a torch that PyPI cannot hold. The lock leaves out torchvision and its
# like (PyPI has only their CUDA builds), so nothing here may resolve dependencies by itself.
setup_add_cpu() {
    local torch
    torch=$(grep '^torch==' "$ROOT/requirements/cpu.txt")
    setup_add --no-deps "$torch" ||
        setup_add --no-deps --index-url "$PYTORCH_CPU_INDEX" "$torch" ||
        setup_fail "no $torch for $("$PY" -V), neither in pip's own sources nor on PyTorch's CPU" \
            "index. The lock is made for Python 3.11: PYTHON=python3.11 bash ..."
    setup_add --no-deps -r "$ROOT/requirements/cpu.txt" &&
        setup_add --no-deps --no-build-isolation -e "$ROOT"
}

setup_venv() {
    local base digest
    digest=$(setup_digest)
    [ "$(cat "$VENV/.hicache-setup" 2>/dev/null)" = "$digest" ] && "$PY" -c '' 2>/dev/null && return
    : >"$SETUP_LOG"
    base=$(setup_base_python) || setup_fail "Python 3.11 or later is needed: PYTHON=... bash ..."
    printf 'setting up %s with %s (%s); log: %s\n' "$VENV" "$("$base" -V)" "$FLAVOUR" "$SETUP_LOG"
    rm -f "$VENV/.hicache-setup"
    if ! "$PY" -m pip --version >/dev/null 2>&1 ||
        [ "$(cat "$VENV/.hicache-flavour" 2>/dev/null)" != "$FLAVOUR" ]; then
        "$base" -m venv --clear "$VENV" >>"$SETUP_LOG" 2>&1 ||
            setup_fail "$base cannot make virtual environments (Debian: install python3-venv)"
        printf '%s\n' "$FLAVOUR" >"$VENV/.hicache-flavour"
    fi
    "$PY" -m pip install uv >>"$SETUP_LOG" 2>&1 || printf 'no uv to be had; pip takes longer\n'
    if [ "$FLAVOUR" = cpu ]; then
        setup_add_cpu || setup_fail "packages could not be installed"
    else
        setup_add -e "$ROOT[cuda,test,dev]" || setup_fail "packages could not be installed"
    fi
    printf '%s\n' "$digest" >"$VENV/.hicache-setup"
}

mkdir -p "$ROOT/.cache"
if [ -z "${NO_INSTALL:-}" ]; then
    exec 9>"$ROOT/.cache/setup.lock"
    flock 9
    setup_venv
    exec 9>&-
fi

# Without PYTHONSAFEPATH, python run in the checkout would take kernels/ for another distribution.
export PYTHONSAFEPATH=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$ROOT/.cache/vllm}
if [ "$FLAVOUR" = cpu ]; then
    export TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
fi
