"""Check of the gateway's renderer: its packages, its name and options, the special tokens that it needs, the model's own chat template."""

from pathlib import Path

from tidemill.actors.errors import NoRenderer, RendererMissing
from tidemill.actors.text.chat_template import ChatTemplate
from tidemill.actors.text.rendering import Renderer, config_of
from tidemill.actors.text.text import Text
from tidemill.bus.wire.json_object import JsonObject
from tidemill.launch.checks.findings import Report
from tidemill.launch.checks.model import CheckedModel
from tidemill.launch.checks.tokens import QUESTION, TOOL
from tidemill.launch.settings.run_config import RunConfig


def check_renderer(report: Report, config: RunConfig, model: CheckedModel | None, *, here: bool) -> None:
    """Make the renderer of ``actor.gateway``, if there is one. ``here``: actors run on this machine; others may have other packages."""
    gateway = config.actor.gateway
    if not gateway.renderer:
        return
    directory = model.directory if model is not None else None
    try:
        if directory is None or (text := _tokenizer(directory)) is None:
            config_of(gateway.renderer, gateway.renderer_options, directory)
            report.good("rollouts", f"renderer: {gateway.renderer}, not tried: there is no tokenizer yet")
            return
        renderer = Renderer.read(gateway.renderer, gateway.renderer_options, directory, text)
    except NoRenderer as error:
        where = report.at(f"actor.gateway.{error.setting}")
        severity = report.warning if isinstance(error, RendererMissing) and not here else report.error
        severity("rollouts", where, want=error.want, got=error.got, cure=error.cure)
        return
    given = {f"eval.sets.{name}.chat_template_args": one.chat_template_args or {} for name, one in config.eval.parsed.items()}
    for setting, template_args in {"data.chat_template_args": config.data.chat_template_args, **given}.items():
        if rejected := _rejects(renderer, template_args):
            cure = "leave it out, and set actor.gateway.renderer_options in its place"
            want = f"arguments that the renderer {renderer.name} has"
            report.error("rollouts", report.at(setting), want=want, got=rejected, cure=cure)
    ends = " ".join(text.decode([token], skip_special=False) for token in renderer.stop_token_ids)
    report.good("rollouts", f"renderer: {renderer.name}, its responses end with {ends}")
    if not _tells_of_tools(renderer):
        want, got = (
            "a renderer that writes the tools of a request into its prompt",
            f"{renderer.name}, which writes calls and results alone",
        )
        cure = "describe the tools in the system prompt"
        report.warning("rollouts", report.at("actor.gateway.renderer"), want=want, got=got, cure=cure)
    if difference := _difference(renderer, text, directory, config.data.chat_template_args):
        want, cure = "the token ids of the model's chat template", "name the renderer of this model's family, if it is another one"
        report.warning("rollouts", report.at("actor.gateway.renderer"), want=want, got=difference, cure=cure)


def _tokenizer(directory: Path) -> Text | None:
    try:
        return Text.read(directory)
    except ValueError:  # reported by the check of the tokenizer
        return None


def _rejects(renderer: Renderer, template_args: JsonObject) -> str:
    """Return the renderer's error for variables of a chat template; empty = it takes them."""
    try:
        renderer.prompt(QUESTION, template_args)
    except ValueError as error:  # BadRequest
        return str(error)
    return ""


def _tells_of_tools(renderer: Renderer) -> bool:
    try:
        return renderer.prompt(QUESTION, {"tools": [TOOL]}) != renderer.prompt(QUESTION, {})
    except ValueError:  # BadRequest
        return True


def _difference(renderer: Renderer, text: Text, directory: Path, template_args: JsonObject) -> str:
    """Return how a question differs from that of the model's chat template; empty where it does not, or there is none to compare with."""
    try:
        template = ChatTemplate.read(directory)
        if template is None:
            return ""
        theirs = text.encode(template.render(QUESTION, add_generation_prompt=True, **template_args), add_special=False)
        ours = renderer.prompt(QUESTION, {**template_args, "add_generation_prompt": True})
    except ValueError:  # BadRequest, or a template that the check of the tokenizer reports
        return ""
    if ours == theirs:
        return ""
    same = next((place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs)))
    before, here, there = (text.decode(ids, skip_special=False) for ids in (ours[:same], ours[same:][:8], theirs[same:][:8]))
    return f"{here!r} instead of {there!r} behind {before!r}"
