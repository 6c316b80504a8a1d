"""The other side of ``tests/bench/learn.py``: TRL's GRPOTrainer on the same model, tokenizer, prompts, reward and seed.

Runs in TRL's own virtual environment, so it imports nothing of ours; prints one JSON line per step: samples, seconds,
reward.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch


def dense_reward(completion_ids: list[list[int]], label: list[str], tokenizer: Any, max_new_tokens: int) -> list[float]:
    """Return the rewards by the formula of ``digits``: right positions and the right end, over the longer length and
    one.
    """
    scores = []
    for ids, want in zip(completion_ids, label, strict=True):
        ended = tokenizer.eos_token_id in ids
        got = tokenizer.decode(ids[: ids.index(tokenizer.eos_token_id)] if ended else ids, skip_special_tokens=True)
        right = sum(a == b for a, b in zip(got, want, strict=False))
        scores.append((right + (ended and len(got) == len(want))) / (max(len(got), len(want)) + 1))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument(
        "--settings",
        required=True,
        help="JSON: steps, groups, group_size, max_new_tokens, lr, betas, eps, clip_grad, seed",
    )
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    settings = json.loads(args.settings)
    torch.set_num_threads(1)

    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    rows = [json.loads(line) for line in Path(args.prompts).read_text().splitlines()]
    samples = settings["groups"] * settings["group_size"]
    rewards: list[float] = []

    def reward(completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
        scores = dense_reward(completion_ids, label, tokenizer, settings["max_new_tokens"])
        rewards.append(sum(scores) / len(scores))
        return scores

    with open(args.out, "w") as out:

        class Clock(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.start = time.monotonic()

            def on_step_end(self, _args: Any, state: Any, *__: Any, **___: Any) -> None:
                line = {
                    "step": state.global_step,
                    "samples": state.global_step * samples,
                    "seconds": time.monotonic() - self.start,
                }
                out.write(json.dumps({**line, "reward": rewards[-1]}) + "\n")
                out.flush()

        config = GRPOConfig(
            output_dir=str(Path(args.out).with_suffix(".trl")),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=samples,
            num_generations=settings["group_size"],
            max_completion_length=settings["max_new_tokens"],
            max_steps=settings["steps"],
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            adam_beta1=settings["betas"][0],
            adam_beta2=settings["betas"][1],
            adam_epsilon=settings["eps"],
            weight_decay=0.0,
            max_grad_norm=settings["clip_grad"],
            beta=0.0,
            temperature=1.0,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=settings["seed"],
            shuffle_dataset=True,
        )
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        GRPOTrainer(
            model=model,
            reward_funcs=[reward],
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        ).train()


if __name__ == "__main__":
    main()
