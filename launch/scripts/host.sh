#!/usr/bin/env bash
# Engines and actors of this machine, as many as `tidemill scale` says. It needs nothing but the bus; start it on every machine that shall work.
set -euo pipefail
PATH="$PATH:$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin"  # the environment that make has made, where no other is active
BUS=${BUS:?set BUS to the URL of the bus, nats://host:port}
exec tidemill host --bus "$BUS" ${RUN:+--run "$RUN"} ${POOL:+--pool "$POOL"} "$@"  # e.g. actors=4 engines=1 for exactly these
