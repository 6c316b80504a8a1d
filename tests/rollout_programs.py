"""Programs of rollouts as users write them: nothing of Tidemill is imported."""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC221, ASYNC230, ASYNC240, ASYNC251 - programs of users do that

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request


class Agent:
    """Two chats by the standard library alone; its reward is the share of the label's letters in the last answer."""

    def __init__(self, turns=2):
        self.turns = turns

    async def run(self, data, **extra):
        messages = [{"role": "user", "content": data["prompt"]}]
        for _ in range(self.turns):
            said = await asyncio.to_thread(ask, extra["base_url"], extra["api_key"], messages)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}]
        return sum(letter in said for letter in str(data["label"])) / max(1, len(str(data["label"])))


def ask(base_url, api_key, messages):
    """Return the content of the answer to a chat."""
    body = json.dumps({"messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(base_url + "/chat/completions", body, headers), timeout=120
    ) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


class Hoards:
    """Needs 300 MB to begin with."""

    def __init__(self):
        self.table = bytearray(300 << 20)


class Resumes:
    """Returns its arguments."""

    def run(self, data, saves):
        return {"run": 1, "saves": saves}

    async def resume(self, data, state, **extra):
        assert "state" not in data and extra["saves"]
        return {"resumed": state["turn"]}


class Tries:
    """Answers to the prompt by the standard library alone, one after the other; the reward is the best one's share of
    right letters.

    Of tasks from ``held_from`` on, no second answer is asked for before there is the file ``until``; ``<until>.held``
    says that one waits.
    """

    def __init__(self, tries=2, held_from=None, until=""):
        self.tries, self.held_from, self.until = tries, held_from, until

    async def run(self, data, **extra):
        found = []
        for n in range(self.tries):
            while (
                n and self.held_from is not None and data["task"] >= self.held_from and not os.path.exists(self.until)
            ):
                open(f"{self.until}.held", "w").close()
                await asyncio.sleep(0.05)
            found.append(
                await asyncio.to_thread(complete, extra["base_url"], extra["api_key"], data["prompt"] + "=" * n)
            )
        label = str(data["label"])
        return max(sum(a == b for a, b in zip(said, label, strict=False)) / len(label) for said in found)


class Tells:
    """Three answers, each noted in a file of the sample as soon as it is known: the environment of which a log must
    know.

    ``scores``: it gives the reward; else the actor's own does.
    """

    def __init__(self, directory, scores=True):
        self.directory, self.scores = directory, scores

    async def run(self, data, base_url, api_key):
        text = data["prompt"]
        for turn in range(3):
            said = await asyncio.to_thread(complete, base_url, api_key, text)
            with open(f"{self.directory}/{data['task']}.{data['index']}", "a") as file:
                file.write(f"{turn} {said!r}\n")
            text += said + "="
        if not self.scores:
            return None
        label = str(data["label"])
        return sum(a == b for a, b in zip(said, label, strict=False)) / len(label)


class Board:
    """Three turns, each noted in a file of the sample as soon as it is played; the state names the turn and the text so
    far.
    """

    def __init__(self, directory):
        self.directory = directory

    def reset(self, data):
        self.file, self.label, self.turn = f"{self.directory}/{data['task']}.{data['index']}", str(data["label"]), 0
        return data["prompt"]

    def step(self, said):
        with open(self.file, "a") as file:
            file.write(f"{self.turn} {said!r}\n")
        self.turn += 1
        reward = (
            sum(a == b for a, b in zip(said, self.label, strict=False)) / len(self.label) if self.turn == 3 else 0.0
        )
        return "=", reward, self.turn == 3

    def state(self):
        return [self.file, self.label, self.turn]

    def restore(self, state):
        self.file, self.label, self.turn = state


def complete(base_url, api_key, prompt):
    """Return the text behind a prompt."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(
        base_url + "/completions", json.dumps({"prompt": prompt, "max_tokens": 6}).encode(), headers
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"]


class Script:
    """Runs the method that the task's metadata names."""

    def __init__(self, **options):
        self.options = options
        self.calls = 0

    async def run(self, data, base_url, api_key, http_client=None):
        self.calls += 1
        self.base_url, self.api_key = base_url, api_key
        return await getattr(self, data["metadata"]["do"])(data)

    async def give(self, data):
        return eval(data["metadata"]["value"])

    async def told(self, data):
        assert data["prompt"] == "p" and data["label"] == "l", data
        return len(self.options)

    async def fault(self, data):
        from tidemill.actors.episodes.child_program import PolicyFault

        raise PolicyFault(data["metadata"]["value"])

    async def breaks(self, data):
        raise KeyError("no such \ud800 room")

    async def leaves(self, data):
        sys.exit(7)

    async def dies(self, data):
        os.kill(os.getpid(), 9)

    async def ends(self, data):
        os._exit(3)

    async def hoards(self, data):
        bytearray(data["metadata"]["mb"] << 20)
        return 1

    async def hoards_below(self, data):
        return subprocess.run(
            [sys.executable, "-c", f"bytearray({data['metadata']['mb']} << 20)"], stderr=subprocess.DEVNULL
        ).returncode

    async def waits(self, data):
        open(data["metadata"]["file"], "w").close()
        await asyncio.Event().wait()

    async def asks(self, data):
        first = await asyncio.to_thread(complete, self.base_url, self.api_key, "3+4")
        open(data["metadata"]["file"], "w").close()
        open(f"{data['metadata']['file']}.{data['index']}", "w").close()
        while not os.path.exists(data["metadata"]["goes_on"]):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(complete, self.base_url, self.api_key, "3+4" + first)
        return 1

    async def observes(self, data):
        first = await asyncio.to_thread(complete, self.base_url, self.api_key, "3+4")
        await asyncio.to_thread(complete, self.base_url, self.api_key, "3+4" + first + "===")

    async def holds_on(self, data):
        open(data["metadata"]["file"], "w").close()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    async def blocks(self, data):
        open(data["metadata"]["file"], "w").close()
        time.sleep(1000)

    async def grandchild(self, data):
        child = subprocess.Popen(
            [sys.executable, "-c", "import os, time; os.setsid(); print('up', flush=True); time.sleep(1000)"], stdout=-1
        )
        child.stdout.readline()
        with open(data["metadata"]["file"] + ".pid", "w") as file:
            file.write(str(child.pid))
        open(data["metadata"]["file"], "w").close()
        await self.holds_on(data)

    async def rubbish(self, data):
        for name in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                    os.write(int(name), data["metadata"]["value"].encode("latin-1"))
            except OSError:
                pass
        await asyncio.Event().wait()

    async def environment(self, data):
        return {name: 1.0 for name in os.environ if name.startswith(("TIDEMILL_", "NATS_", "OPENAI_", "ANTHROPIC_"))}

    async def counts(self, data):
        return self.calls

    async def spins(self, data):
        while True:
            pass

    async def opens(self, data):
        files = []
        try:
            for _ in range(data["metadata"]["count"]):
                files.append(os.open(os.devnull, os.O_RDONLY))
        finally:
            for file in files:
                os.close(file)
        return 1

    async def writes(self, data):
        with open(data["metadata"]["file"], "wb") as file:
            file.write(bytes(data["metadata"]["mb"] << 20))
        return 1

    async def prints(self, data):
        print("from a program")
        return 1

    async def loud(self, data):
        for file in (sys.stdout, sys.stderr):
            print("from a program" * 1000, file=file, flush=True)
        await asyncio.to_thread(print, "from a thread", file=sys.stderr, flush=True)
        return 1


def plain(data, *, base_url, api_key, scale=1.0):
    """A plain function."""
    return len(data["prompt"]) * scale


def slow(data):
    """A plain function that takes its time."""
    open(data["metadata"]["file"], "w").close()
    time.sleep(1000)


not_callable = 5


class Refuses:
    def __init__(self):
        raise RuntimeError("no licence")


class Idle:
    """A class without run."""
