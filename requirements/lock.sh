#!/usr/bin/env bash
# Writes requirements/cpu.txt anew: every package of a CPU checkout (vLLM, tests, linters), pinned for Python 3.11.
# Needs uv, and torch's CPU wheel either in $PIP_FIND_LINKS or on PyTorch's CPU index.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -n "${PIP_FIND_LINKS:-}" ]; then
    where=(--find-links "$PIP_FIND_LINKS" --no-emit-find-links)
else
    where=(--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match --no-emit-index-url)
fi
uv pip compile --quiet --upgrade pyproject.toml --extra cpu --extra test --extra dev \
    --python-version 3.11 --overrides requirements/overrides.txt "${where[@]}" \
    --no-annotate --custom-compile-command "bash requirements/lock.sh" -o requirements/cpu.txt
