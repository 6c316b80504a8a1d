"""Every message of SAMPLES has an entry, which crosses to another process unchanged: any actor may write anything."""

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.bus_kit import make_episode, make_sample, make_turns
from tidemill.bus.errors import WireError
from tidemill.bus.wire.codec import check_sample, decode_sample, encode_sample
from tidemill.bus.wire.messages import Sample, Span
from tidemill.learner.buffer.sample_index import SampleIndex, Unusable, index_of, unusable
from tidemill.learner.feed.feed_messages import _metadata as decode_metadata
from tidemill.learner.feed.feed_messages import encode_metadata
from tidemill.learner.feed.shard_reader import FROM_READER, Rows, frame

NONE = np.zeros(0, np.float32)
LENGTH_BYTES = 4


def received(entry: SampleIndex | Unusable) -> SampleIndex | Unusable:
    """Return the entry as it comes to the feeder."""
    rows = FROM_READER.decode(frame(Rows(1, 0, [entry]))[LENGTH_BYTES:])
    assert isinstance(rows, Rows)
    return rows.entries[0]


@pytest.mark.parametrize(
    ("columns", "seconds"),
    [({}, 4.7), ({"begin_s": NONE}, 0.9), ({"seconds": NONE}, 4.0), ({"begin_s": NONE, "seconds": NONE}, 0)],
)
def test_turns_may_lack_either_column_of_times(columns: dict[str, Any], seconds: float) -> None:
    sample = decode_sample(encode_sample(make_episode(turns=make_turns(**columns))))
    check_sample(sample)
    episode = index_of(1, sample).episode
    assert episode is not None
    assert episode.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("spans", [(Span(0, 2**63), Span(1, 2**63)), (Span(0, 7),)])
def test_a_defect_is_told_whatever_its_value(spans: tuple[Span, ...]) -> None:
    """A sum of two numbers of 64 bits has 65, which msgpack does not hold."""
    sample = decode_sample(encode_sample(make_sample(spans=spans)))
    with pytest.raises(WireError) as refused:
        check_sample(sample)
    entry = received(unusable(3, refused.value, "a1"))
    assert isinstance(entry, Unusable)
    assert str(sum(span.num_tokens for span in spans)) in str(entry.error)


def test_metadata_with_lists_as_keys_reaches_the_ranks() -> None:
    fields = msgspec.msgpack.decode(encode_sample(make_sample()))
    fields["metadata"] = {"by_place": {(1, 2): 3.0}}
    sample: Sample = decode_sample(msgspec.msgpack.encode(fields))
    check_sample(sample)
    entry = index_of(1, sample, metadata=msgspec.msgpack.encode(sample.metadata))
    assert decode_metadata("batch 1", encode_metadata([entry]), 1) == (sample.metadata,)
    assert decode_metadata("batch 1", encode_metadata([index_of(1, sample)]), 1) == (sample.metadata,)
