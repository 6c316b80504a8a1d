"""A Ray cluster on this machine, of a node for each number of CPUs: PYTHON ray_nodes.py CPUS,CPUS,CPUS

Prints its address. Lines of its standard input: `boot CPUS`, a further node; `lose PID`, this raylet and its node
vanish. It ends with that input. Runs in the environment of Ray, and imports nothing of ours.
"""

import sys

from ray._private.node import Node
from ray.cluster_utils import Cluster

SMALL = {"object_store_memory": 80_000_000}


def raylet(node: Node) -> int:
    """Return the process id of a node's raylet."""
    return int(node.all_processes["raylet"][0].process.pid)


def main(cpus: list[int]) -> int:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False, **SMALL})
    try:
        for count in cpus[1:]:
            cluster.add_node(num_cpus=count, **SMALL)
        print(cluster.address, flush=True)
        for line in sys.stdin:
            verb, number = line.split()
            if verb == "boot":
                cluster.add_node(num_cpus=int(number), wait=False, **SMALL)
                continue
            for node in [node for node in cluster.worker_nodes if raylet(node) == int(number)]:
                cluster.remove_node(node, allow_graceful=False)
    finally:
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main([int(count) for count in sys.argv[1].split(",")]))
