"""The cluster's key among those that may log in: added once, and nothing else touched."""

from pathlib import Path

import pytest

from omlx.cluster.authorized_keys import let_in
from omlx.errors import BadSetting

KEY = "ssh-ed25519 " + "A" * 68 + " omlx-0123456789abcdef"


@pytest.mark.parametrize("before", ["", "ssh-rsa AAAA me\n", "ssh-rsa AAAA me"])
def test_a_key_is_added_once_on_a_line_of_its_own_and_others_stay(tmp_path: Path, before: str) -> None:
    file = tmp_path / ".ssh" / "authorized_keys"
    if before:
        file.parent.mkdir()
        file.write_text(before)
    assert let_in(KEY + "\n", file) and not let_in(KEY, file)
    assert file.read_text().splitlines() == [*before.splitlines(), KEY]
    if not before:
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ssh-ed25519 short omlx-00",
        KEY.replace("omlx-", "me-"),
        f"{KEY}\nssh-rsa AAAA evil",
        f'command="evil" {KEY}',
    ],
)
def test_what_is_no_key_of_a_cluster_is_not_added(tmp_path: Path, line: str) -> None:
    with pytest.raises(BadSetting):
        let_in(line, tmp_path / "authorized_keys")
    assert not (tmp_path / "authorized_keys").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadSetting, match="authorized_keys"):
        let_in(KEY, tmp_path / "file" / "authorized_keys")
