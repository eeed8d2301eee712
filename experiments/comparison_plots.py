"""Three plots of a comparison: speed-ups by benchmark, acceptance by position, and length against time of a round.

Each has a panel for each setting (temperature and batch).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

Row = dict[str, Any]


def plot(cells: Sequence[Row], means: Sequence[Row], plain: str, folder: Path) -> None:
    """Write speedup.png, acceptance.png and rounds.png to the folder; without matplotlib, say how to get it."""
    try:
        from matplotlib import pyplot
    except ImportError:
        Console().print("no plots: pip install 'dcoco[plots]'", markup=False)
        return
    settings = list(dict.fromkeys((mean["temperature"], mean["batch"]) for mean in means))
    names = list(dict.fromkeys(mean["system"] for mean in means))
    colours = {name: pyplot.get_cmap("tab20")(index % 20) for index, name in enumerate(names)}
    kinds: dict[str, tuple[Callable[..., None], Sequence[Row]]] = {
        "speedup": (_speedups, cells),
        "acceptance": (_acceptance, means),
        "rounds": (_rounds, means),
    }
    for kind, (draw, rows) in kinds.items():
        width = 15 if kind == "speedup" else 9
        figure, axes = pyplot.subplots(
            len(settings), 1, figsize=(width, 5 * len(settings)), squeeze=False, layout="constrained"
        )
        for axis, (temperature, batch) in zip(axes[:, 0], settings, strict=True):
            of_setting = [row for row in rows if (row["temperature"], row["batch"]) == (temperature, batch)]
            together = [mean for mean in means if (mean["temperature"], mean["batch"]) == (temperature, batch)]
            draw(axis, of_setting, together, colours, plain)
            axis.set_title(f"temperature {temperature:g}, batch {batch}")
            axis.grid(alpha=0.3)
        figure.savefig(folder / f"{kind}.png", dpi=120)
        pyplot.close(figure)


def _speedups(axis: Any, cells: Sequence[Row], means: Sequence[Row], colours: dict[str, Any], plain: str) -> None:
    """Bars by benchmark, the mean last with the range of the repeats."""
    names = [*dict.fromkeys(cell["benchmark"] for cell in cells), "mean"]
    width = 0.85 / len(means)
    for index, mean in enumerate(means):
        mine = {cell["benchmark"]: cell["speedup"] for cell in cells if cell["system"] == mean["system"]}
        heights = [mine.get(name, 0.0) for name in names[:-1]] + [mean["speedup"]]
        places = [place + index * width for place in range(len(names))]
        axis.bar(places, heights, width, label=mean["system"], color=colours[mean["system"]])
        if mean["speedup_min"] is not None:
            below, above = (abs(mean[key] - mean["speedup"]) for key in ("speedup_min", "speedup_max"))
            axis.errorbar(places[-1], mean["speedup"], [[below], [above]], color="black", capsize=2, linewidth=1)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks([place + 0.425 - width / 2 for place in range(len(names))], names)
    axis.set_ylabel(f"tokens/s over {plain}")
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _acceptance(axis: Any, means: Sequence[Row], _: Sequence[Row], colours: dict[str, Any], plain: str) -> None:
    """How often the draft is accepted up to each position."""
    for mean in means:
        if rates := mean["acceptance_per_position"]:
            axis.plot(range(1, len(rates) + 1), rates, marker=".", label=mean["system"], color=colours[mean["system"]])
    axis.set(xlabel="position after the anchor", ylabel="rounds that accept so far / all rounds", ylim=(0, 1))
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _rounds(axis: Any, means: Sequence[Row], _: Sequence[Row], colours: dict[str, Any], plain: str) -> None:
    """Acceptance length against the time of a round; systems on a line through the origin are equally fast."""
    for mean in means:
        axis.scatter(mean["round_ms"], mean["acceptance_length"], color=colours[mean["system"]])
        axis.annotate(mean["system"], (mean["round_ms"], mean["acceptance_length"]), fontsize="small")
    if base := next((mean for mean in means if mean["system"] == plain), None):
        edge = 1.1 * max(mean["round_ms"] for mean in means)
        for times in (1, 2, 3):
            axis.plot([0, edge], [0, times * edge / base["round_ms"]], color="grey", linestyle=":", linewidth=0.8)
    axis.set(xlabel="ms a round", ylabel="tokens a round", xlim=(0, None))
    axis.set_ylim(0, 1.1 * max(mean["acceptance_length"] for mean in means))
