"""What is kept on disk of compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_hvd.gpu import cache


@pytest.mark.parametrize("damage", [None, b"", b"conten", b"other content"])
def test_what_is_kept_is_made_again_only_where_it_is_damaged(tmp_path: Path, damage: bytes | None) -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"content"

    with cache.stored("key", make, str(tmp_path)) as path:
        if damage is not None:
            path.write_bytes(damage)
    with cache.stored("key", make, str(tmp_path)) as path:
        assert path.read_bytes() == b"content"
    assert len(made) == (1 if damage is None else 2)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with cache.stored("key", lambda: b"content", str(tmp_path / "file" / "below")) as path:
        assert path.read_bytes() == b"content"
    assert not path.exists()
