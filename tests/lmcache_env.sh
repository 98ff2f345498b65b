#!/usr/bin/env bash
# Makes an environment with LMCache and this checkout, without vLLM, and prints its interpreter:
# `bash tests/lmcache_env.sh` (.cache/lmcache). A second run with nothing changed installs nothing.
# LMCache's own requirements bring CUDA builds of torch and cupy; its CPU tests need neither.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.cache/lmcache
PYTHON=${PYTHON:-python3.11}
TORCH=$(grep '^torch==' "$ROOT/requirements/cpu.txt")

if [ -n "${PIP_FIND_LINKS:-}" ]; then
    where=(--find-links "$PIP_FIND_LINKS")
else
    where=(--extra-index-url https://download.pytorch.org/whl/cpu)
    where+=(--index-strategy unsafe-best-match)
fi

mkdir -p "$ROOT/.cache"
exec 9>"$VENV.lock"
flock 9
# What decides on packages: our requirements (all of pyproject.toml before its tools) and this.
requirements=$(sed '/^\[tool/,$d' "$ROOT/pyproject.toml")
digest=$(cat "${BASH_SOURCE[0]}" <(echo "$requirements $TORCH $ROOT") | sha256sum)
if [ "$(cat "$VENV/.hicache-setup" 2>/dev/null)" != "$digest" ]; then
    {
        "$PYTHON" -m venv --clear "$VENV"
        "$VENV/bin/python" -m pip install uv
        printf '%s\n' "$TORCH" >"$VENV/overrides.txt"
        for package in cupy-cuda13x cuda-python cufile-python; do
            printf "%s ; sys_platform == 'never'\n" "$package" >>"$VENV/overrides.txt"
        done
        "$VENV/bin/uv" pip install --python "$VENV/bin/python" "${where[@]}" \
            --overrides "$VENV/overrides.txt" -e "$ROOT[lmcache,redis,s3]"
    } >"$VENV.log" 2>&1 || {
        tail -n 15 "$VENV.log" >&2
        exit 1
    }
    printf '%s\n' "$digest" >"$VENV/.hicache-setup"
fi
printf '%s\n' "$VENV/bin/python"
