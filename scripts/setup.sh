#!/usr/bin/env bash
# Make .venv with every extra at the locked versions, and the .types view that mypy reads. Safe to run again.
set -euo pipefail
python=${1:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $("$python" --version) is too old: give Python 3.11 or newer, such as make PYTHON=python3.11" >&2
    exit 2
}

# One line a package: what pip is at, without its chatter about what is already there.
show() { awk '/^(Collecting|Downloading|Installing|ERROR|error)/ { print "  " substr($0, 1, 100); fflush() }'; }

echo "setup: environment in .venv (about 3 GB; two to four minutes the first time)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install --disable-pip-version-check --no-input -c constraints.txt)
"${pip[@]}" setuptools pip 2>&1 | show
"${pip[@]}" --no-build-isolation -e '.[cpu,rtx,build,dev]' 2>&1 | show
mkdir -p .types/ostinato
for room in engines plugins builder runtime; do
    ln -sfn "../../$room" ".types/ostinato/$room"
done
touch .venv/.ready
echo "setup: done"
