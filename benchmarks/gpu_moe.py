"""MoE layers on one GPU: `python benchmarks/gpu_moe.py [--layers qwen3-30b,mixtral-8x7b] [--json OUT.json]`.

1. Every form of a layer (`gpu_moe_kernels.py`) is checked against an fp64 product of the same weights.
2. Then T = 1 to 16384 tokens x balanced and power-law routing are timed, from chosen experts and their weights to the
   layer's sums: sort pairs, gate and up, down, sums. A CUDA graph holds passes over copies of the weights in turn, and
   over other tokens, so that no pass finds its weights in the L2 cache; CUDA events around it, median of its replays.
3. Beside each figure: the same by `torch.nn.functional.grouped_mm` in the same run, the roof (the larger of the least
   bytes over bandwidth and operations over peak), what is published (`gpu_moe_layers.py`), and what is asked for.

No case begins after `--seconds` (225, of which compiling takes part); those left out are named. Needs a GPU,
torch >= 2.11, triton >= 3.6, jinja2, networkx and lark; moec need not be installed. Without a GPU, `--kernels-on-cpu`
runs step 1 for a small layer in Triton's interpreter, and `--predict` prints what moec's cost model says of the kernels
that it chooses for an H200 (two minutes of compiling).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import moec  # noqa: E402

if not any(Path(place, "codegen").is_dir() for place in moec.__path__):
    moec.__path__.append(str(ROOT / "typings" / "moec"))  # links to the parts that lie beside the package

import torch  # noqa: E402
from gpu_moe_kernels import Experts, Forward, LayerKernels, forms_of, make_experts, one_rank, peer, reference  # noqa: E402
from gpu_moe_layers import LAYERS, PUBLISHED, ROUTINGS, TOKENS, WANTED, Layer, choices, expert_loads  # noqa: E402
from gpu_moe_predict import predictions  # noqa: E402
from torch import Tensor  # noqa: E402

from moec.codegen.devices import DEVICES  # noqa: E402
from moec.codegen.targets import Dtype  # noqa: E402

#: Bytes that must be read between two readings of a weight for it to have left an L2 cache of 50 MB.
FLUSHED_BYTES = 200e6
#: Layers' weights are copied so often at most, and a graph holds so many passes.
MOST_COPIES, PASSES = 4, 6
#: Largest difference from fp64 in units of the result's spread: bf16 rounds rows, activations and results; FP8 has
#: three bits of mantissa for rows, weights and activations.
TOLERANCE = {False: 0.03, True: 0.25}


@dataclass(frozen=True)
class Line:
    """Microseconds of one case. `form`: the fastest of moec's forms that the default plan allows."""

    layer: str
    tokens: int
    routing: str
    form: str
    moec_us: dict[str, float]
    torch_us: float | None
    roof_us: float
    published_us: float | None
    wanted_us: float | None


def inputs(layer: Layer, tokens: int, routing: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] in bf16, ids i64 [T, k] and their weights fp32 [T, k], which sum to 1."""
    generator = torch.Generator(device).manual_seed(seed)
    x_TD = torch.randn(tokens, layer.hidden, dtype=torch.bfloat16, device=device, generator=generator)
    weights_Tk = torch.rand(tokens, layer.top, device=device, generator=generator) + 0.1
    ids_Tk = choices(layer, expert_loads(layer, tokens, routing), tokens, device, seed)
    return x_TD, ids_Tk, weights_Tk / weights_Tk.sum(dim=1, keepdim=True)


def check(layer: Layer, experts: Experts, tokens: int, device: torch.device) -> dict[str, float]:
    """Largest difference of each form from fp64 over eight tokens, in units of the spread; ends above `TOLERANCE`."""
    x, ids, weights = inputs(layer, tokens, ROUTINGS[1], device, 0)
    some = torch.linspace(0, tokens - 1, min(8, tokens)).round().long()  # all different
    wanted = reference(x, ids, weights, experts, some)
    found = {}
    for form in forms_of(layer, tokens):
        kernels = LayerKernels(layer, one_rank(layer), form)
        got = kernels(x, ids, weights, experts)[some.to(device)].double()
        kernels.check()
        found[form] = float((got - wanted).abs().max() / wanted.std())
        if not found[form] <= TOLERANCE[layer.is_fp8]:
            raise SystemExit(f"{layer.name}, T = {tokens}, {form}: {found[form]:.3g} of the spread from fp64")
    return found


def timed_us(forward: Forward, cases: Sequence[tuple[Tensor, Tensor, Tensor]], copies: Sequence[Experts]) -> float:
    """Microseconds of a pass: a graph of `PASSES` passes, copies and tokens in turn, replayed for about 50 ms."""

    def passes() -> None:
        for index in range(PASSES):
            forward(*cases[index % len(cases)], copies[index % len(copies)])

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        passes()  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        passes()

    def replay() -> float:
        begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / PASSES

    first = statistics.median(replay() for _ in range(3))
    return statistics.median(replay() for _ in range(max(5, min(100, int(50e3 / (first * PASSES))))))


def measure(layer: Layer, tokens: int, routing: str, copies: Sequence[Experts], device: torch.device) -> Line:
    cases = [inputs(layer, tokens, routing, device, seed) for seed in range(1 if tokens > 512 else PASSES)]
    moec_us = {}
    for form in forms_of(layer, tokens):
        kernels = LayerKernels(layer, one_rank(layer), form)
        moec_us[form] = timed_us(kernels, cases, copies)
        kernels.check()
    torch_us = None if layer.is_fp8 else timed_us(peer, cases, copies)
    fixed = {form: us for form, us in moec_us.items() if form != "accumulated"}
    return Line(
        layer.name, tokens, routing, min(fixed, key=lambda form: fixed[form]), moec_us, torch_us,
        roof_us(layer, expert_loads(layer, tokens, routing), tokens),
        PUBLISHED.get((layer.name, routing), {}).get(tokens), WANTED.get((layer.name, routing), {}).get(tokens),
    )  # fmt: skip


def roof_us(layer: Layer, loads: Sequence[int], tokens: int) -> float:
    """The larger of the least bytes over an H200's bandwidth and operations over its peak."""
    moved = sum(load > 0 for load in loads) * layer.weight_bytes + 4.0 * tokens * layer.hidden
    flops = 6.0 * sum(loads) * layer.hidden * layer.inner
    return DEVICES["h200"].roof_us(moved, flops / (2 if layer.is_fp8 else 1), Dtype.BF16)


