"""SGLang as an engine: a server, and a proxy in front of it with the built-in engine's HTTP API."""
