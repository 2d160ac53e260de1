#!/usr/bin/env bash
# Builds the CUDA kernels, their test and their benchmark; runs the test, compute-sanitizer and the benchmark on the
# GPU; prints a table.
#   tests/gpu/run.sh          needs a GPU; writes gpu_kernels.json to $OUT, by default to benchmarks/results
#   tests/gpu/run.sh --dry    builds only: needs nvcc, no GPU
# Exits with 1 when a step failed. ARCH=80 (or another compute capability) replaces 90.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

arch=${ARCH:-90}
runtime=gradgen/runtime
build=.cache/gpu-tests/sm_$arch
out=${OUT:-benchmarks/results}
steps=()
failed=0

# step <name> <log> <command...>: runs it, shows the log's end when it fails, and notes the outcome for the table.
step() {
    local name=$1 log=$2 start=$SECONDS
    shift 2
    if "$@" >"$build/$log" 2>&1; then
        steps+=("ok|$name|$((SECONDS - start)) s|$(tail -n 1 "$build/$log" | cut -c 1-80)")
    else
        failed=1
        steps+=("FAILED|$name|$((SECONDS - start)) s|$build/$log")
        tail -n 40 "$build/$log"
    fi
}

compile() {  # one object a source, in parallel; then the two programs
    local flags="-std=c++20 -O3 -I$runtime/include"
    {
        for source in $runtime/cuda/*.cu tests/gpu/test_kernels.cu benchmarks/gpu_kernels.cu; do
            local object=$build/$(basename "$(dirname "$source")")_$(basename "$source" .cu).o
            echo "nvcc $flags -arch=sm_$arch -fmad=false -Xcompiler -Wall,-Wextra -c $source -o $object"
        done
        for source in $runtime/src/{kernels*,dtype,layout}.cpp; do
            local object=$build/$(basename "$source" .cpp).o
            echo "g++ $flags -Wall -Wextra -ffp-contract=off ${CPU_FLAGS--march=native} -c $source -o $object"
        done
    } | xargs -P "$(nproc)" -I{} sh -c '{} || exit 255' || return 1
    local link="nvcc -arch=sm_$arch -cudart static"
    $link "$build"/cuda_*.o "$build"/{kernels*,dtype,layout}.o "$build/gpu_test_kernels.o" -o "$build/test_kernels" &&
        $link "$build"/cuda_*.o "$build"/{dtype,layout}.o "$build/benchmarks_gpu_kernels.o" -o "$build/gpu_kernels" &&
        echo "sm_$arch"
}

sanitize() {  # a virtual machine whose driver refuses the tool is no failure of the kernels; the table says so
    compute-sanitizer --tool "$1" --error-exitcode 9 "$build/test_kernels" --small
    local status=$?
    if [ $status -ne 0 ] && grep -q "Device not supported" "$build/$1.log"; then
        echo "not supported on this machine"
        return 0
    fi
    return $status
}

mkdir -p "$build" "$out" || exit 1
command -v nvcc >/dev/null || { echo "nvcc is missing"; exit 1; }
step build build.log compile
if [ "${1:-}" != --dry ] && [ $failed -eq 0 ]; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
    step test test.log "$build/test_kernels"
    step benchmark benchmark.log "$build/gpu_kernels" "$out/gpu_kernels.json" "$driver" "tests/gpu/run.sh"
    for tool in memcheck racecheck initcheck synccheck; do
        command -v compute-sanitizer >/dev/null && step "$tool" "$tool.log" sanitize "$tool"
    done
    cat "$build/benchmark.log"
fi
printf '%s\n' "${steps[@]}" | awk -F '|' '{printf "%-7s %-10s %6s  %s\n", $1, $2, $3, $4}'
exit $failed
