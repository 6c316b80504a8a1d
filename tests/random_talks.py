"""Programs that talk with the model at random (tools, branches, histories cut or compacted, several agents, streams,
token ids), and keep what they were sent.
"""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer

from tests.episode_kit import Client
from tests.tiny_models import tiny_model, write_tiny_model

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages "
    "%}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% "
    "endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = tuple(
    f'\n\n<tool_call>\n{{"name":  "add", "arguments": {{"a":{a}, "b": {a + 1}}}}}</tool_call>\n' for a in range(60)
)
"""Tokens of the model, each a whole call, in a notation in which no template writes it again."""
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
WORDS = ("more", "are you sure?", "seven", "the pond", "Write 1 2 3.", "über", "no")
FIRST_ID, NUM_IDS = 3, 290
"""Ids that a program makes up."""
LONGEST = 700
"""Tokens of a prompt from which on its history is compacted: the model's context has 1,024."""


def write_talking_model(directory: Path) -> Path:
    """Write a model of random weights, which calls a tool about once in six tokens, and return its directory."""
    write_tiny_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(call, normalized=False) for call in CALLS])
    tokenizer.save(str(directory / "tokenizer.json"))
    with torch.no_grad():
        tiny_model(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=1024).save_pretrained(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A turn as its program was sent it."""

    id: str
    prompt: tuple[int, ...] | None
    """Ids of the prompt; None = the answer did not have them."""
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    trained: bool
    agent: str
    behind: tuple[int, ...] = ()
    """Ids with which its prompt must begin: its history is that of an earlier answer, and more."""
    cut: bool = False
    """True if the program hung up: the turn may have more tokens."""


@dataclass
class Chat:
    """One history of messages, or of text, or of token ids."""

    agent: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    tools: bool = False
    extends: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Path -> ids of the last prompt and answer, with which the next prompt begins; none of an answer that had no ids
    of its prompt.
    """


class Talk:
    """One random conversation: a program. The same seed makes the same requests, as far as the answers are the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kept: list[Kept] = []
        self.did: dict[str, int] = {}
        """Requests and changes of histories, by kind."""

    async def __call__(self, client: Client) -> float:
        agents = [self.begun(agent) for agent in ("", "critic", "judge")[: self.random.choice((1, 1, 2, 3))]]
        for _ in range(self.random.randint(3, 7)):
            chat = self.random.choice(agents)
            self.change(chat)
            await self.ask(client, chat)
        if not any(turn.trained and turn.tokens for turn in self.kept):
            await self.of_ids(client, Chat("", ids=self.made_up()), trained=True)
        return 1.0

    # -- histories

    def begun(self, agent: str) -> Chat:
        head = [{"role": "system", "content": "Be brief."}] if self.random.random() < 0.3 else []
        return Chat(
            agent,
            [*head, {"role": "user", "content": self.words()}],
            self.words(),
            self.made_up(),
            self.random.random() < 0.7,
        )

    def words(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, 3)))

    def made_up(self) -> list[int]:
        return [self.random.randrange(FIRST_ID, NUM_IDS) for _ in range(self.random.randint(1, 8))]

    def change(self, chat: Chat) -> None:
        """Change a history, as agents do between two calls."""
        before = (list(chat.messages), chat.text)
        changes: Sequence[Callable[[Chat], None]] = (self.branch, self.cut_short, self.compact, self.rewrite)
        if sum(len(message["content"] or "") for message in chat.messages) > LONGEST:
            self.compact(chat)
        elif self.random.random() < 0.3:
            self.random.choice(changes)(chat)
        if before != (chat.messages, chat.text):
            chat.extends.clear()

    def branch(self, chat: Chat) -> None:
        """Go back to an earlier place, and ask again from there, or something else."""
        self.note("branch")
        places = [place for place, message in enumerate(chat.messages) if message["role"] in ("user", "tool")]
        del chat.messages[self.random.choice(places) + 1 :]
        if self.random.random() < 0.5:
            chat.messages.append({"role": "user", "content": self.words()})
        chat.text = chat.text[: self.random.randint(1, len(chat.text))]
        del chat.ids[self.random.randint(1, len(chat.ids)) :]

    def cut_short(self, chat: Chat) -> None:
        """Forget the first messages."""
        self.note("cut_short")
        chat.messages = [*chat.messages[-2:], {"role": "user", "content": self.words()}]
        chat.text, chat.ids = chat.text[-9:], chat.ids[-9:]

    def compact(self, chat: Chat) -> None:
        """Put a summary, of sampled words, in place of all messages."""
        self.note("compact")
        told = " ".join((message["content"] or "")[:6] for message in chat.messages[-4:])
        chat.messages = [{"role": "user", "content": f"So far: {told}"}]
        chat.text, chat.ids = f"So far: {told}", [FIRST_ID, *chat.ids[-5:]]

    def rewrite(self, chat: Chat) -> None:
        """Change what the model had answered."""
        self.note("rewrite")
        places = [place for place, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if places:
            place = self.random.choice(places)
            chat.messages[place] = {**chat.messages[place], "content": self.words()}

    # -- requests

    async def ask(self, client: Client, chat: Chat) -> None:
        trained = self.random.random() < 0.9
        kind = self.random.choices((self.of_chat, self.both, self.of_text, self.of_ids), (6, 1, 1, 2))[0]
        await kind(client, chat, trained=trained)

    async def both(self, client: Client, chat: Chat, *, trained: bool) -> None:
        """Ask twice at the same time, from one history, and go on behind the first answer."""
        self.note("both")
        other = Chat(chat.agent, list(chat.messages), tools=chat.tools)
        await asyncio.gather(self.of_chat(client, chat, trained=trained), self.of_chat(client, other, trained=trained))

    async def of_chat(self, client: Client, chat: Chat, *, trained: bool) -> None:
        body = {"messages": list(chat.messages), **self.wishes()}
        if chat.tools:
            body["tools"] = [ADD]
        for message in (await self.answers(client, "/v1/chat/completions", body, chat, trained))[:1]:
            chat.messages.append(message)
            calls = message.get("tool_calls") or []
            chat.messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": str(self.random.randrange(99))}
                for call in calls
            ]
            self.note("tool_call", len(calls))
        if chat.messages[-1]["role"] != "tool" or self.random.random() < 0.2:
            chat.messages.append({"role": "user", "content": self.words()})

    async def of_text(self, client: Client, chat: Chat, *, trained: bool) -> None:
        body = {"prompt": chat.text, **self.wishes()}
        for message in (await self.answers(client, "/v1/completions", body, chat, trained))[:1]:
            chat.text += message["content"] + self.words()

    async def of_ids(self, client: Client, chat: Chat, *, trained: bool) -> None:
        """Ask with token ids, at one of the three paths that take them."""
        prompt, most, path = (
            list(chat.ids),
            self.random.randint(1, 8),
            self.random.choice(("/generate", "/inference/v1/generate", "")),
        )
        self.note("ids")
        if not path:
            before = len(self.kept)
            await self.answers(
                client, "/v1/completions", {"prompt": prompt, "max_tokens": most}, Chat(chat.agent), trained
            )
            chat.ids += [*self.kept[before].tokens, *self.made_up()]
            return
        asked = {"sampling_params": {"max_new_tokens" if path == "/generate" else "max_tokens": most}}
        asked |= {"input_ids": prompt} if path == "/generate" else {"token_ids": prompt}  # type: ignore[dict-item]
        status, answer = await client.post(path, asked, **self.headers(chat.agent, trained))
        assert status == 200, answer
        if path == "/generate":
            id, tokens = answer["meta_info"]["turn"], answer["output_ids"]
            log_probs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        else:
            (choice,) = answer["choices"]
            id, tokens = answer["request_id"], choice["token_ids"]
            log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        self.keep(id, tuple(prompt), tokens, log_probs, trained, chat.agent)
        chat.ids += [*tokens, *self.made_up()]

    def wishes(self) -> dict[str, Any]:
        """Return limits and forms of an answer, which no task has."""
        return {
            "max_tokens": self.random.randint(1, 10),
            "n": self.random.choice((1, 1, 1, 2)),
            "stream": self.random.random() < 0.3,
        }

    async def answers(
        self, client: Client, path: str, body: dict[str, Any], chat: Chat, trained: bool
    ) -> list[dict[str, Any]]:
        """Return the messages of the answers; none of a stream on which the program has hung up."""
        body = {**body, "return_token_ids": True}
        self.note("stream" if body.get("stream") else "whole")
        before = chat.extends.pop(path, ())
        if body.get("stream"):
            return await self.streamed(client, path, body, chat.agent, trained)
        status, answer = await client.post(path, body, **self.headers(chat.agent, trained))
        assert status == 200, answer
        prompt = tuple(answer["prompt_token_ids"])
        if before:
            self.note("extends")
        chat.extends[path] = (*prompt, *answer["choices"][0]["token_ids"])
        for place, choice in enumerate(answer["choices"]):
            id = f"{answer['id']}.{place}" if place else answer["id"]
            self.keep(id, prompt, choice["token_ids"], choice["token_logprobs"], trained, chat.agent, behind=before)
        return [
            choice.get("message") or {"role": "assistant", "content": choice["text"]} for choice in answer["choices"]
        ]

    async def streamed(
        self, client: Client, path: str, body: dict[str, Any], agent: str, trained: bool
    ) -> list[dict[str, Any]]:
        most = self.random.choice((None, None, 3)) if body["n"] == 1 else None
        ids: list[list[int]] = [[] for _ in range(body["n"])]
        log_probs: list[list[float]] = [[] for _ in ids]
        messages: list[dict[str, Any]] = [{"role": "assistant", "content": ""} for _ in ids]
        name, cut = "", False
        async with client.session.post(client.root + path, json=body, headers=self.headers(agent, trained)) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                name = event["id"]
                for choice in event["choices"]:
                    place, delta = choice["index"], choice.get("delta", {})
                    ids[place] += choice.get("token_ids", ())
                    log_probs[place] += choice.get("token_logprobs", ())
                    messages[place]["content"] += delta.get("content") or choice.get("text") or ""
                    for call in delta.get("tool_calls", ()):
                        messages[place].setdefault("tool_calls", []).append(
                            {key: call[key] for key in ("id", "type", "function")}
                        )
                if most is not None and len(ids[0]) >= most:
                    cut = True
                    break
            if cut:
                self.note("hung_up")
                answer.close()
        for place, tokens in enumerate(ids):
            self.keep(f"{name}.{place}" if place else name, None, tokens, log_probs[place], trained, agent, cut=cut)
        return [] if cut else messages

    def headers(self, agent: str, trained: bool) -> dict[str, str]:
        return ({"X-Session-Id": agent} if agent else {}) | ({} if trained else {"X-Tidemill-Train": "0"})

    def keep(
        self,
        id: str,
        prompt: tuple[int, ...] | None,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        trained: bool,
        agent: str,
        **more: Any,
    ) -> None:
        self.kept.append(
            Kept(
                id=id,
                prompt=prompt,
                tokens=tuple(tokens),
                log_probs=tuple(log_probs),
                trained=trained,
                agent=agent,
                **more,
            )
        )

    def note(self, kind: str, count: int = 1) -> None:
        self.did[kind] = self.did.get(kind, 0) + count
