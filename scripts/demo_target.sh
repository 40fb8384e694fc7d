#!/usr/bin/env bash
# Which target the demo is built for here: x86 where our kernels run, else cpu. --why says the reason in a line instead.
set -euo pipefail
flags=(avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni) # those of engines/processor.py
target=x86
why="this processor has AVX-512 VNNI, so our own kernels run"
if [ "$(uname -s) $(uname -m)" != "Linux x86_64" ]; then
    target=cpu why="this is $(uname -s) on $(uname -m), our own kernels are for Linux on x86_64"
else
    held=" $(sed -n '/^flags/{s/.*: //p;q}' /proc/cpuinfo) "
    for flag in "${flags[@]}"; do
        if [[ "$held" != *" $flag "* ]]; then
            target=cpu why="this processor lacks $flag, which our own kernels need: OpenVINO's are taken"
            break
        fi
    done
fi
if [ "${1:-}" = --why ]; then
    echo "target $target: $why (RECIPE=engines/recipes/… for another)"
else
    echo "$target"
fi
