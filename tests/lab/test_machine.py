"""What the lab says where it cannot be, and what it shares with another lab."""

import os
from pathlib import Path

import pytest

from tests.lab import machine
from tests.lab.holder import mount_point
from tests.lab.machine import LabError, missing, script, sh


def test_whoever_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "the lab needs root, for namespaces"


def test_another_system_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert missing() == "the lab needs Linux"


def test_a_missing_command_is_named_with_the_package_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(machine, "find", lambda command: None if command in ("ip", "sshd") else "/there")
    assert missing() == "the lab needs ip, sshd: apt-get install iproute2 openssh-server"


def test_a_script_ends_at_its_first_failure_and_quotes_what_it_is_given(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="exit code 1"):
        sh(script(["touch", tmp_path / "a b; true"], ["false"], ["touch", tmp_path / "never"]))
    assert [path.name for path in tmp_path.iterdir()] == ["a b; true"]


def test_a_command_that_hangs_is_an_error() -> None:
    with pytest.raises(LabError, match=r"took more than 0\.1 s"):
        sh(["sleep", "9"], timeout_s=0.1)


def test_a_mount_point_stays_while_another_lab_uses_it(tmp_path: Path) -> None:
    shared = tmp_path / "ray"
    with mount_point(str(shared)):
        with mount_point(str(shared)):
            pass
        assert shared.is_dir()
    assert not shared.exists()


def test_a_mount_point_that_holds_something_stays(tmp_path: Path) -> None:
    with mount_point(str(tmp_path)):
        (tmp_path / "session").touch()
    assert (tmp_path / "session").exists()
