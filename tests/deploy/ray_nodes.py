"""A Ray cluster on this machine, of a node for each number of CPUs: PYTHON ray_nodes.py CPUS,CPUS,CPUS

Prints its address. Each line of its standard input is the CPUs of a further node, and it ends with that input. Runs in
Ray's environment, and imports nothing of ours.
"""

import sys

from ray.cluster_utils import Cluster

SMALL = {"object_store_memory": 80_000_000}


def main(cpus: list[int]) -> int:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False, **SMALL})
    try:
        for count in cpus[1:]:
            cluster.add_node(num_cpus=count, **SMALL)
        print(cluster.address, flush=True)
        for line in sys.stdin:
            cluster.add_node(num_cpus=int(line), wait=False, **SMALL)
    finally:
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main([int(count) for count in sys.argv[1].split(",")]))
