#!/usr/bin/env bash
# The bus of a run: one nats-server. Copy this file, change the first lines, start it on the machine that the others can reach.
# A NATS server (or cluster) that you have already is as good: give its URL to the other scripts and leave this one out.
set -euo pipefail
PATH="$PATH:$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin"  # the environment that make has made, where no other is active
CONFIG=${CONFIG:-digits}
HOST=${HOST:-127.0.0.1}      # address to listen on; anything else than loopback needs a network you trust
PORT=${PORT:-4222}
exec tidemill bus --config "$CONFIG" --set bus.host="$HOST" --set bus.port="$PORT"
