"""Checks of the teachers before a run: the directory or the server of each has the vocabulary of the trained model."""

import json
from pathlib import Path

from tidemill.actors.config import TeacherConfig, chosen
from tidemill.actors.errors import NotDecoded, UnsupportedModel
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.bus.system.processes import direct_opener
from tidemill.bus.wire.model_values import language_values
from tidemill.launch.checks.data import Prompts
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import CheckedModel
from tidemill.launch.settings.run_config import RunConfig

ANSWER_S = 2.0  # Seconds for a teacher to answer
TOKENIZER = "tokenizer.json"


def check_teachers(
    report: Report, config: RunConfig, model: CheckedModel | None, data: Prompts | None, *, reach: bool
) -> None:
    """Report teachers that cannot score the run's samples. ``data``: None = not known; ``reach``: ask their servers."""
    teachers = [*config.actor.teachers.values()]
    for teacher in teachers:
        where = "actor.teachers"
        if teacher.model:
            _check_directory(report, config, teacher, where, model)
        for url in teacher.servers if reach and not teacher.model else ():
            _check_server(report, config, teacher, url, where, model, data)
    row = None if data is None else data.first
    if row is not None and teachers and chosen(teachers, row.metadata) is None:
        want, got = "a teacher that applies to every row", f"none for {row.where} with metadata {row.metadata!r:.200}"
        cure = "fix when, or add a teacher without it"
        report.error("teachers", "actor.teachers", want=want, got=got, cure=cure)


def _check_directory(
    report: Report, config: RunConfig, teacher: TeacherConfig, where: str, model: CheckedModel | None
) -> None:
    path, want = Path(teacher.model), "the directory of a Hugging Face model that the built-in engine serves"
    try:
        num_ids, positions, size = _sizes(path)
    except (UnsupportedModel, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        cure = "fix the path, or start another server (SGLang) and set urls"
        report.error("teachers", where, want=want, got=f"{teacher.name}: {teacher.model!r}: {error}", cure=cure)
        return
    if not _same_vocabulary(report, teacher.name, num_ids, where, model):
        return
    ours, theirs = Path(config.model.path) / TOKENIZER, path / TOKENIZER
    is_there = model is not None and model.directory is not None and ours.is_file() and theirs.is_file()
    if is_there and _tokens(ours) != _tokens(theirs):
        want, got = f"the tokens of {ours}", f"{teacher.name}: others in {theirs}"
        cure = "use a teacher of the same family: ids must mean the same tokens"
        report.error("teachers", where, want=want, got=got, cure=cure)
        return
    if model is not None and positions < model.context:
        want = f"a context of at least {model.context} tokens, the trained model's"
        got = f"{teacher.name}: {positions}"
        report.error("teachers", where, want=want, got=got, cure="use another teacher, or set engine.max_context")
        return
    report.good("teachers", f"{teacher.name}: {teacher.model}, {size}, started beside the run")


def _sizes(path: Path) -> tuple[int, int, str]:
    """Return the vocabulary, the context and the size in words of a model directory. Raises UnsupportedModel and the
    errors of files of any content.
    """
    try:
        shape = ModelShape.read(path)
    except NotDecoded:  # transformers runs it, which the teacher finds out
        values = language_values(json.loads((path / "config.json").read_text(encoding="utf-8")))
        names = ("vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size")
        num_ids, positions, layers, hidden = (int(values[name]) for name in names)
        return num_ids, positions, f"{layers} layers of {hidden}"
    return shape.vocab_size, shape.max_positions, f"{shape.num_layers} layers of {shape.hidden}"


def _same_vocabulary(report: Report, name: str, num_ids: int, where: str, model: CheckedModel | None) -> bool:
    """Report a teacher with fewer ids than the trained model; one with more, which are padding, is fine."""
    if model is None or num_ids >= model.vocab_size:
        return True
    want, got = f"the vocabulary of the trained model, {model.vocab_size} ids", f"{name}: {num_ids} ids"
    report.error("teachers", where, want=want, got=got, cure="use a teacher with the same tokenizer")
    return False


def _tokens(file: Path) -> object:
    """Return the tokens of a tokenizer file with their ids; its bytes where it cannot be read."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return values["model"]["vocab"], [(token["id"], token["content"]) for token in values.get("added_tokens", [])]
    except (ValueError, LookupError, TypeError, OSError, RecursionError):
        return file.read_bytes()


def _check_server(
    report: Report,
    config: RunConfig,
    teacher: TeacherConfig,
    url: str,
    where: str,
    model: CheckedModel | None,
    data: Prompts | None,
) -> None:
    """Ask a server for its model, and whether it scores at the temperatures. One that is away is a warning."""
    try:
        info, server = _get(f"{url}/model_info"), _get(f"{url}/server_info")
    except (OSError, ValueError) as error:
        got, cure = f"{teacher.name}: {url}: {error}", "start it; the actors wait for it for actor.teacher_timeout_s"
        report.warning("teachers", where, want="a teacher that answers", got=got, cure=cure)
        return
    vocabulary = info.get("vocab_size") or server.get("vocab_size")
    if isinstance(vocabulary, int) and not _same_vocabulary(report, f"{teacher.name}: {url}", vocabulary, where, model):
        return
    warm = None if data is None else data.warm
    if (config.sampling.temperature != 1 or warm is not None) and server.get("engine") != "builtin":
        want = f"a teacher that scores at sampling.temperature {config.sampling.temperature:g}"
        if config.sampling.temperature == 1 and warm is not None:
            want = f"a teacher that scores at the temperature {warm.sampling.temperature:g} of {warm.where}"
        got, cure = f"{teacher.name}: {url}, which scores at 1, as SGLang does", "temperature 1, or `tidemill teacher`"
        report.error("teachers", where, want=want, got=got, cure=cure)
        return
    served = f"{info.get('model_path', 'a model')}, {vocabulary or 'an unknown number of'} ids"
    report.good("teachers", f"{teacher.name}: {url}, {served}")


def _get(url: str) -> dict[str, object]:
    with direct_opener().open(url, timeout=ANSWER_S) as answer:
        answer_map = json.loads(answer.read(1 << 20))
    if not isinstance(answer_map, dict):
        raise ValueError("no map")
    return answer_map
