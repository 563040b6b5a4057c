#!/usr/bin/env bash
# Tests and measures parallel PyTorch code in any CI system. Buildkite and Jenkins call it as it is; github.yml and
# gitlab.yml beside it call it, too.
#
#   bash distributed.sh test                tests: on simulated ranks and on processes; with a GPU those marked gpu, too
#   bash distributed.sh bench [MAIN.json]   benchmarks: bench.json, report.html, and what became slower since MAIN.json
#
# Variables:
#   TESTS        folders or files of tests; default: those of the project's pytest settings
#   BENCHMARKS   files of tests with rank_benchmark, or suites of pdlcheck; default: comm sync
#   LIMIT        how much more time fails the job; default: 1.1
#
# Python with the project, pdlcheck[report] and, for a GPU, torch with CUDA must be there.
set -euo pipefail

has_gpu() { python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }

run_tests() {
  local tests
  read -ra tests <<<"${TESTS:-}"
  python -m pytest "${tests[@]}" --world sim,gloo --no-skip-worlds --junitxml=junit.xml
  if has_gpu; then
    python -m pytest "${tests[@]}" -m gpu --require-gpu --junitxml=junit-gpu.xml ||
      [[ $? == 5 ]] # no test is marked gpu
  fi
}

run_benchmarks() {
  local main=$1 benchmarks device=cpu ranks=2 runs=(bench.json)
  read -ra benchmarks <<<"${BENCHMARKS:-comm sync}"
  if has_gpu; then
    device=cuda
    ranks=$(python -c 'import torch; print(torch.cuda.device_count())')
  fi
  python -m pdlcheck bench "${benchmarks[@]}" --device "$device" --ranks "$ranks" --json bench.json
  if [[ -s $main ]]; then
    runs=("$main" bench.json)
  fi
  python -m pdlcheck report "${runs[@]}" --output report.html --limit "${LIMIT:-1.1}"
  if [[ -s $main ]]; then # exit code 1 if a row became slower
    python -m pdlcheck compare "${runs[@]}" --limit "${LIMIT:-1.1}" --markdown |
      tee compare.md | tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
  fi
}

case ${1:-} in
  test) run_tests ;;
  bench) run_benchmarks "${2:-}" ;;
  *)
    echo "usage: bash distributed.sh test | bench [MAIN.json]" >&2
    exit 2
    ;;
esac
