"""`RESULTS.md`: tables and plots of the JSON in one folder, and nothing that the JSON does not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench import plots, results
from bench.case import CASES, Case, load
from bench.measuring import losses

Entries = Sequence[Mapping[str, Any]]
NOTHING = "–"
DEVICES = ("cpu", "cuda")


def write(folder: Path, cases: Sequence[str] = CASES) -> Path:
    """Write the report of a folder's results, and its plots beside them; returns its path.

    The committed results lie in bench/results, and their report in bench; any other folder has its report inside.
    Raises ValueError where the folder holds no results.
    """
    measured = {
        (name, device): results.read(file)
        for name in cases
        for device in DEVICES
        if (file := results.path(folder, name, device)).exists() and results.read(file)["entries"]
    }
    if not measured:
        raise ValueError(f"{folder} holds no results; `python -m bench run` writes them")
    target = (folder.parent if folder.resolve() == results.FOLDER else folder) / "RESULTS.md"
    parts = [INTRODUCTION, *in_short(measured)]
    for name in cases:
        case = load(name)
        parts.append(f"## {case.title}\n")
        parts.append(f"*Expected.* {case.expected}\n")
        if case.notes:
            parts.append(f"*Note.* {case.notes}\n")
        for device in DEVICES:
            if (name, device) in measured:
                file = results.path(folder, name, device)
                parts += section(case, measured[name, device], file, target.parent)
            else:
                parts.append(f"### {device.upper()}\n\nnot measured\n")
    target.write_text("\n".join(parts))
    return target


INTRODUCTION = """\
# Results

Written by `python -m bench report` from the JSON files that it links to; `bench/README.md` says how to measure again.
Each contender runs in a process of its own, or in two, one after the other, each with half of the rounds. All are
timed in turns, so a ratio is that of neighbours in time. A cell is the median of the rounds; `±` is half the
distance of the quartiles. A contender is timed only if its loss and the norm of its gradients are those of the
baseline. A step is forward and backward, without an optimizer, on a batch of new tensors.
"""


def in_short(measured: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    """How each contender of ours compares in each case: the range of the groups' median ratios."""
    rows = []
    for (name, device), found in measured.items():
        case, entries = load(name), found["entries"]
        theirs = {contender.name for contender in case.contenders if not contender.ours}
        for contender in case.contenders:
            mine = [e["against"] for e in entries if e["contender"] == contender.name and "against" in e]
            if not contender.ours or contender.bound or not any(theirs & ratios.keys() for ratios in mine):
                continue
            to_baseline = [ratios[case.baseline]["median"] for ratios in mine if case.baseline in ratios]
            to_best = [max(ratios[other]["median"] for other in theirs & ratios.keys()) for ratios in mine]
            rows.append(
                {
                    "case": case.name.rsplit(".", 1)[-1],
                    "device": device,
                    "ours": contender.name,
                    "baseline": case.baseline,
                    "to the baseline": extent(to_baseline),
                    "to the fastest that is not ours": extent(to_best),
                }
            )
    text = "In short: how many times as long a step of ours takes, over all groups\n\n"
    return [text + markdown(rows) + "\n"] if rows else []


