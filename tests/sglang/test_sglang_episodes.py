"""Episodes on real SGLang: an agent with OpenAI's client asks the server through the gateway, twice, and its tokens are
trained.
"""

from pathlib import Path

from tests.episode_runs import NEW_TOKENS, QUESTIONS, assert_turns, trained
from tests.sglang.server import CONTEXT, OVERLAY
from tests.tiny_models import write_tiny_model

LIMIT_S = 900.0
"""Seconds of wall time on shared cores, the server's start included."""


def test_an_agent_with_the_client_of_openai_is_trained(python: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=CONTEXT, initializer_range=0.05)
    rollout = {"use": "agent:tests.openai_agent:Asks", "options": {"max_tokens": NEW_TOKENS}}
    on_sglang = (f"engine.sglang.python={python}",)
    run = trained(tmp_path, model, rollout, QUESTIONS, overlay=[OVERLAY], settings=on_sglang, limit_s=LIMIT_S)
    assert_turns(run, 2)
    log = (run.directory / "logs" / "engine-0.log").read_text()
    assert "weights updated version=" in log, "the server was pushed weights"
