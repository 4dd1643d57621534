#!/usr/bin/env bash
# Kills parts of a running stack, one after the other, and prints how every run ended; CHAOS_LOG=FILE keeps the table.
# Runs in a mount namespace of its own: a scenario fills the storage, which therefore is a small tmpfs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
namespace=(unshare --mount)
((EUID == 0)) || namespace=(unshare --map-root-user --mount)
"${namespace[@]}" true || {
    echo "error: '${namespace[*]}' is not allowed here; run as root, or allow user namespaces" >&2
    exit 1
}
exec "${namespace[@]}" .venv/bin/python -m pytest tests/chaos --durations=0 "$@"
