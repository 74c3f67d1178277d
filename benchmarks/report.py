"""What a run of bench_layer.py prints and draws."""

import pathlib
from typing import Any

from protocol import DIRECTIONS, LIMIT
from rivals import NCCL

from mok_jax.moe import IMPLEMENTATIONS

COLORS = {"cuda": "tab:red", "host": "tab:orange", LIMIT: "0.5", "xla": "tab:green", "dense": "tab:purple"}
MEBI, GIBI = 2**20, 2**30


def _title(report: dict[str, Any]) -> str:
    machine, on_cpu = report["machine"], _on_cpu(report)
    place = "{cores} cores of {cpu}".format(**machine) if on_cpu else machine["device"]
    if report["gpus"] > 1:
        place = f"on each of {report['gpus']} ranks{', devices of this CPU' if on_cpu else ''}; {place}"
    shape = "T {tokens}, H {hidden}, I {intermediate}, E {experts}, K {top_k}, {dtype}, ".format(**report["shape"])
    return f"{shape}{report['routing']} routing; {place}, jax {machine['jax']}, {machine['date']}"


def _on_cpu(report: dict[str, Any]) -> bool:
    return report["machine"]["platform"] == "cpu"


def table(report: dict[str, Any]) -> str:
    """The short table that ends a run."""
    lines = [_title(report)]
    lines += [_growth(name, point) for name, point in report["memory"].items()]
    if report["peak"]:
        lines.append(_peak(report["peak"]))
    if report["mxfp8"]:
        lines += _mxfp8(report["mxfp8"])
    lines += _ratios(report) if _on_cpu(report) else [*_rates(report), *_scaling(report)]
    lines += [f"{name} left out: {reason}" for name, reason in report["left_out"].items()]
    return "\n".join(lines)


def _mxfp8(measured: dict[str, Any]) -> list[str]:
    pulled, mxfp8 = (measured["pulled_bytes"][precision] for precision in ("None", "mxfp8"))
    shares = ", ".join(
        f"{b / GIBI:.3f} GiB {direction}, {b / a:.4f} of bfloat16's"
        for direction, a, b in zip(("forward", "backward"), pulled, mxfp8, strict=True)
    )
    return [
        f"MXFP8: quantising the weights, once for an update: {measured['quantize_ms']:.2f} ms",
        f"MXFP8: x and dy pulled by two virtual ranks: {shares} (33/64 = {33 / 64:.4f})",
    ]


def _growth(name: str, point: dict[str, Any]) -> str:
    points = zip(point["tokens"], point["resident_bytes"], strict=True)
    sizes = ", ".join(f"{b / MEBI:.0f} at T {t}" for t, b in points)
    slopes = ", ".join(f"{b / 1024:.1f}" for b in point["bytes_per_further_token"])
    verdict = ": grows linearly with T" if point["linear"] else ": grows FASTER than linearly with T"
    small = point["resident_bytes"][-1] < 16 * MEBI  # what the process does beside is as much
    return f"memory of {name}, MiB: {sizes}; KiB a further token: {slopes}{'' if small else verdict}"


