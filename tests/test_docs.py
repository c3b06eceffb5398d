"""What the documents say about settings, commands and flags is what the code has."""

import re
from pathlib import Path

import pytest
import typer

from omlx.commands import app
from omlx.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs" / "SETTINGS.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
ADRS = sorted((ROOT / "docs" / "adr").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_ADR_LINES = 40


def flags(command: str) -> set[str]:
    """Its own, and those of the commands below it."""
    found = COMMANDS[command]
    below = getattr(found, "commands", {}).values()
    return {option for one in (found, *below) for parameter in one.params for option in parameter.opts}


def rows() -> dict[str, tuple[str, str]]:
    """By setting: the cells of its flag and of its default."""
    found = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|", SETTINGS, re.MULTILINE)
    return {name: (flag, default) for name, flag, default in found}


def test_every_setting_has_its_row_with_its_default() -> None:
    shown = rows()
    assert shown.keys() == Settings.model_fields.keys()
    for name, field in Settings.model_fields.items():
        default = field.default
        said = "none" if default is None else f"`{[] if default == () else default}`"
        assert shown[name][1] == said, name


def test_a_setting_is_said_to_have_a_flag_where_serve_has_one() -> None:
    for name, (flag, _) in rows().items():
        option = "--" + name.replace("_", "-")
        if option in flags("serve"):
            assert flag == f"`{option}`"
        else:
            assert flag == "none" or name == "models"


def test_every_command_stands_in_the_readme() -> None:
    for name in COMMANDS:
        assert re.search(rf"^omlx {name}\b", README, re.MULTILINE), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_that_are_shown_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for command, rest in re.findall(r"^omlx ([a-z]\w*)(.*?)(?:#|$)", text, re.MULTILINE):
        assert set(re.findall(r"--[\w-]+", rest)) <= flags(command), command
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z]\w*)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:node|cluster|api|bench|tests|docs|scripts)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / path).exists() or (ROOT / "omlx" / path).exists(), path


@pytest.mark.parametrize("adr", ADRS, ids=lambda adr: adr.name)
def test_a_decision_is_short_numbered_and_says_what_would_change_it(adr: Path) -> None:
    text = adr.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_ADR_LINES
    assert text.startswith(f"# {adr.name[:4]} ")
    for part in ("Question", "Decision", "What else was thought of", "What would change our mind"):
        assert f"\n## {part}\n" in text, part


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(adr.name[:4]) for adr in ADRS] == list(range(1, len(ADRS) + 1))
