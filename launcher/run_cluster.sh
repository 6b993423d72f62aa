#!/usr/bin/env bash
# The one command of a fresh machine: sets up the clone's own environment when needed, then runs the `sonar` command.
#   run_cluster.sh demo [--port P] [--host H] [--detach] [flags of `sonar serve`]   serve the demo model
#   run_cluster.sh demo --disaggregated                                             by a prefill and a decode replica
#   run_cluster.sh status | stop [--port P]                                         look at it, end it
#   run_cluster.sh head --config cluster.toml                                       a cluster of many hosts: one head,
#   run_cluster.sh join HEAD[:PORT] --token-file FILE                               and this on every other host
#   run_cluster.sh serve MODEL | chat | bench ...                                   any other `sonar` command
# Knows nothing of models or processes: see launcher/setup.sh and launcher/cli.
set -eEuo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launcher/setup.sh
source "$ROOT/launcher/setup.sh"
DEMO_MODEL=smollm2-135m

usage() { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

# A port in use is said before minutes are spent on an installation. Arguments: those of `sonar serve`.
check_port() {
    local host=127.0.0.1 port=2242
    while (($#)); do
        case $1 in
        --host=*) host=${1#*=} ;;
        --port=*) port=${1#*=} ;;
        --host) host=${2:-} && shift ;;
        --port) port=${2:-} && shift ;;
        esac
        shift || break
    done
    PYTHONPATH=$ROOT "$PYTHON" -B -m launcher.cli.ports "$host" "$port" || exit 2
}

main() {
    local command=${1:-}
    case $command in
    "" | -h | --help)
        usage
        exit 0
        ;;
    status | stop)
        [ -x "$VENV/bin/sonar" ] || { say "nothing is set up here yet: $0 demo" && exit 3; }
        exec "$VENV/bin/sonar" "$@"
        ;;
    demo)
        shift
        [ -x "$VENV/bin/sonar" ] || { find_python && check_port "$@"; }
        set -- serve "$DEMO_MODEL" "$@"
        ;;
    esac
    # never: .venv is part of an image, or of a file system that many hosts share, and is to be taken as it is.
    [ "${SONAR_SETUP:-}" = never ] || sonar_setup ""
    exec "$VENV/bin/sonar" "$@"
}

main "$@"
