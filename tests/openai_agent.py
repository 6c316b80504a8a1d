"""An agent with OpenAI's own client, in the shape of AReaL's: ``run(data, **extra)``. Nothing of Tidemill is
imported.
"""

from openai import AsyncOpenAI


class Asks:
    """Asks the question, and once more, in one conversation; its reward is the share of letters in both answers."""

    def __init__(self, **options):
        self.options = options

    async def run(self, data, **extra):
        client = AsyncOpenAI(
            base_url=extra["base_url"],
            api_key=extra["api_key"],
            http_client=extra.get("http_client"),
            max_retries=0,
            timeout=300,
        )
        messages, said = list(data["prompt"]), ""
        for _ in range(2):
            answer = await client.chat.completions.create(model="default", messages=messages, **self.options)
            message = answer.choices[0].message
            said += message.content or ""
            messages += [message, {"role": "user", "content": "Are you sure?"}]
        return sum(letter.isascii() and letter.isalpha() for letter in said) / max(1, len(said))
