#!/usr/bin/env bash
# Runs the tests part by part and prints what each took. A failing part does not hide the next ones.
# unit and contract mostly wait, numerics computes on one core: they run side by side; the former's output comes after.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS results=$(mktemp -d)
waiting=
trap '[[ -z $waiting ]] || kill "$waiting" 2>/dev/null; rm -rf "$results"' EXIT

part() { # NAME [pytest arguments]: leaves a line in $results/NAME
    local name=$1 begun=$SECONDS status
    shift
    printf '\n== %s\n' "$name"
    .venv/bin/python -m pytest "tests/$name" --durations=5 "$@"
    status=$?
    printf '  %-9s %4d s  %s\n' "$name" $((SECONDS - begun)) "$([[ $status == 0 ]] && echo ok || echo FAILED)" >"$results/$name"
    return $status
}

(part unit "$@"; part contract "$@") >"$results/output" 2>&1 &
waiting=$!
echo "unit and contract tests run meanwhile; their output follows that of the numerics"
part numerics "$@"
(($? == 130)) && exit 130
wait "$waiting"
waiting=
cat "$results/output"
part cluster "$@"
(($? == 130)) && exit 130

echo
cat "$results"/{unit,contract,numerics,cluster}
printf '  %-9s %4d s\n' total $((SECONDS - started))
! grep -q FAILED "$results"/{unit,contract,numerics,cluster}
