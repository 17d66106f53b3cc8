#!/bin/sh
# Makes .venv with a pip that knows dependency groups, also on a Debian without python3-venv,
# as root or not. Does nothing when that is there already.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive

fail() {
    echo "setup: $1" >&2
    exit 1
}

has_ensurepip() {
    "$python" -c 'import ensurepip' 2>/dev/null
}

# A pip to start from, out of Debian's package; needs no root, touches nothing outside $scratch.
debian_pip() {
    apt="apt-get -qq -o Dir::State::lists=$scratch/lists -o Dir::Cache=$scratch/cache"
    mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial"
    (cd "$scratch" && $apt update && $apt download python3-pip-whl && dpkg -x ./*.deb .) \
        >"$scratch/log" 2>&1 || return 1
    pip_wheel=$(ls "$scratch"/usr/share/python-wheels/pip-*.whl)
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$python is missing or older than 3.11; set PYTHON to a newer one"
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    if ! has_ensurepip && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing python3-venv"
        { apt-get -qq update && apt-get -qq install -y python3-venv; } >/dev/null 2>&1 || true
    fi
    if has_ensurepip; then
        "$python" -m venv .venv
    else
        scratch=$(mktemp -d)
        trap 'rm -rf "$scratch"' EXIT
        debian_pip || fail "cannot make a virtual environment: ask an administrator for python3-venv"
        "$python" -m venv --without-pip .venv
        .venv/bin/python "$pip_wheel/pip" install -q pip
    fi
fi
.venv/bin/python -m pip install -q --upgrade 'pip>=25.1' || fail "pip cannot be upgraded to 25.1"
