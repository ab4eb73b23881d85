"""The generated pages of the documentation site: what the code already says, as Markdown.

``PAGES`` maps the address of each page on the site to the function that writes it. `docs/hooks.py` calls them while the
site is built; ``python docs/reference.py NAME`` prints one. None of these pages is kept in the repository.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import yaml

ROOT = Path(__file__).resolve().parents[1]

Schema = dict[str, Any]


def job() -> str:
    """Every key of a job file, from its JSON schema: a section for each block, a row for each key."""
    from paddlewheel.trainer.job.schema import job_schema

    schema = job_schema()
    lines = [
        "# Job file",
        "",
        "Every key of a job file, section by section. `paddlewheel job schema` prints the same as a JSON schema, for",
        "editors; `paddlewheel job show JOB` prints a job with all its defaults. An unknown key is refused, and the",
        "message names the nearest known one.",
    ]
    for title, section in _sections("", schema, schema["$defs"]):
        lines += ["", f"## {title}", ""]
        if text := _sentence(section.get("description", "")):
            lines += [text, ""]
        if not section.get("properties"):
            lines += ["No keys."]
            continue
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        required = section.get("required", ())
        for name, key in section["properties"].items():
            default = "*required*" if name in required else _default(key)
            lines.append(
                f"| `{name}` | {_type(key, schema['$defs'])} | {default} | {_sentence(key.get('description', ''))} |"
            )
    return "\n".join(lines) + "\n"


def _sections(path: str, section: Schema, definitions: dict[str, Schema]) -> Iterator[tuple[str, Schema]]:
    """The section and those below it, each with the path of its keys."""
    yield f"`{path}`" if path else "The whole job", section
    for name, key in section.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        for place, item in _blocks(below, key):
            block = definitions[item["$ref"].rpartition("/")[2]]
            choice = _choice(block)
            for title, found in _sections(place, block, definitions):
                yield (f"`{place}` ({choice})" if choice and found is block else title), found


def _blocks(path: str, key: Schema) -> Iterator[tuple[str, Schema]]:
    """References to other sections in a key: by itself, in a list, by name, or one of several."""
    if "$ref" in key:
        yield path, key
    for item in (*key.get("anyOf", ()), *key.get("oneOf", ())):
        yield from _blocks(path, item)
    if isinstance(key.get("items"), dict):
        yield from _blocks(f"{path}[]", key["items"])
    if isinstance(key.get("additionalProperties"), dict):
        yield from _blocks(f"{path}.NAME", key["additionalProperties"])


def _choice(block: Schema) -> str:
    """What makes this block one of several: the value of its `kind` or `rule`."""
    for name in ("kind", "rule"):
        if "const" in block.get("properties", {}).get(name, {}):
            return f"{name}: {block['properties'][name]['const']}"
    return ""


def _type(key: Schema, definitions: dict[str, Schema]) -> str:
    if "$ref" in key:
        target = definitions[key["$ref"].rpartition("/")[2]]
        return _type(target, definitions) if "enum" in target else "section"
    if "const" in key:
        return f"`{json.dumps(key['const'])}`"
    if "enum" in key:
        return " \\| ".join(f"`{value}`" for value in key["enum"])
    options = [*key.get("anyOf", ()), *key.get("oneOf", ())]
    if options:
        return " \\| ".join(dict.fromkeys(_type(option, definitions) for option in options))
    if key.get("type") == "array":
        return f"list of {_type(key['items'], definitions)}" if isinstance(key.get("items"), dict) else "list"
    if isinstance(key.get("additionalProperties"), dict):
        return f"{_type(key['additionalProperties'], definitions)} by name"
    limits = [
        f"{sign} {key[name]:,}" if abs(key[name]) < 1e15 else ""
        for name, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if name in key
    ]
    return ", ".join(filter(None, [key.get("type", "any"), *limits]))


def _default(key: Schema) -> str:
    if "default" not in key:
        return ""
    text = json.dumps(key["default"], ensure_ascii=False)
    return f"`{text}`" if len(text) <= 60 else "see its section"


def _sentence(text: str) -> str:
    """A description on one line that a table can hold."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", "\\|"))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def command_line() -> str:
    """Every command with its arguments, as ``--help`` says it."""
    from paddlewheel.deploy.cli import build_app

    text = build_app().generate_docs(heading_level=1)
    head, _, rest = text.partition("## Table of Contents")
    # The lists of commands repeat the headings, which the site shows beside the page.
    rest = rest[rest.index("\n## ") :]
    codes = (
        "Exit codes: `0` done; `64` fix the job (command line, job file, data or environment): trying again cannot "
        "help; `75` trying again may help; `129`, `130`, `143` stopped in order by SIGHUP, Ctrl-C or SIGTERM."
    )
    page = head.replace("# paddlewheel\n", "# Command line\n", 1).rstrip() + f"\n\n{codes}\n" + rest
    parts = re.split(r"(`[^`]*`|^```.*?^```)", page, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def metrics() -> str:
    """The catalogue of Prometheus metrics."""
    from paddlewheel.deploy.monitoring.catalogue_page import render

    return render()


def alerts() -> str:
    """Alert rules: when each fires, and the section of the runbook."""
    rules = yaml.safe_load((ROOT / "deploy" / "monitoring" / "rules.yaml").read_text(encoding="utf-8"))
    lines = [
        "# Alerts",
        "",
        "From [`rules.yaml`](../deploy/monitoring/rules.yaml). The [runbook](../deploy/RUNBOOK.md) has a section for",
        "each: what it means, where to look, what to do.",
        "",
        "| alert | severity | fires after | condition | summary |",
        "| --- | --- | --- | --- | --- |",
    ]
    recorded = ["", "## Recorded series", "", "| series | expression |", "| --- | --- |"]
    for group in rules["groups"]:
        for rule in group["rules"]:
            expression = " ".join(rule["expr"].split())
            if "record" in rule:
                recorded.append(f"| `{rule['record']}` | `{expression}` |")
                continue
            name = rule["alert"]
            summary = _sentence(rule["annotations"]["summary"]).replace("{{ $labels.", "").replace(" }}", "")
            link = f"[{name}](../deploy/RUNBOOK.md#{name.lower()})"
            lines.append(
                f"| {link} | {rule['labels']['severity']} | {rule.get('for', '0m')} | `{expression}` | {summary} |"
            )
    return "\n".join(lines + recorded) + "\n"


def messages() -> str:
    """What the processes of a job say to each other, the journal, and the state machine, from the classes."""
    from paddlewheel.pserver import messages as servers
    from paddlewheel.trainer.coordinator import messages as module
    from paddlewheel.trainer.coordinator import records, specs
    from paddlewheel.trainer.protocol import messages as protocol

    lines = [
        "# Messages",
        "",
        "How these messages travel is in the [protocol](../trainer/coordinator/PROTOCOL.md). The first column is the",
        "tag of a message on a pipe and in the journal.",
    ]
    tagged = {
        "Events of a worker": protocol.WorkerEvent,
        "Requests of a trainer": protocol.TrainerRequest,
        "Replies to them": protocol.TrainerReply,
        "Commands to a trainer": protocol.WorkerCommand,
        "Orders to the hosts of servers": protocol.HostOrder,
        "Their answers": protocol.HostAnswer,
        "Records of the journal": records.Record,
    }
    for title, union in tagged.items():
        lines += ["", f"## {title}", "", "| tag | message | fields | meaning |", "| --- | --- | --- | --- |"]
        lines += [_tagged_message(kind) for kind in get_args(union)]
    detailed = [protocol.Progress, protocol.TableFigures, protocol.Durations, servers.ServerSpec, specs.TrainerSpec]
    for kind in detailed:
        lines += ["", f"## `{kind.__name__}`, field by field", "", _sentence(inspect.getdoc(kind) or ""), ""]
        lines += ["| field | type | meaning |", "| --- | --- | --- |", *_fields_of(kind)]
    lines += ["", "## The state machine", "", "It takes events and answers with actions (`coordinator/messages.py`)."]
    for title, union in (("Events", module.Event), ("Actions", module.Action)):
        lines += ["", f"### {title}", "", "| message | fields | meaning |", "| --- | --- | --- |"]
        lines += [_message(kind) for kind in get_args(union)]
    return "\n".join(lines) + "\n"


def _message(kind: type) -> str:
    names = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
    return f"| `{kind.__name__}` | {names} | {_sentence(inspect.getdoc(kind) or '')} |"


def _tagged_message(kind: Any) -> str:
    tag, fields = "", []
    for name, field in kind.model_fields.items():
        if get_args(field.annotation) == (field.default,):
            tag = field.default
        elif name not in {"record", "time"}:  # which every record has
            fields.append(f"`{name}`")
    return f"| `{tag}` | `{kind.__name__}` | {', '.join(fields)} | {_sentence(inspect.getdoc(kind) or '')} |"


def _fields_of(kind: Any) -> Iterator[str]:
    """A row for each field of a message, with the text that stands below it in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    for place, found in enumerate(body.body):
        if not isinstance(found, ast.AnnAssign) or ast.unparse(found.annotation).startswith("Literal["):
            continue
        below = body.body[place + 1] if place + 1 < len(body.body) else None
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
        meaning = " ".join(str(text).split()).replace("|", "\\|")
        annotation = re.sub(r"^Annotated\[(.*), Field.*\]$", r"\1", ast.unparse(found.annotation))
        type_ = annotation.replace("Measure", "float | None").replace("|", "\\|")
        yield f"| `{ast.unparse(found.target)}` | `{type_}` | {meaning} |"


PAGES: dict[str, Callable[[], str]] = {
    "reference/job.md": job,
    "reference/command-line.md": command_line,
    "reference/metrics.md": metrics,
    "reference/alerts.md": alerts,
    "reference/messages.md": messages,
}


def main(arguments: list[str]) -> int:
    """Entry point."""
    pages = {Path(name).stem: write for name, write in PAGES.items()}
    if len(arguments) == 1 and arguments[0] in pages:
        sys.stdout.write(pages[arguments[0]]())
        return 0
    sys.stderr.write(f"usage: python docs/reference.py {'|'.join(pages)}\n")
    return 64


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
