#!/usr/bin/env bash
# Everything about one GPU: builds, tests, checks with compute-sanitizer, measures; ends in a table.
#   tests/gpu/run.sh                                       all steps
#   tests/gpu/run.sh build tests sanitize benchmarks       those named, in this order
#   tests/gpu/run.sh --dry [steps]                         what needs no GPU: compiles, and checks the benchmarks' own code
# Steps: build (the kernels' programs, the runtime and the models), kernels (their test), tests (the contract and
# tests/gpu on the GPU), sanitize, benchmarks. Each has a time limit of its own; the table says which ran out.
# Results go to $OUT where it is set (with steps.txt: the table and the ends of the logs), else to benchmarks/results.
# PYTHON (python3) runs gradgen and torch. ARCH=80 (or another compute capability) replaces that of the GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

dry=0
wanted=()
for argument in "$@"; do
    case $argument in
        --dry) dry=1 ;;
        build | kernels | tests | sanitize | benchmarks) wanted+=("$argument") ;;
        *) echo "no step '$argument'; there are: build kernels tests sanitize benchmarks, and --dry" >&2; exit 2 ;;
    esac
done
[ ${#wanted[@]} -eq 0 ] && wanted=(build kernels tests sanitize benchmarks)

python=${PYTHON:-python3}
arch=${ARCH:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)}
arch=${arch:-90}
runtime=gradgen/runtime
build=.cache/gpu-tests/sm_$arch
out=${OUT:-benchmarks/results}
logs=$build
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} NCCL_NVLS_ENABLE=0
# One cache for tests and benchmarks, so that the runtime is compiled once (tests/conftest.py names the same folder).
export GRADGEN_CACHE=$PWD/.cache/gradgen-tests

. tests/gpu/steps.sh

sources_of_core() {  # as gradgen compiles them: all but the kernels are one unit
    for source in "$runtime"/src/*.cpp; do
        case $source in */kernels*) ;; *) echo "#include \"${source#"$runtime"/}\"" ;; esac
    done
}

compile() {  # one object a source, in parallel; then the three programs
    local flags="-std=c++20 -O3 -I$runtime/include -I$runtime"
    local host="g++ $flags -Wno-psabi -ffp-contract=off ${CPU_FLAGS--march=native}"
    sources_of_core >"$build/core.cpp"
    for source in "$runtime"/cuda/*.cpp; do echo "#include \"${source#"$runtime"/}\""; done >"$build/cuda.cpp"
    {
        for source in $runtime/cuda/*.cu tests/gpu/test_kernels.cu benchmarks/gpu_kernels.cu; do
            local object=$build/$(basename "$(dirname "$source")")_$(basename "$source" .cu).o
            echo "nvcc $flags -arch=sm_$arch -fmad=false -Xcompiler -Wall,-Wextra -c $source -o $object"
        done
        for source in $runtime/src/{kernels*,dtype,layout}.cpp; do
            echo "$host -Wall -Wextra -c $source -o $build/$(basename "$source" .cpp).o"
        done
        echo "$host -DGRADGEN_CUDA=1 -c $build/core.cpp -o $build/host_core.o"
        echo "$host -c generated/llama/manager.cpp -o $build/host_llama.o"
        echo "nvcc $flags -DGRADGEN_CUDA=1 -Xcompiler -Wno-psabi -c $build/cuda.cpp -o $build/host_cuda.o"
        echo "nvcc $flags -DGRADGEN_CUDA=1 -Igenerated/llama -c benchmarks/gpu_host_time.cpp -o $build/host_time.o"
    } | xargs -P "$(nproc)" -I{} sh -c '{} || exit 255' || return 1
    local link="nvcc -arch=sm_$arch -cudart static"
    $link "$build"/cuda_*.o "$build"/{kernels*,dtype,layout}.o "$build/gpu_test_kernels.o" -o "$build/test_kernels" &&
        $link "$build"/cuda_*.o "$build"/{dtype,layout}.o "$build/benchmarks_gpu_kernels.o" -o "$build/gpu_kernels" &&
        $link "$build"/cuda_*.o "$build"/kernels*.o "$build"/host_{core,llama,cuda,time}.o -lpthread -ldl \
            -o "$build/gpu_host_time" &&
        echo "sm_$arch"
}

modules() {  # what tests and benchmarks import
    "$python" - <<PYTHON
import gradgen
for spec in ("tests/specs/mini.yaml", "llama", "benchmarks/step_model_gpu.yaml"):
    gradgen.load(spec, device="cuda")
PYTHON
}

sanitize() {  # a virtual machine whose driver refuses the tool is no failure of the kernels; the table says so
    compute-sanitizer --tool "$1" --error-exitcode 9 "$build/test_kernels" --small
    local status=$?
    if [ $status -ne 0 ] && grep -q "Device not supported" "$logs/$1.log"; then
        echo "not supported on this machine"
        return 0
    fi
    return $status
}

contract() { GRADGEN_TEST_DEVICE=cuda "$python" -m pytest tests/test_contract_*.py tests/gpu -q -p no:cacheprovider; }

mkdir -p "$build" "$out" "$logs" || exit 1
chosen() { printf '%s\n' "${wanted[@]}" | grep -qx "$1"; }

if chosen build; then
    command -v nvcc >/dev/null || { echo "nvcc is missing"; exit 1; }
    step $((dry ? 900 : 300)) programs compile  # two cores need more
    [ $dry -eq 1 ] || step 300 modules modules
fi
if [ $dry -eq 1 ]; then
    step 120 benchmarks "$python" -m pytest tests/test_gpu_benchmarks.py -q -p no:cacheprovider
    finish
fi
if chosen kernels && [ $failed -eq 0 ]; then step 120 kernels "$build/test_kernels"; fi
if chosen tests; then step 420 contract contract; fi
if chosen sanitize; then
    for tool in memcheck racecheck initcheck synccheck; do
        command -v compute-sanitizer >/dev/null && step 120 "$tool" sanitize "$tool"
    done
fi
if chosen benchmarks; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
    step 60 bench-kernels "$build/gpu_kernels" "$out/gpu_kernels.json" "$driver" "tests/gpu/run.sh"
    step 150 bench-manager "$python" benchmarks/gpu_manager.py --program "$build/gpu_host_time" --out "$out/gpu_manager.json"
    step 200 bench-step "$python" benchmarks/gpu_step.py --out "$out/gpu_step.json"
    show bench-kernels bench-manager bench-step
fi
finish
