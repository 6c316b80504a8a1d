#!/usr/bin/env bash
# An inference engine; it needs the model directory and the bus, and finds the rest there. Several on a machine with GPUs: name the GPU of each
# (DEVICES=2 launch/scripts/engine.sh), or start host.sh, which gives each engine its own (docs/devices.md).
set -euo pipefail
PATH="$PATH:$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin"  # the environment that make has made, where no other is active
CONFIG=${CONFIG:-digits}
BUS=${BUS:?set BUS to the URL of the bus, nats://host:port}
HOST=${HOST:-auto}   # that of the route to the bus, or the address at which actors and the learner reach this engine
tidemill prepare "$CONFIG"   # makes the small model, if the configuration asks for it and it is not there; the same seed, the same weights
exec tidemill engine --config "$CONFIG" --bus "$BUS" --id "${ID:-$(hostname)-$$}" --set engine.host="$HOST" ${DEVICES:+--set engine.devices="[$DEVICES]"}
