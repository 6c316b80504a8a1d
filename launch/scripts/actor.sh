#!/usr/bin/env bash
# A rollout worker: takes prompts, asks engines, scores, sends samples. It needs nothing but the bus; start and stop it when you like.
set -euo pipefail
PATH="$PATH:$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin"  # the environment that make has made, where no other is active
BUS=${BUS:?set BUS to the URL of the bus, nats://host:port}
exec tidemill actor --bus "$BUS" ${RUN:+--run "$RUN"} --id "${ID:-$(hostname)-$$}"  # RUN: only where the bus carries several
