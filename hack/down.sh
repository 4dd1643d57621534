#!/usr/bin/env bash
# Stops the stack of `make up`, and the demo's where a demo was killed before it could clean up.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
state=${LORAFLEET_STATE_DIR:-.lorafleet}
for folder in "$state" "$state/demo"; do
    if [[ -f $folder/state.json ]]; then .venv/bin/lorafleet-local down --state-dir "$folder"; fi
done
