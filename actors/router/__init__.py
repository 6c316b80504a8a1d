"""One address for many engines: chooses, proxies, retries, and keeps multi-turn clients token-exact."""
