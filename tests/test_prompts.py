"""One test per trap that prompt files have set for people, and the exact order of passes."""

import json
from collections import Counter

import pytest

from vgrpo.errors import UserError
from vgrpo.prompts import batch, keep, locate, read_prompts, spread, summary
from vgrpo.types import Prompt

TEXTS = ["a red circle", "two café stars ✨", "حلم", "e\u0301 and 𝔘", "“curly” — dash"]


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def message(call, *arguments, **keywords):
    with pytest.raises(UserError) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


def as_file(suffix, texts, *, newline="\n", mark=b"", trailing="", blank=False, final=True):
    """The same prompts as txt, jsonl or csv with the given oddities."""
    lines = {
        ".txt": list(texts),
        ".jsonl": [json.dumps({"text": t}, ensure_ascii=False) for t in texts],
        ".csv": ["text", *texts],
    }[suffix]
    gap = newline + "   " + newline if blank else newline
    return mark + (gap.join(line + trailing for line in lines) + (newline if final else "")).encode()


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv"])
@pytest.mark.parametrize(
    "oddity",
    [
        {},
        {"mark": b"\xef\xbb\xbf"},
        {"newline": "\r\n"},
        {"trailing": "  \t"},
        {"blank": True},
        {"final": False},
        {"mark": b"\xef\xbb\xbf", "newline": "\r\n", "trailing": " ", "blank": True, "final": False},
    ],
    ids=["plain", "mark", "crlf", "trailing", "blank", "no-final-newline", "all"],
)
def test_texts_come_through_unchanged(tmp_path, suffix, oddity):
    path = written(tmp_path, f"p{suffix}", as_file(suffix, TEXTS, **oddity))
    assert [p.text for p in read_prompts(path)] == TEXTS


def test_ids_are_line_numbers_that_count_blank_lines(tmp_path):
    path = written(tmp_path, "p.txt", "one\n\n  \ntwo\n")
    assert [(p.id, p.text) for p in read_prompts(path)] == [("1", "one"), ("4", "two")]


def test_unicode_line_separators_do_not_split_a_prompt(tmp_path):
    path = written(tmp_path, "p.txt", "a\u2028b\x0bc\u0085d\nnext\n")
    assert [p.text for p in read_prompts(path)] == ["a\u2028b\x0bc\u0085d", "next"]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["bare", "mark"])
def test_a_byte_of_another_encoding_is_named(tmp_path, suffix, mark):
    path = written(tmp_path, f"p{suffix}", mark + b"text\nsecond\nit\x92s here\n")
    text = message(read_prompts, path)
    assert str(path) in text and "line 3, byte 3" in text and "0x92" in text and "UTF-8" in text


