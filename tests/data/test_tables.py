"""Reviews and texts in the tables that people have."""

import csv
import gzip
import io
import json
import re
import tracemalloc
import zipfile

import pytest

from scratchformer.data import DataError, load_imdb, read_splits, tables
from scratchformer.data.tables import rows

REVIEWS = {
    split: [
        (i % 2, f'{split} {i}: "Good", he said;\n<br /><br />a,b\tc \\ d', ["neg", "pos"][i % 2]) for i in range(count)
    ]
    for split, count in (("train", 12), ("test", 6))
}
UNLABELLED = [f"unsup {i} it's unlabelled" for i in range(3)]


def separated(table, delimiter=",", **options):
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, list(table[0]), delimiter=delimiter, **options)
    writer.writeheader()
    writer.writerows(table)
    return buffer.getvalue().encode()


def json_lines(table):
    return "".join(json.dumps(row) + "\n" for row in table).encode()


def parquet(table, stream=False):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    buffer, table = io.BytesIO(), pyarrow.Table.from_pylist(table)
    if stream:
        with ipc.new_stream(buffer, table.schema) as writer:
            writer.write_table(table)
    else:
        parquet.write_table(table, buffer)
    return buffer.getvalue()


def zipped(content, name="IMDB Dataset.csv"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def labelled(split, **columns):
    """The rows of a split: for each name of a column, which of (number, text, word) is in it."""
    return [{name: review[place] for name, place in columns.items()} for review in REVIEWS[split]]


HUB = {"text": 1, "label": 0}  # the columns of the dataset `imdb` on the hub
LAYOUTS = {
    "csv": lambda: {f"{s}.csv": separated(labelled(s, review=1, sentiment=2)) for s in REVIEWS},
    "csv.gz": lambda: {f"imdb_{s}.csv.gz": gzip.compress(separated(labelled(s, Text=1, Label=0))) for s in REVIEWS},
    "tsv": lambda: {f"{s}.tsv": separated(labelled(s, sentiment=0, review=1), "\t") for s in REVIEWS},
    "jsonl": lambda: {f"{s}.jsonl": json_lines(labelled(s, **HUB)) for s in REVIEWS},
    "json list": lambda: {f"{s}.json": json.dumps(labelled(s, **HUB)).encode() for s in REVIEWS},
    "a column": lambda: {
        "all.csv": separated([row | {"split": s} for s in REVIEWS for row in labelled(s, text=1, label=2)])
    },
    "hub": lambda: {
        "plain_text/unsupervised-00000-of-00001.parquet": parquet([{"text": t, "label": -1} for t in UNLABELLED]),
        **{f"plain_text/{s}-00000-of-00001.parquet": parquet(labelled(s, **HUB)) for s in REVIEWS},
    },
    "save_to_disk": lambda: {
        f"imdb/{s}/data-00000-of-00001.arrow": parquet(labelled(s, **HUB), stream=True) for s in REVIEWS
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_reviews(tmp_path, layout):
    for name, content in LAYOUTS[layout]().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    splits = read_splits(tmp_path, optional=["unsup"])
    for split, reviews in REVIEWS.items():
        expected = sorted(reviews, key=lambda review: review[0])
        assert splits[split][0] == [text for _, text, _ in expected]
        assert splits[split][1].tolist() == [label for label, *_ in expected]
    assert splits["unsup"][0] == (UNLABELLED if layout == "hub" else [])


def arrow(table):
    return parquet(table, stream=True)


FORMS = {
    "csv": separated,
    "tsv": lambda table: separated(table, "\t"),
    "jsonl": json_lines,
    "parquet": parquet,
    "arrow": arrow,
}
TWO = [(0, 1), (0.0, 1.0), ("0", "1"), ("neg", "pos"), ("Negative", "POSITIVE"), (False, True), ("false", "True")]
THREE = [
    (-1, 0, 1),
    (-1.0, 0.0, 1.0),
    ("-1", "0", "1"),
    (0, 1, 2),
    (1, 2, 3),
    ("negative", "neutral", "positive"),
    (-1, 1),
]


@pytest.mark.parametrize("form", FORMS)
def test_two_classes_are_read_and_others_refused(tmp_path, form):
    """In whatever way the labels come. What is unlabelled says so: in its name, or by the class unsup."""

    def read(labels, name="train"):
        table = [{"text": f"good {i}", "label": labels[i % len(labels)]} for i in range(12)]
        (tmp_path / f"{name}.{form}").write_bytes(FORMS[form](table))
        (tmp_path / f"test.{form}").write_bytes(FORMS[form](table))
        return read_splits(tmp_path, ("train", "test"))

    for labels in TWO:
        assert read(labels)["train"][1].tolist() == [0] * 6 + [1] * 6, labels
    for labels in THREE:
        with pytest.raises(DataError, match=r"(row|line) [0-9]+: expected a class, one of neg, .*, got "):
            read(labels)
    assert read(("neg", "pos", "unsup"))["train"][1].tolist() == [0] * 4 + [1] * 4


def test_a_table_without_a_test_part_is_divided_always_alike(tmp_path):
    table = labelled("train", review=1, sentiment=2)
    (tmp_path / "archive.zip").write_bytes(zipped(separated([*table, table[0]])))  # one review twice
    (tmp_path / "train.csv").write_bytes(separated(table))
    divided = []
    for name in ("archive.zip", "train.csv"):
        with pytest.warns(UserWarning, match="no test reviews in it, so 6 of 12 were drawn"):
            divided.append(read_splits(tmp_path / name, ("train", "test")))
    first, second = divided
    for split in ("train", "test"):
        assert first[split][0] == second[split][0] and first[split][1].tolist() == [0, 0, 0, 1, 1, 1]
    assert sorted(first["train"][0] + first["test"][0]) == sorted(text for _, text, _ in REVIEWS["train"])


def test_a_classifier_learns_from_a_table(tmp_path):
    for name, content in LAYOUTS["csv"]().items():
        (tmp_path / name).write_bytes(content)
    data = load_imdb(tmp_path, 100, validation=2)
    assert [len(part.labels) for part in data[:3]] == [10, 2, 6]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a,b\n1,2\n", ": line 1: expected a table with a column review or text .*, got the columns 0, 1"),
        ("a.csv", b"review,sentiment\ngood,fine\n", ": line 2: expected a class, one of neg, .*, got 'fine'"),
        ("a.csv", b"review,sentiment\n,pos\n", r": line 2: an empty review \(no word in it\)"),
        ("a.csv", b"review,sentiment\ngood,pos,3\n", ": line 2: expected 2 columns, as in the first line, got 3"),
        ("a.csv", b'review,sentiment\n"good,pos\n', ": damaged at line 2: unexpected end of data"),
        ("a.csv", b"review,sentiment\ngood,pos\nb\xe9,neg\n", " is damaged: not UTF-8 at byte 27"),
        ("a.csv", b"review,sentiment\ngood,pos\n", "a.csv: no train/neg review in it"),
        ("a.jsonl", b'{"text": "good", "label": 1}\n{"text": \n', ": line 2 is damaged: Expecting value"),
        ("a.jsonl", b'{"text": 1, "label": 1}\n', ": line 1: an empty review"),
        ("a.json", b'[{"text": "good", "label": 1}, 2]', ": row 2: expected an object"),
        ("a.parquet", b"PAR1\x15\4\x15\0 ... PAR1", ": damaged: "),
        ("a.txt", b"%PDF\0", r": expected a table \(CSV, TSV, JSON lines, Parquet or Arrow\), got binary data"),
        ("a.csv", b"", "no train review in it"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no test reviews")
def test_tables_that_cannot_be_read(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    if name == "a.parquet":
        pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match=f"^{path}.*{message}" if message.startswith((":", " ")) else message):
        read_splits(path, ("train", "test"))


def test_without_pyarrow(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1\x15\4\x15\0")
    with pytest.raises(DataError, match=r"a Parquet file, which needs pyarrow: pip install 'scratchformer\[files\]'"):
        list(rows(path, ()))


def repeated(kind):
    """A table that takes little room in a file: a text of 10,000 bytes in 2,000 rows, or in one, or 100,000 rows."""
    pa = pytest.importorskip("pyarrow")
    text, label = pa.array(["a good film " * 834]), pa.array([0] * 2000)
    same = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), text)
    columns = {
        "dictionary": {"text": same, "label": label},
        "runs": {"text": pa.RunEndEncodedArray.from_arrays([2000], text), "label": label},
        "struct": {"text": pa.StructArray.from_arrays([same], ["en"]), "label": label},
        "rows": {"text": pa.nulls(100_000), "label": pa.nulls(100_000)},
        "whole": {"text": ["good " * 1_000_000], "label": [0]},
    }[kind]
    return pa.table(columns)


@pytest.mark.parametrize("kind", ["dictionary", "runs", "struct", "rows", "whole"])
@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_a_small_file_with_much_in_it_is_read_up_to_a_limit(kind, form, tmp_path, monkeypatch):
    table, buffer = repeated(kind), io.BytesIO()
    from pyarrow import ipc, parquet

    if form != "parquet":
        options = ipc.IpcWriteOptions(compression="zstd")
        with (ipc.new_file if form == "file" else ipc.new_stream)(buffer, table.schema, options=options) as writer:
            writer.write_table(table)
    elif kind == "runs":
        pytest.skip("Parquet has no such columns")
    else:
        parquet.write_table(table, buffer, compression="zstd")
    monkeypatch.setattr(tables, "MAX_UNPACKED", 1 << 18)
    path = tmp_path / "a.data"
    path.write_bytes(buffer.getvalue())
    assert len(buffer.getvalue()) < 1 << 15
    read, message = 0, rf"^{re.escape(str(path))}: its rows have more than 262,144 bytes"
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            for _, row in tables.rows(path, ("text",)):
                read += len(str(row))
        assert read <= 1 << 18 and tracemalloc.get_traced_memory()[1] < 1 << 21
    finally:
        tracemalloc.stop()


def test_lists_in_rows_are_not_read(tmp_path):
    """Each may repeat a text of the file as often as it likes."""
    pa = pytest.importorskip("pyarrow")
    words = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), pa.array(["x" * 10_000]))
    words = pa.ListArray.from_arrays(pa.array([0, 10_000], pa.int32()), words)
    table = pa.table({"text": ["good"], "words": words, "both": pa.StructArray.from_arrays([words], ["words"])})
    buffer = io.BytesIO()
    with pa.ipc.new_file(buffer, table.schema) as writer:
        writer.write_table(table)
    path = tmp_path / "a.arrow"
    path.write_bytes(buffer.getvalue())
    assert [row for _, row in tables.rows(path, ("text",))] == [{"text": "good"}]
