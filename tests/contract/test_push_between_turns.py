"""New weights between two turns of an episode: each turn has the version and the log-probs of the weights that sampled
it.
"""

from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM

from tests.engine_push import joined
from tests.engine_serving import log_probs_of, scores
from tests.episode_kit import Client, said, stage, task
from tests.tiny_models import write_tiny_model
from tidemill.bus.wire.codec import check_sample

USER = ("user", "What is three plus four?")


async def test_spans_and_log_probs_differ_by_turn(tmp_path: Path) -> None:
    directories = [
        write_tiny_model(tmp_path / f"model-{seed}", seed=seed, max_position_embeddings=1024) for seed in (0, 1)
    ]
    models = [AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval() for directory in directories]

    async def program(client: Client) -> float:
        first = await client.chat(USER)
        async with joined(scene.served) as push:
            await push.whole(models[1], 1)
        await client.chat(USER, ("assistant", said(first)), ("user", "Are you sure?"))
        return 1.0

    async with stage(directories[0], program) as scene:
        sample = (await scene.rollout.sample(task(), 0, "n0")).sample
    check_sample(sample)
    assert sample.turns is not None and len(sample.turns.at) == 2
    versions = np.repeat([span.version for span in sample.spans], [span.num_tokens for span in sample.spans])
    first, second = (slice(at, at + count) for at, count in zip(sample.turns.at, sample.turns.tokens, strict=True))
    assert (versions[first] == 0).all() and (versions[first.stop :] == 1).all(), (
        "what the second turn has read is of its version"
    )
    at, done = 0, 0
    for size in sample.sizes:
        ids = sample.tokens[at : at + size.num_tokens].tolist()
        context, response = ids[: -size.response_length], ids[-size.response_length :]
        by_model = [log_probs_of((await scores(model, context, response)) / 0.8, response) for model in models]
        region = slice(done, done + size.response_length)
        mask = sample.loss_mask[region] == 1
        wanted = np.where(versions[region] == 0, *by_model)
        np.testing.assert_allclose(sample.rollout_log_probs[region][mask], wanted[mask], atol=1e-4)
        assert (np.abs(by_model[0] - by_model[1])[mask] > 1e-3).any(), "the two sets of weights do not agree by chance"
        at, done = at + size.num_tokens, done + size.response_length
    assert second.stop == len(sample.loss_mask)
