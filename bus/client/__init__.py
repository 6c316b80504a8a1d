"""The connection to NATS: publishing until stored, reading without a gap, key-value rows, fenced writes."""
