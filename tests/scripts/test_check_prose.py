"""Counts of ``scripts/check_prose`` on small files."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "check_prose"))
CODE = '''"""Return {0}."""

NUMBERS: list[str] = []
"""{0}, too."""


def f(text="anew"):  # {0}
    """Return the number.

    The line break in "so
    many" does not matter.
    """
    return f"{{text}} anew"
'''


@pytest.mark.parametrize(("word", "lines"), [("a value", []), ("it anew", [1, 4, 7]), ("it Anew", [1, 4, 7])])
def test_python_prose_is_docstrings_and_comments(tmp_path, word, lines):
    file = tmp_path / "module.py"
    file.write_text(CODE.format(word))
    assert SCRIPT["check"](file) == [f"{file}:{line}: '{word.split()[1]}': use again" for line in lines]


def test_markdown_prose_is_text_outside_code(tmp_path):
    file = tmp_path / "page.md"
    file.write_text("Goes\non. `goes on`\n\n```python\ngoes on\n```\n\n- It went on.\n")
    assert SCRIPT["check"](file) == [
        f"{file}:{line}: '{text}': use continue, resume" for line, text in ((1, "Goes on"), (8, "went on"))
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("What is it? See what\nthis does?", 0),
        ("See what is written. It is what is read.", 2),
        ("The result is None. It was None.", 0),
        ("It says what is said.", 2),  # one "what" is accepted
        ("So many words. So many that it overflows.", 0),
        ("Each " * 2000 + "says that it says.", 2),
        ("Each " * 9000 + "says that it says.", 0),
    ],
)
def test_limits_are_per_ten_thousand_words(tmp_path, text, number):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "page.md").write_text(text)
    assert len(SCRIPT["check"](tmp_path)) == number


def test_exit_status_is_1_above_a_limit(tmp_path, capsys):
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("Nobody waits.")
    bad.write_text("Nobody waits for somebody, and somebody waits.")
    assert SCRIPT["main"]([str(good)]) == 0
    assert SCRIPT["main"]([str(good), str(bad)]) == 1
    assert "bad.md:1: 'somebody': use the user, the caller" in capsys.readouterr().out


def test_pages_have_a_limit_of_their_words(tmp_path):
    for name, words in (("long.md", 7), ("short.md", 3), ("code.py", 9), ("api/generated.md", 9)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("word " * words)
    assert SCRIPT["length"](tmp_path, 10) == []
    assert SCRIPT["length"](tmp_path, 9) == [
        f"{tmp_path}: 10 words, at most 9: shorten it (longest: long.md 7, short.md 3)"
    ]
    assert SCRIPT["length"](tmp_path / "long.md", 6)[0].startswith(f"{tmp_path / 'long.md'}: 7 words, at most 6")
