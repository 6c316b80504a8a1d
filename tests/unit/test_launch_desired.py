"""Desired replicas of each host: rows, totals and shares."""

from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusal
from tidemill.launch.run.desired import ALL, DesiredRoles, LiveHost, parse

A, B, C, UP = LiveHost("a"), LiveHost("b", "gpu"), LiveHost("c", "gpu"), LiveHost("up")


def wanted(**rows: dict[str, int]) -> DesiredRoles:
    return DesiredRoles({key.replace("_", "."): (value, place + 1) for place, (key, value) in enumerate(rows.items())})


def test_a_row_of_the_host_counts_before_its_pools_and_that_before_all_for_each_role() -> None:
    rows = wanted(all={"actor": 8, "engine": 2}, pool_gpu={"engine": 3}, host_c={"actor": 1})
    hosts = [A, B, C]
    assert rows.of(A, hosts) == {"engine": 2, "scorer": 0, "actor": 4}
    assert rows.of(B, hosts) == {"engine": 2, "scorer": 0, "actor": 4}
    assert rows.of(C, hosts) == {"engine": 1, "scorer": 0, "actor": 1}


def test_the_run_itself_comes_first_where_a_total_does_not_divide() -> None:
    rows = wanted(all={"actor": 4, "engine": 1})
    assert [rows.of(host, [A, B, UP]) for host in (UP, A, B)] == [
        {"engine": 1, "scorer": 0, "actor": 2},
        {"engine": 0, "scorer": 0, "actor": 1},
        {"engine": 0, "scorer": 0, "actor": 1},
    ]


def test_without_a_row_or_with_an_invalid_number_the_count_is_zero() -> None:
    assert wanted().of(A, [A]) == {"engine": 0, "scorer": 0, "actor": 0}
    assert DesiredRoles({ALL: ({"actor": "many", "engine": -3}, 1)}).of(A, [A]) == {
        "engine": 0,
        "scorer": 0,
        "actor": 0,
    }


@given(total=st.integers(0, 50), names=st.sets(st.sampled_from("abcdefgh"), min_size=1))
def test_shares_add_up_to_the_total_and_differ_by_one_at_most(total: int, names: set[str]) -> None:
    hosts = [LiveHost(name) for name in names]
    shares = [wanted(all={"actor": total}).of(host, hosts)["actor"] for host in hosts]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_role_counts_are_parsed() -> None:
    assert parse(["actors=8", "engine=1", "scorers=2"]) == {"actor": 8, "engine": 1, "scorer": 2}
    for bad in ("actors", "actors=-1", "actors=x", "learners=1", "actors=10001"):
        with refusal(ValueError, got=repr(bad)):
            parse([bad])
