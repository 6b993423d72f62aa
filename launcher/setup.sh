# shellcheck shell=bash
# Makes the clone's own virtual environment: Python, torch (a CPU build where there is no GPU), the package.
#
# Sourced by launcher/run_cluster.sh and tests/run.sh, which set ROOT and call `sonar_setup [EXTRA]`. Knows nothing of
# models, ports or servers. A finished set-up is stamped with a hash of what it was made from, so that the next start
# only compares hashes; an interrupted one leaves no stamp and is taken up again. Concurrent runs wait on one lock.

TORCH_VERSION=2.13.0 # the version the tests run on; pyproject.toml names the range that works
VENV="$ROOT/.venv"
SETUP_LOG="$VENV/setup.log"
STAGE_CHILD=""

say() { printf '%s\n' "$*" >&2; }

# Sourced scripts run with `set -eE`: where one stops without a word of its own, this names the place.
trap 'say "error: ${BASH_SOURCE[0]##*/} line $LINENO failed: $BASH_COMMAND"' ERR

die() {
    say "error: $*"
    exit 1
}

# stage TITLE COMMAND...: runs the command with its output in the log, showing elapsed time and the log's last line.
# On a terminal the line is rewritten every second; elsewhere a line comes every 15 s.
stage() {
    local title=$1 begin=$SECONDS line shown=0 width
    shift
    mkdir -p "$VENV"
    printf '\n=== %s: %s\n' "$title" "$*" >>"$SETUP_LOG"
    set -m # a process group of its own, so that end_stage reaches what the command started
    "$@" >>"$SETUP_LOG" 2>&1 </dev/null &
    STAGE_CHILD=$!
    set +m
    width=$(($(tput cols 2>/dev/null || echo 100) - 1))
    while kill -0 "$STAGE_CHILD" 2>/dev/null; do
        line=$(tail -n 1 "$SETUP_LOG" | tr -d '\r' | cut -c1-70)
        if [ -t 2 ]; then
            printf '\r\033[K%.*s' "$width" "  ... $title  $((SECONDS - begin)) s  $line" >&2
        elif ((SECONDS - begin >= shown + 15)); then
            shown=$((SECONDS - begin))
            say "  ... $title  $shown s  $line"
        fi
        sleep 0.5
    done
    [ -t 2 ] && printf '\r\033[K' >&2
    if ! wait "$STAGE_CHILD"; then
        STAGE_CHILD=""
        say "  failed: $title, after $((SECONDS - begin)) s; the end of $SETUP_LOG:"
        tail -n 25 "$SETUP_LOG" >&2
        return 1
    fi
    STAGE_CHILD=""
    say "  done: $title ($((SECONDS - begin)) s)"
}

# Ends the running stage, if any: without it Ctrl-C would leave pip behind.
end_stage() {
    [ -z "$STAGE_CHILD" ] || kill -- "-$STAGE_CHILD" 2>/dev/null || true
}

python_fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

