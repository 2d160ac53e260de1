#!/usr/bin/env bash
# Everything about several GPUs of one host, one rank a GPU: builds, tests, measures; ends in a table, within 8 minutes.
#   tests/gpu/run_multi.sh              all steps
#   tests/gpu/run_multi.sh --dry        what needs no GPU: the benchmarks' own code, and their path over gloo
# RANKS=4 takes another number of ranks than there are GPUs; more ranks than GPUs need NCCL 2.30 or later. Results go to
# $OUT where it is set (with steps.txt: the table and the ends of the logs), else to benchmarks/results. PYTHON (python3)
# runs gradgen and torch.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

dry=0
case ${1:-} in
    "") ;;
    --dry) dry=1 ;;
    *) echo "unknown argument '$1'; there is --dry" >&2; exit 2 ;;
esac

python=${PYTHON:-python3}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
ranks=${RANKS:-$gpus}
out=${OUT:-benchmarks/results}
logs=.cache/gpu-tests/multi
total=470  # seconds
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} NCCL_NVLS_ENABLE=0 GLOO_SOCKET_IFNAME=lo
export GRADGEN_CACHE=$PWD/.cache/gradgen-tests
mkdir -p "$out" "$logs" || exit 1

. tests/gpu/steps.sh

if [ $dry -eq 1 ]; then
    step 120 own-code "$python" -m pytest tests/test_gpu_benchmarks.py -q -p no:cacheprovider
    step 420 gloo "$python" benchmarks/gpu_multi.py --device cpu --ranks 2 --quick --rounds 1 --steps 1 \
        --out "$logs/dry.json"
    finish
fi
if [ "$ranks" -lt 2 ]; then
    echo "$gpus GPUs: two are needed, or RANKS=2 and NCCL 2.30 or later for two ranks on one" >&2
    exit 1
fi
[ "$ranks" -gt "$gpus" ] && export NCCL_MULTI_RANK_GPU_ENABLE=1

modules() {  # what tests and benchmarks import
    "$python" - <<PYTHON
import gradgen
for spec in ("tests/specs/mini.yaml", "llama", "benchmarks/step_model_gpu.yaml", "benchmarks/gpu_blocks.yaml"):
    gradgen.load(spec, device="cuda")
PYTHON
}
torchrun() { OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$@"; }
contract() {  # every check of the file but the models, which are a step of their own
    torchrun tests/gpu/nccl_rank.py sums as_on_the_cpu rows_and_whole absent norms nonfinite graph errors_and_reset late
}
peers() { GRADGEN_TEST_DEVICE=cuda "$python" -m pytest tests/gpu/test_peers.py -q -p no:cacheprovider; }

step 150 modules modules
step 90 contract contract
step 60 parity torchrun tests/gpu/nccl_rank.py models
step 45 peers peers
step 45 bench-overlap torchrun benchmarks/gpu_overlap.py --out "$out/gpu_overlap.json"
left=$((total - SECONDS))
step $left bench-multi "$python" benchmarks/gpu_multi.py --ranks "$ranks" --rounds 2 --limit $((left - 15)) --out "$out/gpu_multi.json"
show contract parity bench-overlap bench-multi
finish
