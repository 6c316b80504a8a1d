#!/usr/bin/env bash
# A rollout worker: takes prompts, asks engines, scores, sends samples. It needs nothing but the bus; start and stop it when you like.
set -euo pipefail
BUS=${BUS:?set BUS to the URL of the bus, nats://host:port}
exec tidemill actor --bus "$BUS" ${RUN:+--run "$RUN"} --id "${ID:-$(hostname)-$$}"  # RUN: only where the bus carries several
