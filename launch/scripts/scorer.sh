#!/usr/bin/env bash
# Computes rewards for the actors of a run with actor.scorers.enabled. It needs nothing but the bus; start and stop it when you like.
set -euo pipefail
PATH="$PATH:$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin"  # the environment that make has made, where no other is active
BUS=${BUS:?set BUS to the URL of the bus, nats://host:port}
exec tidemill scorer --bus "$BUS" ${RUN:+--run "$RUN"} --id "${ID:-$(hostname)-$$}" --host "${HOST:-auto}"  # RUN: only where the bus carries several
