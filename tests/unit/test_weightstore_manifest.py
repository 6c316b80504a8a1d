"""Manifests, buckets and staging: every tensor once, in place, for all sizes and dtypes."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refusal
from tidemill.weightstore.errors import BadManifest
from tidemill.weightstore.format.manifest import ITEM_BYTES, Manifest, TensorSpec, spec_of, unflatten
from tidemill.weightstore.transport.staging import StagingPool

DTYPES = ["float32", "bfloat16", "float16", "int64", "uint8", "bool"]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
manifests = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12).map(
    lambda rows: Manifest(TensorSpec(name=f"t{i}", shape=shape, dtype=dtype) for i, (shape, dtype) in enumerate(rows))
)


def some(spec: TensorSpec, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2 if spec.dtype == "bool" else 100, spec.shape, generator=generator)
    return values.to(getattr(torch, spec.dtype))


@given(manifests, st.integers(1, 300))
def test_buckets_hold_every_tensor_once_in_order_aligned_and_within_the_size(
    manifest: Manifest, bucket_bytes: int
) -> None:
    buckets = manifest.buckets(bucket_bytes)
    assert [spec for bucket in buckets for spec in bucket.specs] == list(manifest.specs)
    assert sum(bucket.num_bytes for bucket in buckets) == manifest.num_bytes
    for bucket in buckets:
        assert bucket.num_bytes <= bucket_bytes or len([spec for spec in bucket.specs if spec.num_bytes]) == 1
        for spec, place in bucket.places():
            assert place.start % ITEM_BYTES[spec.dtype] == 0 and place.stop - place.start == spec.num_bytes
    assert buckets == Manifest(manifest.specs).buckets(bucket_bytes)


@given(manifests, st.integers(1, 300), st.randoms(use_true_random=False))
def test_what_is_staged_in_any_order_comes_out_of_the_buckets(
    manifest: Manifest, bucket_bytes: int, random: object
) -> None:
    staging = StagingPool(manifest, bucket_bytes).take(0)
    tensors = [(spec.name, some(spec, seed)) for seed, spec in enumerate(manifest.specs)]
    staging.fill(sorted(tensors, key=lambda each: hash((each[0], 7))))
    wire = [(bucket, torch.tensor(flat.tolist(), dtype=torch.uint8)) for bucket, flat in staging.buckets]
    received = {name: tensor for bucket, flat in wire for name, tensor in unflatten(bucket, flat)}
    assert received.keys() == {name for name, _ in tensors}
    assert all(torch.equal(received[name], tensor) and received[name].dtype == tensor.dtype for name, tensor in tensors)


def test_a_bucket_is_the_plain_concatenation_of_its_tensors() -> None:
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3]], dtype=torch.int32)}
    manifest = Manifest.of(tensors.items())
    staging = StagingPool(manifest, 1000).take(0)
    staging.fill(tensors.items())
    assert bytes(staging.buckets[0][1].tolist()) == tensors["a"].numpy().tobytes() + tensors["b"].numpy().tobytes()


def test_the_digest_depends_on_names_shapes_and_dtypes_but_not_on_their_order() -> None:
    a, b = TensorSpec(name="a", shape=(2, 3), dtype="float32"), TensorSpec(name="b", shape=(), dtype="bfloat16")
    assert Manifest([a, b]).digest == Manifest([b, a]).digest
    others = [
        [a],
        [a, TensorSpec(name="c", shape=(), dtype="bfloat16")],
        [a, TensorSpec(name="b", shape=(1,), dtype="bfloat16")],
        [a, TensorSpec(name="b", shape=(), dtype="float16")],
    ]
    digests = {Manifest(specs).digest for specs in others} | {Manifest([a, b]).digest}
    assert len(digests) == 5 and all(len(digest) == 64 for digest in digests)


def test_every_dtype_of_the_table_is_torchs_with_its_size() -> None:
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size
        assert spec_of("x", torch.empty(2, dtype=getattr(torch, name))) == TensorSpec(name="x", shape=(2,), dtype=name)


def test_strange_manifests_are_refused() -> None:
    spec = TensorSpec(name="a", shape=(1,), dtype="float32")
    with refusal(BadManifest, got="a twice"):
        Manifest([spec, spec])
    with refusal(BadManifest, where="a: dtype", got="'complex64'"):
        TensorSpec(name="a", shape=(), dtype="complex64")
    with refusal(BadManifest, where="flat bucket", got="3 of torch.uint8"):
        list(unflatten(Manifest([spec]).buckets(9)[0], torch.zeros(3, dtype=torch.uint8)))


def test_strange_tensors_are_refused_by_name() -> None:
    good = {"a": torch.zeros(2), "b": torch.zeros(3)}
    staging = StagingPool(Manifest.of(good.items()), 100).take(0)
    cases = [
        ({**good, "c": torch.zeros(1)}, "c: want every tensor of the manifest once, got one that is not in it"),
        ({"a": good["a"]}, "b: want every tensor of the manifest once, got 1 of 2 missing"),
        ({**good, "b": torch.zeros(4)}, r"b: want float32\[3\], got float32\[4\]"),
        ({**good, "b": torch.zeros(3, dtype=torch.float64)}, r"b: want float32\[3\], got float64\[3\]"),
    ]
    for tensors, message in cases:
        with pytest.raises(BadManifest, match=message):
            staging.fill(tensors.items())
    with refusal(BadManifest, got="it twice"):
        staging.fill([*good.items(), ("a", good["a"])])


def test_a_copy_in_use_is_not_lent_again() -> None:
    pool = StagingPool(Manifest.of([("a", torch.zeros(1))]), 100)
    first, second = pool.take(0), pool.take(0)
    assert first is not second
    with refusal(TimeoutError, place="staging"):
        pool.take(0)
    first.hold()
    first.release()
    with pytest.raises(TimeoutError):
        pool.take(0)
    found: list[object] = []
    waiter = threading.Thread(target=lambda: found.append(pool.take(60)))
    waiter.start()
    first.release()
    waiter.join(60)
    assert found == [first]
