#!/bin/sh
# Every check there is: style, types, tests. Makes .venv if needed. Arguments go to pytest: sh tests/run.sh -k config
set -eu
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/python ]; then
    python=""
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "mpdist needs Python 3.11 or newer, and none of python3, python3.14 ... python3.11 is" >&2
        exit 4
    fi
    "$python" -m venv .venv
fi

# Install again only where what is asked for has changed.
wanted=$(cat pyproject.toml constraints.txt | cksum)
if [ "$(cat .venv/tests-installed 2>/dev/null)" != "$wanted" ]; then
    .venv/bin/python -m pip install --quiet -e '.[test]' -c constraints.txt
    echo "$wanted" >.venv/tests-installed
fi
# What is not installed by copying nobody has compiled, and many processes are to start from it.
.venv/bin/python -m compileall -q mpdist tests

# The plan's picture is looked at in a real browser. Where none is and none can be had, those tests skip and say so.
browser=""
for candidate in chromium chromium-browser google-chrome-stable google-chrome chrome; do
    browser=${browser:-$(command -v "$candidate" || true)}
done
if [ -z "$browser" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
        >/dev/null 2>&1 </dev/null || echo "tests/run.sh: Chromium could not be installed" >&2
fi

# Jobs are tried on a Slurm of the tests' own. Where none can be had those tests skip, and fail if MPDIST_EXPECT_SLURM is set.
if ! command -v slurmctld >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2; } \
        >/dev/null 2>&1 </dev/null || echo "tests/run.sh: Slurm could not be installed" >&2
fi

.venv/bin/python -m ruff check
.venv/bin/python -m ruff format --check
.venv/bin/python -m mypy

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # threads that wait for a core by spinning cost a busy machine a multiple

# What is synced to a disk thousands of times is as well kept in memory, where there is enough of it.
memory=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }')
if [ -z "${TMPDIR:-}" ] && [ "${memory:-0}" -ge 4096 ] && [ -w /dev/shm ]; then
    TMPDIR=$(mktemp -d /dev/shm/mpd.XXXX)
    export TMPDIR
    trap 'rm -rf "$TMPDIR"' EXIT
fi

# Several workers at once, then what judges time by itself. 5 says that no test was chosen, as in one of the two may be.
run() {
    status=0
    .venv/bin/python -m pytest "$@" || status=$?
    case $status in 0 | 1 | 5) ;; *) exit "$status" ;; esac
}
run -n auto --alone not "$@"
most=$status
run "$@" -n 0 --alone only
case $most$status in *1*) exit 1 ;; 55) exit 5 ;; esac
