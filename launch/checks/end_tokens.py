"""Checks of the tokens that end a response: there is one, and the files of the model agree."""

from pathlib import Path

from tidemill.launch.checks.findings import Report
from tidemill.rewards.end_tokens import EndTokens

TOPIC = "ends"


def check_end_tokens(report: Report, model: Path) -> None:
    """Warn about a model directory without an end token, or with files that name different ones."""
    try:
        tokens = EndTokens.read(model)
    except ValueError as error:  # the check of the model or of its tokenizer names it
        report.warning(TOPIC, str(model), want="files of a model and its tokenizer", got=str(error), cure="correct the file")
        return
    before = len(report.warnings)
    if not tokens.ids:
        want = "a token that ends a response: eos_token_id in config.json or generation_config.json, or eos_token of the tokenizer"
        cure = "set eos_token_id in generation_config.json; every response goes on to sampling.max_new_tokens"
        report.warning(TOPIC, str(model), want=want, got="none", cure=cure)
    if tokens.tokenizer is not None and tokens.configured and tokens.tokenizer not in tokens.configured:
        want = f"the tokenizer's eos_token among eos_token_id of config.json and generation_config.json, {_shown(tokens.configured)}"
        cure = "correct the file that is wrong, often tokenizer_config.json behind a conversion; here both end a response"
        report.warning(TOPIC, str(model / "tokenizer_config.json"), want=want, got=tokens.tokenizer, cure=cure)
    if tokens.turn is not None and tokens.turn not in tokens.named:
        want = f"the token behind an answer in the chat template among the end tokens of the files, {_shown(tokens.named)}"
        cure = "add it to eos_token_id in generation_config.json; here it ends a response, other programs do not know it"
        report.warning(TOPIC, str(model), want=want, got=tokens.turn, cure=cure)
    if len(report.warnings) == before:
        report.good(TOPIC, f"a response ends with {_shown(tokens.ids)}")


def _shown(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) or "none"
