"""How far several streams of samples go: measured points, a simulation that is calibrated with them, and costs.

python -m tests.bench scaling [--rates 100,200,400] [--shards 1,2] [--seconds 20] [--target 10000] [--gpus 8,...,100000]

Measured: ``tests.bench.actors`` at each rate, with one stream and with several. A kind of process has a share of a core
of ``base + cost * rate``, by least squares over its points. Simulated: queues of work in steps of a millisecond; groups
arrive at random (Poisson), their task chooses the shard, and processes that have work share the cores. The feeder
issues at most ``--tasks-per-s`` tasks a second (``tests.bench.issuing``). The simulation is compared with every
measured point; the same is then run at ``--target`` samples/s, with a core for each process, and a server for each
shard's leader, and ``--ranks`` data-parallel ranks, which fetch and pack the samples of several streams themselves. The
costs of hardware follow by the formulas printed.
"""

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.bench.actors import GROUP_SIZE, GROUPS_PER_STEP, Point, measure, report

STEP_S = 0.001
SIMULATED_S = 20.0
NEAR, SMALL = 0.2, 0.05
"""Largest relative difference between a measured and a simulated share of a core, of shares that are not small."""
TASKS_PER_S = 14_000.0
"""Tasks that a feeder issues (``tests.bench.issuing``, two idle cores)."""
SAMPLE_BYTES, SAMPLE_TOKENS = 32_000, 3_500
ROLES = ("actors", "nats-server", "readers", "feeder", "rank")


@dataclass(frozen=True, slots=True)
class Cost:
    """Share of a core of a kind of process: ``base`` without samples, and seconds for each sample."""

    base: float
    sample_s: float

    @classmethod
    def fitted(cls, points: Sequence[tuple[float, float]]) -> "Cost":
        """Return the least squares fit of (samples/s, share); the base is not negative."""
        rates, shares = zip(*points, strict=True)
        mean_rate, mean_share = sum(rates) / len(rates), sum(shares) / len(shares)
        spread = sum((rate - mean_rate) ** 2 for rate in rates)
        slope = sum((rate - mean_rate) * (share - mean_share) for rate, share in points) / spread if spread else 0.0
        if slope <= 0 or (base := mean_share - slope * mean_rate) < 0:
            return cls(0.0, sum(rate * share for rate, share in points) / sum(rate**2 for rate in rates))
        return cls(base, slope)


