"""The streams, consumers and buckets of a run, created once and read back: older servers drop unknown settings."""

import logging
from collections.abc import Iterator
from contextlib import suppress

from tidemill.bus.client.jetstream import JetStream
from tidemill.bus.config import BusConfig
from tidemill.bus.errors import BusError, ConfigMismatch, NoRoom, NotFound, Refused
from tidemill.bus.wire import subjects
from tidemill.bus.wire.json_object import JsonObject
from tidemill.bus.wire.subjects import Shards

_log = logging.getLogger(__name__)

_NS = 1_000_000_000
_ALREADY_IN_USE = (10058, 10148, 10013, 10105)
_NO_STORAGE = 10047  # A stream's ``max_bytes`` is reserved when it is created, and the server has no such room left
_ROW_DUPLICATE_WINDOW_S = 120
# Settings with another value in older releases, which affect stored messages; and the bound of a stream for viewers
_CHANGED_IN_PLACE, _OF_TRAINED = ("allow_rollup_hdrs",), ("max_bytes",)
_MAX_WAITING = 16_384  # Limit of pull requests that wait at one consumer: one for every free slot of every actor


async def create_layout(jet: JetStream) -> None:
    """Create missing streams and consumers; compare every setting with the server's.

    Raises ConfigMismatch naming stream and field, NoRoom, BusUnavailable; nothing because of TRAINED. A run without
    room leaves no stream behind that was made by this call: its bound would be taken from the other runs of the bus.
    """
    await _refuse_other_shards(jet)
    made, raised = list[str](), list[JsonObject]()
    try:
        await _create_layout(jet, made, raised)
    except NoRoom as error:
        for name in made:
            with suppress(BusError):  # on a bus with users a learner may not; it has the bus for itself
                await jet.call(f"STREAM.DELETE.{name}")
        for before in raised:  # with these bounds the run goes on
            with suppress(BusError):
                await jet.call(f"STREAM.UPDATE.{before['name']}", before)
        reserved_bytes = int((await jet.call("INFO")).get("reserved_storage", 0))
        raise NoRoom(error.stream, error.max_bytes, error.setting, reserved_bytes) from None


async def _create_layout(jet: JetStream, made: list[str], raised: list[JsonObject]) -> None:
    """Create and compare as ``create_layout`` does.

    ``made`` gets the names of streams that this call creates, ``raised`` the earlier settings of streams whose bound it
    raises.
    """
    trained, stream = (subjects.stream(jet.run, name) for name in (subjects.TRAINED, subjects.TASKS))
    # TRAINED takes the room that the others leave; TASKS is last, because runs are found by it.
    order = {trained: 1, stream: 2}
    for config in sorted(stream_configs(jet.run, jet.config), key=lambda config: order.get(config["name"], 0)):
        try:
            await _ensure_stream(jet, config, made, raised)
        except BusError as error:
            if config["name"] != trained:
                raise
            _log.warning("the stream for values of trained tokens is not as configured: %s", error)
    for config in consumer_configs(jet.run, jet.config):
        await _ensure_consumer(jet, stream, config)


async def _refuse_other_shards(jet: JetStream) -> None:
    """Raise ConfigMismatch if SAMPLES is there in another number of shards: their samples would not be read."""
    stored, want = await jet.stored_shards(), jet.config.sample_shards
    if stored is not None and stored.count != want:
        raise ConfigMismatch(subjects.stream(jet.run, subjects.SAMPLES), "sample_shards", want, stored.count)


async def create_archive(jet: JetStream) -> None:
    """Create the streams and buckets of a run that only keeps samples, without TASKS, by which runs are found.

    It has no TRAINED. Its SAMPLES has no bound, so that it and a run that trains refuse each other by ConfigMismatch.
    """
    for config in stream_configs(jet.run, jet.config):
        if config["name"] in [subjects.stream(jet.run, name) for name in (subjects.TASKS, subjects.TRAINED)]:
            continue
        if config["name"] == subjects.stream(jet.run, subjects.SAMPLES):
            config = {**config, "max_bytes": -1}
        await _ensure_stream(jet, config, [], [])


