#!/usr/bin/env bash
# Runs the tests part by part, cheapest first, and prints what each took. A failing part does not hide the next ones.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS failed=()
times=""
for part in unit contract numerics cluster; do
    begun=$SECONDS
    printf '\n== %s\n' "$part"
    .venv/bin/python -m pytest "tests/$part" --durations=5 "$@"
    status=$?
    ((status == 130)) && exit 130
    ((status == 0)) || failed+=("$part")
    times+=$(printf '  %-9s %4d s  %s' "$part" $((SECONDS - begun)) "$([[ $status == 0 ]] && echo ok || echo FAILED)")$'\n'
done
printf '\n%s  %-9s %4d s\n' "$times" total $((SECONDS - started))
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}"; exit 1; }
