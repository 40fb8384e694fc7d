"""Which of our kernel binaries a GPU runs: its compute capability → the folder of cubins (offline; once at start)."""

from __future__ import annotations

# 12.1 runs the binaries of 12.0, which are assembled without features of 12.0 alone; all others have their own.
KERNEL_ARCHITECTURES = {
    "8.0": "sm_80",
    "8.6": "sm_86",
    "8.7": "sm_87",
    "8.9": "sm_89",
    "9.0": "sm_90",
    "10.0": "sm_100",
    "12.0": "sm_120",
    "12.1": "sm_120",
}
