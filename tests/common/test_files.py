import errno

import pytest

from trainer.common.files import replacing, write_text


def test_text_replaces_the_old_file_without_leftovers(tmp_path):
    path = tmp_path / "made" / "file.txt"
    for text in ("first", "zweite Fassung: größer"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [one.name for one in path.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize("durable", [True, False])
def test_failed_write_keeps_the_old_file(tmp_path, durable):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_a_part():
        with replacing(path, part=".unfinished", durable=durable) as file:
            file.write(b"new, and cut sho")
            assert [one.name.endswith(".unfinished") for one in tmp_path.glob(".*")] == [True]
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_a_part()
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
    with replacing(path, durable=durable) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "secret").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    write_text(tmp_path / "link", "page")
    assert (tmp_path / "secret").read_text() == "kept"
    assert not (tmp_path / "link").is_symlink()