def _peak(peak: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {size / GIBI:.2f}" for name, size in peak["parts"].items())
    more = peak["peak_bytes"] / peak["formula_bytes"] - 1
    return (
        f"peak memory of cuda, GiB: {peak['peak_bytes'] / GIBI:.2f}, {more:+.1%} against the formula's "
        f"{peak['formula_bytes'] / GIBI:.2f} ({parts})"
    )


def _ratios(report: dict[str, Any]) -> list[str]:
    """Times, and what they are of the limit and of the package's first implementation."""
    names = list(report[DIRECTIONS[0]])
    rivals = [name for name in (LIMIT, *IMPLEMENTATIONS) if name in names][:2]
    width = max(map(len, names)) + 2
    header = "".join(f"{'/ ' + rival:>12}" for rival in rivals)
    lines = [f"{'':{width}}" + "".join(f"{title:>18}{header}" for title in ("forward ms", "fwd+bwd ms"))]
    for name in names:
        row = f"{name:{width}}"
        for direction in DIRECTIONS:
            median = report[direction][name]["median_ms"]
            ratios = "".join(f"{median / report[direction][rival]['median_ms']:12.2f}" for rival in rivals)
            row += f"{median:18.2f}{ratios}"
        lines.append(row)
    return lines


def _rates(report: dict[str, Any]) -> list[str]:
    """Times, rates, and shares of the limit that the same process measured."""
    header = "".join(f"{title:>14}{'TFLOP/s':>9}{'share':>7}" for title in ("forward ms", "fwd+bwd ms"))
    lines = [f"{'':20}{header}"]
    for name in report[DIRECTIONS[0]]:
        points = [report[direction][name] for direction in DIRECTIONS]
        row = "".join(f"{p['median_ms']:14.3f}{p['tflops']:9.0f}{p.get('share', float('nan')):7.3f}" for p in points)
        lines.append(f"{name:20}{row}")
    if "cuda_mxfp8" in report[DIRECTIONS[0]] and "cuda" in report[DIRECTIONS[0]]:
        speeds = [report[d]["cuda"]["median_ms"] / report[d]["cuda_mxfp8"]["median_ms"] for d in DIRECTIONS]
        lines.append(f"MXFP8 has {speeds[0]:.1%} of cuda's speed forward, {speeds[1]:.1%} forward+backward")
    for routing in ("skewed", "remote"):
        name = f"cuda_{routing}"
        if name in report[DIRECTIONS[0]] and "cuda" in report[DIRECTIONS[0]] and report["routing"] == "uniform":
            costs = [report[d][name]["median_ms"] / report[d]["cuda"]["median_ms"] - 1 for d in DIRECTIONS]
            line = f"{routing} routing costs cuda {costs[0]:+.1%} forward, {costs[1]:+.1%} forward+backward"
            lines.append(line + (_busiest(report) if routing == "skewed" else ""))
    return lines


def _busiest(report: dict[str, Any]) -> str:
    """What skewed routing costs several ranks is mostly this."""
    return f"; the busiest rank has {report['busiest']:.2f} times the mean's rows" if report["gpus"] > 1 else ""


def _scaling(report: dict[str, Any]) -> list[str]:
    """The package over several GPUs against itself on one, and against what goes through NCCL."""
    milliseconds = {
        name: [report[direction][name]["median_ms"] for direction in DIRECTIONS] for name in report[DIRECTIONS[0]]
    }
    if report["gpus"] == 1 or "cuda" not in milliseconds:
        return []
    lines, mine = [], milliseconds["cuda"]
    if "cuda_alone" in milliseconds:
        shares = [alone / ms for alone, ms in zip(milliseconds["cuda_alone"], mine, strict=True)]
        lines.append(
            f"R = {report['gpus']}: a GPU has {shares[0]:.1%} of its speed by itself forward, {shares[1]:.1%} "
            "forward+backward" + (_busiest(report) if report["routing"] == "skewed" else "")
        )
    rivals = [name for name in NCCL if name in milliseconds]
    if rivals:
        # Backward alone is the difference.
        times = {name: [*milliseconds[name], milliseconds[name][1] - milliseconds[name][0]] for name in rivals}
        best = [min(rivals, key=lambda name, i=i: times[name][i]) for i in range(3)]
        ratios = [
            times[name][i] / ms for i, (name, ms) in enumerate(zip(best, [*mine, mine[1] - mine[0]], strict=True))
        ]
        lines.append(
            "times the speed of the best layer over NCCL: "
            + ", ".join(
                f"{ratio:.2f} {direction} ({name})"
                for ratio, direction, name in zip(ratios, (*DIRECTIONS, "backward alone"), best, strict=True)
            )
        )
    return lines


def draw(path: pathlib.Path, report: dict[str, Any]) -> None:
    """Bars of both passes, and memory over T where it was measured."""
    from matplotlib.figure import Figure  # only here: the benchmark itself needs no matplotlib

    panels = 2 + bool(report["memory"])
    figure = Figure(figsize=(4.5 * panels, 3.5), layout="constrained")
    axes = figure.subplots(1, panels)
    for axis, direction in zip(axes, DIRECTIONS, strict=False):
        names = list(report[direction])[::-1]
        medians = [report[direction][name]["median_ms"] for name in names]
        bars = axis.barh(names, medians, color=[COLORS.get(name, "tab:blue") for name in names])
        axis.bar_label(bars, [f"{median:,.1f}" for median in medians], padding=3)
        axis.margins(x=0.25)
        axis.set(title=direction, xlabel="ms, median")
    for name, point in report["memory"].items():
        mebibytes = [b / MEBI for b in point["resident_bytes"]]
        axes[-1].plot(point["tokens"], mebibytes, marker="o", label=name, color=COLORS.get(name, "tab:blue"))
    if report["memory"]:
        axes[-1].set(title="peak memory, forward+backward", xlabel="tokens", ylabel="MiB", xlim=0, ylim=0)
        axes[-1].legend()
    figure.suptitle(_title(report), fontsize="x-small")
    figure.savefig(path, dpi=120)
