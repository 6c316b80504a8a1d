"""A metric sink: the mean reward of each step, sent to a web hook."""

import json
import urllib.request

from tidemill.launch import StepMetrics


def hook(one: StepMetrics, *, url: str, seconds: float = 10.0) -> None:
    """POST step and reward as JSON. An exception makes the call be repeated."""
    if "data/reward_mean" not in one.metrics:
        return
    body = json.dumps({"run": one.run, "step": one.step, "reward": one.metrics["data/reward_mean"]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=seconds).close()
