"""Checks of a run's environment: bus, engine's program, directories, disk, memory, store. Starts nothing but a
program that lists the models of SGLang.
"""

import json
import math
import os
import queue
import re
import shutil
import threading
from pathlib import Path
from urllib.parse import urlsplit

from tidemill.actors.errors import EngineFailed, UnsupportedModel
from tidemill.actors.serving.builtin.blocks import host_memory
from tidemill.actors.serving.sglang.arguments import OLDEST, release_of, written
from tidemill.actors.serving.sglang.registry import find_refusal
from tidemill.bus.client.addresses import parse
from tidemill.bus.config import STORE_SHARE, needed_bytes
from tidemill.bus.system.files import lacking
from tidemill.bus.wire.codec import HEADER_RESERVE_BYTES, MAX_SAMPLE_BYTES
from tidemill.bus.wire.task_settings import Budget
from tidemill.launch.checks.data import Prompts
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import CheckedModel
from tidemill.launch.checks.servers import check_servers
from tidemill.launch.devices.memory_table import dtype_on, kv_budget, training_bytes
from tidemill.launch.devices.rank_memory import ITEM_BYTES
from tidemill.launch.settings.run_config import SAMPLE_BYTES_PER_TOKEN, RunConfig
from tidemill.learner.buffer.step_plan import plan_bytes
from tidemill.learner.checkpoints.object_store import ObjectStore, missing_package
from tidemill.learner.errors import StoreFailed
from tidemill.learner.settings.config import MOST_PENDING, OF_THIS_MACHINE, protocol_of

MORE_FOR_BEST = 3  # Checkpoints that `eval.best` keeps: the best, that of the version under evaluation and the next
MODEL_BYTES = 4  # Bytes on disk per parameter of a model, float32
# Bytes on disk per parameter of a checkpoint: weight, master copy and Adam's two moments, float32.
CHECKPOINT_BYTES = 16
MEGATRON_LOGS = "config_logger_dir"  # Megatron's argument that names a directory
GPU = Path("/dev/nvidiactl")  # A file that exists where CUDA does: weights are then not in the memory that is checked

STORE_SETTING = "learner.checkpoint.store"
STORE_ANSWER_S = 20.0  # Longest time in which the store takes a small object, returns and removes it


def check_engine(report: Report, config: RunConfig, model: CheckedModel | None, *, on_this_machine: bool) -> None:
    """Check the engine's program, the release of SGLang, and whether it serves the model; ``on_this_machine``: engines
    are started here.
    """
    engine = config.engine
    if engine.kind != "sglang" or engine.sglang.url:
        is_running = "a server that is running (engine.sglang.url)"
        user = is_running if engine.kind == "sglang" else f"engine.kind: {engine.kind}"
        for name in ("arguments", "environment"):
            if values := getattr(engine.sglang, name):
                cure = "remove them, or give them to the server where it is started"
                want = f"none with {user}"
                report.warning("engine", f"engine.sglang.{name}", want=want, got=values, cure=cure)
        return
    severity = report.error if on_this_machine else report.warning
    where, program = "engine.sglang.python", shutil.which(engine.sglang.python)
    want = "the Python interpreter of an environment with SGLang"
    if program is None:
        cure = "make that environment (docs/sglang.md), or set engine.kind: builtin"
        severity("engine", where, want=want, got=f"{engine.sglang.python!r}: no such program", cure=cure)
        return
    releases = _installed(program, "sglang")
    if releases is not None and not releases:
        cure = "install it there (docs/sglang.md), or give another one"
        got = f"{engine.sglang.python!r}, whose packages have no sglang"
        report.warning("engine", where, want=want, got=got, cure=cure)
    for release in releases or ():
        try:
            release_of(engine.sglang.python, release)
        except EngineFailed:
            want = f"an environment with SGLang {written(OLDEST)} or newer"
            got = f"{engine.sglang.python!r}: SGLang {release}"
            severity("engine", where, want=want, got=got, cure="install a newer release there (docs/sglang.md)")
    if releases and model is not None and model.directory is not None:
        _check_served(report, config, model.directory / "config.json", model.context, program)


def _check_served(report: Report, config: RunConfig, file: Path, context: int, program: str) -> None:
    """Report a model that the SGLang of this interpreter does not serve, as the engine's start refuses it."""
    try:
        refusal = find_refusal(json.loads(file.read_text()), config.engine.sglang, context, program)
    except EngineFailed as error:
        cure = "install SGLang there (docs/sglang.md), or give another one"
        report.warning("engine", "engine.sglang.python", want="its models", got=error.reason, cure=cure)
        return
    if refusal:
        report.error("model", f"{file}: {refusal.key}", want=refusal.want, got=refusal.got, cure=refusal.cure)