@dataclass(slots=True)
class Station:
    """A process in the simulation: samples wait until it has done their work."""

    name: str
    cost: Cost
    parallel: float = 1.0
    """Cores that it can use at once."""
    waiting: float = 0.0
    """Samples."""
    overhead_s: float = 0.0
    used_s: float = 0.0
    done: float = 0.0

    @property
    def work_s(self) -> float:
        return self.overhead_s + self.waiting * self.cost.sample_s

    def spend(self, seconds: float) -> float:
        """Do work for so long. Returns the number of samples that are done with it."""
        self.used_s += seconds
        overhead = min(seconds, self.overhead_s)
        self.overhead_s -= overhead
        done = min(self.waiting, (seconds - overhead) / self.cost.sample_s) if self.cost.sample_s else self.waiting
        self.waiting -= done
        self.done += done
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Result of a simulation."""

    trained: float
    """Samples that the rank took, per second."""
    shares: Mapping[str, float]
    """Share of a core by name, of several of a kind the sum."""
    busiest: Mapping[str, float]
    """Largest share of one process of a kind, of what it can use."""
    behind: list[float] = field(repr=False)
    """Samples that readers and feeder have not read, once a second."""


def simulate(
    costs: Mapping[str, Cost],
    *,
    rate: float,
    shards: int,
    cores: float,
    servers: int = 1,
    num_ranks: int = 1,
    tasks_per_s: float = math.inf,
    seed: int = 0,
) -> Simulated:
    """Simulate ``SIMULATED_S`` seconds of a run.

    ``cores``: of the machine of all processes, or ``inf``. ``tasks_per_s``: that the feeder issues at most.
    """
    chance = random.Random(seed)
    actors = Station("actors", costs["actors"], parallel=math.inf if cores == math.inf else 1.0)
    stores = [Station("nats-server", costs["nats-server"], parallel=math.inf if servers < shards else 1.0)]
    stores += [Station("nats-server", costs["nats-server"]) for _ in range(servers - 1)]
    readers = [Station("readers", costs["readers"]) for _ in range(shards)] if shards > 1 else []
    feeder, ranks = Station("feeder", costs["feeder"]), [Station("rank", costs["rank"]) for _ in range(num_ranks)]
    stations = [actors, *stores, *readers, feeder, *ranks]
    behind: list[float] = []
    demanded = 0.0
    for step in range(round(SIMULATED_S / STEP_S)):
        for station in stations:
            # The base is of all processes of a kind together.
            same = sum(other.name == station.name for other in stations)
            station.overhead_s += station.cost.base / same * STEP_S
        demanded += _poisson(chance, rate / GROUP_SIZE * STEP_S)
        issued = min(demanded, tasks_per_s * STEP_S)
        demanded -= issued
        actors.waiting += GROUP_SIZE * issued
        spent = _shared([station.work_s for station in stations], [s.parallel for s in stations], cores)
        done = {id(station): station.spend(seconds) for station, seconds in zip(stations, spent, strict=True)}
        stores[chance.randrange(len(stores))].waiting += done[id(actors)]
        for store in stores:
            (readers[chance.randrange(shards)] if readers else feeder).waiting += done[id(store)]
        feeder.waiting += sum(done[id(reader)] for reader in readers)
        for rank in ranks:
            rank.waiting += done[id(feeder)] / num_ranks
        if not step % round(1 / STEP_S):
            behind.append(sum(station.waiting for station in (*readers, feeder)))
    shares: dict[str, float] = {}
    busiest: dict[str, float] = {}
    for station in stations:
        share = station.used_s / SIMULATED_S
        shares[station.name] = shares.get(station.name, 0.0) + share
        busiest[station.name] = max(busiest.get(station.name, 0.0), share / max(1.0, min(station.parallel, cores)))
    return Simulated(
        trained=sum(rank.done for rank in ranks) / SIMULATED_S, shares=shares, busiest=busiest, behind=behind
    )


def _poisson(chance: random.Random, mean: float) -> int:
    """Return a random number of events (Knuth, The Art of Computer Programming 2, 3.4.1)."""
    limit, count, product = math.exp(-mean), 0, chance.random()
    while product > limit:
        count, product = count + 1, product * chance.random()
    return count


def _shared(work_s: Sequence[float], parallel: Sequence[float], cores: float) -> list[float]:
    """Return the CPU seconds of each process in a step: equal shares of the cores among those that have work."""
    spent = [0.0] * len(work_s)
    left = [min(work, limit * STEP_S) for work, limit in zip(work_s, parallel, strict=True)]
    room = cores * STEP_S
    while room > 1e-12 and (busy := [number for number, work in enumerate(left) if work > 1e-12]):
        share = room / len(busy)
        for number in busy:
            part = min(share, left[number])
            spent[number] += part
            left[number] -= part
            room -= part
    return spent


def calibrated(points: Sequence[Point]) -> dict[str, Cost]:
    """Return the costs by kind of process, of points with one number of shards."""
    return {name: Cost.fitted([(point.stored, point.shares[name]) for point in points]) for name in ROLES}


def compared(points: Sequence[Point], costs: Mapping[str, Cost], cores: float) -> float:
    """Print measured beside simulated shares, and return the largest relative difference of those not small."""
    worst = 0.0
    print("| streams | samples/s | | trained/s | " + " | ".join(ROLES) + " |")
    for point in points:
        result = simulate(costs, rate=point.stored, shards=point.shards, cores=cores)
        for name, trained, shares in (
            ("measured", point.trained, point.shares),
            ("simulated", result.trained, result.shares),
        ):
            cells = " | ".join(f"{100 * shares.get(role, 0.0):.1f} %" for role in ROLES)
            print(f"| {point.shards} | {point.stored:.0f} | {name} | {trained:.0f} | {cells} |")
        differences = [
            abs(result.shares.get(role, 0.0) / point.shares[role] - 1) for role in ROLES if point.shares[role] > SMALL
        ]
        worst = max([worst, *differences, abs(result.trained / point.stored - 1)])
    return worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Assumptions of the costs; change them with the options of the same names."""

    tokens_per_gpu_s: float = 1000.0
    """Tokens of responses that a GPU of an engine generates in a second."""
    engine_share: float = 0.75
    """Share of the GPUs that generate."""
    copies: int = 3
    gpu_hour: float = 3.0
    """Dollars."""
    core_hour: float = 0.04
    stored_gb_month: float = 0.1
    kept_s: float = 3600.0
    """Seconds for which a sample stays in the stream."""


