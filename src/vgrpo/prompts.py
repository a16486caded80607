"""Prompt files, and which prompts belong to which step.

A file is .txt (one prompt a line), .jsonl (one object a line, also GenEval's `evaluation_metadata.jsonl`) or .csv; a
folder is a flow_grpo dataset. A name that starts with `asset:` is looked up in the package. Files are UTF-8, with or
without a byte-order mark; prompts lose the blanks around them and nothing else.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.resources
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from vgrpo.errors import UserError
from vgrpo.types import Prompt

T = TypeVar("T")
Split = Literal["train", "test"]
TEXT_KEYS = ("text", "prompt")
ASSET = "asset:"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MISTAKES_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Line:
    """One entry of a file. Example: `Line(number=3, text="a red circle", id=None, meta={"tag": "colors"})`"""

    number: int
    """1-based line on which the entry starts."""
    text: str
    id: str | None
    meta: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a list of prompts holds. `str()` of it is one line for a person."""

    lines: int
    unique: int
    duplicates: int
    """Lines whose text an earlier line had; they stay prompts of their own."""
    tags: Mapping[str, int]
    """Lines per `meta["tag"]`, in the order of first appearance; prompts without a tag are not in it."""

    def __str__(self) -> str:
        head = f"{self.lines} prompts, {self.unique} different texts, {self.duplicates} duplicates"
        return head + (f" ({', '.join(f'{tag} {n}' for tag, n in self.tags.items())})" if self.tags else "")


def read_prompts(path: str | Path, *, split: Split = "train") -> tuple[Prompt, ...]:
    """The prompts of a file or folder in their order; `split` chooses the file of a folder and is else unused.

    - txt: a line is a prompt.
    - jsonl: `text` or `prompt`, an optional `id`, an optional object `meta`; any other key goes into `meta` as it is.
    - csv: a header that has `text` or `prompt`, optionally `id`; any other column goes into `meta` as text.
    - folder: `{split}_metadata.jsonl`, else `{split}.jsonl`, `{split}.csv` or `{split}.txt`.

    An id is the line's own or else the 1-based number of the line, as text. Blank lines are skipped but numbered.

    Raises:
        UserError: no such file, not UTF-8 (names the line and byte), no prompt in it, a line that cannot be read (names
            each), an id that comes twice.
    """
    file = prompt_file(locate(path), split)
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise UserError(f"{file}: prompt files end in {', '.join(READERS)}, this one in {file.suffix or 'nothing'!r}")
    lines = list(reader(file, decoded(file)))
    if not lines:
        raise UserError(f"{file} has no prompts, only blank lines or nothing at all; write at least one prompt into it")
    return identified(file, lines)