# Sets PYTHON to the first usable interpreter of $SONAR_PYTHON, python3 and python3.11 to 3.13, or explains and exits.
# Each is run, not just looked up: version managers put names on PATH that refuse to start.
find_python() {
    local candidate seen="" bare=""
    for candidate in ${SONAR_PYTHON:+"$SONAR_PYTHON"} python3 python3.11 python3.12 python3.13; do
        command -v "$candidate" >/dev/null || continue
        if ! python_fits "$candidate"; then
            seen+=" $candidate ($("$candidate" --version 2>&1 | head -n 1 || true))"
        elif ! "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            bare=${bare:-$candidate}
        else
            PYTHON=$(command -v "$candidate")
            return
        fi
    done
    if [ -n "$bare" ]; then
        local version
        version=$("$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        die "$bare has no venv module. On Debian or Ubuntu: apt-get update && apt-get install -y python$version-venv"
    fi
    die "Sonar needs Python 3.11, 3.12 or 3.13 and found none${seen:+; seen:$seen}." \
        "On Debian 12+ or Ubuntu 24.04+: apt-get update && apt-get install -y python3 python3-venv;" \
        "elsewhere name an interpreter with SONAR_PYTHON=/path/to/python3.12"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# Hash of everything an installed environment depends on. $1: the extra.
setup_hash() {
    {
        printf '%s\n' "$ROOT" "$1" "$TORCH_VERSION"
        "$VENV/bin/python" --version
        has_gpu && echo gpu
        command -v c++ || true # with a compiler that came later the kernels can be built
        cd "$ROOT"
        cat pyproject.toml launcher/setup.sh
        if [ -f CMakeLists.txt ]; then
            find CMakeLists.txt csrc -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
        fi
    } 2>/dev/null | sha256sum | cut -d' ' -f1
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

make_venv() {
    [ -x "$VENV/bin/python" ] && python_fits "$VENV/bin/python" && pip --version && return
    # A half-made environment, or one whose interpreter has gone. The log is in there and is kept.
    find "$VENV" -mindepth 1 -maxdepth 1 ! -name "${SETUP_LOG##*/}" -exec rm -rf {} +
    "$PYTHON" -m venv "$VENV"
}

torch_is_there() {
    "$VENV/bin/python" - <<'PY'
import importlib.metadata as metadata
version = metadata.version("torch").split("+")[0].split(".")
raise SystemExit(not (2, 11) <= (int(version[0]), int(version[1])) < (2, 15))
PY
}

# Whether the torch that pip would choose brings no CUDA libraries; asks for the metadata only.
pip_torch_is_cpu() {
    pip install --dry-run --ignore-installed --no-deps --quiet --report - "torch==$TORCH_VERSION" | "$VENV/bin/python" -c '
import json, sys
meta = json.load(sys.stdin)["install"][0]["metadata"]
heavy = any(need.startswith(("nvidia-", "cuda-")) for need in meta.get("requires_dist", []))
sys.exit(heavy and not meta["version"].endswith("+cpu"))'
}

# On most package indexes the x86-64 wheel of torch carries gigabytes of CUDA libraries. Without a GPU a CPU build is
# taken: from pip where that is what it offers, else through uv, which knows where CPU builds are.
install_torch() {
    torch_is_there 2>/dev/null && return
    if has_gpu || pip_torch_is_cpu; then
        pip install "torch==$TORCH_VERSION"
        return
    fi
    local uv
    uv=$(command -v uv) || { pip install uv && uv="$VENV/bin/uv"; }
    if [ -n "$uv" ] && "$uv" pip install --python "$VENV/bin/python" --torch-backend=cpu "torch==$TORCH_VERSION"; then
        return
    fi
    echo "no CPU build of torch could be had; installing the CUDA build, several GB"
    pip install "torch==$TORCH_VERSION"
}

# The build back end is installed beside the package rather than in a throw-away environment, so that nothing is
# resolved twice and no second torch is fetched for the build. CMake and Ninja come from the system when they are there.
install_package() {
    local -a tools
    mapfile -t tools < <("$VENV/bin/python" -c '
import tomllib; print(*tomllib.load(open("'"$ROOT"'/pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")')
    command -v cmake >/dev/null || tools+=(cmake)
    command -v ninja >/dev/null || tools+=(ninja)
    pip install "${tools[@]}" || return
    PATH="$VENV/bin:$PATH" pip install --verbose --no-build-isolation -e "$ROOT${1:+[$1]}"
}

setup_stages() {
    stage "Python environment in .venv ($("$PYTHON" --version))" make_venv || return
    stage "torch $TORCH_VERSION ($(has_gpu && echo 'GPU build' || echo 'CPU build'))" install_torch || return
    stage "Sonar and what it needs${1:+ [$1]}" install_package "$1"
}

# Whether the environment is as it should be for the extra $1; one with all extras will do for none.
is_set_up() {
    [ -x "$VENV/bin/python" ] || return
    local extra
    for extra in "$1" dev; do
        [ "$(cat "$(stamp_of "$extra")" 2>/dev/null)" != "$(setup_hash "$extra")" ] || return 0
    done
    return 1
}

stamp_of() { echo "$VENV/.sonar-stamp${1:+-$1}"; }

# sonar_setup [EXTRA]: returns with $VENV ready, or exits with the reason. EXTRA: of pyproject's optional dependencies.
sonar_setup() {
    local extra=${1:-} begin=$SECONDS
    command -v flock >/dev/null || die "flock is missing. On Debian or Ubuntu: apt-get install -y util-linux"
    exec 9>"$ROOT/.venv.lock"
    flock -n 9 || { say "another set-up of this clone is running; waiting for it" && flock 9; }
    if ! is_set_up "$extra"; then
        find_python
        say "Setting up in $ROOT (once; the log is $SETUP_LOG)"
        rm -f "$VENV"/.sonar-stamp*
        trap 'end_stage; exit 130' INT TERM
        setup_stages "$extra" || exit 1
        trap - INT TERM
        setup_hash "$extra" >"$(stamp_of "$extra")"
        say "Set up in $((SECONDS - begin)) s"
        "$VENV/bin/python" -c 'import sonar.ops._cpu' 2>/dev/null ||
            say "Note: without a C++ compiler Sonar's kernels were not built, and a CPU runs slower code." \
                "On Debian or Ubuntu: apt-get install -y g++, then start again"
    fi
    exec 9>&- # the lock; what is started later must not hold it
}
