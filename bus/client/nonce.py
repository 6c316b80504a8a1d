"""Unique names."""

import secrets


def nonce() -> str:
    """12 hexadecimal digits: 48 bits from the operating system."""
    return secrets.token_hex(6)


def new_id(kind: str) -> str:
    """A message id for something that is written once: ``<kind>.<nonce>``."""
    return f"{kind}.{nonce()}"