def _installed(program: str, package: str) -> list[str] | None:
    """Return the releases of a package in an interpreter's environment; None where it has another layout."""
    places = list(Path(program).parent.parent.glob("lib/python3*/site-packages"))
    names = [folder.name for place in places for folder in place.glob(f"{package}-*.dist-info")]
    return [name.removeprefix(f"{package}-").removesuffix(".dist-info") for name in names] if places else None


def check_bus(
    report: Report, config: RunConfig, model: CheckedModel | None, data: Prompts | None, *, reach: bool
) -> None:
    """Report errors in ``bus``; ``reach``: connect to the server that ``bus.url`` names and check its version."""
    _check_stream(report, config, model, data)
    for name in ("tls_cert", "tls_key", "tls_ca"):
        file = getattr(config.bus, name)
        if file and not Path(file).is_file():
            got = f"{file!r}: no such file"
            report.error("bus", f"bus.{name}", want="a PEM file", got=got, cure="fix the path")
    if not config.bus.url:
        _check_plan(report, config, config.bus.max_payload_bytes, "bus.max_payload_bytes")
        return
    where = "bus.url"
    wrong = _wrong_servers(config.bus.url)
    if wrong:
        want = "nats://host:port (or tls://), several with commas"
        cure = "fix it, or remove it: a server is started then"
        report.error("bus", where, want=want, got=f"{config.bus.url!r}: {wrong}", cure=cure)
    elif reach:
        largest = check_servers(report, where, parse(config.bus.url).servers)
        if largest:
            _check_plan(report, config, largest, f"max_payload of {config.bus.url}")


def _wrong_servers(url: str) -> str:
    if "://" not in url and ":" not in url:
        return "no port"
    try:
        for server in parse(url).servers:
            parts = urlsplit(server)
            if parts.port == 0 or not re.fullmatch(r"[A-Za-z0-9._:-]+", parts.hostname or ""):
                return f"no host and port in {server}"
    except ValueError as error:
        return str(error)
    return ""


def _check_stream(report: Report, config: RunConfig, model: CheckedModel | None, data: Prompts | None) -> None:
    """Check that SAMPLES has room for the longest prompts between the kept checkpoints; unknown ones are a warning."""
    known_longest = config.data.max_prompt_tokens or (data.longest if data is not None else 0)
    longest = known_longest or max(0, model.context - config.sampling.max_new_tokens if model is not None else 0)
    routed = model.routed_bytes if model is not None else 0
    needed, severity = config.stream_bytes(longest, routed), report.error if known_longest else report.warning
    if config.bus.samples_max_bytes < needed:
        parts = "what lies between the kept checkpoints, the lag and the history"
        want = f">= {needed} for {parts}, in samples of {longest} prompt tokens"
        cure = "raise it, or lower data.max_prompt_tokens, learner.checkpoint_every or bus.history_samples"
        severity("bus", "bus.samples_max_bytes", want=want, got=config.bus.samples_max_bytes, cure=cure)
    sample_bytes = (SAMPLE_BYTES_PER_TOKEN + routed) * (longest + config.sampling.max_new_tokens)
    if routed and sample_bytes > MAX_SAMPLE_BYTES:
        per_token = f"{routed} bytes of experts and {SAMPLE_BYTES_PER_TOKEN} more"
        want = f"samples of at most {MAX_SAMPLE_BYTES} bytes, in which a token has {per_token}"
        cure = "use learner.routing_replay: old, or lower data.max_prompt_tokens or sampling.max_new_tokens"
        severity("bus", "learner.routing_replay", want=want, got=f"{sample_bytes} bytes", cure=cure)


def _check_plan(report: Report, config: RunConfig, max_payload: int, where: str) -> None:
    """Check that the plan of a step fits in one message, also with the sequences that budgets allow."""
    samples, groups, room = config.samples_per_step, config.learner.groups_per_step, max_payload - HEADER_RESERVE_BYTES
    versions = config.staleness.max_lag + 1
    want = f"room for the plan of a step, of {groups} groups and {samples} samples, in one message"
    least = plan_bytes(groups=groups, samples=samples, sequences=samples, versions=versions)
    if least > room:
        cure = f"raise it to {least + HEADER_RESERVE_BYTES}, or lower learner.groups_per_step or learner.group_size"
        report.error("bus", where, want=want, got=f"{max_payload}, for a plan of {least} bytes", cure=cure)
        return
    for name, rollout in config.trained_rollouts.items():
        num_sequences = _most_sequences(rollout.limits)
        largest = plan_bytes(groups=groups, samples=samples, sequences=samples * num_sequences, versions=versions)
        if largest > room:
            budget, needed = f"rollouts.{name}.budget", largest + HEADER_RESERVE_BYTES
            why = f"with the {num_sequences} sequences that {budget} allows an episode"
            got = f"{max_payload}, for up to {largest} bytes {why}"
            cure = f"such a step runs with fewer groups; raise it to {needed}, or lower {budget}.turns"
            report.warning("bus", where, want=want, got=got, cure=cure)


