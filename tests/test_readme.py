"""The README's snippets run, and its outputs are what the program prints.

`python tests/test_readme.py` writes the outputs anew after a change of the model.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

from emulator.cli import main
from plots.accuracy import point, rows, table

README = Path(__file__).parents[1] / "README.md"
JOB = re.compile(r"```toml\n(.*?)```", re.S)
SNIPPET = re.compile(r"```python\n(.*?)```", re.S)
OUTPUT = re.compile(r"(<!-- output: (.*?) -->\n```console\n\$ [^\n]*\n)(.*?)(```)", re.S)
ACCURACY = re.compile(r"(<!-- accuracy -->\n)(\|.*\n)*")
VARIES = re.compile(r"\d[\d,]* events, [\d.]+ s")
"""Wall time is not the same twice."""


def printed(command: str, folder: Path) -> str:
    """What a command of the README prints, piped through its grep if it has one."""
    line, _, pattern = command.partition(" | grep -E ")
    arguments = [str(folder / word) if word == "job.toml" else word for word in line.split()[1:]]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(arguments) == 0
    lines = text.getvalue().rstrip().splitlines()
    if pattern:
        lines = [each for each in lines if re.search(pattern.strip('"'), each)]
    return "\n".join(each.rstrip() for each in lines) + "\n"


@pytest.mark.parametrize("command", [match[1] for match in OUTPUT.findall(README.read_text())])
def test_output_is_what_the_program_prints(command: str, tmp_path: Path) -> None:
    text = README.read_text()
    (tmp_path / "job.toml").write_text(JOB.findall(text)[0])
    shown = next(match[2] for match in OUTPUT.findall(text) if match[1] == command)
    assert VARIES.sub("", shown) == VARIES.sub("", printed(command, tmp_path))


@pytest.mark.parametrize("number", range(len(SNIPPET.findall(README.read_text()))))
def test_snippet_runs(number: int) -> None:
    exec(compile(SNIPPET.findall(README.read_text())[number], f"README snippet {number}", "exec"), {})


def test_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text())
    assert pictures
    assert all((README.parent / picture).is_file() for picture in pictures)


def rewrite() -> None:
    """Put the program's present output into the README."""
    import tempfile

    text = README.read_text()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(JOB.findall(text)[0])
        fresh = OUTPUT.sub(lambda match: match[1] + printed(match[2], Path(folder)) + match[4], text)
    fresh = ACCURACY.sub(lambda match: match[1] + table([point(row) for row in rows()]), fresh)
    README.write_text(fresh)


if __name__ == "__main__":
    sys.exit(rewrite())
