"""Unique names."""

import secrets


def nonce() -> str:
    """Return 12 hexadecimal digits: 48 bits from the operating system."""
    return secrets.token_hex(6)


def new_id(kind: str) -> str:
    """Return the id of a message that is written once: ``<kind>.<nonce>``."""
    return f"{kind}.{nonce()}"
