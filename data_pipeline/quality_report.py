"""The result of a data check as one HTML page that needs nothing else."""

import html

from paddlewheel.data_pipeline.quality import FileReport, Quality

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1c2430;background:#fff}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.facts{display:flex;flex-wrap:wrap;gap:.8rem;margin:1rem 0}.fact{background:#f2f5f9;border-radius:8px;padding:.6rem
1rem} .fact b{display:block;font-size:1.25rem}.fact span{color:#5a6675}
table{border-collapse:collapse;width:100%;font-size:.9rem}th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px
solid #e3e8ee;
vertical-align:top}th{color:#5a6675;font-weight:600}th:first-child,td:first-child,td.text,th.text{text-align:left}
.bar{background:#e3e8ee;border-radius:3px;height:.6rem;width:7rem;display:inline-block;overflow:hidden} .bar
i{background:#2f6fde;display:block;height:100%}.bar i.high{background:#d9822b}
li.error{color:#b3261e}li.warning{color:#8a5a00}ul{padding-left:1.2rem}svg{width:100%;height:auto}small{color:#5a6675}
"""


def page(quality: Quality, title: str) -> str:
    """HTML of the result."""
    q = quality
    facts = [
        (f"{q.rows:,}", "rows"),
        (f"{q.rows_read:,}", "rows read"),
        (f"{len(q.files):,}", "files"),
        (_bytes(q.bytes), "on disk"),
        ("-" if q.label_rate is None else f"{q.label_rate:.2%}", "label rate"),
        (f"{sum(f.distinct for f in q.features):,.0f}", "distinct ids (estimate)"),
    ]
    parts = [f"<h1>Data check: {html.escape(title)}</h1><small>data {q.fingerprint}</small>", '<div class="facts">']
    parts += [f'<div class="fact"><b>{value}</b><span>{name}</span></div>' for value, name in facts]
    parts.append("</div>")
    if q.errors or q.warnings:
        parts.append("<h2>Findings</h2><ul>")
        parts += [f'<li class="error">Error: {html.escape(e)}</li>' for e in q.errors]
        parts += [f'<li class="warning">Warning: {html.escape(w)}</li>' for w in q.warnings]
        parts.append("</ul>")
    if q.tables:
        rows = [
            [t.name, f"{t.keys:,.0f}", str(t.width), _bytes(t.memory_bytes), _bytes(t.checkpoint_bytes)]
            for t in q.tables
        ]
        parts.append("<h2>Expected tables</h2>")
        parts.append(_table(["table", "keys", "floats a key", "server memory", "checkpoint"], rows))
        parts.append(f"<p>Servers needed: <b>{q.servers}</b></p>")
    if len(q.files) > 1 and q.label_rate is not None:
        parts.append("<h2>Label rate by file</h2>" + _rates(q.files, q.label_rate))
    rows = []
    for f in q.features:
        top = ", ".join(f"{html.escape(v)} ({n / max(1, f.ids):.1%})" for v, n in f.top[:3])
        extent = f"{html.escape(f.smallest)} .. {html.escape(f.largest or '')}" if f.smallest is not None else ""
        length = f"{f.mean_list:.1f} / {f.longest_list}" if f.longest_list > 1 else ""
        rows.append([html.escape(f.name), _bar(f.null_rows, f.rows), f"{f.distinct:,.0f}", extent, length, f"\0{top}"])
    if rows:
        head = ["sparse feature", "no id", "distinct", "range", "list mean / longest", "\0most frequent"]
        parts.append("<h2>Sparse features</h2>" + _table(head, rows))
    rows = [
        [
            html.escape(d.name),
            _bar(d.null_rows, d.rows),
            *("" if v is None else f"{v:,.4g}" for v in (d.smallest, d.mean, d.largest)),
        ]
        for d in q.dense
    ]
    if rows:
        parts.append("<h2>Dense columns</h2>" + _table(["column", "null", "smallest", "mean", "largest"], rows))
    body = "\n".join(parts)
    first = f'<meta charset="utf-8"><title>Data check</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en">{first}{body}</html>\n'


def _table(head: list[str], rows: list[list[str]]) -> str:
    def cells(tag: str, values: list[str]) -> str:
        return "".join(
            f'<{tag} class="text">{v[1:]}</{tag}>' if v.startswith("\0") else f"<{tag}>{v}</{tag}>" for v in values
        )

    lines = [f"<tr>{cells('th', head)}</tr>"] + [f"<tr>{cells('td', row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _bar(part: int, whole: int) -> str:
    share = part / whole if whole else 0.0
    high = ' class="high"' if share > 0.5 else ""
    return f'{share:.1%} <span class="bar"><i{high} style="width:{share:.0%}"></i></span>'


def _rates(files: list[FileReport], overall: float) -> str:
    """A bar per file (at most 400, evenly chosen) and a line at the overall rate."""
    shown = [f for f in files if f.rate is not None]
    if len(shown) > 400:
        shown = [shown[i * len(shown) // 400] for i in range(400)]
    top = max([overall, *(f.rate or 0.0 for f in shown)]) * 1.1 or 1.0
    width, height = 1000, 160
    step = width / max(1, len(shown))
    bars = "".join(
        f'<rect x="{i * step:.1f}" y="{height * (1 - (f.rate or 0) / top):.1f}" width="{max(1.0, step * 0.85):.1f}" '
        f'height="{height * (f.rate or 0) / top:.1f}" fill="#2f6fde"><title>{html.escape(f.name)}: '
        f"{f.rate:.4f}</title></rect>"
        for i, f in enumerate(shown)
    )
    y = height * (1 - overall / top)
    stroke = 'stroke="#d9822b" stroke-width="2" stroke-dasharray="6 4"'
    line = f'<line x1="0" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" {stroke}/>'
    note = f"<small>{len(shown)} files in order; the dashed line is the overall rate {overall:.4f}</small>"
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="label rate by file">{bars}{line}</svg>{note}'


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"