def batch(prompts: Sequence[Prompt], per_step: int, step: int, seed: int) -> tuple[Prompt, ...]:
    """The `per_step` prompts of `step` (0-based): the next ones of an endless row of passes, each in its own order.

    The order of a pass depends on `seed` and the number of the pass alone, so any step can be had without the ones
    before it. Fewer prompts than `per_step` come several times in a step, as separate slots.
    """
    n = len(prompts)
    if n == 0 or per_step < 1 or step < 0:
        raise ValueError(f"need prompts, per_step >= 1 and step >= 0, got {n} prompts, {per_step} and {step}")
    positions = range(step * per_step, (step + 1) * per_step)
    return tuple(prompts[order(n, seed, position // n)[position % n]] for position in positions)


@lru_cache(maxsize=8)
def order(n: int, seed: int, number: int) -> tuple[int, ...]:
    """The permutation of `range(n)` in pass `number`. By hashes: no library promises its random stream forever."""

    def key(i: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{number}/{i}".encode(), digest_size=16).digest()

    return tuple(sorted(range(n), key=key))


def spread(prompts: Sequence[Prompt], count: int) -> tuple[Prompt, ...]:
    """`count` prompts spread evenly over the file; all of them when there are fewer."""
    count = min(count, len(prompts))
    return tuple(prompts[i * len(prompts) // count] for i in range(count))


def summary(prompts: Sequence[Prompt]) -> Summary:
    unique = len({p.text for p in prompts})
    tags = Counter(tag for p in prompts if (tag := tag_of(p)) is not None)
    return Summary(lines=len(prompts), unique=unique, duplicates=len(prompts) - unique, tags=dict(tags))


def keep(
    prompts: Sequence[Prompt], tags: Iterable[str] | None = None, without: Iterable[str] | None = None
) -> tuple[Prompt, ...]:
    """The prompts whose `meta["tag"]` is in `tags` (all of them when None) and not in `without`.

    Raises:
        UserError: a tag that no prompt has, or nothing is left; the message names the tags that there are.
    """
    wanted, unwanted = None if tags is None else set(tags), set(without or ())
    present = list(summary(prompts).tags)
    there_are = f"the tags in the file are: {', '.join(present) or 'none'}"
    unknown = sorted(((wanted or set()) | unwanted) - set(present))
    if unknown:
        raise UserError(f"no prompt has the tag {', '.join(map(repr, unknown))}; {there_are}")
    left = tuple(p for p in prompts if (wanted is None or tag_of(p) in wanted) and tag_of(p) not in unwanted)
    if not left:
        raise UserError(f"no prompt is left of {len(prompts)} after choosing by tag; {there_are}")
    return left


def tag_of(prompt: Prompt) -> str | None:
    tag = prompt.meta.get("tag")
    return None if tag is None or tag == "" else str(tag)


def locate(path: str | Path) -> Path:
    """`path`, or the file in the package that `asset:NAME` means. Raises UserError if there is none."""
    name = str(path)
    if not name.startswith(ASSET):
        return Path(path)
    assets = Path(str(importlib.resources.files("vgrpo"))) / "assets"
    found = assets / name.removeprefix(ASSET)
    if ".." in found.parts or not found.exists():
        files = sorted(str(f.relative_to(assets)) for f in assets.glob("*/*") if f.suffix in READERS)
        raise UserError(f"no {name!r} in the package; its prompt files are: {', '.join(ASSET + f for f in files)}")
    return found


def prompt_file(path: Path, split: Split) -> Path:
    """`path` itself, or the file of `split` in the folder `path`."""
    if not path.is_dir():
        return path
    names = [f"{split}_metadata.jsonl", *(split + suffix for suffix in (".jsonl", ".csv", ".txt"))]
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        raise UserError(f"the folder {path} has no {split} prompts; expected one of {', '.join(names)}")
    return found[0]


def decoded(file: Path) -> str:
    """The text of a UTF-8 file without its byte-order mark. Raises UserError with line and byte of what is no UTF-8."""
    try:
        raw = file.read_bytes().removeprefix(BYTE_ORDER_MARK)
    except FileNotFoundError:
        raise UserError(f"no prompt file {file}; give a .txt, .jsonl or .csv file or a dataset folder") from None
    except OSError as error:
        raise UserError(f"cannot read the prompt file {file}: {error.strerror}") from error
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise UserError(
            f"{file}, line {line}, byte {column} of the line: 0x{raw[error.start]:02x} is not UTF-8; "
            f"save the file as UTF-8 (for a Windows file: iconv -f cp1252 -t utf-8)"
        ) from None


def numbered(text: str) -> Iterator[tuple[int, str]]:
    """Each line that is not blank, stripped, with its 1-based number; ends of line are those of any system."""
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if line.strip():
            yield number, line.strip()


def read_txt(file: Path, text: str) -> Iterator[Line]:
    for number, line in numbered(text):
        yield Line(number=number, text=line, id=None, meta={})


def read_jsonl(file: Path, text: str) -> list[Line]:
    return collected(file, numbered(text), json_line)


def json_line(number: int, line: str) -> Line:
    """Raises ValueError with what is wrong."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("no usable JSON: nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError(f"""expected an object such as {{"text": "a cat"}}, got {line[:60]}""")
    text, rest = text_and_rest(entry)
    own = rest.pop("id", None)
    if own is not None and (isinstance(own, bool) or not isinstance(own, (str, int)) or own == ""):
        raise ValueError(f"id must be text or a whole number, got {own!r}")
    meta = rest.pop("meta", None)
    if meta is not None and not isinstance(meta, dict):
        raise ValueError(f"meta must be an object, got {meta!r}")
    twice = sorted(set(meta or {}) & set(rest))
    if twice:
        raise ValueError(f"{', '.join(twice)} both beside meta and inside it; keep one")
    return Line(number=number, text=text, id=None if own is None else str(own), meta={**rest, **(meta or {})})


def text_and_rest(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The prompt of an entry and its other keys. Raises ValueError with what is wrong."""
    keys = [key for key in TEXT_KEYS if key in entry]
    if len(keys) != 1:
        came = "both" if keys else f"only {', '.join(map(repr, entry)) or 'nothing'}"
        raise ValueError(f"expected one key 'text' or 'prompt', got {came}")
    text = entry[keys[0]]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{keys[0]} must be a text that is not empty, got {text!r}")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{keys[0]} has half of a surrogate pair, which is no character: {text!r}")
    return text.strip(), {key: value for key, value in entry.items() if key != keys[0]}


def read_csv(file: Path, text: str) -> list[Line]:
    rows = csv_rows(file, text)
    _, names = next(rows, (1, []))
    header = [name.strip() for name in names]
    if sum(header.count(key) for key in TEXT_KEYS) != 1 or len(set(header)) != len(header) or "" in header:
        raise UserError(
            f"{file}, line 1: expected a header with one column 'text' or 'prompt' and no name twice or empty, "
            f"got {', '.join(map(repr, header)) or 'nothing'}"
        )
    return collected(file, rows, lambda number, row: csv_line(number, row, header))


def csv_rows(file: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, with the 1-based line on which it starts; quoted fields may go over several lines."""
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"{file}: the row that starts on line {start} is no CSV: {error}; check its quotes"
            ) from None
        if any(field.strip() for field in row):
            yield start, row


def csv_line(number: int, row: Sequence[str], header: Sequence[str]) -> Line:
    """Raises ValueError with what is wrong."""
    if len(row) != len(header):
        raise ValueError(
            f"expected {len(header)} columns ({', '.join(header)}), got {len(row)}; a text with commas needs quotes"
        )
    text, rest = text_and_rest({name: field.strip() for name, field in zip(header, row, strict=True)})
    return Line(number=number, text=text, id=rest.pop("id", None) or None, meta=rest)


def collected(file: Path, numbered_items: Iterable[tuple[int, T]], read: Callable[[int, T], Line]) -> list[Line]:
    """`read(number, item)` of each; every ValueError among them is a line of one UserError."""
    lines, mistakes = [], []
    for number, item in numbered_items:
        try:
            lines.append(read(number, item))
        except ValueError as error:
            mistakes.append(f"{file}, line {number}: {error}")
    if mistakes:
        more = [f"... and {len(mistakes) - MISTAKES_SHOWN} more lines"] if len(mistakes) > MISTAKES_SHOWN else []
        raise UserError("\n".join(mistakes[:MISTAKES_SHOWN] + more))
    return lines


def identified(file: Path, lines: Sequence[Line]) -> tuple[Prompt, ...]:
    """The prompts of `lines`. Raises UserError if two have the same id, also if one's own id is another's number."""
    first: dict[str, int] = {}
    for line in lines:
        name = line.id or str(line.number)
        if name in first:
            raise UserError(f"{file}: lines {first[name]} and {line.number} have the same id {name!r}; ids must differ")
        first[name] = line.number
    return tuple(Prompt(text=line.text, id=line.id or str(line.number), meta=line.meta) for line in lines)


READERS: dict[str, Callable[[Path, str], Iterable[Line]]] = {".txt": read_txt, ".jsonl": read_jsonl, ".csv": read_csv}