def extent(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else NOTHING
    return f"{min(values):.2f} to {max(values):.2f}"


def section(case: Case, found: Mapping[str, Any], file: Path, base: Path) -> list[str]:
    entries: Entries = found["entries"]
    parts = [f"### {found['device'].upper()}\n", origin(found, file, base)]
    parts += tables(case, entries)
    if case.arithmetic and (rows := case.arithmetic(entries)):
        parts.append("The arithmetic beside the measurement\n\n" + markdown(rows) + "\n")
    elif not case.arithmetic and (rows := own_figures(entries)):
        parts.append("Counted by the contenders themselves\n\n" + markdown(rows) + "\n")
    for suffix, draw in (("times", plots.times), ("timeline", lambda c, e, f: plots.timelines(e, f))):
        picture = file.with_suffix(f".{suffix}.svg")
        if draw(case, entries, picture):
            parts.append(f"![{case.name}, {found['device']}, {suffix}]({picture.relative_to(base)})\n")
    parts += missing(entries)
    parts += where_ours_is_slower(entries)
    return parts


def origin(found: Mapping[str, Any], file: Path, base: Path) -> str:
    machine, versions = found["machine"], found["versions"]
    accelerator = f", {machine['accelerator']}" if "accelerator" in machine else ""
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in machine else ""
    fixed = [key for key in found["entries"][0]["parameters"] if key not in plots.varying(found["entries"])]
    groups = ", ".join(f"{key} {found['entries'][0]['parameters'][key]}" for key in fixed)
    clock = "CPU time of its process; " if computing(found) else ""
    return (
        f"{'Quick run' if found['quick'] else 'Full run'} of {found['started'][:10]} at commit {found['commit']}: "
        f"{machine['processor']}, {machine['cores']} cores{memory}{accelerator}; "
        f"{counted(found['threads'], 'thread')}, {counted(found.get('processes', 1), 'process')} of each contender; "
        f"{clock}torch {versions['torch']}, transformers {versions['transformers']}, fxpasses {versions['fxpasses']}, "
        f"Python {versions['python']}{'; ' + groups if groups else ''}. [{file.name}]({file.relative_to(base)})\n"
    )


def computing(found: Mapping[str, Any]) -> bool:
    """Whether `bench.worker` took the time that processes computed, and not that of the clock on the wall."""
    return load(found["case"]).cpu_time and found["device"] == "cpu" and found["threads"] == 1


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{'e' * thing.endswith('s')}s"


# Cells: the text for an entry, or "" where it has no such figure


def time_cell(entry: Mapping[str, Any]) -> str:
    if "median_s" not in entry:
        return entry["outcome"] if entry["outcome"] != "unavailable" else ""
    return f"{number(1e3 * entry['median_s'])} ±{number(1e3 * (entry['q3_s'] - entry['q1_s']) / 2)}"


def ratio_cell(baseline: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(entry: Mapping[str, Any]) -> str:
        ratio = entry.get("against", {}).get(baseline)
        return f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})" if ratio else ""

    return cell


def plain(key: str, scale: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
    return lambda entry: "" if entry.get(key) is None or "median_s" not in entry else number(entry[key] * scale)


def pair(first: str, second: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(entry: Mapping[str, Any]) -> str:
        texts = [plain(key)(entry) for key in (first, second)]
        return " / ".join(text or NOTHING for text in texts) if any(texts) else ""

    return cell


def compile_cell(entry: Mapping[str, Any]) -> str:
    if entry["outcome"] == "too slow":
        return entry["why"].removeprefix("prepare took ")
    return pair("compile_cold_s", "compile_warm_s")(entry)


MIB = 1 / 2**20
TABLES: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "time": ("Time of a step, ms", time_cell),
    "step_bytes": ("Memory of a step beyond what is held between steps, MiB", plain("step_bytes", MIB)),
    "peak_bytes": ("Largest memory during steps, MiB (on a CPU: of the whole process)", plain("peak_bytes", MIB)),
    "compile_peak_bytes": ("Largest memory of the process while it compiles, MiB", plain("compile_peak_bytes", MIB)),
    "host_reads": ("Host reads in a step", plain("host_reads")),
    "page_faults": ("Page faults in a step", plain("page_faults")),
    "operators": ("ATen operators in a step", plain("operators")),
    "launches": ("Kernel launches in a step", plain("launches")),
    "waits": ("Waits for the device in a step", plain("waits")),
    "copies_to_host": ("Copies from device to host in a step", plain("copies_to_host")),
    "graphs": ("Graphs / graph breaks", pair("graphs", "graph_breaks")),
    "compile": ("Time to compile, s: cold / with filled caches", compile_cell),
}


def tables(case: Case, entries: Entries) -> list[str]:
    """Those that the case shows and that have a figure; after the times their ratios."""
    found = []
    for name, (title, cell) in TABLES.items():
        if not case.shows or name in case.shows:
            found.append((title, table(case, entries, cell)))
        if name == "time":
            found.append((f"The same as a ratio to {case.baseline}, with quartiles", ratios_table(case, entries)))
    return [f"{title}\n\n{text}\n" for title, text in found if text]


def ratios_table(case: Case, entries: Entries) -> str:
    others = [entry for entry in entries if entry["contender"] != case.baseline]
    return table(case, others, ratio_cell(case.baseline), plots.varying(entries))


def table(
    case: Case, entries: Entries, cell: Callable[[Mapping[str, Any]], str], keys: Sequence[str] | None = None
) -> str:
    """A row for each group, a column for each contender that has a figure; "" where none has."""
    keys = (plots.varying(entries) if keys is None else keys) or [case.x or "group"]
    rows: dict[str, dict[str, Any]] = {}
    for entry in entries:
        parameters = entry["parameters"]
        row = rows.setdefault(str(parameters), {key: parameters.get(key, NOTHING) for key in keys})
        if text := cell(entry):
            row[entry["contender"]] = text
    names = [c.name for c in case.contenders if any(c.name in row for row in rows.values())]
    if not names:
        return ""
    return markdown([{key: row.get(key, NOTHING) for key in (*keys, *names)} for row in rows.values()])


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [[NOTHING if v is None else number(v) if isinstance(v, float) else v for v in row.values()] for row in rows]
    columns = len(cells[0])
    return tabulate(
        cells, headers=list(rows[0]), tablefmt="github", disable_numparse=True, colalign=["right"] * columns
    )


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if isinstance(value, int) or value == 0 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.6f}".rstrip("0")