def rotated(layer: Layer, device: torch.device) -> list[Experts]:
    """Copies of the weights, enough that `top` experts of each in turn flush the cache, as far as they fit."""
    needed = -(-FLUSHED_BYTES // (layer.top * layer.weight_bytes)) + 1
    room = torch.cuda.mem_get_info(device)[0] * 0.6 // (layer.experts * layer.weight_bytes)
    return [make_experts(layer, device, seed) for seed in range(int(max(1, min(needed, MOST_COPIES, room))))]


def table(lines: Sequence[Line]) -> str:
    """All lines as text; microseconds, and of the roof the part that moec's fastest form in fixed order reaches."""
    columns = ("paired", "gathered", "permuted", "accumulated", "torch", "roof", "of roof", "published", "wanted")
    text = [f"{'layer':<13}{'T':>6} {'routing':<15}" + "".join(f"{name:>12}" for name in columns)]
    for line in lines:
        figures = {**line.moec_us, "torch": line.torch_us, "roof": line.roof_us, "published": line.published_us}
        figures |= {"of roof": line.roof_us / line.moec_us[line.form], "wanted": line.wanted_us}
        cells = [figures.get(name) for name in columns]
        shown = "".join(f"{'-' if us is None else f'{us:.1f}' if us >= 2 else f'{us:.2f}':>12}" for us in cells)
        text.append(f"{line.layer:<13}{line.tokens:>6} {line.routing:<15}{shown}")
    return "\n".join(text)


def on_cpu() -> dict[str, Any]:
    """Step 1 of small layers in Triton's interpreter."""
    small = (Layer("small", 256, 128, 8, 2), Layer("small-fp8", 256, 128, 8, 2, is_fp8=True))
    device = torch.device("cpu")
    return {layer.name: {t: check(layer, make_experts(layer, device), t, device) for t in (1, 40)} for layer in small}


def on_gpu(layers: Sequence[Layer], until: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Steps 1 to 3; a case that would begin after `until` (seconds of the monotonic clock) is left out and named."""
    device = torch.device("cuda")
    lines: list[Line] = []
    errors, left_out = {}, []
    for layer in layers:
        copies = rotated(layer, device)
        errors[layer.name] = {tokens: check(layer, copies[0], tokens, device) for tokens in (1, 64, 4096)}
        say(f"{layer.name}: {len(copies)} copies of the weights; from fp64: {errors[layer.name]}")
        for tokens in TOKENS:
            for routing in ROUTINGS:
                if time.monotonic() > until:
                    left_out.append(f"{layer.name} {tokens} {routing}")
                    continue
                lines.append(measure(layer, tokens, routing, copies, device))
        copies.clear()
        torch.cuda.empty_cache()
    say(table(lines))
    for case in left_out:
        say(f"no time left: {case}")
    name = torch.cuda.get_device_name(device)
    return {"device": name, "torch": torch.__version__, "from_fp64": errors, "lines": [asdict(line) for line in lines]}


def main() -> None:
    parser = argparse.ArgumentParser(description="time MoE layers on one GPU")
    names = [layer.name for layer in LAYERS]
    parser.add_argument("--layers", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=225, help="no case begins later than this")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--kernels-on-cpu", action="store_true", help="check the kernels in Triton's interpreter only")
    parser.add_argument("--predict", action="store_true", help="predict the times of bf16 layers, without a GPU")
    options = parser.parse_args()
    wanted = options.layers.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"there is no layer {', '.join(sorted(unknown))}; layers are {', '.join(names)}")
    chosen = [layer for layer in LAYERS if layer.name in wanted]
    if options.kernels_on_cpu:
        found = on_cpu()
        print(json.dumps(found))
    elif options.predict:
        found = {"predicted": [asdict(one) for one in predictions(chosen)]}
    elif not torch.cuda.is_available():
        parser.error("there is no GPU here; `--kernels-on-cpu` and `--predict` need none")
    else:
        found = on_gpu(chosen, time.monotonic() + options.seconds, lambda text: print(text, flush=True))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
