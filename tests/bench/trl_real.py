"""The other side of ``tests/bench/real.py``: TRL's GRPOTrainer on the same model, prompts, rewards and schedule.

Runs in TRL's own virtual environment, with our rewards on the path; writes one JSON line per step (step, reward), and
the trained model.
"""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tidemill.bus.wire.messages import Status
from tidemill.rewards.builtin.ifeval import ifeval
from tidemill.rewards.builtin.text import sentence
from tidemill.rewards.port import RewardRequest

REWARDS = {"ifeval": ifeval, "sentence": sentence}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--prompts", "--settings", "--out", "--final"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    settings = json.loads(args.settings)
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(args.prompts).read_text().splitlines()]
    system = {"role": "system", "content": settings["system_prompt"]}
    dataset = Dataset.from_list(
        [{"prompt": [system, *row["prompt"]], "label": json.dumps(row["label"])} for row in rows]
    )
    rewards: list[float] = []

    def reward(completions: list[list[dict[str, str]]], label: list[str], **_: Any) -> list[float]:
        scores = [
            score(settings["parts"], completion[0]["content"], json.loads(text))
            for completion, text in zip(completions, label, strict=True)
        ]
        rewards.append(sum(scores) / len(scores))
        return scores

    with open(args.out, "w") as out:

        class Lines(TrainerCallback):
            def on_step_end(self, _args: Any, state: Any, *__: Any, **___: Any) -> None:
                out.write(json.dumps({"step": state.global_step, "reward": rewards[-1]}) + "\n")
                out.flush()

        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            reward_funcs=[reward],
            args=configuration(settings, args.out),
            train_dataset=dataset,
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            callbacks=[Lines()],
        )
        # Its own schedule warms up from a rate of 0, a step behind ours.
        rates = settings["rates"]
        trainer.create_optimizer()
        trainer.lr_scheduler = LambdaLR(trainer.optimizer, lambda step: rates[min(step, len(rates) - 1)] / max(rates))
        trainer.train()
    trainer.save_model(args.final)


def score(parts: Mapping[str, Mapping[str, Any]], text: str, label: object) -> float:
    """Return the weighted sum of the reward's parts."""
    request = RewardRequest(prompt="", response=text, label=label, status=Status.COMPLETED)
    scores = {
        name: REWARDS[part["reward"]](request, **part["options"])["score"] * part["weight"]
        for name, part in parts.items()
    }
    return math.fsum(scores.values())


def configuration(settings: Mapping[str, Any], out: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(Path(out).with_suffix(".trl")),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=settings["groups"] * settings["group_size"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=settings["steps"],
        learning_rate=max(settings["rates"]),
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        adam_epsilon=settings["eps"],
        weight_decay=0.0,
        max_grad_norm=settings["clip_grad"],
        beta=settings["kl"],
        temperature=1.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        gradient_checkpointing=settings["gradient_checkpointing"],
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=settings["seed"],
        shuffle_dataset=True,
    )


if __name__ == "__main__":
    main()
