"""Tokens of recorded answers behind those of their prompts: answers that begin with newlines and blanks, templates,
tokenizers.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.examples import examples
from tests.refusals import refusal
from tidemill.learner.errors import PromptError
from tidemill.learner.prompts.responses import RecordedResponse, RecordedRow, Recordings
from tidemill.rewards.model_text import MessageTemplate

SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
END = 2
PIECES = ["\n", "\n\n", " ", "  ", "\t", "Hello", " Hello", "12", "é", "模型", ".", "\r\n", ":", "assistant"]
TEXTS = [
    "user\n\nHello  Hello\n\n\nassistant\n\n Hello",
    "12 12\t\t. .",
    "é é模型模型",
    "User: a\nAssistant: b\n\n",
    ":\n\n:\n :  ",
] * 20
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "blank line": "<s>{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    "trimmed": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "words": "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "no end": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt "
        "%}assistant:{% endif %}"
    ),
}


def trained(kind: str) -> Tokenizer:
    """Return a tokenizer of bytes, or of words with a blank before each text, as SentencePiece makes it."""
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
        alphabet = sorted({letter for piece in PIECES for letter in piece} | set("abcdefghijklmnopqrstuvwxyz:. \n"))
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=list(alphabet), special_tokens=list(SPECIAL))
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return tokenizer


class Model:
    """A tokenizer with a chat template, as ``Tokenize`` and ``ChatTexts``."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer, self._template = tokenizer, MessageTemplate(template, {})

    def __call__(self, prompt: Any, tools: Sequence[Any] = (), *, whole: bool = False) -> list[int]:
        return self.encode(prompt if isinstance(prompt, str) else self.render(prompt, whole=whole))

    def render(self, messages: Sequence[Any], tools: Sequence[Any] = (), *, whole: bool = False) -> str:
        return self._template.render(messages, add_generation_prompt=not whole)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


MODELS = {
    f"{kind}, {name}": Model(trained(kind), template)
    for kind in ("bytes", "words")
    for name, template in TEMPLATES.items()
}
ANSWERS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


def turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def sequence_of(model: Model, messages: list[dict[str, Any]]) -> Any:
    made = Recordings(model, rollouts={"a"}, end_ids=(END,), max_tokens=10_000, texts=model)
    response = RecordedResponse(messages=tuple(messages[1:]))
    (sequence,) = made.sequences(RecordedRow(prompt=messages[:1], responses=(response,), tools=(), where="a.jsonl:1"))
    return sequence


def check_sequence(model: Model, contents: Sequence[str]) -> None:
    """Assert that the prompt's tokens are those that an engine gets, and that behind it tokens and masks are the
    template's text.
    """
    messages = turns(*contents)
    sequence = sequence_of(model, messages)
    prompt, tokens = model(messages[:1]), sequence.tokens.tolist()
    assert tokens[: len(prompt)] == prompt == sequence.prompt_tokens.tolist()
    head, whole, text = (
        model.render(messages[:1]),
        model.render(messages, whole=True),
        model.decode(tokens)[len(model.decode(prompt)) :],
    )
    assert whole[len(head) :].startswith(text) and not whole[len(head) + len(text) :].strip(), (
        "all but what is behind the last end token"
    )
    mask = [0] * len(prompt) + sequence.loss_mask.tolist()
    starts = [at for at in range(len(mask)) if mask[at] and not mask[at - 1]]
    assert len(starts) == len(contents) // 2
    for start, at in zip(starts, range(1, len(contents), 2), strict=True):
        stop = next((place for place in range(start, len(mask)) if not mask[place]), len(mask))
        taught = model.decode(tokens[:stop])[len(model.decode(tokens[:start])) :]
        answer = model.render(messages[: at + 1], whole=True)[len(model.render(messages[:at])) :]
        assert (
            answer.startswith(taught)
            and not answer[len(taught) :].strip()
            and (END in tokens[start:stop]) == ("<|im_end|>" in answer)
        )


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize(
    "answer", ["\n\nHello", "  Hello", "\n", " ", "\tHello", "Hello\n\n", "\r\nHello", "Hello", "é", "\n\n\n 12"]
)
def test_an_answer_may_begin_with_blanks_and_newlines(model: Model, answer: str) -> None:
    check_sequence(model, ["Hello", answer])
    check_sequence(model, ["Hello\n", answer, " 12", answer])


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    contents=st.lists(st.tuples(ANSWERS, ANSWERS.filter(str.strip)), min_size=1, max_size=3),
    name=st.sampled_from(sorted(MODELS)),
)
def test_any_conversation_has_the_text_of_its_template(contents: list[tuple[str, str]], name: str) -> None:
    check_sequence(MODELS[name], [text for pair in contents for text in pair])


def test_an_answer_that_the_template_changes_later_is_still_refused() -> None:
    last_alone = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    )
    with refusal(PromptError, where="a.jsonl:1", got="other tokens for 'a'"):
        sequence_of(Model(trained("bytes"), last_alone), turns("Hello", "a", "Hello", "b"))


def test_masks_end_with_the_end_token_of_each_answer() -> None:
    model = MODELS["bytes, chatml"]
    sequence = sequence_of(model, turns("Hello", "\n\nHello", "12", "  Hello"))
    behind = sequence.tokens[-len(sequence.loss_mask) :]
    assert model.decode(behind[sequence.loss_mask == 1]) == "\n\nHello<|im_end|>  Hello<|im_end|>"
