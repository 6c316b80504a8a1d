#!/usr/bin/env bash
# The learner: a feeder and its ranks on this machine. Stopped and started again, it goes on from its checkpoint.
# The ranks get the first GPUs, or those that DEVICES names: DEVICES=4,5 (docs/devices.md).
set -euo pipefail
PATH="$PATH:$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin"  # the environment that make has made, where no other is active
CONFIG=${CONFIG:-digits}
BUS=${BUS:?set BUS to the URL of the bus, nats://host:port}
HOST=${HOST:-auto}   # that of the route to the bus, or the address at which engines reach this machine for weights and snapshots
tidemill prepare "$CONFIG"   # makes the small model and the prompts, if the configuration asks for it and they are not there
exec tidemill learner --config "$CONFIG" --bus "$BUS" --set weights.host="$HOST" ${DEVICES:+--set learner.devices="[$DEVICES]"}
