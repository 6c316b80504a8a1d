"""What stands on the wire: messages, their bytes, what must hold for them, and the names of streams and subjects."""
