"""A message compiled for msgspec, which checks, reads and writes it in C: several times as fast as field by field in Python.

It handles the usual case: on the wire, every field and no unknown one; in memory, fields of the declared types, all of which msgpack
can express. The table (``tidemill.bus.wire.table``) handles the rest: it knows defaults and unknown fields and names the field that is wrong.
A test requires equal results of both.
"""

from collections.abc import Mapping
from typing import Literal

import msgpack
import msgspec

from tidemill.bus.wire.fields import FieldCodec

_UNFIT = (msgspec.MsgspecError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors after which the table handles the message itself, and gives the reason if it cannot either."""


class Compiled:
    """Encoder and decoder of one message type. ``head``: further fields on the wire, and the one value of each."""

    def __init__(self, message: type, codecs: Mapping[str, FieldCodec], head: Mapping[str, object]) -> None:
        heads = {name: Literal[value] for name, value in head.items()}
        fields = [(name, codec.wire) for name, codec in codecs.items()]
        incoming = msgspec.defstruct(message.__name__, [*heads.items(), *fields], gc=False)
        given = [(name, wire, head[name]) for name, wire in heads.items()]
        # kw_only, because the heads have defaults and stand before fields without. gc: such an object is never part of a cycle.
        self._outgoing = msgspec.defstruct(message.__name__, [*given, *fields], kw_only=True, gc=False)
        self._message = message
        self._decoder = msgspec.msgpack.Decoder(incoming, ext_hook=lambda code, data: msgpack.ExtType(code, bytes(data)))
        self._encoder = msgspec.msgpack.Encoder()
        self._packs = [(name, codec.plain or codec.pack) for name, codec in codecs.items() if codec.by_hand]
        self._unpacks = [(name, codec.unpack) for name, codec in codecs.items() if codec.by_hand]
        self._map_header = msgpack.Packer().pack_map_header(len(incoming.__struct_fields__))

    def encode(self, value: object) -> bytes | None:
        """Return the bytes; None when the table must encode it."""
        try:
            wire = msgspec.convert(value, self._outgoing, from_attributes=True)
            for name, pack in self._packs:
                setattr(wire, name, pack(getattr(wire, name)))
            return self._encoder.encode(wire)
        except _UNFIT:
            return None

    def decode(self, data: bytes) -> object:
        """Return the message; None when the table must decode it."""
        # Another number of fields: some are missing or unknown, which the table handles.
        if not data.startswith(self._map_header):
            return None
        try:
            wire = self._decoder.decode(data)
            for name, unpack in self._unpacks:
                setattr(wire, name, unpack(getattr(wire, name)))
            return msgspec.convert(wire, self._message, from_attributes=True)
        except _UNFIT:
            return None


def nested(message: type, codecs: Mapping[str, FieldCodec]) -> type:
    """Return the wire type of a message that is a field of another, without unknown fields."""
    assert not any(codec.by_hand for codec in codecs.values()), message
    return msgspec.defstruct(message.__name__, [(name, codec.wire) for name, codec in codecs.items()], forbid_unknown_fields=True, gc=False)


def pair(message: type, *fields: tuple[str, type]) -> type:
    """Return the wire type of a message that is a list of its fields."""
    return msgspec.defstruct(message.__name__, fields, array_like=True, forbid_unknown_fields=True, gc=False)
