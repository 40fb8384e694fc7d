#!/usr/bin/env bash
# Make .venv with every extra at the locked versions, and the .types view that mypy reads. Safe to run again.
set -euo pipefail
unset CDPATH # which cd would look through
cd "$(dirname "$0")/.."
python=${1:-python3}
command -v "$python" > /dev/null || {
    echo "setup: there is no $python: give Python 3.11 or newer, such as make PYTHON=python3.11" >&2
    exit 2
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $("$python" --version) is too old: give Python 3.11 or newer, such as make PYTHON=python3.11" >&2
    exit 2
}
log=.venv/setup.log

# What pip is at: one line that counts where a terminal shows it, else a line now and then.
show() {
    local count=0 line
    while read -r line; do
        case $line in
            Collecting*) count=$((count + 1)) line=${line%% (from *} ;;
            Installing*packages:*) line="installing them" ;;
            Downloading*) ;;
            *) continue ;;
        esac
        if [ "$count" = 0 ]; then continue; fi # of what is there already, only our own package is put in again
        if [[ $line == installing* && $count -ge 40 ]]; then line+=", a minute or two"; fi
        if [ -t 1 ]; then
            printf '\r\e[K  %.70s' "$count packages: ${line,}"
        elif [[ $line == installing* || ($line == Collecting* && $((count % 40)) == 0) ]]; then
            echo "  $count packages: ${line,}"
        fi
    done
    if [ -t 1 ]; then printf '\r\e[K'; fi
}

install() {
    .venv/bin/python -m pip install --disable-pip-version-check --no-input -c constraints.txt "$@" 2>&1 |
        tee -a "$log" | show && return
    echo "setup: pip could not install the packages; all it said is in $log, and last" >&2
    tail -n 20 "$log" | sed 's/^/  /' >&2
    exit 1
}

echo "setup: environment in .venv (about 3 GB; two to four minutes the first time)"
[ -x .venv/bin/pip ] || "$python" -m venv .venv
: > "$log"
install setuptools pip
install --no-build-isolation -e '.[cpu,rtx,build,dev]'
mkdir -p .types/ostinato
for room in engines plugins builder runtime; do
    ln -sfn "../../$room" ".types/ostinato/$room"
done
touch .venv/.ready
echo "setup: done"
