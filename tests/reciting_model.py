"""A model that recites a call of two tools, and an answer behind their results, in a chat template of its own."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer

from tests.tiny_models import EOS, tiny_model, write_tiny_model
from tidemill.actors.text.tool_calls import CLOSING, OPENING

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% set ns = namespace(tool=false) %}"
    "{% for m in messages %}"
    "{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{% else %}{{ '[then]' if ns.tool else '[first]' "
    "}}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% "
    "endfor %}<|im_end|>\n"
    "{% set ns.tool = m.role == 'tool' %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[then]' if ns.tool else '[first]' }}{% endif %}"
)
CALLS = [
    *("[first]", "I shall add.\n\n", OPENING, '\n{"name":  "add", ', '"arguments": {"a":3,', ' "b": 4}}\n', CLOSING),
    *("\n", "<tool_call>{", '"name": "now"}', "</tool_call>\n", EOS),
]
ANSWER = ["[then]", "It is ", "seven", ".", EOS]
SAID = "".join(CALLS[1:-1])


def write_reciting_model(directory: Path) -> Path:
    """Write the model: each token of the two chains is followed by the next, in any context. Return its directory."""
    write_chains(directory, [CALLS, ANSWER], added=[piece for piece in dict.fromkeys(CALLS + ANSWER) if piece != EOS])
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return directory


def write_chains(
    directory: Path, chains: Sequence[Sequence[str]], *, added: Sequence[str], context: int = 1024
) -> Path:
    """Write a model that follows each token of a chain by the next, in any context. ``added``: tokens that its
    tokenizer gets.
    """
    write_tiny_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in added])
    tokenizer.save(str(directory / "tokenizer.json"))
    model = tiny_model(hidden_size=32, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=context)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        pairs = [pair for chain in chains for pair in itertools.pairwise(chain)]
        for place, (piece, following) in enumerate(pairs):
            model.model.embed_tokens.weight[tokenizer.token_to_id(piece), place] = 1.0
            model.lm_head.weight[tokenizer.token_to_id(following), place] = 20.0
    model.save_pretrained(directory)
    return directory