# What a table does not show


def own_figures(entries: Entries) -> list[dict[str, Any]]:
    keys = dict.fromkeys(key for entry in entries for key in entry.get("figures", {}))
    varying = plots.varying(entries)
    return [
        {**{key: e["parameters"].get(key) for key in varying}, "contender": e["contender"]}
        | {key: e["figures"].get(key) for key in keys}
        for e in entries
        if e.get("figures")
    ]


def label(entry: Mapping[str, Any], entries: Entries) -> str:
    keys = plots.varying(entries)
    return ", ".join([entry["contender"], *(f"{key} {entry['parameters'].get(key)}" for key in keys)])


def missing(entries: Entries) -> list[str]:
    """Why contenders have no figures, each reason once."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for entry in entries:
        if entry["outcome"] != "measured":
            reasons.setdefault((entry["contender"], entry["outcome"], entry["why"]), []).append(label(entry, entries))
    lines = []
    for (contender, outcome, why), places in reasons.items():
        where = "" if len(places) == 1 and not plots.varying(entries) else f" ({len(places)} groups)"
        where = f" ({places[0].removeprefix(contender + ', ')})" if len(places) == 1 and where else where
        lines.append(f"- {contender}{where}: {outcome}: {why}")
    return ["Without figures\n\n" + "\n".join(lines) + "\n"] if lines else []


def where_ours_is_slower(entries: Entries) -> list[str]:
    """In at least three quarters of the rounds, than contenders that are not ours; with the profiles of both."""
    rows, profiles = [], []
    theirs = {entry["contender"] for entry in entries if not entry["ours"]}
    for entry in entries:
        if not entry["ours"]:
            continue
        faster = {name: ratio for name, ratio in losses(entry).items() if name in theirs}
        for name, ratio in faster.items():
            other = results.find(entries, entry["parameters"], name)
            rows.append({"ours": label(entry, entries), "slower than": name, "ratio": ratio})
            for one in (entry, other):
                if one and one.get("top") and one not in profiles:
                    profiles.append(one)
    if not rows:
        measured = any(entry["ours"] and "against" in entry for entry in entries)
        return ["Ours is not slower than any other contender beyond the spread.\n"] if measured else []
    text = ["Where ours is slower beyond the spread\n\n" + markdown(rows) + "\n"]
    for one in profiles:
        text.append(
            f"<details><summary>Profile of {label(one, entries)}: the operators with the most time of their own"
            f"</summary>\n\n{markdown(one['top'])}\n\n</details>\n"
        )
    return text
