"""How the feeder reads samples. Knows no socket."""

import msgspec

from tidemill.bus.wire.routed_experts import RoutedShape


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How samples are checked, and what of them the feeder gets."""

    vocab_size: int | None = None
    """Number of token ids of the model; None = not known."""
    routed: RoutedShape | None = None
    """Sizes of the model's routing; None = no experts are replayed."""
    with_data: bool = False
    """True if the feeder itself reads the tokens of samples, as filters do."""
    with_metadata: bool = False
    """True if ranks may ask for the metadata of samples."""
