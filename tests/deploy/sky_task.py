"""Validate files of SkyPilot by its own parser, and print what it has understood as JSON: PYTHON sky_task.py FILE...

Runs in SkyPilot's environment, and imports nothing of ours.
"""

import json
import sys

import sky
import yaml


def main(files: list[str]) -> int:
    for file in files:
        with open(file, encoding="utf-8") as text:
            task = sky.Task.from_yaml_config(yaml.safe_load(text), env_overrides=[("BUS", "nats://10.0.0.5:4222")])
        resources = list(task.resources)
        print(
            json.dumps(
                {
                    "nodes": task.num_nodes,
                    "spot": [resource.use_spot for resource in resources],
                    "devices": sorted(str(resource.accelerators) for resource in resources),
                    "envs": sorted(task.envs),
                    "run": task.run,
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
