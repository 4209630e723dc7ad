"""The benchmark of whole runs writes its tables, with a row for each case."""

import re

import pytest


@pytest.mark.whole
def test_tables_have_times_files_and_bytes(table):
    text = table("benchmark_fit", ["--repeats", "1", "--only", "fit, bare, one batch"])
    assert re.search(r"^\| fit, bare, one batch, no validation \| \*\*[\d.]+\*\* \| [\d.]+ \| [\d.]+ \|$", text, re.M)
    files = re.search(r"^\| files that the fit leaves behind \| \*\*(\d+)\*\* \| (\d+) \|$", text, re.M)
    assert files[1] == files[2]