@pytest.mark.parametrize("content", ["", "\n \r\n\t\n", "\ufeff"], ids=["empty", "blank", "mark"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_without_prompts_is_refused(tmp_path, suffix, content):
    path = written(tmp_path, f"p{suffix}", content)
    assert f"{path} has no prompts" in message(read_prompts, path)


def test_a_csv_with_nothing_but_a_header_is_refused(tmp_path):
    assert "has no prompts" in message(read_prompts, written(tmp_path, "p.csv", "text,tag\n"))


def test_a_missing_file_and_an_unknown_kind_are_named(tmp_path):
    assert "no prompt file" in message(read_prompts, tmp_path / "nowhere.txt")
    text = message(read_prompts, written(tmp_path, "p.parquet", "x"))
    assert "'.parquet'" in text and ".txt, .jsonl, .csv" in text


def test_jsonl_fields(tmp_path):
    lines = [
        {"text": "a cat", "id": "cat", "meta": {"tag": "animals"}},
        {"prompt": "a dog", "id": 7, "tag": "animals", "include": [{"class": "dog", "count": 1}]},
        {"text": "  a bird ", "id": None, "weight": 0.5, "meta": {"tag": "x"}},
    ]
    path = written(tmp_path, "p.jsonl", "\n".join(map(json.dumps, lines)))
    assert read_prompts(path) == (
        Prompt(text="a cat", id="cat", meta={"tag": "animals"}),
        Prompt(text="a dog", id="7", meta={"tag": "animals", "include": [{"class": "dog", "count": 1}]}),
        Prompt(text="a bird", id="3", meta={"tag": "x", "weight": 0.5}),
    )


def test_geneval_metadata(tmp_path):
    """The first lines of GenEval's evaluation_metadata.jsonl, as its repository has them."""
    path = written(
        tmp_path,
        "evaluation_metadata.jsonl",
        '{"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"}\n'
        '{"tag": "counting", "include": [{"class": "clock", "count": 2}], "exclude": [{"class": "clock", "count": 3}], '
        '"prompt": "a photo of two clocks"}\n',
    )
    first, second = read_prompts(path)
    assert (first.text, first.id) == ("a photo of a bench", "1")
    assert first.meta == {"tag": "single_object", "include": [{"class": "bench", "count": 1}]}
    assert second.meta["exclude"] == [{"class": "clock", "count": 3}]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "a"', "no JSON"),
        ("[1, 2]", "expected an object"),
        ('"a cat"', "expected an object"),
        ('{"caption": "a"}', "expected one key 'text' or 'prompt', got only 'caption'"),
        ("{}", "got only nothing"),
        ('{"text": "a", "prompt": "b"}', "got both"),
        ('{"text": ""}', "not empty"),
        ('{"text": 3}', "got 3"),
        ('{"text": "a", "id": true}', "id must be"),
        ('{"text": "a", "id": [1]}', "id must be"),
        ('{"text": "a", "meta": "b"}', "meta must be"),
        ('{"text": "a", "tag": "b", "meta": {"tag": "c"}}', "tag both beside meta and inside it"),
        (r'{"text": "\ud83d"}', "surrogate"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "limit"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path, line, complaint):
    path = written(tmp_path, "p.jsonl", '{"text": "good"}\n\n' + line + "\n")
    text = message(read_prompts, path)
    assert f"{path}, line 3: " in text and complaint in text


def test_all_bad_lines_are_named_at_once_but_not_thousands(tmp_path):
    path = written(tmp_path, "p.jsonl", "nonsense\n" * 500)
    text = message(read_prompts, path)
    assert "line 1:" in text and "line 10:" in text and "line 11:" not in text and "490 more" in text


def test_csv_quoting_read_exactly(tmp_path):
    path = written(
        tmp_path,
        "p.csv",
        "tag, prompt ,id\n"
        'a,"red, green and blue",\n'
        'b, "she said ""hi""", x\n'
        '"c","first line\nsecond line",\n'
        ',5" nails,\n',
    )
    assert [(p.text, p.id, p.meta) for p in read_prompts(path)] == [
        ("red, green and blue", "2", {"tag": "a"}),
        ('she said "hi"', "x", {"tag": "b"}),
        ("first line\nsecond line", "4", {"tag": "c"}),
        ('5" nails', "6", {"tag": ""}),
    ]


def test_bad_csv_rows_are_all_named_by_line(tmp_path):
    path = written(tmp_path, "p.csv", 'text,tag\n"a\nb",x\na cat, a dog, y\nonly\n,z\ngood,z\n')
    text = message(read_prompts, path)
    assert "line 4: expected 2 columns (text, tag), got 3" in text
    assert "line 5: expected 2 columns (text, tag), got 1" in text
    assert "line 6: text must be a text that is not empty" in text
    assert "line 2:" not in text and "line 7:" not in text


@pytest.mark.parametrize("header", ["caption,tag", "text,prompt", "text,tag,tag", "text,", "a cat sits", "text;tag"])
def test_a_csv_without_a_usable_header_is_refused(tmp_path, header):
    assert "line 1: expected a header" in message(read_prompts, written(tmp_path, "p.csv", header + "\nx,y\n"))


def test_an_open_quote_is_named_by_the_line_on_which_its_row_starts(tmp_path):
    path = written(tmp_path, "p.csv", 'text\ngood\n"never closed\nand on\n')
    assert "row that starts on line 3" in message(read_prompts, path)


@pytest.mark.parametrize(
    ("lines", "same"),
    [
        (['{"text": "a", "id": "x"}', '{"text": "b", "id": "x"}'], "'x'"),
        (['{"text": "a"}', '{"text": "b", "id": 1}'], "'1'"),  # another line's number
    ],
)
def test_two_lines_with_one_id_are_refused(tmp_path, lines, same):
    text = message(read_prompts, written(tmp_path, "p.jsonl", "\n".join(lines)))
    assert "lines 1 and 2" in text and same in text


def test_equal_texts_stay_separate_prompts(tmp_path):
    prompts = read_prompts(written(tmp_path, "p.txt", "same\nother\nsame\n"))
    assert [(p.id, p.text) for p in prompts] == [("1", "same"), ("2", "other"), ("3", "same")]
    assert (summary(prompts).lines, summary(prompts).unique, summary(prompts).duplicates) == (3, 2, 1)


@pytest.mark.parametrize("split", ["train", "test"])
def test_flow_grpo_folders(tmp_path, split):
    plain, metadata = tmp_path / "ocr", tmp_path / "geneval"
    plain.mkdir(), metadata.mkdir()
    for name in ("train", "test"):
        written(plain, f"{name}.txt", f"{name} one\n{name} two\n")
        written(metadata, f"{name}_metadata.jsonl", json.dumps({"tag": "colors", "include": [], "prompt": name}))
        written(metadata, f"{name}.txt", "without metadata\n")
    assert [p.text for p in read_prompts(plain, split=split)] == [f"{split} one", f"{split} two"]
    assert read_prompts(metadata, split=split) == (Prompt(text=split, id="1", meta={"tag": "colors", "include": []}),)


def test_a_folder_without_the_split_says_what_it_looked_for(tmp_path):
    written(tmp_path, "train.txt", "a\n")
    assert "no test prompts" in message(read_prompts, tmp_path, split="test")
    assert "test_metadata.jsonl" in message(read_prompts, tmp_path, split="test")


def test_asset_names_resolve_into_the_package(tmp_path, monkeypatch):
    (tmp_path / "assets" / "scenes").mkdir(parents=True)
    written(tmp_path / "assets" / "scenes", "train.jsonl", '{"text": "a"}')
    monkeypatch.setattr("vgrpo.prompts.importlib.resources.files", lambda package: tmp_path)
    assert [p.text for p in read_prompts("asset:scenes/train.jsonl")] == ["a"]
    assert "asset:scenes/train.jsonl" in message(locate, "asset:scenes/trian.jsonl")
    written(tmp_path, "secret.txt", "x")
    assert "no 'asset:../secret.txt'" in message(locate, "asset:../secret.txt")


def numbered(n):
    return tuple(Prompt(text=f"t{i}", id=str(i), meta={"tag": "ab"[i % 2]}) for i in range(n))


@pytest.mark.parametrize(("n", "per_step"), [(10, 5), (10, 3), (7, 7), (3, 8), (1, 4)])
def test_each_pass_has_every_prompt_once(n, per_step):
    prompts = numbered(n)
    stream = [p.id for step in range(n * 3) for p in batch(prompts, per_step, step, seed=1)]
    assert len(stream) == 3 * n * per_step
    for start in range(0, len(stream), n):
        assert Counter(stream[start : start + n]) == Counter(p.id for p in prompts)


def test_batches_depend_on_nothing_but_their_arguments():
    prompts = numbered(20)
    assert batch(prompts, 8, 5, seed=3) == batch(tuple(prompts), 8, 5, seed=3)
    passes = [[p.id for s in (2 * k, 2 * k + 1) for p in batch(prompts, 10, s, seed=3)] for k in range(4)]
    assert len({tuple(p) for p in passes}) == 4, "each pass has an order of its own"
    assert batch(prompts, 8, 0, seed=3) != batch(prompts, 8, 0, seed=4)
    # positions 24..29, from coreutils: printf "0/1/%d" i | b2sum -l 128, sorted; a resumed run relies on these
    assert [p.id for p in batch(prompts, 6, 4, seed=0)] == ["12", "8", "17", "7", "19", "9"]


def test_the_order_of_a_pass_is_uniform():
    """Each of the 24 orders of four prompts should appear about 100 times in 2,400 passes (chi-square, 23 degrees)."""
    prompts = numbered(4)
    seen = Counter(tuple(p.id for p in batch(prompts, 4, step, seed=0)) for step in range(2400))
    assert len(seen) == 24
    assert sum((count - 100) ** 2 / 100 for count in seen.values()) < 49.7  # the 0.999 quantile


def test_fewer_prompts_than_slots_cycle():
    ids = Counter(p.id for p in batch(numbered(3), 8, 0, seed=0))
    assert sorted(ids.values()) == [2, 3, 3]


@pytest.mark.parametrize(("n", "per_step", "step"), [(0, 4, 0), (3, 0, 0), (3, 4, -1)])
def test_impossible_batches_are_refused(n, per_step, step):
    with pytest.raises(ValueError):
        batch(numbered(n), per_step, step, seed=0)


def test_spread_takes_even_distances():
    assert [p.id for p in spread(numbered(10), 4)] == ["0", "2", "5", "7"]
    assert spread(numbered(3), 9) == numbered(3)


def test_summary_counts_tags():
    prompts = (*numbered(5), Prompt(text="t0", id="z"))
    got = summary(prompts)
    assert (got.lines, got.unique, got.duplicates, got.tags) == (6, 5, 1, {"a": 3, "b": 2})
    assert str(got) == "6 prompts, 5 different texts, 1 duplicates (a 3, b 2)"


def test_keep_filters_by_tag():
    prompts = numbered(5)
    assert [p.id for p in keep(prompts, ["a"])] == ["0", "2", "4"]
    assert [p.id for p in keep(prompts, without=["a"])] == ["1", "3"]
    assert keep(prompts) == prompts


@pytest.mark.parametrize(
    ("tags", "without"), [(["c"], None), (["a", "c"], None), (None, ["c"]), (["a"], ["a"]), ([], None)]
)
def test_keep_names_the_tags_when_none_fits(tags, without):
    assert "the tags in the file are: a, b" in message(keep, numbered(4), tags, without)