def stream_configs(run: str, config: BusConfig) -> Iterator[JsonObject]:
    """Yield the settings of every stream of a run, buckets included, as the server spells them."""
    shards = Shards(config.sample_shards)
    suffixes = [shards.suffix(shard) for shard in range(shards.count)]
    names = {
        subjects.TASKS: [subjects.task(run, "*")],
        **{
            subjects.SAMPLES + suffix: [subjects.samples(run, shard=suffix), subjects.parts(run, suffix)]
            for suffix in suffixes
        },
        subjects.PLAN: [subjects.plan(run, "*")],
        subjects.PARTIALS: [subjects.partial(run)],
        subjects.DEAD: [subjects.dead(run)],
        subjects.TRAINED: [subjects.trained(run)],
    }
    if config.rollouts:
        names[subjects.TURNS] = [subjects.turn(run)]
    bounds = {
        **record_bounds(config),
        **{subjects.SAMPLES + suffix: config.samples_max_bytes // shards.count for suffix in suffixes},
        subjects.TURNS: config.turns_max_bytes,
        subjects.TRAINED: config.trained_max_bytes,
    }
    for name, subject_list in names.items():
        for_viewers = name == subjects.TRAINED
        yield {
            "name": subjects.stream(run, name),
            "subjects": subject_list,
            "retention": "limits",
            "storage": "file",
            # A full stream refuses new messages, because the old ones may not have been read.
            "discard": "old" if for_viewers else "new",
            "max_bytes": bounds.get(name, -1),
            "max_age": 0,
            "max_msgs": -1,
            "num_replicas": 1 if for_viewers else config.copies,
            "duplicate_window": int(config.duplicate_window_s * _NS),
            "allow_direct": True,
        }
    for bucket in subjects.BUCKETS:
        yield _bucket_config(run, bucket, config)


def record_bounds(config: BusConfig) -> dict[str, int]:
    """Return the bounds of the streams and buckets that have none of their own; none without a quota."""
    if not config.quota_bytes:
        return {}
    large = (subjects.TASKS, subjects.PLAN, subjects.PARTIALS)
    small = (subjects.DEAD, *subjects.BUCKETS)
    quarter = config.records_bytes // 4
    return {**dict.fromkeys(large, quarter), **dict.fromkeys(small, quarter // len(small))}


def _bucket_config(run: str, bucket: str, config: BusConfig) -> JsonObject:
    return {
        "name": subjects.bucket_stream(run, bucket),
        "subjects": [subjects.row(run, bucket, ">")],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": record_bounds(config).get(bucket, -1),
        "max_msgs_per_subject": 1,  # a row is the last message on its subject
        "num_replicas": config.copies,
        "duplicate_window": _ROW_DUPLICATE_WINDOW_S * _NS,
        "allow_direct": True,
        "allow_rollup_hdrs": False,  # by its header, a user that may write one row could remove all others
        "deny_delete": True,
    }


def consumer_configs(run: str, config: BusConfig) -> Iterator[JsonObject]:
    for (kind, rollout), name in subjects.queues(config.rollouts).items():
        yield {
            "durable_name": name,
            "name": name,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "ack_wait": int(config.lease_s * _NS),
            "max_deliver": -1,  # failures are counted in DEAD (docs/decisions/002)
            "max_ack_pending": -1,  # the learner bounds the tasks that are out
            "max_waiting": _MAX_WAITING,
            "filter_subject": subjects.task(run, kind, rollout),
        }


async def _ensure_stream(jet: JetStream, config: JsonObject, made: list[str], raised: list[JsonObject]) -> None:
    name = config["name"]
    try:
        info = await jet.call(f"STREAM.INFO.{name}")
    except NotFound:
        info = await _created(jet, f"STREAM.CREATE.{name}", config, f"STREAM.INFO.{name}")
        made += [name] if info.get("did_create") else []
    present = info["config"]
    fields = _OF_TRAINED if name == subjects.stream(jet.run, subjects.TRAINED) else _CHANGED_IN_PLACE
    settings = {field: config[field] for field in fields if field in config}
    if 0 < present.get("max_bytes", -1) < config["max_bytes"]:  # lowered, a stream may lose its oldest messages
        settings["max_bytes"] = config["max_bytes"]
    if any(present.get(field, False) != value for field, value in settings.items()):
        info = await _answered(jet, f"STREAM.UPDATE.{name}", {**present, **settings})
        raised += [present] if "max_bytes" in settings else []
    _compare(name, config, info["config"])


async def _ensure_consumer(jet: JetStream, stream: str, config: JsonObject) -> None:
    name = config["name"]
    try:
        info = await jet.call(f"CONSUMER.INFO.{stream}.{name}")
    except NotFound:
        verb = f"CONSUMER.CREATE.{stream}.{name}.{config['filter_subject']}"
        info = await _created(jet, verb, {"stream_name": stream, "config": config}, f"CONSUMER.INFO.{stream}.{name}")
    _compare(f"{stream}.{name}", config, info["config"])


async def _created(jet: JetStream, verb: str, request: JsonObject, info: str) -> JsonObject:
    """Return the server's description of a stream or consumer that this, or another process just now, created."""
    try:
        return await _answered(jet, verb, request)
    except Refused as error:
        if error.code not in _ALREADY_IN_USE:
            raise
        return await jet.call(info)


async def _answered(jet: JetStream, verb: str, request: JsonObject) -> JsonObject:
    """Return the answer to the request of a stream or consumer. Raises NoRoom for a bound that the server has not."""
    try:
        return await jet.call(verb, request)
    except Refused as error:
        if error.code != _NO_STORAGE:
            raise
        raise NoRoom(request["name"], request["max_bytes"], _setting(jet, request["name"])) from None


def _setting(jet: JetStream, stream: str) -> str:
    """Return the setting that bounds a stream."""
    short = stream.removeprefix(subjects.stream(jet.run, "")).partition("-")[0]
    bounded = (subjects.SAMPLES, subjects.TURNS, subjects.TRAINED)
    return f"bus.{short.lower()}_max_bytes" if short in bounded else "bus.quota_bytes"


def _compare(name: str, want: JsonObject, got: JsonObject) -> None:
    for field, value in want.items():
        actual = got.get(field)
        if actual is None and value in (False, 0):  # the server leaves out settings that are off
            continue
        if field == "subjects":
            value, actual = sorted(value), sorted(actual or [])
        if actual != value:
            raise ConfigMismatch(name, field, value, actual)
