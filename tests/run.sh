#!/usr/bin/env bash
# Sets up this clone and checks everything: ruff, mypy, clang-format, shellcheck where it is installed, pytest.
#   tests/run.sh [pytest's arguments]     e.g. tests/run.sh tests/launcher -k chat
#   tests/run.sh faults [...]             every row of the fault matrix (needs root); prints its table
# Works on a bare Debian or Ubuntu machine; as root it installs the system packages that are missing. A failed check
# does not hide the tests' results: all run, and the exit code tells. The last line is pytest's.
set -eEuo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
# shellcheck source=launcher/setup.sh
source launcher/setup.sh

# command -> the Debian package that has it
declare -A PACKAGES=([git]=git [ip]=iproute2 [c++]=g++ [flock]=util-linux [tput]=ncurses-bin
    [etcd]=etcd-server)

system_packages() {
    local tool missing=()
    for tool in "${!PACKAGES[@]}"; do
        command -v "$tool" >/dev/null || missing+=("${PACKAGES[$tool]}")
    done
    python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing+=(python3 python3-venv)
    ((${#missing[@]})) || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "missing system packages; install: ${missing[*]}"
        return 0 # what truly cannot go on without them says so itself
    fi
    mkdir -p "$VENV"
    stage "System packages ${missing[*]}" apt_install "${missing[@]}"
}

# shellcheck disable=SC2317 # called through `stage`
apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update && apt-get install -y --no-install-recommends "$@"
}

FAILED=()

# check NAME COMMAND...: runs it, shows its output only when it fails, and how long it took.
check() {
    local name=$1 begin=$SECONDS output
    shift
    if output=$("$@" 2>&1); then
        say "  ok: $name ($((SECONDS - begin)) s)"
    else
        say "$output" && say "  FAILED: $name ($((SECONDS - begin)) s): $*"
        FAILED+=("$name")
    fi
}

check_sources() {
    local -a cpp
    check "ruff" "$VENV/bin/ruff" check .
    check "ruff format" "$VENV/bin/ruff" format --check .
    mapfile -t cpp < <(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.hpp' 'csrc/*.cu' 'csrc/*.cuh')
    ((${#cpp[@]} == 0)) || check "clang-format" "$VENV/bin/clang-format" --dry-run -Werror "${cpp[@]}"
    ! command -v shellcheck >/dev/null || check "shellcheck" shellcheck -x launcher/run_cluster.sh tests/run.sh .ci/run
    check "mypy" "$VENV/bin/mypy"
}

main() {
    local code=0 begin=$SECONDS
    [ "${1:-}" != faults ] || set -- tests/faults -m "faults or not faults" "${@:2}"
    system_packages
    sonar_setup dev
    check_sources
    ((${#FAILED[@]} == 0)) || say "Failed so far: ${FAILED[*]}"
    say "Tests begin after $((SECONDS - begin)) s"
    "$VENV/bin/python" -m pytest --durations=10 "$@" || code=$?
    ((${#FAILED[@]} == 0)) || code=1
    exit "$code"
}

main "$@"
