"""Seconds that a compile takes beyond `import torch`: DeepSeek-V3 on 4 nodes of 8, with 61 and with 610 layers.

    python benchmarks/compile_time.py [--runs N]

Every figure is the least of N fresh processes. Exit code 1 where 61 layers take over 2 s, or 610 over 1.5 times that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from moec.specs import read

LIMIT_S, LIMIT_RATIO = 2.0, 1.5

#: A pod like 4 DGX nodes, whose memory is not limited: 610 layers would not fit.
POD = """
cluster pod { devices = 8  intra = link(450 GB/s, latency = 3 us)  inter = link(400 Gbit/s, latency = 8 us) }
mesh ranks on pod[4] { attention = dp(4) * tp(8)  experts = ep(32) }
plan serve { run deepseek_v3 on ranks  prefill { tokens = 16384 }  decode { batch = 64 } }
"""

#: Run in a fresh process: torch is there before the clock starts, moec is not.
MEASURE = """
import sys, time, torch
start = time.perf_counter()
from pathlib import Path
from moec.compiler import compile
compile(Path(sys.argv[1])).save(Path(sys.argv[2]))
print(time.perf_counter() - start)
"""


def seconds(source: Path, out: Path, runs: int) -> float:
    command = [sys.executable, "-c", MEASURE, str(source), str(out)]
    return min(float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(runs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    model = read("models", "deepseek_v3.moe")
    taken = {}
    with tempfile.TemporaryDirectory() as folder:
        for layers in (61, 610):
            source = Path(folder) / f"{layers}.moe"
            source.write_text(model.replace("layers 3..60", f"layers 3..{layers - 1}") + POD)
            taken[layers] = seconds(source, Path(folder) / f"{layers}.build", runs)
            print(f"{layers} layers: {taken[layers]:.2f} s beyond import torch")
    ratio = taken[610] / taken[61]
    print(f"610 / 61 layers: {ratio:.2f}")
    return 0 if taken[61] <= LIMIT_S and ratio <= LIMIT_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
