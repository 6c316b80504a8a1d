"""A rollout: any program that asks a model over HTTP. It imports nothing of Tidemill."""

import json
import urllib.request


class Twice:
    """Asks, asks for a second thought, and is rewarded if the label is in it."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds

    def run(self, data: dict, base_url: str, api_key: str, **extra: object) -> float:
        """Play one episode; ``data`` has prompt, label and metadata of the row."""
        messages = [{"role": "user", "content": str(data["prompt"])}]
        messages += [self._answer(messages, base_url, api_key), {"role": "user", "content": "Are you sure?"}]
        return float(str(data["label"]) in self._answer(messages, base_url, api_key)["content"])

    def _answer(self, messages: list, base_url: str, api_key: str) -> dict:
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(base_url + "/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=self._seconds) as answer:
            return json.load(answer)["choices"][0]["message"]