def _most_sequences(budget: Budget) -> int:
    """Return the largest number of sequences that a budget allows an episode; 1 without a limit."""
    # A sequence has a turn of its own, a sampled token, and a token of context.
    limits = [limit for limit in (budget.turns, budget.tokens, budget.total_tokens // 2) if limit]
    return min(limits, default=1)


def _writable(report: Report, setting: str, directory: Path) -> Path | None:
    """Return the nearest directory that exists; None, after an error, where it cannot be written to."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return existing
    want = "a directory that can be made and written to"
    got = f"{existing} cannot be written to"
    report.error("disk", setting, want=want, got=got, cure="set another directory")
    return None


def check_places(report: Report, config: RunConfig, model: CheckedModel | None, *, trains: bool = True) -> None:
    """Check that the run's directory can be written, and that its disk has room."""
    logs = config.learner.megatron.get(MEGATRON_LOGS)
    if isinstance(logs, str) and logs:
        _writable(report, f"learner.megatron.{MEGATRON_LOGS}", Path(logs))
    existing = _writable(report, "directory", config.root)
    if existing is None:
        return
    free = shutil.disk_usage(existing).free
    pending = MOST_PENDING if config.learner.checkpoint.url else 0  # while the store does not answer
    checkpoints = config.learner.keep_checkpoints + (MORE_FOR_BEST if config.eval.best else 0) + pending
    models = _models_kept(config)
    kept = 0
    if trains and model is not None:
        kept = (checkpoints + 1) * _checkpoint_bytes(config, model) + models * MODEL_BYTES * model.num_parameters
    turns = config.bus.turns_max_bytes if config.bus.rollouts else 0
    stored = 0 if config.bus.url else config.bus.quota_bytes or config.bus.samples_max_bytes + turns
    got = f"{_gb(free)} free on {existing}"
    if kept > free:
        files = (
            f"{checkpoints} checkpoints, one being written, and {'the model' if models == 1 else f'{models} models'}"
        )
        want, cure = f"{_gb(kept)} for {files}", "set directory to a larger disk, or lower learner.keep_checkpoints"
        cure += " or learner.keep_hf" if models > 1 else ""
        report.error("disk", "directory", want=want, got=got, cure=cure)
    elif stored > STORE_SHARE * free and not (config.root / "bus").exists():  # streams that exist have their room
        share = "three quarters of what is free on the disk of the directory, which nats-server takes for its store"
        want, cure = f"<= {share}: {got}", "lower it, or set directory to a larger disk"
        report.error("disk", "bus.samples_max_bytes", want=want, got=_gb(stored), cure=cure)
    elif not config.bus.url and (lack := lacking(config.root / "bus", needed_bytes(config.bus))):
        # No error: a learner that starts beside a bus on a full disk waits for it, as all processes do.
        want = "room for the bus, which waits for it"
        report.warning("disk", "directory", want=want, got=lack, cure="or set another directory")
    elif kept + stored > free:
        want = f"room for {_gb(kept)} of checkpoints beside {_gb(stored)} of samples (bus.samples_max_bytes)"
        cure = "lower bus.samples_max_bytes or learner.keep_checkpoints, or set directory to a larger disk"
        report.warning("disk", "directory", want=want, got=got, cure=cure)
    else:
        report.good("disk", f"{got}; checkpoints need {_gb(kept)}, the bus's samples up to {_gb(stored)}")


def _checkpoint_bytes(config: RunConfig, model: CheckedModel) -> int:
    """Return the bytes of a checkpoint: state of the policy or its adapters, critic, a reference that moves."""
    learner, parameters = config.learner, model.num_parameters
    state = model.num_trained or parameters if learner.lora.rank else parameters
    if learner.algorithm.by_critic:
        tensors = model.critic_tensors
        state += parameters if tensors is None else sum(map(math.prod, tensors.values()))
    moving = parameters if learner.algorithm.needs_reference and learner.algorithm.kl.moves else 0
    return CHECKPOINT_BYTES * state + MODEL_BYTES * moving


def _models_kept(config: RunConfig) -> int:
    """Return the number of Hugging Face directories at the end of the run."""
    every, keep = config.learner.save_hf_every, config.learner.keep_hf
    num_models = config.learner.steps // every if every else 0
    return 1 + (min(num_models, keep) if keep else num_models)


def check_memory(
    report: Report, config: RunConfig, model: CheckedModel | None, *, engines: int, trains: bool = True
) -> None:
    """Compare the memory that ranks and engines need with this machine's; an accelerator's memory is not checked."""
    if model is None or (GPU.exists() and config.learner.device != "cpu"):
        return
    ranks = config.learner.num_ranks if trains else 0
    dtypes = [dtype_on(setting, cuda=False) for setting in (config.learner.dtype, config.engine.dtype)]
    weights = ITEM_BYTES[dtypes[1]] * model.num_parameters
    rank = training_bytes(model.tensors, dtypes[0], config.learner, cuda=False, critic=model.critic_tensors)
    total = host_memory()
    sizes = model.sizes_of_rows(dtypes[1]) if engines > 0 and config.engine.kind == "builtin" else None
    room, kv_bytes, needed = "", 0, ranks * rank + engines * 2 * weights  # those served, and those being pushed
    if sizes is not None:
        try:
            tokens, kv_bytes = kv_budget(sizes, config, total)
        except UnsupportedModel as error:
            report.error("memory", error.where, want="fewer rows", got=error.reason, cure="lower it")
            return
        needed += engines * sizes.states_bytes(config.engine.max_running)
        if tokens < (longest := min(model.context, config.data.max_prompt_tokens + config.sampling.max_new_tokens)):
            want = f"room for keys and values of {longest:,} tokens, the longest prompt with its response"
            cure = "set it to as many, or lower data.max_prompt_tokens or sampling.max_new_tokens"
            got = f"{tokens:,} tokens in a quarter of {_gb(total)}"
            report.error("memory", "engine.kv_tokens", want=want, got=got, cure=cure)
        room = f"; keys and values of an engine take at most {_gb(kv_bytes)} ({tokens:,} tokens, engine.kv_tokens)"
        if config.engine.kv_tokens:
            needed += engines * kv_bytes
    of_all = f"{ranks} rank(s) and {engines} engine(s)"
    if needed > total:
        blocks, cure = "", "train a smaller model, lower up.engines or learner.data_parallel, or use a larger machine"
        if sizes is not None and config.engine.kv_tokens:
            blocks, cure = ", keys and values", f"lower engine.kv_tokens, or set it to 0; {cure}"
        want = f"{_gb(needed)} of memory for the weights{blocks} of {of_all}"
        where = "engine.kv_tokens" if blocks else "model.path"
        report.error("memory", where, want=want, got=_gb(total), cure=cure)
    elif room and not config.engine.kv_tokens and needed + engines * kv_bytes > total:
        # Each engine has a quarter of the memory, and does not know of other engines.
        want = f"{_gb(needed + engines * kv_bytes)} for weights, and for keys and values once all blocks are used, of"
        cure = "set engine.kv_tokens, which each engine has, or lower up.engines"
        report.warning("memory", "engine.kv_tokens", want=f"{want} {of_all}", got=_gb(total), cure=cure)
    else:
        report.good("memory", f"{_gb(total)}, {_gb(needed)} needed for weights{room}")


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def check_store(report: Report, config: RunConfig, *, reach: bool, answer_s: float = STORE_ANSWER_S) -> None:
    """Check the URL of the store, if there is one. ``reach``: write, read and remove a small object there, too."""
    url, where = config.learner.checkpoint.url, STORE_SETTING
    if not url:
        return
    if protocol_of(url) == "memory":
        cure = "use the URL of an object store, or local"
        report.error("store", where, want="a store that outlives a process", got=url, cure=cure)
    elif missing := missing_package(url):
        got, cure = missing
        want = f"a protocol that can be used here, as in {url}"
        report.error("store", where, want=want, got=got, cure=f"{cure}, or set local")
    elif reach:
        _reach_store(report, where, ObjectStore(url, config.run), answer_s)
    elif protocol_of(url) in OF_THIS_MACHINE and config.learner.nodes > 1:
        cure = "use an object store, unless the path is one directory for all nodes"
        got = f"{url}, a path of each machine"
        report.warning("store", where, want="a store that all nodes reach", got=got, cure=cure)


def _reach_store(report: Report, where: str, store: ObjectStore, answer_s: float) -> None:
    """Write, read and remove a small object, in a thread: a store without an answer would block for ever."""
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def probe() -> None:
        try:
            store.probe()
        except StoreFailed as error:
            answers.put(error.reason)
        else:
            answers.put("")

    threading.Thread(target=probe, name="store", daemon=True).start()
    try:
        reason = answers.get(timeout=answer_s)
    except queue.Empty:
        reason = f"no answer within {answer_s:.0f} s"
    if reason:
        cure = "give its package the credentials (environment, its own files), or fix the URL"
        want = "a place that this process can write to"
        report.error("store", where, want=want, got=f"{store.url}: {reason}", cure=cure)
    else:
        report.good("store", f"{store.url}: a small object was written, read and removed")
