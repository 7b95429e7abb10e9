#!/usr/bin/env bash
# The CUDA kernels under NVIDIA's compute-sanitizer, on one GPU: scripts/sanitize_kernels.sh [TOOL…]
# Tools: memcheck, racecheck and synccheck unless told. racecheck looks at shared memory only. A rank runs alone, on
# what its peers were recorded to send, so races between ranks are not looked for here: tests/gpu/test_p2p_random.py is.
# racecheck knows barriers, not st.release and ld.acquire: it names the words through which the teams, the send warp and
# the receive warp speak, and what these words guard (EXPECTED). Anything else that it names is an error.
# Exit status: 0 if every tool found nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
SANITIZER=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
if [ ! -x "$SANITIZER" ]; then
    echo "sanitize_kernels.sh: expected compute-sanitizer of the CUDA toolkit on PATH or in /usr/local/cuda/bin, found" \
        "none; install it (Debian, Ubuntu: cuda-sanitizer-13-0) or name it in COMPUTE_SANITIZER" >&2
    exit 2
fi
[ $# -gt 0 ] || set -- memcheck racecheck synccheck
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" tests/gpu/sanitized_calls.py record "$folder" || exit 1

EXPECTED='store_release_shared|load_acquire_shared|::release\(echo::Stage'
failed=0
summary=""
for tool in "$@"; do
    # Only this project's kernels: those of PyTorch would take most of the time. Without PyTorch's cache every tensor is
    # an allocation with bounds of its own.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$SANITIZER" --tool "$tool" --kernel-name kernel_substring=echo --error-exitcode 9 --print-limit 20 \
        "$PYTHON" tests/gpu/sanitized_calls.py replay "$folder" 2>&1 | tee "$folder/$tool.log"
    status=${PIPESTATUS[0]}
    if [ "$tool" = racecheck ] && [ "$status" -eq 9 ]; then
        others=$(grep 'Race reported between' "$folder/$tool.log" | grep -cEv "$EXPECTED")
        if [ "$others" -eq 0 ]; then
            summary="$summary
  racecheck: nothing but release and acquire in shared memory, which it does not know"
            continue
        fi
    fi
    case $status in
        0) summary="$summary
  $tool: nothing found" ;;
        9) summary="$summary
  $tool: errors, see above (exit status 9)" ;;
        *) summary="$summary
  $tool: the calls themselves failed, see above (exit status $status)" ;;
    esac
    [ "$status" -eq 0 ] || failed=1
done
echo "sanitize_kernels.sh:$summary"
exit $failed