def cost_rows(gpus: Sequence[int], costs: Mapping[str, Cost], prices: Prices) -> list[str]:
    """Return the rows of the table of costs: what the sample path takes beside so many GPUs."""
    rows = []
    for count in gpus:
        rate = count * prices.engine_share * prices.tokens_per_gpu_s / SAMPLE_TOKENS
        written = rate * SAMPLE_BYTES
        cores = {name: costs[name].base + costs[name].sample_s * rate for name in ("nats-server", "readers", "feeder")}
        cores["nats-server"] *= prices.copies
        stored_gb = written * prices.copies * prices.kept_s / 1e9
        dollars = sum(cores.values()) * prices.core_hour + stored_gb * prices.stored_gb_month / 730
        share = 100 * dollars / (count * prices.gpu_hour)
        runs = math.ceil(cores["feeder"])
        cells = [f"{count:,}", f"{rate:,.0f}", f"{written * (prices.copies + 1) / 1e6:,.1f}", f"{stored_gb:,.1f}"]
        cells += [f"{cores[name]:,.2f}" for name in ("nats-server", "readers", "feeder")]
        rows.append(f"| {' | '.join([*cells, str(runs), f'{dollars:,.2f}', f'{share:.3f} %'])} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="100,200,400", help="samples/s of the measured points")
    parser.add_argument("--shards", default="1,2", help="numbers of streams of the measured points")
    parser.add_argument("--actors", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0, help="measured at each point")
    parser.add_argument("--cores", type=float, default=2.0, help="of this machine")
    parser.add_argument("--target", type=float, default=10_000.0, help="samples/s of the simulated run")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks of the simulated run")
    parser.add_argument("--tasks-per-s", type=float, default=TASKS_PER_S, help="that a feeder issues, at most")
    parser.add_argument("--gpus", default="8,64,1000,10000,100000")
    args = parser.parse_args()
    costs: dict[int, dict[str, Cost]] = {}
    worst = 0.0
    for shards in map(int, args.shards.split(",")):
        points = measured(args, shards)
        costs[shards] = calibrated(points)
        worst = max(worst, compared(points, costs[shards], args.cores))
    print(
        f"largest difference between measurement and simulation: {100 * worst:.0f} %, want at most {100 * NEAR:.0f} %"
    )
    most = costs[max(costs)]
    print(f"simulated at {args.target:.0f} samples/s, a core for each process:")
    print(f"(a feeder that issues {args.tasks_per_s:.0f} tasks/s at most)")
    print_target(args.target, {shards: costs.get(shards, most) for shards in (1, 2, 4, 8)}, args)
    print("costs of the sample path; formulas: samples/s = GPUs * share of engines * tokens/s / tokens of a sample;")
    print("MB/s = samples/s * bytes * (copies + 1 read); cores = base + cost * samples/s, of servers times copies")
    print(f"with {Prices()}, {SAMPLE_BYTES} bytes and {SAMPLE_TOKENS} tokens a sample")
    print("| GPUs | samples/s | MB/s | GB stored | cores of servers | readers | feeder | runs | $/h | of the GPUs |")
    print("\n".join(cost_rows([int(count) for count in args.gpus.split(",")], most, Prices())))
    if worst > NEAR:
        raise SystemExit(f"simulation and measurement differ by {100 * worst:.0f} %")


def measured(args: argparse.Namespace, shards: int) -> list[Point]:
    """Measure at each rate, and print what was measured."""
    options = {
        "actors": args.actors,
        "seconds": args.seconds,
        "shards": shards,
        "tokens": SAMPLE_TOKENS,
        "groups": GROUPS_PER_STEP,
    }
    points = measure(argparse.Namespace(**options), [float(rate) for rate in args.rates.split(",")])
    for point in points:
        report(point, args.actors)
    return points


def print_target(target: float, costs: Mapping[int, Mapping[str, Cost]], args: argparse.Namespace) -> None:
    """Print what a run at ``target`` samples/s does, by the number of streams."""
    print("| streams | trained/s | busiest server | reader | feeder | rank | behind after 10 s | at the end |")
    for shards, chosen in costs.items():
        most = {"num_ranks": args.ranks, "tasks_per_s": args.tasks_per_s}
        result = simulate(chosen, rate=target, shards=shards, cores=math.inf, servers=shards, **most)
        cells = [
            f"{100 * result.busiest.get(name, 0.0):.0f} %" for name in ("nats-server", "readers", "feeder", "rank")
        ]
        behind = f"{result.behind[10]:.0f} | {result.behind[-1]:.0f}"
        print(f"| {shards} | {result.trained:.0f} | {' | '.join(cells)} | {behind} |")


if __name__ == "__main__":
    main()
